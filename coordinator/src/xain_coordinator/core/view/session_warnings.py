"""Warnings of a session that its events give: each once, with how often and when last.

They are part of the history, so that status, report and the end of a session have them, also after
a restart. Rounds in which a participant did not count are counted in accounts.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from xain_coordinator.core.vocabulary import events as e

# Kinds of warnings that are kept; the one that was seen longest ago is dropped for another one.
MAX_KINDS = 50


@dataclass(frozen=True, slots=True)
class Warned:
    """One kind of warning. text: the latest sentence, without its full stop. num: how often; it is
    shown from `least` on. round: of the last time."""

    text: str
    num: int
    round: int
    least: int


class SessionWarnings:
    """Fold with `apply`, in the order of the journal. by_kind: oldest last time first."""

    def __init__(self, by_kind: Mapping[str, Warned] | None = None) -> None:
        self.by_kind = dict(by_kind or {})

    def apply(self, event: e.Event) -> None:
        """Count what an event warns of, if it does."""
        match event:
            case e.ModelEvaluated(number, None, reason=reason):
                text = f"The coordinator's own evaluation failed: {reason}"
                self._add("own evaluation", text, number, least=1)
            case e.TrainingFailed(name, number, kind, message):
                why = f"{kind}: {message}" if message else kind
                self._add(f"failed {name}", f"The training of {name} failed: {why}", number)
            case e.UpdateRefused(name, number, reason):
                self._add(f"refused {name}", f"An update of {name} was refused: {reason}", number)
            case e.UpdateDamaged(name, number, reason=reason):
                self._add(f"damaged {name}", f"An update of {name} was damaged: {reason}", number)
            case e.GroupBroken(_, number, reason=reason):
                self._add("group", f"A process group broke: {reason}", number)
            case _:
                pass

    def sentences(self) -> Iterator[str]:
        """The warnings that are to be shown, one sentence each."""
        for one in self.by_kind.values():
            if one.num >= one.least:
                often = "" if one.num == 1 else f"{one.num} times, the last "
                yield f"{one.text.removesuffix('.')} ({often}in round {one.round})."

    def _add(self, kind: str, text: str, round_: int, least: int = 2) -> None:
        """Count a warning of this kind once more, with its latest text. least: as in Warned."""
        before = self.by_kind.pop(kind, None)
        num = before.num if before is not None else 0
        self.by_kind[kind] = Warned(text, num + 1, round_, least)
        if len(self.by_kind) > MAX_KINDS:
            del self.by_kind[next(iter(self.by_kind))]
