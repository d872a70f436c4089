"""What an operator wants to know of the past: a second fold of the same events.

Bounded: the latest rounds in full, and the counts of those who are here and of the latest who have
left. Of every model its reference is kept, since any may be asked for; what models have in common
is in memory once.
"""

from collections import Counter, deque
from dataclasses import dataclass, field, replace

from xain_coordinator.core import events as e
from xain_coordinator.core.values import GlobalModel

MAX_ROUNDS = 1000
MAX_DEPARTED = 1000


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round as it was.

    selected: without those who left while they still owed an update.
    seconds: from opening to publication, None while it runs.
    """

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
    # Those of `contributions` who have left, longest ago first.
    _departed: dict[str, None] = field(default_factory=dict)
    _latest_model: GlobalModel | None = None

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
            case e.ParticipantJoined(participant_id):
                self._departed.pop(participant_id, None)
            case e.ParticipantLeft(participant_id):
                self._leave(participant_id)
            case e.ModelInitialised(model):
                self._keep(model)
            case e.ModelPublished(_, model, at):
                latest = self.rounds[-1]
                self.rounds[-1] = replace(latest, seconds=at - latest.opened_at)
                self._keep(model)
            case _:
                pass

    def _leave(self, participant_id: str) -> None:
        latest = self.rounds[-1] if self.rounds else None
        # As in the session: what was accepted stays, what is owed somebody else will do.
        if (
            latest is not None
            and latest.seconds is None
            and participant_id in latest.selected
            and participant_id not in latest.contributors
        ):
            selected = tuple(p for p in latest.selected if p != participant_id)
            self.rounds[-1] = replace(latest, selected=selected)
        if participant_id in self.contributions:
            self._departed[participant_id] = None
        if len(self._departed) > MAX_DEPARTED:
            forgotten = next(iter(self._departed))
            del self._departed[forgotten], self.contributions[forgotten]

    def _keep(self, model: GlobalModel) -> None:
        # Each event that is read back from a journal brings its own copy of what never changes.
        before = self._latest_model
        if before is not None:
            model = replace(
                model,
                dtype=before.dtype if before.dtype == model.dtype else model.dtype,
                shape=before.shape if before.shape == model.shape else model.shape,
                layout=before.layout if before.layout == model.layout else model.layout,
                metadata=before.metadata if before.metadata == model.metadata else model.metadata,
            )
        self.models[model.ref.key] = self._latest_model = model
