"""Accounts of participants: how often each one counted, and why it did not.

Accounts are a part of the history (history.py), folded from the same events.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.replacing import replace
from xain_coordinator.core.vocabulary.values import Rules

# Rounds in a row without counting after which a participant is named in a warning. A round for
# which it was by chance not selected is not among them.
MANY_ROUNDS = 3

MAX_DEPARTED = 1000  # that are remembered
MAX_WARNINGS = 20  # that name a participant each

# The reason of a selected participant without which the round was complete: neither a fault nor a
# loss.
NOT_WAITED_FOR = "not waited for"


@dataclass(frozen=True)  # without slots: see replacing.py
class Account:
    """Account of one participant: rounds that it was selected for and counted in.

    num_selected: number of rounds for which it was selected; selected_for: the latest of them.
    num_counted: number of rounds that it counted in.
    missed: rounds in a row in which it was selected and did not count, or could not be selected.
    reason: why, in the last of these rounds.
    failure: the last refused update or failure, with the round; "" if there was none.
    num_samples: of the latest update, or of the data profile; None if not known.
    left_out_until: round from which it is selected again after refusals, failures and missed
        deadlines. away: why the participant is not connected; "" if it is.
    """

    num_selected: int = 0
    num_counted: int = 0
    selected_for: int = -1
    missed: int = 0
    reason: str = ""
    failure: str = ""
    num_samples: int | None = None
    is_eligible: bool = True
    left_out_until: int = 0
    away: str = ""

    def why_not_selected(self, number: int) -> str:
        """Why the participant could not be selected for a round; "" if it could, or has left."""
        if self.away:
            return self.away if self.away == "expired" else ""
        if not self.is_eligible:
            return "not eligible"
        if self.left_out_until > number:
            return f"left out until round {self.left_out_until}"
        return ""


class Accounts:
    """Accounts of all participants, by name; those that have left in the order in which they left.

    rules: of the session; None where nothing is known of them.
    begun: participants whose MANY_ROUNDS rounds without counting were full with the latest round.
    """

    def __init__(self, rules: Rules | None, accounts: Mapping[str, Account] | None = None) -> None:
        self.by_name = dict(accounts or {})
        self._departed = {name: None for name, one in self.by_name.items() if one.away}
        self.begun: list[str] = []
        self._rules = rules

    def apply(self, event: e.Event) -> None:
        """Change a participant's account by an event that names it; the other methods count whole
        rounds."""
        match event:
            case e.UpdateAccepted(_, update):
                known: dict[str, object] = {"left_out_until": 0}
                if update.num_samples:
                    known["num_samples"] = update.num_samples
                self._set(update.participant_id, **known)
            case e.UpdateRefused(participant_id, number, reason):
                self._set(participant_id, failure=f"round {number}: refused: {reason}")
            case e.TrainingFailed(participant_id, number):
                self._set(participant_id, failure=f"round {number}: {failure_reason(event)}")
            case e.ParticipantLeftOut(participant_id, until):
                self._set(participant_id, left_out_until=until)
            case e.ParticipantJoined(participant_id, profile, _, tags):
                self._departed.pop(participant_id, None)
                is_eligible = self._rules is None or self._rules.is_eligible(participant_id, tags)
                num_samples = self._of(participant_id).num_samples
                if profile is not None:
                    num_samples = profile.num_samples
                self._set(participant_id, away="", is_eligible=is_eligible, num_samples=num_samples)
            case e.ParticipantLeft(participant_id, cause):
                self._note_left(participant_id, cause)
            case _:
                pass

    def count_round(
        self,
        number: int,
        selected: Iterable[str],
        contributors: Collection[str],
        missing: Mapping[str, str],
    ) -> tuple[int, int]:
        """Count a round of training that is over, for those selected and for those that could not
        be. contributors: those whose updates counted. missing: why a selected participant did not
        contribute, by participant.

        Returns the number of samples that were lost, and of all that could have counted.
        """
        self.begun = []
        contributed = frozenset(contributors)
        known = [one.num_samples for one in self.by_name.values() if one.num_samples is not None]
        usual = round(fmean(known)) if known else 1
        late_go_on = self._rules is not None and self._rules.carries_over
        names = dict.fromkeys(selected)
        lost = could = 0
        for name in names:
            num_samples = self._of(name).num_samples
            samples = usual if num_samples is None else num_samples
            could += samples
            reason = missing.get(name, "")
            if name in contributed:
                self._set(name, missed=0, reason="")
            elif reason != NOT_WAITED_FOR:
                lost += samples
                self._count_missed(name, reason)
            elif not late_go_on:
                self._count_missed(name, reason)
        for name, account in list(self.by_name.items()):
            if name in names or not (why := account.why_not_selected(number)):
                continue
            self._count_missed(name, why)
            if account.is_eligible and not account.away:
                samples = usual if account.num_samples is None else account.num_samples
                lost, could = lost + samples, could + samples
        return lost, could

    def note_selected(self, number: int, names: Iterable[str]) -> None:
        """Note in their accounts that participants were selected for a round that trains, once for
        each round."""
        for name in names:
            account = self._of(name)
            if account.selected_for != number:
                num_selected = account.num_selected + 1
                self._set(name, num_selected=num_selected, selected_for=number)

    def note_counted(self, name: str, difference: int) -> None:
        """Note that a participant counted in one more round, or in one less. difference: 1 or
        -1."""
        self._set(name, num_counted=self._of(name).num_counted + difference)

    def contributions(self) -> dict[str, int]:
        """Number of rounds that each participant counted in which ever did."""
        counted = {name: account.num_counted for name, account in self.by_name.items()}
        return {name: number for name, number in counted.items() if number}

    def _note_left(self, name: str, cause: str) -> None:
        """Keep the account of a participant that has left, if it was ever selected or counted,
        among the latest MAX_DEPARTED. cause: as in ParticipantLeft."""
        account = self.by_name.pop(name, _NEW)
        if account.num_selected or account.num_counted:
            self.by_name[name] = replace(account, away=cause)
            self._departed[name] = None
        if len(self._departed) > MAX_DEPARTED:
            forgotten = next(iter(self._departed))
            del self._departed[forgotten], self.by_name[forgotten]

    def _count_missed(self, name: str, reason: str) -> None:
        """Count one more round in a row without the participant, and keep the reason; at
        MANY_ROUNDS of them its name goes into `begun`."""
        missed = self._of(name).missed + 1
        self._set(name, missed=missed, reason=reason)
        if missed == MANY_ROUNDS:
            self.begun.append(name)

    def warnings(self, *, is_over: bool) -> Iterator[str]:
        """A sentence for each participant that does not count, the longest absence first. is_over:
        those that never counted are named however short the session was."""
        never = set(self.never_counted()) if is_over else set()
        found = [
            (-account.missed, name)
            for name, account in self.by_name.items()
            if account.missed >= MANY_ROUNDS or name in never
        ]
        for _, name in sorted(found)[:MAX_WARNINGS]:
            account = self.by_name[name]
            what = f"has not counted for {account.missed} rounds"
            if name in never:
                selected = account.num_selected
                what = "has never counted; it was selected for " + (
                    "1 round" if selected == 1 else f"{selected} rounds"
                )
            yield f"{name} {what}: {account.reason or 'no reason is known'}."
        if len(found) > MAX_WARNINGS:
            yield f"{len(found) - MAX_WARNINGS} more participants have not counted either."

    def never_counted(self) -> list[str]:
        """Participants that could have counted, or were not eligible, and never have."""
        return [
            name
            for name, account in sorted(self.by_name.items())
            if not account.num_counted and (account.num_selected or account.missed)
        ]

    def failures_of_departed(self) -> dict[str, str]:
        """Failures of participants that have left after one, the latest first."""
        failures = {name: self._of(name).failure for name in reversed(self._departed)}
        return {name: failure for name, failure in failures.items() if failure}

    def _of(self, name: str) -> Account:
        """The account of a participant, which may be a new one."""
        return self.by_name.get(name, _NEW)

    def _set(self, name: str, **changes: object) -> None:
        """Change these fields of the account of a participant, which may be a new one."""
        # The changes are fields of an account by name, of several types.
        account = self.by_name.get(name, _NEW)
        self.by_name[name] = replace(account, **changes)  # type: ignore[arg-type]


_NEW = Account()


def failure_reason(event: e.TrainingFailed) -> str:
    """The reason why an update does not count after a failure of its participant's code."""
    return f"failed: {event.kind}: {event.message}" if event.message else f"failed: {event.kind}"
