"""When a round may open, how many it asks, when it is complete: the rules of pacing once more,
slowly and obviously, from the fields of the events alone.
"""

from enum import Enum
from math import ceil

from xain_coordinator.core import events as e
from xain_coordinator.core.values import GlobalModel, Rules, Task
from xain_coordinator.ports import Record

ROUNDING_S = 1e-6  # between sums of times in different orders


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
        self._rules: Rules = opened.rules
        self._members: set[str] = set()
        self._evaluators: set[str] = set()  # members that can evaluate
        self._without_weights: set[str] = set()  # members that cannot make initial weights
        self._asked: set[str] = set()  # for an evaluation of the last model
        self._model: GlobalModel | None = None
        self._number = -1
        # The selected, each at the round that it trains; between rounds, those who still train.
        self._clocks: dict[str, int] = {}
        self._updated: set[str] = set()
        self._wanted = 0
        self._target = 0
        self._num_needed = 0
        self._is_overdue = False
        # Faults since the last good update; and who is left out until which round for them.
        self._in_a_row: dict[str, int] = {}
        self._left_out_until: dict[str, int] = {}
        self._refused: set[str] = set()  # in this round
        self._failed: set[str] = set()  # in this round, and not joined again since
        self._late: set[str] = set()  # whose latest fault is a missed deadline
        self._opened_at: dict[int, float] = {}
        self._since = opened.at  # of the stage

    def take(self, record: Record) -> None:
        event, at = record.event, record.at
        match event:
            case e.ParticipantJoined(
                name, can_evaluate=can_evaluate, can_initialise=can_initialise
            ):
                self._members.add(name)
                self._without_weights.discard(name)
                if not can_initialise:
                    self._without_weights.add(name)
                if can_evaluate:
                    self._evaluators.add(name)
                self._failed.discard(name)
            case e.ParticipantLeft(name):
                self._members.discard(name)
                self._evaluators.discard(name)
                self._asked.discard(name)
                if name not in self._updated:
                    self._clocks.pop(name, None)
            case e.ModelInitialised(model):
                self._model = model
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
            case e.UpdateRefused(name):
                assert name in self._outstanding, f"{name} owes no update"
                assert name not in self._left_out, f"{name} is left out already"
                self._fault(name)
                self._refused.add(name)
            case e.TrainingFailed(name):
                assert name in self._outstanding, f"{name} owes no update"
                self._fault(name)
                self._failed.add(name)
                self._clocks.pop(name)
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
                self._is_overdue = True
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
                    assert self._is_complete, f"it is not complete: {self._state}"
                self._to(Stage.CLOSED, at)
            case e.ModelPublished(number, model):
                self._require_open(number, Stage.CLOSED)
                self._go_on(model)
                self._to(Stage.BETWEEN, at)
            case e.SessionFinished(cause):
                if cause == "completed":
                    is_late = at >= self._since + self._rules.evaluate_deadline_s - ROUNDING_S
                    is_evaluated = self.stage is Stage.EVALUATING and (is_late or not self._asked)
                    assert is_evaluated or not self._to_evaluate, "the last model is not evaluated"
                self._to(Stage.OVER, at)

    def settled(self, at: float) -> None:
        """A transaction is over: nothing is left that follows from the state that it has reached,
        at the time of its last event."""
        stage, num_required = self.stage, self._num_required
        if stage in (Stage.CLOSED, Stage.OVER):
            return
        if stage is Stage.EVALUATING:
            assert self._asked, "no evaluation is waited for"
            is_late = at > self._since + self._rules.evaluate_deadline_s + ROUNDING_S
            assert not is_late, f"it has evaluated since {self._since}"
            return
        has_required = len(self._members) >= num_required and bool(self._able)
        if stage is Stage.BETWEEN:
            assert self._model is None or not has_required, "no round is opened"
            return
        assert not self._to_be_selected[1], f"nobody is selected: {self._state}"
        assert not self._gives_way, f"{self._drafted} are not needed any more: {self._state}"
        over = {p for p, num in self._in_a_row.items() if num >= self._rules.refused_limit}
        over -= self._late  # these are left out when the next round opens
        assert not (over and self._rules.refused_limit), f"{over} are not left out"
        assert not self._is_complete, f"round {self._number} stays open, complete: {self._state}"
        assert has_required == (stage is Stage.OPEN), (
            f"{len(self._members)} are here, it is {stage}"
        )
        is_late = at > self._deadline + ROUNDING_S
        if stage is Stage.OPEN:
            assert self._is_overdue or not is_late, f"its deadline was at {self._deadline}"
        else:
            assert not (is_late and self._has_enough), f"its deadline was at {self._deadline}"

    def _to(self, stage: Stage, at: float) -> None:
        self.stage, self._since = stage, at

    def _fault(self, name: str) -> None:
        if name not in self._left_out:
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
        self._late.discard(name)

    def _miss(self, missed: tuple[str, ...]) -> None:
        """Owed at the deadline: by nobody who has been counted in this round, or goes on with it in
        the next one."""
        expected = self._outstanding - self._refused - self._left_out
        if self._is_buffered:
            limit = self._rules.staleness
            oldest = 0 if limit is None else self._number + 1 - limit
            expected = {p for p in expected if self._clocks[p] < oldest}
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
        assert num_here >= self._num_required, f"{num_here} are too few"
        carried = dict(self._clocks)
        assert set(selected[: len(carried)]) == set(carried), f"{carried} go on"
        drawn = selected[len(carried) :]
        assert len(set(selected)) == len(selected), "somebody is selected twice"
        assert self._members.issuperset(selected), "somebody is not here"
        # As if those who are left out had gone, but the least number is always there.
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
        num_reserve = max(0, num_needed - len(carried) - num_drawn)
        num_reserve = min(len((self._left_out & self._able) - set(carried)), num_reserve)
        expected_in_all = num_drawn + num_reserve
        assert len(drawn) == expected_in_all, f"{drawn} were selected, and not {expected_in_all}"
        assert pool.issuperset(drawn[:num_drawn]), f"{drawn} are not all of {pool}"
        task = Task.INITIALISE if self._makes_initial_weights else Task.TRAIN
        assert opened.task is task, f"its task is {opened.task}, not {task}"
        expected = wanted if rules.over_selection else len(selected)
        assert opened.num_wanted == expected, f"{expected} are wanted, not {opened.num_wanted}"
        self._number, self._wanted, self._target = number, expected, len(selected)
        self._num_needed = num_needed
        self._clocks |= dict.fromkeys(drawn, number)
        self._updated = set()
        self._refused = set()
        self._is_overdue = False
        self._opened_at[number] = opened.at

    @property
    def _to_evaluate(self) -> set[str]:
        return self._evaluators if self._rules.evaluate_every else set()

    def _open_evaluation(self, opened: e.RoundOpened) -> None:
        assert self.stage is Stage.BETWEEN, f"it is {self.stage}"
        assert opened.round == self._number + 1 == self._rules.num_rounds, (
            "it is not the last model"
        )
        assert opened.selected, "nobody is asked"
        assert set(opened.selected) == self._to_evaluate, f"{self._to_evaluate} can evaluate"
        self._number, self._asked = opened.round, set(opened.selected)

    def _accept(self, sender: str, number: int, staleness: int) -> None:
        assert sender in self._clocks, f"{sender} is not selected"
        assert sender not in self._updated, f"{sender} has handed in"
        expected = number - self._clocks[sender]
        assert staleness == expected, f"{sender} is {expected} rounds behind"
        limit = self._rules.staleness
        assert staleness >= 0, "it is of a round to come"
        assert limit is None or staleness <= limit, f"at most {limit} rounds behind are allowed"
        self._updated.add(sender)
        self._in_a_row.pop(sender, None)
        self._left_out_until.pop(sender, None)

    def _leave_out(self, name: str, until: int) -> None:
        """For the last of a row of refusals; or because enough others have come."""
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
        self._left_out_until[name] = until
        if name not in self._updated:
            self._clocks.pop(name, None)

    def _go_on(self, model: GlobalModel) -> None:
        """Who trains an earlier round goes on, if that is not too old for the next one."""
        oldest = self._number + 1
        if self._is_buffered:
            limit = self._rules.staleness
            oldest = 0 if limit is None else oldest - limit
        self._clocks = {p: self._clocks[p] for p in self._outstanding if self._clocks[p] >= oldest}
        self._updated, self._failed = set(), set()
        self._model = model

    def _require_late(self, at: float) -> None:
        deadline = self._deadline
        if self.stage is Stage.PAUSED and not self._is_overdue:  # before that ends the session
            assert self._rules.idle_timeout_s is not None
            deadline = min(deadline, self._since + self._rules.idle_timeout_s)
        assert at >= deadline - ROUNDING_S, f"the deadline is at {deadline}"

    @property
    def _deadline_s(self) -> float:
        assert self._rules.deadline_s is not None
        return self._rules.deadline_s

    @property
    def _deadline(self) -> float:
        return self._opened_at[self._number] + self._deadline_s

    @property
    def _num_required(self) -> int:
        """The smallest number of which the fraction is enough."""
        rules, n = self._rules, 1
        while ceil(n * rules.fraction_participants) < rules.min_participants:
            n += 1
        return n

    @property
    def _present_round(self) -> int:
        return self._number + (self.stage is Stage.BETWEEN)

    @property
    def _left_out(self) -> set[str]:
        """Members before whom others are selected."""
        until, now = self._left_out_until, self._present_round
        return {p for p in self._members if until.get(p, 0) > now}

    @property
    def _able(self) -> set[str]:
        """Members that can do what the round asks for."""
        is_empty = self._model is not None and self._model.is_empty
        return self._members - self._without_weights if is_empty else self._members

    @property
    def _pool(self) -> set[str]:
        return self._able - set(self._clocks) - self._left_out - self._failed

    @property
    def _drafted(self) -> set[str]:
        """Those who are left out, and asked all the same, because others were too few."""
        return self._left_out & self._outstanding

    @property
    def _num_lacking(self) -> int:
        """How many of those who are left out the round needs; less than none: it has too many."""
        return self._num_needed - len(self._clocks)

    @property
    def _gives_way(self) -> bool:
        """Enough others are there for one of those who were asked for want of them."""
        return not self._is_overdue and bool(self._drafted) and self._num_lacking < 0

    @property
    def _to_be_selected(self) -> tuple[set[str], int]:
        """Among whom, and how many of them."""
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
    def _outstanding(self) -> set[str]:
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
    def _is_buffered(self) -> bool:
        is_empty = self._model is None or self._model.is_empty
        return self._rules.consistency != "bsp" and not is_empty

    @property
    def _is_complete(self) -> bool:
        rules, num_updates = self._rules, len(self._updated)
        if not self._has_enough:
            return False
        if self._is_overdue or not self._outstanding:
            return True
        if self._is_buffered:
            slowest = min(self._clocks[p] for p in self._outstanding)
            in_time = rules.staleness is None or self._number + 1 - slowest <= rules.staleness
            return in_time and num_updates >= rules.buffer_size
        if rules.quorum:
            return num_updates >= self._quorum
        return num_updates >= self._wanted

    @property
    def _quorum(self) -> int:
        """Of everybody's updates; scenario.py draws no other."""
        assert isinstance(self._rules.quorum, str)
        source, tag, amount = self._rules.quorum.split(":")
        assert source in ("*", "participant")
        assert tag == "update"
        if not amount.endswith("%"):
            return int(amount)
        return max(1, ceil(int(amount[:-1]) * len(self._clocks) / 100))

    @property
    def _state(self) -> str:
        return (
            f"{len(self._updated)} updates of {self._clocks}, {self._wanted} wanted, "
            f"overdue: {self._is_overdue}"
        )
