"""What an operator wants to know of the past: a second fold of the same events.

Bounded: the latest rounds, with the names of those who took part where they are few, and the counts
of those who are here and of the latest who have left. Of every model its reference is kept, since
any may be asked for; what models have in common is in memory once.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from xain_coordinator.core import events as e
from xain_coordinator.core.values import GlobalModel

MAX_ROUNDS = 1000
MAX_DEPARTED = 1000

# Selected and contributors together, of a round that is over. Its names are for a person to read;
# those of a thousand rounds of a thousand participants would fill the memory, and every snapshot.
MAX_NAMES_OF_A_ROUND = 200

# Reasons of damaged updates that are kept for each round.
MAX_DAMAGED = 20

# Events that the record of a round may lack until somebody asks for it: all its names are copied
# when they are written into it, which with each update would take longer than all the rest.
MAX_UNWRITTEN = 1000


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round as it was.

    selected: without those who left, or were left out, while they still owed an update.
    selected, contributors: empty when the round is over and they were many; `counts` has their
        numbers then.
    damaged: why accepted updates were dropped, by participant; the first MAX_DAMAGED.
    seconds: from opening to publication, None while it runs.
    """

    round: int
    selected: tuple[str, ...]
    opened_at: float
    contributors: tuple[str, ...] = ()
    num_samples: int = 0
    seconds: float | None = None
    counts: tuple[int, int] | None = None
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_selected(self) -> int:
        return len(self.selected) if self.counts is None else self.counts[0]

    @property
    def num_contributors(self) -> int:
        return len(self.contributors) if self.counts is None else self.counts[1]

    def after(self, events: Iterable[e.Event]) -> "RoundRecord":
        """As in the session: what was accepted stays, what is owed somebody else will do."""
        selected, contributors = dict.fromkeys(self.selected), dict.fromkeys(self.contributors)
        num_samples, damaged = self.num_samples, dict(self.damaged)
        for event in events:
            match event:
                case e.UpdateAccepted(_, update):
                    contributors[update.participant_id] = None
                    num_samples += update.num_samples
                case e.UpdateDamaged(participant_id, _, lost, reason):
                    del contributors[participant_id]
                    num_samples -= lost
                    if len(damaged) < MAX_DAMAGED:
                        damaged[participant_id] = reason
                case e.ParticipantsSelected(_, more):
                    selected |= dict.fromkeys(more)
                case e.ParticipantLeft(participant_id) | e.ParticipantLeftOut(participant_id):
                    if participant_id not in contributors:
                        selected.pop(participant_id, None)
        return replace(
            self,
            selected=tuple(selected),
            contributors=tuple(contributors),
            num_samples=num_samples,
            damaged=damaged,
        )

    def published(self, at: float) -> "RoundRecord":
        """The round when it is over: short enough to be kept."""
        over = replace(self, seconds=at - self.opened_at)
        counts = self.num_selected, self.num_contributors
        if sum(counts) <= MAX_NAMES_OF_A_ROUND:
            return over
        return replace(over, selected=(), contributors=(), counts=counts)


class History:
    """Fold with `apply`, in the order of the journal.

    models: by key, oldest first. contributions: by participant. departed: those of `contributions`
    who have left, longest ago first.
    """

    def __init__(
        self,
        rounds: Iterable[RoundRecord] = (),
        models: Mapping[str, GlobalModel] | None = None,
        contributions: Mapping[str, int] | None = None,
        departed: Iterable[str] = (),
    ) -> None:
        self._rounds = deque(rounds, maxlen=MAX_ROUNDS)
        self._unwritten: list[e.Event] = []  # of the round that runs
        self.models = dict(models or {})
        self.contributions = Counter(contributions or {})
        self.departed = dict.fromkeys(departed)

    @property
    def rounds(self) -> deque[RoundRecord]:
        """Oldest first. The last one may run."""
        self._write()
        return self._rounds

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return self._content() == other._content()

    def __repr__(self) -> str:
        return f"History{self._content()!r}"

    def _content(self) -> tuple[object, ...]:
        return self.rounds, self.models, self.contributions, self.departed

    def apply(self, event: e.Event) -> None:
        match event:
            case e.UpdateAccepted(_, update):
                self._note(event)
                self.contributions[update.participant_id] += 1
            case e.UpdateDamaged(participant_id):
                self._note(event)
                self.contributions[participant_id] -= 1
            case e.ParticipantJoined(participant_id):
                self.departed.pop(participant_id, None)
            case e.ParticipantLeft(participant_id):
                self._note(event)
                self._leave(participant_id)
            case e.ParticipantLeftOut() | e.ParticipantsSelected():
                self._note(event)
            case e.RoundOpened(number, selected, _, at):
                self.rounds.append(RoundRecord(number, selected, at))
            case e.ModelInitialised(model):
                self._keep(model)
            case e.ModelPublished(_, model, at):
                self.rounds.append(self.rounds.pop().published(at))
                self._keep(model)
            case _:
                pass

    def copy(self) -> "History":
        """As it is now, for a reader in another thread."""
        return History(self.rounds, self.models, self.contributions, self.departed)

    def _note(self, event: e.Event) -> None:
        self._unwritten.append(event)
        if len(self._unwritten) == MAX_UNWRITTEN:
            self._write()

    def _write(self) -> None:
        """Bring the round that runs up to date."""
        if self._unwritten:
            if self._rounds and self._rounds[-1].seconds is None:
                self._rounds.append(self._rounds.pop().after(self._unwritten))
            self._unwritten = []

    def _leave(self, participant_id: str) -> None:
        if participant_id in self.contributions:
            self.departed[participant_id] = None
        if len(self.departed) > MAX_DEPARTED:
            forgotten = next(iter(self.departed))
            del self.departed[forgotten], self.contributions[forgotten]

    def _keep(self, model: GlobalModel) -> None:
        # Each event that is read back from a journal brings its own copy of what never changes.
        before = next(reversed(self.models.values()), None)
        if before is not None:
            model = replace(
                model,
                dtype=before.dtype if before.dtype == model.dtype else model.dtype,
                shape=before.shape if before.shape == model.shape else model.shape,
                layout=before.layout if before.layout == model.layout else model.layout,
                metadata=before.metadata if before.metadata == model.metadata else model.metadata,
            )
        self.models[model.ref.key] = model
