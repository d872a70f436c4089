"""The rules of pacing and selection once more, slowly and obviously, from the fields of the events
alone: when a round may open, whom it selects, when it closes, and who is left out.

Unit tests, state machines of Hypothesis and the simulation ask this one oracle about every event of
a session, whatever else they test. It does not know the rule "assemble", nor rules that are plugged
in.
"""

from dataclasses import replace
from enum import Enum
from fractions import Fraction
from math import ceil, inf

from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import GlobalModel, Task
from xain_foundation.conditional_events import parse

ROUNDING_S = 1e-6  # between sums of times in different orders


def num_required(min_participants: int, fraction: Fraction) -> int:
    """N: the smallest number of which the fraction, rounded up, is enough."""
    n = 1
    while ceil(n * fraction) < min_participants:
        n += 1
    return n


class Stage(Enum):
    BETWEEN = "between rounds"
    OPEN = "open"
    PAUSED = "paused"
    CLOSED = "closed"
    EVALUATING = "evaluating the last model"
    OVER = "over"


class Rounds:
    """Follows the journal. What does not follow raises AssertionError."""

    def __init__(self, opened: e.SessionOpened) -> None:
        self.stage = Stage.BETWEEN
        self._rules = rules = opened.rules
        self._num_required = num_required(rules.min_participants, rules.fraction_participants)
        self._members: set[str] = set()
        self._evaluators: set[str] = set()  # members that can evaluate
        self._without_weights: set[str] = set()  # members that cannot make initial weights
        self._asked: set[str] = set()  # for an evaluation of the last model
        self._model: GlobalModel | None = None
        self._number = -1
        # The selected, each at the round that it trains; between rounds, those that still train.
        self._clocks: dict[str, int] = {}
        self._updated: set[str] = set()
        self._wanted = 0
        self._target = 0
        self._num_needed = 0
        self._is_overdue = False
        self._damaged: set[str] = set()  # whose update of this round was found damaged
        self._reopened_at: float | None = None  # for the first damaged update of this round
        self._first_update_at: float | None = None
        # The round that a script has configured last, and the participants that it wants in it.
        self._configured = -1
        self._chosen: set[str] = set()
        self._measured = -1  # number of the model that a script has evaluated last
        self._has_gathered = self._script_is_over = False
        # Faults since the last good update; and who is left out until which round for them.
        self._in_a_row: dict[str, int] = {}
        self._left_out_until: dict[str, int] = {}
        self._last_fault: dict[str, int] = {}  # and the round of the latest one
        self._failed: set[str] = set()  # in this round, and not joined again since
        self._late: set[str] = set()  # whose latest fault is a missed deadline
        self._opened_at: dict[int, float] = {}
        self._since = opened.at  # of the stage; or when enough had gathered, or a model was there
        self._overdue_at = opened.at

    def take(self, event: e.DurableEvent, at: float) -> None:
        """Follow one event. Raises AssertionError if it may not follow the events before."""
        match event:
            case e.ParticipantJoined():
                self._join(event)
            case e.ParticipantLeft(name):
                self._members.discard(name)
                self._evaluators.discard(name)
                self._asked.discard(name)
                if name not in self._updated:
                    self._clocks.pop(name, None)
            case e.TrainingPlanned(plan):
                self._rules = replace(self._rules, rounds=plan.rounds, epochs=plan.epochs)
            case e.RoundConfigured(number, config):
                assert self._awaits_script, f"no script is waited for: {self.stage}"
                assert number == self._number + 1, f"it follows on {self._number}"
                assert number < self._rules.num_rounds, "there is no round after the last one"
                self._configured, self._chosen, self._since = number, set(config.selected), at
            case e.ScriptEvaluated(number):
                assert self._has_script, "no script is here"
                assert self._model is not None, "there is no model"
                assert not self._model.is_empty, "there is nothing to evaluate"
                assert number == self._model.round, f"the model is {self._model.round}"
                assert self._measured < number, f"model {number} is evaluated already"
                self._measured = number
            case e.ScriptEnded():
                assert self._has_script, "no script is here"
                self._script_is_over, self._since = True, at
            case e.FitRequested():
                self._since = at
            case e.ParticipantsGathered():
                self._since, self._has_gathered = at, True
            case e.ModelInitialised(model):
                self._model, self._since = model, at
            case e.RoundOpened(task=Task.EVALUATE):
                self._open_evaluation(event)
                self._to(Stage.EVALUATING, at)
            case e.EvaluationAccepted(number, name):
                self._require_open(number, Stage.EVALUATING)
                assert name in self._asked, f"{name} owes no evaluation"
                self._asked.discard(name)
            case e.RoundOpened():
                self._open(event)
                self._to(Stage.OPEN, at)
            case e.ParticipantsSelected(number, more) if self.stage is Stage.EVALUATING:
                assert self._rules.step is not None, "only a study waits for those that were away"
                assert self._evaluators.issuperset(more), f"{more} cannot all evaluate"
                assert not self._asked.intersection(more), f"{more} are asked already"
                self._asked |= set(more)
            case e.ParticipantsSelected(number, more):
                self._require_open(number, Stage.OPEN, Stage.PAUSED)
                candidates, expected = self._to_be_selected
                assert len(more) == expected, f"{more} were selected, and not {expected}"
                assert candidates.issuperset(more), f"{more} are not all of {candidates}"
                self._clocks |= dict.fromkeys(more, number)
            case e.RoundPaused(number):
                self._require_open(number, Stage.OPEN)
                self._to(Stage.PAUSED, at)
            case e.RoundResumed(number):
                self._require_open(number, Stage.PAUSED)
                self._to(Stage.OPEN, at)
            case e.UpdateAccepted(number, update, staleness):
                self._require_open(number, Stage.OPEN)
                self._accept(update.participant_id, number, staleness)
                if self._first_update_at is None:
                    self._first_update_at = at
            case e.UpdateDamaged(name):
                self._require_open(event.round, Stage.OPEN, Stage.PAUSED, Stage.CLOSED)
                self._damage(name, at)
            case e.UpdateRefused(name):
                assert name in self.outstanding | self._asked, f"{name} owes no update"
                assert name not in self._left_out, f"{name} is left out already"
                self._fault(name)
            case e.TrainingFailed(name):
                assert name in self.outstanding | self._asked, f"{name} owes no update"
                self._fault(name)
                self._failed.add(name)
                self._asked.discard(name)
                self._clocks.pop(name, None)
            case e.ParticipantReturned(name):
                assert name in self._failed, f"{name} has not failed"
                self._failed.discard(name)
            case e.ParticipantLeftOut(name, until):
                self._leave_out(name, until)
            case e.RoundOverdue(number, missed=missed):
                self._require_open(number, Stage.OPEN)
                assert not self._has_enough, "there are enough updates"
                self._require_late(at)
                self._miss(missed)
                self._is_overdue, self._overdue_at = True, at
                self._failed = set()
            case e.RoundClosed(number, _, cause, missed):
                self._require_open(number, Stage.OPEN, Stage.PAUSED)
                assert self._has_enough, f"there are too few updates: {self._state}"
                if cause == "deadline":
                    self._require_late(at)
                    self._miss(missed)
                else:
                    assert not missed, f"{missed} are not late"
                    assert not self._to_be_selected[1], "others could be selected"
                    is_due = self._closes_at <= at + ROUNDING_S
                    assert self.is_complete or is_due, f"it is not complete: {self._state}"
                self._to(Stage.CLOSED, at)
            case e.ModelPublished(number, model):
                self._require_open(number, Stage.CLOSED)
                self._go_on(model)
                self._to(Stage.BETWEEN, at)
            case e.SessionFinished(cause):
                is_open = self.stage in (Stage.OPEN, Stage.PAUSED, Stage.CLOSED)
                if self._script_is_over and is_open:
                    pass  # a round that is open when the script ends is not waited for
                elif cause == "completed":
                    is_late = at >= self._since + self._rules.evaluate_deadline_s - ROUNDING_S
                    is_done = is_late or not (self._asked or self._absent)
                    is_evaluated = self.stage is Stage.EVALUATING and is_done
                    assert is_evaluated or not self._to_evaluate, "the last model is not evaluated"
                elif "rounds.idle_timeout_s" in cause:
                    assert at >= self.gives_up_at - ROUNDING_S, f"it gives up at {self.gives_up_at}"
                self._to(Stage.OVER, at)

    def settled(self, at: float) -> None:
        """A transaction is over: nothing is left that follows from the state that it has reached,
        at the time of its last event."""
        stage, num_required = self.stage, self._num_required
        if stage in (Stage.CLOSED, Stage.OVER):
            return
        if stage is Stage.EVALUATING:
            is_awaited = self._asked or self._rules.evaluate_data or self._absent
            assert is_awaited, "no evaluation is waited for"
            is_late = at > self._since + self._rules.evaluate_deadline_s + ROUNDING_S
            assert not is_late, f"it has evaluated since {self._since}"
            return
        num_able = 1 if stage is not Stage.BETWEEN or self._makes_initial_weights else num_required
        has_required = len(self._members) >= num_required and len(self._fit) >= num_able
        if stage is Stage.BETWEEN:
            lacks_chosen = self._wants_chosen and len(self._able) < self._rules.min_participants
            is_awaited = self._model is None or not has_required or self._awaits_script
            assert is_awaited or lacks_chosen, "no round is opened"
            return
        assert not self._to_be_selected[1], f"nobody is selected: {self._state}"
        assert not self._gives_way, f"{self._drafted} are not needed any more: {self._state}"
        over = {p for p, num in self._in_a_row.items() if num >= self._rules.refused_limit}
        over -= self._late  # these are left out when the next round opens
        assert not (over and self._rules.refused_limit), f"{over} are not left out"
        assert not self.is_complete, f"round {self._number} stays open, complete: {self._state}"
        assert at < self._closes_at + ROUNDING_S, f"its pacing closes it at {self._closes_at}"
        assert has_required == (stage is Stage.OPEN), (
            f"{len(self._members)} are here, it is {stage}"
        )
        is_late = at > self._deadline + ROUNDING_S
        if stage is Stage.OPEN:
            assert self._is_overdue or not is_late, f"its deadline was at {self._deadline}"
        else:
            assert not (is_late and self._has_enough), f"its deadline was at {self._deadline}"

    def _join(self, joined: e.ParticipantJoined) -> None:
        if any(joined.tags.get(key) not in values for key, values in self._rules.tags.items()):
            return  # it is connected, and nothing else
        name = joined.participant_id
        if self._rules.sites and name not in self._rules.sites:
            return
        self._members.add(name)
        self._without_weights.discard(name)
        if not joined.can_initialise:
            self._without_weights.add(name)
        if joined.can_evaluate:
            self._evaluators.add(name)
        self._failed.discard(name)

    def _damage(self, name: str, at: float) -> None:
        """An accepted update counts no longer, and its sender owes it again, if it is here."""
        assert name in self._updated, f"{name} has no update"
        self._updated.discard(name)
        self._damaged.add(name)
        if name not in self._members:
            self._clocks.pop(name)
        if self._reopened_at is None:
            self._reopened_at, self._is_overdue = at, False
        if self.stage is Stage.CLOSED:
            self._to(Stage.OPEN, at)

    def _to(self, stage: Stage, at: float) -> None:
        self.stage, self._since = stage, at

    def _fault(self, name: str) -> None:
        if name not in self._left_out:
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
            self._last_fault[name] = self._present_round
        self._late.discard(name)

    def _miss(self, missed: tuple[str, ...]) -> None:
        """Count the participants that owe an update at the deadline. A fault in this round is
        counted already, and a participant that goes on in the next round is not late."""
        expected = self.outstanding - self._damaged - self._left_out
        expected = {p for p in expected if self._last_fault.get(p) != self._number}
        if self.is_buffered:
            expected = {p for p in expected if self._clocks[p] < self._number + 1 - self.limit}
        assert set(missed) == expected, f"{expected} are late, not {missed}"
        for name in missed:
            self._fault(name)
            self._late.add(name)

    def _require_open(self, number: int, *stages: Stage) -> None:
        assert number == self._number, f"it is round {self._number}"
        assert self.stage in stages, f"it is {self.stage}"

    def _open(self, opened: e.RoundOpened) -> None:
        assert self.stage is Stage.BETWEEN, f"it is {self.stage}"
        number, selected, rules = opened.round, opened.selected, self._rules
        num_here = len(self._members)
        assert number == self._number + 1, f"it follows on {self._number}"
        assert not self._awaits_script, "its script has not configured it"
        assert num_here >= self._num_required, f"{num_here} are too few"
        carried = dict(self._clocks)
        assert set(selected[: len(carried)]) == set(carried), f"{carried} go on"
        drawn = selected[len(carried) :]
        assert len(set(selected)) == len(selected), "somebody is selected twice"
        assert self._members.issuperset(selected), "somebody is not here"
        # As if left-out participants had gone, but the least number is always there.
        num_counted = max(num_here - len(self._left_out), self._num_required)
        wanted = ceil(rules.fraction_participants * num_counted)
        asked = min(num_counted, ceil(wanted * (1 + rules.over_selection)))
        deadlines = [self._opened_at[n] + self._deadline_s for n in carried.values()]
        num_busy = sum(deadline > opened.at for deadline in deadlines)
        pool = self._pool
        num_drawn = min(len(pool), max(0, asked - num_busy))
        if rules.controller == "all":
            num_drawn = len(pool)
        num_needed = rules.min_participants
        if self._makes_initial_weights:
            wanted, num_needed, num_drawn = 1, 1, min(len(pool), 1)
        num_chosen = len(self._chosen) if self._wants_chosen else 0
        if num_chosen:  # all of them that are here, left out or not
            pool = self._able
            num_drawn, wanted = len(pool), num_chosen
            assert num_drawn >= num_needed, f"{pool} are too few of {self._chosen}"
        num_reserve = max(0, num_needed - len(carried) - num_drawn)
        num_reserve = min(len((self._left_out & self._able) - set(carried)), num_reserve)
        expected_in_all = num_drawn + num_reserve
        assert len(drawn) == expected_in_all, f"{drawn} were selected, and not {expected_in_all}"
        assert pool.issuperset(drawn[:num_drawn]), f"{drawn} are not all of {pool}"
        task = Task.INITIALISE if self._makes_initial_weights else Task.TRAIN
        assert opened.task is task, f"its task is {opened.task}, not {task}"
        expected = wanted if rules.over_selection or num_chosen else len(selected)
        assert opened.num_wanted == expected, f"{expected} are wanted, not {opened.num_wanted}"
        self._number, self._wanted, self._target = number, expected, num_chosen or len(selected)
        self._num_needed = num_needed
        self._clocks |= dict.fromkeys(drawn, number)
        self._updated = set()
        self._failed, self._damaged = set(), set()
        self._is_overdue = False
        self._reopened_at = self._first_update_at = None
        self._opened_at[number] = opened.at

    @property
    def _absent(self) -> set[str]:
        """Sites of a study that are not connected."""
        return set(self._rules.sites) - self._members

    @property
    def _to_evaluate(self) -> set[str]:
        return self._evaluators if self._rules.evaluate_every else set()

    def _open_evaluation(self, opened: e.RoundOpened) -> None:
        assert self.stage is Stage.BETWEEN, f"it is {self.stage}"
        stops_early = self._rules.evaluate_patience or self._rules.aggregation == "gradient"
        stops_early = stops_early or self._script_is_over
        is_last = opened.round == self._rules.num_rounds or stops_early
        assert is_last, "it is not the last model"
        assert opened.round == self._number + 1, f"it follows on {self._number}"
        is_measured = self._rules.evaluate_data or self._measured == opened.round
        assert opened.selected or is_measured, "nobody is asked"
        assert set(opened.selected) == self._to_evaluate, f"{self._to_evaluate} can evaluate"
        self._number, self._asked = opened.round, set(opened.selected)
        self._clocks, self._updated = {}, set()

    def _accept(self, sender: str, number: int, staleness: int) -> None:
        assert sender in self._clocks, f"{sender} is not selected"
        assert sender not in self._updated, f"{sender} has handed in"
        expected = number - self._clocks[sender]
        assert staleness == expected, f"{sender} is {expected} rounds behind"
        assert 0 <= staleness <= self.limit, f"{staleness} rounds behind, and not {self.limit}"
        self._updated.add(sender)
        self._in_a_row.pop(sender, None)
        self._last_fault.pop(sender, None)
        self._left_out_until.pop(sender, None)

    def _leave_out(self, name: str, until: int) -> None:
        """Leave a participant out, for the last fault of a row, or because enough others came."""
        limit, num_rounds = self._rules.refused_limit, self._rules.refused_rounds
        if self._in_a_row.get(name, 0):
            assert self._in_a_row[name] >= limit, f"{self._in_a_row[name]} in a row"
            expected = self._present_round + num_rounds + (self.stage is not Stage.BETWEEN)
        else:
            assert name in self._drafted, f"{name} was not asked although it is left out"
            assert self._gives_way, f"{name} is needed: {self._state}"
            expected = self._left_out_until[name]
        assert until == expected, f"until {expected}, not {until}"
        self._in_a_row.pop(name, None)
        self._last_fault.pop(name, None)
        self._left_out_until[name] = until
        self._asked.discard(name)
        if name not in self._updated:
            self._clocks.pop(name, None)

    def _go_on(self, model: GlobalModel) -> None:
        """Carry over participants whose round is not too old for the next one."""
        oldest = self._number + 1 - (self.limit if self.is_buffered else 0)
        self._clocks = {p: self._clocks[p] for p in self.outstanding if self._clocks[p] >= oldest}
        self._updated, self._failed = set(), set()
        self._model = model

    def _require_late(self, at: float) -> None:
        deadline = self._deadline
        if self.stage is Stage.PAUSED and not self._is_overdue:  # before that ends the session
            deadline = min(deadline, self._since + self._idle_s)
        assert at >= deadline - ROUNDING_S, f"the deadline is at {deadline}"

    @property
    def clocks(self) -> dict[str, int]:
        """The selected, each with the round that it trains; between rounds, those that go on."""
        return dict(self._clocks)

    @property
    def limit(self) -> float:
        """Rounds that an update may be behind."""
        return inf if self._rules.staleness is None else self._rules.staleness

    @property
    def gives_up_at(self) -> float:
        """Time at which the session ends if nothing happens. An overdue round is waited for from
        its deadline on, whatever pauses it; while one collects updates, nothing ends."""
        if self._is_overdue and self.stage in (Stage.OPEN, Stage.PAUSED):
            return self._overdue_at + self._idle_s
        if self._awaits_script:
            return inf
        return inf if self.stage is Stage.OPEN else self._since + self._idle_s

    @property
    def _idle_s(self) -> float:
        return inf if self._rules.idle_timeout_s is None else self._rules.idle_timeout_s

    @property
    def _deadline_s(self) -> float:
        return inf if self._rules.deadline_s is None else self._rules.deadline_s

    @property
    def _deadline(self) -> float:
        began = self._opened_at[self._number] if self._reopened_at is None else self._reopened_at
        return began + self._deadline_s

    @property
    def _closes_at(self) -> float:
        """Time at which the pacing rule after_first closes the round."""
        first = self._first_update_at
        if self._rules.pacing != "after_first" or first is None or not self._has_enough:
            return inf
        if not self._is_trained:  # initial weights are awaited from all
            return inf
        return max(first, self._reopened_at or first) + float(self._rules.pacing_options["seconds"])

    @property
    def _present_round(self) -> int:
        number = self._number + (self.stage is Stage.BETWEEN)
        return min(number, self._rules.num_rounds - 1)

    @property
    def _left_out(self) -> set[str]:
        """Members before whom others are selected."""
        until, now = self._left_out_until, self._present_round
        return {p for p in self._members if until.get(p, 0) > now}

    @property
    def _fit(self) -> set[str]:
        """Members that can do what the round asks for."""
        is_empty = self._model is not None and self._model.is_empty
        return self._members - self._without_weights if is_empty else self._members

    @property
    def _able(self) -> set[str]:
        """Members that are fit, and that the script has chosen if it has chosen some."""
        return self._fit & self._chosen if self._wants_chosen else self._fit

    @property
    def _awaits_script(self) -> bool:
        """Whether nothing happens until a script has decided."""
        is_between = self.stage is Stage.BETWEEN and self._is_trained and self._has_gathered
        is_due = self._has_script and is_between
        return is_due and self._configured != self._number + 1

    @property
    def _has_script(self) -> bool:
        """Whether there is a script, which goes on."""
        return self._rules.scripted and not self._script_is_over

    @property
    def _wants_chosen(self) -> bool:
        """Whether the participants of the present round, or of the next one, are chosen by name."""
        is_between = self.stage is Stage.BETWEEN
        if self._is_overdue and not is_between:
            return False  # others are asked, too
        return bool(self._chosen) and self._configured == self._number + is_between

    @property
    def _pool(self) -> set[str]:
        return self._able - set(self._clocks) - self._left_out - self._failed

    @property
    def _drafted(self) -> set[str]:
        """Participants that are left out, and selected all the same, since others were too few."""
        return self._left_out & self.outstanding

    @property
    def _num_lacking(self) -> int:
        """Participants that the round lacks; below 0 it has selected more than it needs."""
        return self._num_needed - len(self._clocks)

    @property
    def _gives_way(self) -> bool:
        """Enough others have come to release a participant that is left out."""
        if self._is_overdue or self._wants_chosen:
            return False
        return bool(self._drafted) and self._num_lacking < 0

    @property
    def _to_be_selected(self) -> tuple[set[str], int]:
        """Candidates for the free places of the open round, and the number of these places."""
        if self._is_overdue:
            everybody = self._able - set(self._clocks) - self._failed
            return everybody, len(everybody)
        num_free = self._target - len(set(self._clocks) - self._drafted)
        if num_free > 0 and self._pool:
            return self._pool, min(num_free, len(self._pool))
        reserve = (self._left_out & self._able) - set(self._clocks) - self._failed
        if self._num_lacking > 0 and reserve:
            return reserve, min(self._num_lacking, len(reserve))
        return set(), 0

    @property
    def outstanding(self) -> set[str]:
        """The selected that have not handed in."""
        return set(self._clocks) - self._updated

    @property
    def _has_enough(self) -> bool:
        return len(self._updated) >= self._num_needed

    @property
    def _makes_initial_weights(self) -> bool:
        """The next round is that of one participant, which makes the initial weights."""
        is_empty = self._model is not None and self._model.is_empty
        return self._rules.initial == "first" and is_empty

    @property
    def _is_trained(self) -> bool:
        return self._model is not None and not self._model.is_empty

    @property
    def is_buffered(self) -> bool:
        """Models are made without waiting for late participants; not the first one."""
        return self._rules.consistency != "bsp" and self._is_trained

    @property
    def is_complete(self) -> bool:
        """The round closes with the updates that it has, however late it is."""
        rules, num_updates = self._rules, len(self._updated)
        if not self._has_enough:
            return False
        if self._is_overdue or not self.outstanding:
            return True
        if self.is_buffered:
            slowest = min(self._clocks[p] for p in self.outstanding)
            return self._number + 1 - slowest <= self.limit and num_updates >= rules.buffer_size
        if rules.quorum:
            return parse(rules.quorum).is_met(
                lambda source, _: self._num_of(source, self._updated),
                lambda source: self._num_of(source, set(self._clocks)),
            )
        return num_updates >= self._wanted

    def _num_of(self, source: str, names: set[str]) -> int:
        """The number of these names that a unit of the quorum counts."""
        return len(names) if source in ("*", "participant") else len(names & {source})

    @property
    def _state(self) -> str:
        return (
            f"{len(self._updated)} updates of {self._clocks}, {self._wanted} wanted, "
            f"overdue: {self._is_overdue}"
        )
