"""Pacing: who must be connected, who is selected, when a round is complete, and when
it has waited long enough.

Exact rational arithmetic. XAIN computed these in floats and waited for 99 participants where 100
were meant, or selected 8 of 25 where 7 were asked for.

In BSP a round is complete with all the updates that it wants, or with its quorum. In SSP and ASP a
model is made of every `buffer_size` updates (Nguyen et al. 2022, Federated Learning with Buffered
Asynchronous Aggregation), and whoever still trains an earlier round goes on with that; the clock
table says whether the next round may begin without them.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor

from xain_coordinator.core.values import Expression, Round, Rules, Task
from xain_messaging.clock_table import ClockTable
from xain_messaging.conditional_events import Condition, parse

# A quorum counts the updates of participants.
PEER_TYPE = "participant"
TAG = "update"

# Session time is written down this often while a deadline is waited for: a crash puts a deadline
# off by at most this fraction of it, or by the least time.
NOTED_FRACTION = 0.1
MIN_NOTED_S = 1.0
MAX_NOTED_S = 60.0


def exact_fraction(value: float | str | Fraction) -> Fraction:
    """The decimal that was written, not the binary float nearest to it: 0.1 is 1/10.

    Raises ValueError outside (0, 1].
    """
    fraction = Fraction(str(value))
    if not 0 < fraction <= 1:
        raise ValueError(f"must be greater than 0 and at most 1, got {value}")
    return fraction


def num_wanted(num_connected: int, fraction: Fraction) -> int:
    """k = ceil(fraction · connected)."""
    return ceil(num_connected * fraction)


def num_selected(num_connected: int, fraction: Fraction, over_selection: Fraction) -> int:
    """ceil(k · (1 + over_selection)), as far as there are so many.

    Source: Bonawitz et al. 2019, Towards Federated Learning at Scale: System Design, section 2.2,
    which selects 130 % of those it needs.
    """
    wanted = num_wanted(num_connected, fraction)
    return min(num_connected, ceil(wanted * (1 + over_selection)))


def num_required(min_participants: int, fraction: Fraction) -> int:
    """N, the smallest n with ceil(n · fraction) ≥ min_participants.

    ceil(x) ≥ m exactly when x > m - 1, so n is the first integer above (m - 1) / fraction.
    """
    return floor((min_participants - 1) / fraction) + 1


def num_needed(round_: Round, rules: Rules) -> int:
    """The least number of updates that a model may be made of."""
    return 1 if round_.task is Task.INITIALISE else rules.min_participants


def has_enough(round_: Round, rules: Rules) -> bool:
    """The round has enough updates for a model."""
    return len(round_.updates) >= num_needed(round_, rules)


def is_complete(round_: Round, rules: Rules, *, buffered: bool) -> bool:
    """Nothing more is waited for.

    buffered: a model is made of buffer_size updates, without waiting for those who are late.
    """
    if not has_enough(round_, rules):
        return False
    if round_.overdue_at is not None or round_.all_in:
        return True
    if buffered:
        if len(round_.updates) < rules.buffer_size:
            return False
        # Without a limit nobody is waited for, and a round may be as large as the fleet.
        clocks = {} if rules.staleness is None else _clocks(round_)
        return ClockTable(clocks, rules.staleness).admits(round_.number + 1)
    if rules.quorum:
        return has_quorum(round_, rules.quorum)
    return len(round_.updates) >= round_.num_wanted


def carried_over(round_: Round, rules: Rules) -> Mapping[str, int]:
    """Participants that go on training when this round is over, with the round that they train."""
    return {p: clock for p, clock in _clocks(round_).items() if _may_go_on(clock, round_, rules)}


def is_carried_over(round_: Round, rules: Rules, participant_id: str) -> bool:
    """Whether this participant goes on training when the round is over."""
    clock = round_.trained_by(participant_id)
    return round_.owes(participant_id) and _may_go_on(clock, round_, rules)


def _may_go_on(clock: int, round_: Round, rules: Rules) -> bool:
    """Whether an update of the round `clock` would not be too stale for the next model."""
    return rules.staleness is None or clock >= round_.number + 1 - rules.staleness


def _clocks(round_: Round) -> dict[str, int]:
    """The round that each participant trains whose answer is outstanding."""
    return {p: round_.trained_by(p) for p in round_.outstanding}


_parsed = lru_cache(maxsize=8)(parse)


def has_quorum(round_: Round, quorum: Expression) -> bool:
    """The updates so far satisfy the conditional event. Its percentages are of the selected."""
    condition: Condition = _parsed(quorum)

    def count(source: str, tag: str) -> int:
        if source in ("*", PEER_TYPE):
            return len(round_.updates)
        return int(source in round_.updates)

    def num_peers(source: str) -> int:
        if source in ("*", PEER_TYPE):
            return len(round_.selected)
        return int(source in round_.selected)

    return condition.is_met(count, num_peers)


def describe(quorum: Expression) -> str:
    """A quorum in words."""
    return str(_parsed(quorum))


def round_deadline(round_: Round, rules: Rules) -> float | None:
    """Session time at which the round makes do with the least number of updates; that of an
    EVALUATE round closes it."""
    if round_.is_evaluation:
        return round_.opened_at + rules.evaluate_deadline_s
    if rules.deadline_s is None or round_.overdue_at is not None:
        return None
    began = round_.opened_at if round_.reopened_at is None else round_.reopened_at
    return began + rules.deadline_s


def noted_every_s(rules: Rules, round_: Round | None = None) -> float | None:
    """Interval at which session time is recorded while this round is open; None if nothing depends
    on it."""
    is_evaluation = round_ is not None and round_.is_evaluation
    deadline_s = rules.evaluate_deadline_s if is_evaluation else rules.deadline_s
    waits = [wait for wait in (deadline_s, rules.idle_timeout_s) if wait is not None]
    if not waits:
        return None
    return min(MAX_NOTED_S, max(MIN_NOTED_S, NOTED_FRACTION * min(waits)))
