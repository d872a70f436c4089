"""What an operator wants to know of the past: a second fold of the same events.

Bounded: the latest rounds in full, of all others the model's reference and each participant's
count.
"""

from collections import Counter, deque
from dataclasses import dataclass, field, replace

from xain_coordinator.core import events as e
from xain_coordinator.core.values import GlobalModel

MAX_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round as it was. seconds: from opening to publication, None while it runs."""

    round: int
    selected: tuple[str, ...]
    opened_at: float
    contributors: tuple[str, ...] = ()
    num_samples: int = 0
    seconds: float | None = None


@dataclass(slots=True)
class History:
    """Fold with `apply`, in the order of the journal."""

    rounds: deque[RoundRecord] = field(default_factory=lambda: deque(maxlen=MAX_ROUNDS))
    models: dict[str, GlobalModel] = field(default_factory=dict)  # by key, oldest first
    contributions: Counter[str] = field(default_factory=Counter)

    def apply(self, event: e.Event) -> None:
        match event:
            case e.RoundOpened(number, selected, _, at):
                self.rounds.append(RoundRecord(number, selected, at))
            case e.ParticipantsSelected(_, more):
                latest = self.rounds[-1]
                self.rounds[-1] = replace(latest, selected=(*latest.selected, *more))
            case e.UpdateAccepted(_, update):
                latest = self.rounds[-1]
                self.rounds[-1] = replace(
                    latest,
                    contributors=(*latest.contributors, update.participant_id),
                    num_samples=latest.num_samples + update.num_samples,
                )
                self.contributions[update.participant_id] += 1
            case e.ModelInitialised(model):
                self.models[model.ref.key] = model
            case e.ModelPublished(_, model, at):
                latest = self.rounds[-1]
                self.rounds[-1] = replace(latest, seconds=at - latest.opened_at)
                self.models[model.ref.key] = model
            case _:
                pass
