"""A round: the participants that it selects, the answers that it takes in, and its attempts.

The methods that begin with `with` or `without` answer the round after an event, and leave this one
as it was.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xain_coordinator.core.parts import descent
from xain_coordinator.core.vocabulary.layered import excluding, including
from xain_coordinator.core.vocabulary.replacing import replace
from xain_coordinator.core.vocabulary.values import Evaluation, Names, Task, Update


@dataclass(frozen=True)  # without slots: see replacing.py
class Round:
    """A round from opening to publication.

    selected: in the order of selection.
    target: how many ought to be selected; below it, participants who come are added.
    num_wanted: updates with which it is complete, if no quorum says otherwise.
    carried: those of the selected who still train an earlier round, with its number.
    first_update_at: when the first update was accepted; None before, and in a journal of an earlier
        version.
    overdue_at: when the deadline passed with too few updates; from then on the least number will
        do, and all participants are selected.
    updates: accepted ones by participant, each of them in `selected`.
    closed_at: None while updates are taken in.
    damaged: the key of each participant's latest accepted update that was found damaged in the
        store, and no longer counts.
    reopened_at: when the first damaged update was found, or the attempt began that is not the first
        one; the deadline is counted from then.
    task: of the selected participants.
    evaluations: of model `number`, by participant. In an EVALUATE round they are the answers that
        the round waits for; one with 0 samples tells that its sender has measured nothing.
    failed: participants whose own code failed in this round, and that are not selected again in it
        before it is overdue.
    losses: with the rule "gradient", the loss that each participant has measured at the model.
    learning_rate: with that rule, the rate of the round's step, once it is closed.
    total_samples: in asynchronous modes, samples of the sites that trained when it was closed.
    control_share: of its sites in the mean of all control variates, once it is closed; None for a
        model without them. lost_control: whether a site of it had lost its own.
    attempt: with the rule "assemble", the number of the attempt at this round, from 1; else 0.
    broken: members of the attempt that are gone, or have reported that its process group broke, and
        why. Not empty: the attempt is broken.
    stopped_first: members that were the first to stop in an attempt that is over, with the number
        of these attempts.
    """

    number: int
    selected: tuple[str, ...]
    target: int
    epochs: int
    opened_at: float
    num_wanted: int
    carried: Mapping[str, int] = field(default_factory=dict)
    overdue_at: float | None = None
    updates: Mapping[str, Update] = field(default_factory=dict)
    closed_at: float | None = None
    damaged: Mapping[str, str] = field(default_factory=dict)
    reopened_at: float | None = None
    task: Task = Task.TRAIN
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    failed: Mapping[str, None] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    total_samples: int = 0
    control_share: float | None = None
    lost_control: bool = False
    attempt: int = 0
    broken: Mapping[str, str] = field(default_factory=dict)
    stopped_first: Mapping[str, int] = field(default_factory=dict)
    first_update_at: float | None = None

    def __post_init__(self) -> None:
        # Every change of the round looks up names in it, which Names does in constant time.
        object.__setattr__(self, "selected", Names(self.selected))

    @property
    def answers(self) -> Mapping[str, object]:
        """Updates or evaluations by participant, of which the round needs one of each selected."""
        return self.evaluations if self.task is Task.EVALUATE else self.updates

    @property
    def all_in(self) -> bool:
        """Whether all selected participants have answered."""
        return len(self.answers) == len(self.selected)  # whose answers they are

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Selected participants whose update or evaluation is outstanding."""
        answers = self.answers
        return tuple(p for p in self.selected if p not in answers)

    def owes(self, participant_id: str) -> bool:
        """Whether the answer of a selected participant is outstanding."""
        return participant_id in self.selected and participant_id not in self.answers

    def trained_by(self, participant_id: str) -> int:
        """The round that a selected participant trains, or has trained."""
        return self.carried.get(participant_id, self.number)

    @property
    def first_to_stop(self) -> dict[str, int]:
        """The number of attempts in which a participant was the first to stop, the present one
        included, by participant."""
        first = dict(self.stopped_first)
        for participant_id in list(self.broken)[:1]:
            first[participant_id] = first.get(participant_id, 0) + 1
        return first

    # --- the round after an event ---

    def with_selected(self, more: Sequence[str]) -> "Round":
        """Select more participants."""
        return replace(self, selected=Names((*self.selected, *more)))

    def without_selected(self, participant_id: str) -> "Round":
        """Take a participant out of the selection."""
        at = self.selected.index(participant_id)
        selected = Names((*self.selected[:at], *self.selected[at + 1 :]))
        return replace(self, selected=selected, carried=excluding(self.carried, participant_id))

    def with_update(self, update: Update, at: float | None) -> "Round":
        """Count an update. at: session time; None in a journal of an earlier version."""
        participant_id = update.participant_id
        assert participant_id in self.selected, "an update from outside the selection"
        assert participant_id not in self.updates, "an update counted twice"
        first_update_at = at if self.first_update_at is None else self.first_update_at
        updates = including(
            self.updates, participant_id, dataclasses.replace(update, accepted_at=at)
        )
        return replace(self, updates=updates, first_update_at=first_update_at)

    def with_loss(self, participant_id: str, metrics: Mapping[str, float]) -> "Round":
        """Note the loss that a participant has measured, if its metrics have one."""
        loss = next((metrics[name] for name in descent.LOSSES if name in metrics), None)
        if loss is None:
            return self
        return replace(self, losses=including(self.losses, participant_id, loss))

    def with_evaluation(self, participant_id: str, evaluation: Evaluation) -> "Round":
        """Take the evaluation of a participant."""
        return replace(self, evaluations=including(self.evaluations, participant_id, evaluation))

    def with_failed(self, participant_id: str) -> "Round":
        """Note that a participant's own code has failed, so that it is not selected again."""
        return replace(self, failed=including(self.failed, participant_id, None))

    def without_failed(self, participant_id: str) -> "Round":
        """Select a participant again whose code has failed; its process may have been mended."""
        return replace(self, failed=excluding(self.failed, participant_id))

    def with_broken(self, participant_id: str, reason: str) -> "Round":
        """Record why a member that still owes its slice has stopped training in the attempt."""
        if not self.attempt or not self.owes(participant_id) or participant_id in self.broken:
            return self
        return replace(self, broken=including(self.broken, participant_id, reason))

    def without_update(self, participant_id: str, at: float) -> "Round":
        """Take a damaged update out of the round, which collects updates again."""
        key = self.updates[participant_id].weights.ref.key
        is_first = self.reopened_at is None
        round_ = replace(
            self,
            updates=excluding(self.updates, participant_id),
            evaluations=excluding(self.evaluations, participant_id),
            losses=excluding(self.losses, participant_id),
            damaged=including(self.damaged, participant_id, key),
            closed_at=None,
            reopened_at=at if is_first else self.reopened_at,
            overdue_at=None if is_first else self.overdue_at,
        )
        return round_.with_broken(participant_id, "its slice is damaged in the store")

    def restarted(self, selected: Sequence[str], attempt: int, at: float) -> "Round":
        """Begin the next attempt, without the slices that came in."""
        return replace(
            self,
            selected=Names(selected),
            target=len(selected),
            num_wanted=len(selected),
            updates={},
            evaluations={},
            failed={p: None for p in self.failed if p not in selected},
            attempt=attempt,
            broken={},
            reopened_at=at,
            stopped_first=self.first_to_stop,
        )
