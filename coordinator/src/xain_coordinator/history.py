"""What an operator wants to know of the past: a second fold of the same events.

Bounded: the latest rounds, with the names of those who took part where they are few, and the counts
of those who are here and of the latest who have left. Of every model its reference is kept, since
any may be asked for; what models have in common is in memory once.
"""

from collections import Counter, deque
from dataclasses import dataclass, field, replace

from xain_coordinator.core import events as e
from xain_coordinator.core.values import GlobalModel

MAX_ROUNDS = 1000
MAX_DEPARTED = 1000

# Selected and contributors together, of a round that is over. Its names are for a person to read;
# those of a thousand rounds of a thousand participants would fill the memory, and every snapshot.
MAX_NAMES_OF_A_ROUND = 200


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round as it was.

    selected: without those who left, or were left out, while they still owed an update.
    selected, contributors: empty when the round is over and they were many; `counts` has their
        numbers then.
    seconds: from opening to publication, None while it runs.
    """

    round: int
    selected: tuple[str, ...]
    opened_at: float
    contributors: tuple[str, ...] = ()
    num_samples: int = 0
    seconds: float | None = None
    counts: tuple[int, int] | None = None

    @property
    def num_selected(self) -> int:
        return len(self.selected) if self.counts is None else self.counts[0]

    @property
    def num_contributors(self) -> int:
        return len(self.contributors) if self.counts is None else self.counts[1]

    def published(self, at: float) -> "RoundRecord":
        """The round when it is over: short enough to be kept."""
        over = replace(self, seconds=at - self.opened_at)
        counts = self.num_selected, self.num_contributors
        if sum(counts) <= MAX_NAMES_OF_A_ROUND:
            return over
        return replace(over, selected=(), contributors=(), counts=counts)


@dataclass(slots=True)
class History:
    """Fold with `apply`, in the order of the journal."""

    rounds: deque[RoundRecord] = field(default_factory=lambda: deque(maxlen=MAX_ROUNDS))
    models: dict[str, GlobalModel] = field(default_factory=dict)  # by key, oldest first
    contributions: Counter[str] = field(default_factory=Counter)
    # Those of `contributions` who have left, longest ago first.
    departed: dict[str, None] = field(default_factory=dict)

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
                self.departed.pop(participant_id, None)
            case e.ParticipantLeft(participant_id):
                self._leave(participant_id)
            case e.ParticipantLeftOut(participant_id):
                self._release(participant_id)
            case e.ModelInitialised(model):
                self._keep(model)
            case e.ModelPublished(_, model, at):
                self.rounds[-1] = self.rounds[-1].published(at)
                self._keep(model)
            case _:
                pass

    def copy(self) -> "History":
        """As it is now, for a reader in another thread."""
        return History(
            self.rounds.copy(),
            self.models.copy(),
            self.contributions.copy(),
            self.departed.copy(),
        )

    def _leave(self, participant_id: str) -> None:
        self._release(participant_id)
        if participant_id in self.contributions:
            self.departed[participant_id] = None
        if len(self.departed) > MAX_DEPARTED:
            forgotten = next(iter(self.departed))
            del self.departed[forgotten], self.contributions[forgotten]

    def _release(self, participant_id: str) -> None:
        """As in the session: what was accepted stays, what is owed somebody else will do."""
        latest = self.rounds[-1] if self.rounds else None
        if (
            latest is not None
            and latest.seconds is None
            and participant_id in latest.selected
            and participant_id not in latest.contributors
        ):
            selected = tuple(p for p in latest.selected if p != participant_id)
            self.rounds[-1] = replace(latest, selected=selected)

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
