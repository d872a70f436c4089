"""Participants that may be selected, and those that are left out for their faults.

A fault is a refused update, a failure of the participant's own code, or a missed deadline. Whoever
has too many in a row is left out: others are selected before it for some rounds.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xain_coordinator.core.vocabulary.layered import excluding, including, including_all
from xain_coordinator.core.vocabulary.replacing import replace

# Participants that have left and whose faults are remembered, so that a participant cannot clear
# its record by leaving and coming back.
MAX_DEPARTED = 1000


@dataclass(frozen=True, slots=True)
class LastSelection:
    """The last selection of a member.

    at: how many selections of single participants the session had made then, or when it came.
    round: the one that it was selected for; None before the first.
    """

    at: int
    round: int | None = None


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of a participant.

    num_refused: updates that were refused as unusable, all of them.
    in_a_row: faults since the last update that was accepted, or since it was left out.
    last: the round of the latest fault.
    left_out_until: it is selected again for this round and later ones; 0: it is not left out.
    """

    num_refused: int = 0
    in_a_row: int = 0
    left_out_until: int = 0
    last: int = -1


NO_FAULTS = Faults()


@dataclass(frozen=True)  # without slots: see replacing.py
class SelectionState:
    """State that selection goes by. The methods that begin with `with` or `without` answer the
    state after an event.

    unselected: the eligible members that are neither in the open round nor, between two rounds,
        carried over; kept, since every change may ask whether there are any. Empty after the end.
    left_out: the eligible members that are left out; kept for the same reason.
    faults: of participants, also of those that have left, while they matter.
    last_selected: the last selection of each member.
    num_selections: of single participants, so far. num_draws: selections in the open round.
    """

    unselected: Mapping[str, None] = field(default_factory=dict)
    left_out: Mapping[str, None] = field(default_factory=dict)
    faults: Mapping[str, Faults] = field(default_factory=dict)
    last_selected: Mapping[str, LastSelection] = field(default_factory=dict)
    num_selections: int = 0
    num_draws: int = 0

    def faults_of(self, participant_id: str) -> Faults:
        """The faults of a participant, which may have none."""
        return self.faults.get(participant_id, NO_FAULTS)

    def is_left_out(self, participant_id: str, round_: int) -> bool:
        """Whether others are selected before the participant in this round."""
        return self.left_out_until(participant_id, round_) is not None

    def left_out_until(self, participant_id: str, round_: int) -> int | None:
        """The round from which a participant is selected again; None if it is not left out."""
        until = self.faults_of(participant_id).left_out_until
        return until if until > round_ else None

    def with_member(
        self, participant_id: str, round_: int, *, is_eligible: bool, is_selected: bool
    ) -> "SelectionState":
        """Add a joining participant, last in the order of selection. is_selected: it has handed in
        for the open round, left and come back, so it is not selected anew."""
        unselected, left_out = self.unselected, self.left_out
        if is_eligible and not is_selected:
            unselected = including(unselected, participant_id, None)
        if is_eligible and self.is_left_out(participant_id, round_):
            left_out = including(left_out, participant_id, None)
        arrived = LastSelection(self.num_selections)
        last_selected = including(self.last_selected, participant_id, arrived)
        return replace(self, unselected=unselected, left_out=left_out, last_selected=last_selected)

    def without_member(
        self, participant_id: str, round_: int, members: Collection[str]
    ) -> "SelectionState":
        """Remove a participant that leaves. members: those that stay."""
        state = replace(
            self,
            last_selected=excluding(self.last_selected, participant_id),
            unselected=excluding(self.unselected, participant_id),
            left_out=excluding(self.left_out, participant_id),
        )
        return state._with_departed(participant_id, round_, members)

    def _with_departed(
        self, participant_id: str, round_: int, members: Collection[str]
    ) -> "SelectionState":
        """Keep the faults of a participant that has left, of at most MAX_DEPARTED participants."""
        known = self.faults.get(participant_id)
        if known is None:
            return self
        if not known.in_a_row and not self.is_left_out(participant_id, round_):
            return replace(self, faults=excluding(self.faults, participant_id))
        faults = including(self.faults, participant_id, known)  # as the latest of them
        if len(faults) > MAX_DEPARTED:
            departed = [p for p in faults if p not in members]
            for forgotten in departed[: max(0, len(departed) - MAX_DEPARTED)]:
                faults = excluding(faults, forgotten)
        return replace(self, faults=faults)

    def with_selected(self, round_: int, selected: Sequence[str]) -> "SelectionState":
        """Note that participants are selected for a round, in this order."""
        first = self.num_selections + 1
        new = {p: LastSelection(at, round_) for at, p in enumerate(selected, first)}
        return replace(
            self,
            num_selections=self.num_selections + len(selected),
            last_selected=including_all(self.last_selected, new),
            unselected={p: None for p in self.unselected if p not in new},
        )

    def with_unselected(self, participant_id: str) -> "SelectionState":
        """Let a participant that was taken out of the open round be selected again."""
        return replace(self, unselected=including(self.unselected, participant_id, None))

    def without_unselected(self, participant_id: str) -> "SelectionState":
        """Keep a participant from being selected."""
        return replace(self, unselected=excluding(self.unselected, participant_id))

    def with_fault(
        self, participant_id: str, round_: int, *, num_refused: int = 0
    ) -> "SelectionState":
        """Count a fault, unless the participant is left out already."""
        if self.is_left_out(participant_id, round_):
            return self
        known = self.faults_of(participant_id)
        known = Faults(
            known.num_refused + num_refused, known.in_a_row + 1, known.left_out_until, round_
        )
        return replace(self, faults=including(self.faults, participant_id, known))

    def with_missed(self, missed: Iterable[str], round_: int) -> "SelectionState":
        """Count one more fault of each participant that has missed a deadline."""
        state = self
        for participant_id in missed:
            state = state.with_fault(participant_id, round_)
        return state

    def with_good_update(self, participant_id: str) -> "SelectionState":
        """Clear the faults in a row of a participant whose update counted; it is left out no
        longer."""
        known = self.faults.get(participant_id)
        if known is None or known == Faults(known.num_refused):
            return self
        cleared = Faults(known.num_refused)
        return replace(
            self,
            faults=including(self.faults, participant_id, cleared),
            left_out=excluding(self.left_out, participant_id),
        )

    def with_left_out(self, participant_id: str, until: int, round_: int) -> "SelectionState":
        """Leave a participant out. until: the round from which it is selected again."""
        known = Faults(self.faults_of(participant_id).num_refused, left_out_until=until)
        left_out = self.left_out
        if until > round_:
            left_out = including(left_out, participant_id, None)
        faults = including(self.faults, participant_id, known)
        return replace(self, faults=faults, left_out=left_out)

    def after_round(self, next_round: int, unselected: Iterable[str]) -> "SelectionState":
        """The state once a model is published. unselected: members that train nothing."""
        return replace(
            self,
            unselected=dict.fromkeys(unselected),
            left_out={p: None for p in self.left_out if self.is_left_out(p, next_round)},
            num_draws=0,
        )
