"""When a round may open, how many it asks, when it is complete: the rules of pacing once more,
slowly and obviously, from the fields of the events alone.
"""

from enum import Enum
from math import ceil

from xain_coordinator.core import events as e
from xain_coordinator.core.values import GlobalModel, Rules
from xain_coordinator.ports import Record

ROUNDING_S = 1e-6  # between sums of times in different orders


class Stage(Enum):
    BETWEEN = "between rounds"
    OPEN = "open"
    PAUSED = "paused"
    CLOSED = "closed"
    OVER = "over"


class Rounds:
    """Follows the journal. What does not follow raises AssertionError."""

    def __init__(self, opened: e.SessionOpened) -> None:
        self.stage = Stage.BETWEEN
        self._rules: Rules = opened.rules
        self._members: set[str] = set()
        self._model: GlobalModel | None = None
        self._number = -1
        # The selected, each at the round that it trains; between rounds, those who still train.
        self._clocks: dict[str, int] = {}
        self._updated: set[str] = set()
        self._wanted = 0
        self._target = 0
        self._is_overdue = False
        self._opened_at: dict[int, float] = {}
        self._since = opened.at  # of the stage

    def take(self, record: Record) -> None:
        event, at = record.event, record.at
        match event:
            case e.ParticipantJoined(name):
                self._members.add(name)
            case e.ParticipantLeft(name):
                self._members.discard(name)
                if name not in self._updated:
                    self._clocks.pop(name, None)
            case e.ModelInitialised(model):
                self._model = model
            case e.RoundOpened():
                self._open(event)
                self._to(Stage.OPEN, at)
            case e.ParticipantsSelected(number, more):
                self._require_open(number, Stage.OPEN, Stage.PAUSED)
                expected = min(self._num_missing, len(self._pool))
                assert len(more) == expected, f"{more} were selected, and not {expected}"
                assert self._pool.issuperset(more), f"{more} are not all in the pool"
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
            case e.RoundOverdue(number):
                self._require_open(number, Stage.OPEN)
                assert not self._has_enough, "there are enough updates"
                self._require_late(at)
                self._is_overdue = True
            case e.RoundClosed(number, _, cause):
                self._require_open(number, Stage.OPEN, Stage.PAUSED)
                assert self._has_enough, f"there are too few updates: {self._state}"
                if cause == "deadline":
                    self._require_late(at)
                else:
                    assert self._num_missing <= 0 or not self._pool, "others could be selected"
                    assert self._is_complete, f"it is not complete: {self._state}"
                self._to(Stage.CLOSED, at)
            case e.ModelPublished(number, model):
                self._require_open(number, Stage.CLOSED)
                self._go_on(model)
                self._to(Stage.BETWEEN, at)
            case e.SessionFinished():
                self._to(Stage.OVER, at)

    def settled(self, at: float) -> None:
        """A transaction is over: nothing is left that follows from the state that it has reached,
        at the time of its last event."""
        stage, num_required = self.stage, self._num_required
        if stage in (Stage.CLOSED, Stage.OVER):
            return
        has_required = len(self._members) >= num_required
        if stage is Stage.BETWEEN:
            assert self._model is None or not has_required, "no round is opened"
            return
        assert self._num_missing <= 0 or not self._pool, f"nobody is selected: {self._state}"
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
        wanted = ceil(rules.fraction_participants * num_here)
        asked = min(num_here, ceil(wanted * (1 + rules.over_selection)))
        deadlines = [self._opened_at[n] + self._deadline_s for n in carried.values()]
        num_busy = sum(deadline > opened.at for deadline in deadlines)
        num_drawn = min(num_here - len(carried), max(0, asked - num_busy))
        if rules.controller == "all":
            num_drawn = num_here - len(carried)
        assert len(drawn) == num_drawn, f"{drawn} were selected, and not {num_drawn}"
        expected = wanted if rules.over_selection else len(selected)
        assert opened.num_wanted == expected, f"{expected} are wanted, not {opened.num_wanted}"
        self._number, self._wanted, self._target = number, expected, len(selected)
        self._clocks |= dict.fromkeys(drawn, number)
        self._updated = set()
        self._is_overdue = False
        self._opened_at[number] = opened.at

    def _accept(self, sender: str, number: int, staleness: int) -> None:
        assert sender in self._clocks, f"{sender} is not selected"
        assert sender not in self._updated, f"{sender} has handed in"
        expected = number - self._clocks[sender]
        assert staleness == expected, f"{sender} is {expected} rounds behind"
        limit = self._rules.staleness
        assert staleness >= 0, "it is of a round to come"
        assert limit is None or staleness <= limit, f"at most {limit} rounds behind are allowed"
        self._updated.add(sender)

    def _go_on(self, model: GlobalModel) -> None:
        """Who trains an earlier round goes on, if that is not too old for the next one."""
        oldest = self._number + 1
        if self._is_buffered:
            limit = self._rules.staleness
            oldest = 0 if limit is None else oldest - limit
        self._clocks = {p: self._clocks[p] for p in self._outstanding if self._clocks[p] >= oldest}
        self._updated = set()
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
    def _pool(self) -> set[str]:
        return self._members - set(self._clocks)

    @property
    def _num_missing(self) -> int:
        return len(self._pool) if self._is_overdue else self._target - len(self._clocks)

    @property
    def _outstanding(self) -> set[str]:
        return set(self._clocks) - self._updated

    @property
    def _has_enough(self) -> bool:
        return len(self._updated) >= self._rules.min_participants

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
