"""Pacing: how many participants a round needs and selects, and when it closes.

Numbers are computed in exact rational arithmetic. Floats would wait for 99 participants where 100
are meant, or select 8 of 25 where 7 are asked for.

When a round closes is said by one object, its Pacing: WantedUpdates and Quorum in BSP; Buffer in
SSP and ASP, where a model is made of every `buffer_size` updates (Nguyen et al. 2022, Federated
Learning with Buffered Asynchronous Aggregation) and participants that still train an earlier round
go on with it; and rules with a name, built in or plugged in.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor
from typing import Protocol

from xain_coordinator.core.parts import attempts, descent
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary.values import Expression, Plan, Rules, Task
from xain_foundation.clock_table import ClockTable
from xain_foundation.conditional_events import Condition, parse
from xain_workloads.passes import plan

# A quorum counts the updates of participants.
PEER_TYPE = "participant"
TAG = "update"

# Session time is written down this often while a deadline is waited for: a crash puts a deadline
# off by at most this fraction of it, or by the least time.
NOTED_FRACTION = 0.1
MIN_NOTED_S = 1.0
MAX_NOTED_S = 60.0


def exact_fraction(value: float | str | Fraction) -> Fraction:
    """The decimal that was written, not the binary float nearest to it: 0.1 is 1/10. Raises
    ValueError outside (0, 1]."""
    fraction = Fraction(str(value))
    if not 0 < fraction <= 1:
        raise ValueError(f"must be greater than 0 and at most 1, got {value}")
    return fraction


def num_wanted(num_connected: int, fraction: Fraction) -> int:
    """Number of updates that a round waits for: k = ceil(fraction · connected)."""
    return ceil(num_connected * fraction)


def num_selected(num_connected: int, fraction: Fraction, over_selection: Fraction) -> int:
    """Number of participants selected: ceil(k · (1 + over_selection)), at most the connected ones.

    Source: Bonawitz et al. 2019, Towards Federated Learning at Scale: System Design, section 2.2,
    which selects 130 % of those it needs.
    """
    wanted = num_wanted(num_connected, fraction)
    return min(num_connected, ceil(wanted * (1 + over_selection)))


def num_required(min_participants: int, fraction: Fraction) -> int:
    """Number of connected participants that a round requires: N, the smallest n with ceil(n ·
    fraction) ≥ min_participants.

    ceil(x) ≥ m exactly when x > m - 1, so n is the first integer above (m - 1) / fraction.
    """
    return floor((min_participants - 1) / fraction) + 1


def num_needed(round_: Round, rules: Rules) -> int:
    """The least number of updates that a model may be made of."""
    return 1 if round_.task is Task.INITIALISE else rules.min_participants


def plan_of(rules: Rules, samples: Sequence[int]) -> Plan:
    """The rounds of a training that begins with some sites, from the passes or rounds of the rules.
    samples: rows of each of them; 0 where they are not known."""
    counted = len(samples)
    if rules.controller != "all" and rules.aggregation != attempts.RULE:
        counted = num_wanted(counted, rules.fraction_participants)
    if rules.consistency != "bsp":
        counted = min(counted, rules.buffer_size)
    return plan(
        rules.passes,
        rules.rounds,
        None if rules.plans_epochs else rules.epochs,
        rules.stride,
        samples,
        num_counted=counted,
        is_gradient=rules.aggregation == descent.RULE,
    )


def has_enough(round_: Round, rules: Rules) -> bool:
    """Whether the round has enough updates for a model."""
    return len(round_.updates) >= num_needed(round_, rules)


def is_complete(round_: Round, pacing: "Pacing") -> bool:
    """Whether a round that has enough updates has all that it waits for."""
    return round_.overdue_at is not None or round_.all_in or pacing.is_complete(round_)


_parsed = lru_cache(maxsize=8)(parse)


class Pacing(Protocol):
    """Rule that says when an open round closes.

    It is asked once the round has enough updates for a model, and while answers are outstanding; at
    its deadline a round closes whatever the rule says. A rule keeps no state: a coordinator that is
    started again asks it about the same round.
    """

    def is_complete(self, round_: Round) -> bool:
        """Whether the round closes now, with the updates that it has."""
        return len(round_.updates) >= round_.num_wanted

    def closes_at(self, round_: Round) -> float | None:
        """Session time in seconds at which the round closes with the updates that it has by then;
        None if time makes no difference."""
        return None

    def shortest_wait_s(self) -> float | None:
        """The least seconds for which a round waits for the time `closes_at`; None if it never
        does. Session time is recorded each tenth of them."""
        return None

    def max_staleness(self) -> int | None:
        """Rounds that an update may be behind; None: any number. Participants that are late go on
        with their round while the next one is open, until their updates would be staler.

        Asked when a session is opened. The answer is kept in its rules, since events are folded
        without the code of a plug-in.
        """
        return 0

    def closes_initial_round(self) -> bool:
        """Whether the rule is asked about initial weights, too. Otherwise they are awaited from all
        participants that are to make some, since without a model there is nothing to train."""
        return False

    def describe(self) -> str:
        """The updates that a model is made of, as the end of "A model is made of"."""
        ...

    def awaited(self, round_: Round) -> str:
        """The updates that the round still waits for, as a sentence for `status`."""
        ...


@dataclass(frozen=True, slots=True)
class WantedUpdates(Pacing):
    """A round is complete with as many updates as it wants: all, or with over-selection the first.

    first: number of updates when the least number of participants is connected; 0: all.
    """

    first: int = 0

    def describe(self) -> str:
        if self.first:
            return f"the first {self.first} updates"
        return "the updates of all who are selected"

    def awaited(self, round_: Round) -> str:
        return _count_awaited(round_, round_.num_wanted)


@dataclass(frozen=True, slots=True)
class Quorum(Pacing):
    """A round is complete when its updates satisfy a conditional event, whose percentages are of
    the selected participants."""

    expression: Expression

    def is_complete(self, round_: Round) -> bool:
        """Whether the updates that came satisfy the conditional event."""

        def num(names: Collection[str], source: str) -> int:
            """How many of these names a source of the event means: all, or one."""
            return len(names) if source in ("*", PEER_TYPE) else int(source in names)

        condition: Condition = _parsed(self.expression)
        return condition.is_met(
            lambda source, tag: num(round_.updates, source),
            lambda source: num(round_.selected, source),
        )

    def closes_initial_round(self) -> bool:
        return True

    def describe(self) -> str:
        return f"the updates {_parsed(self.expression)}"

    def awaited(self, round_: Round) -> str:
        """The quorum and the participants that have not answered, as sentences."""
        missing = round_.outstanding
        return (
            f"The quorum, {_parsed(self.expression)}. {len(missing)} have not answered: "
            f"{names_of(missing)}."
        )


@dataclass(frozen=True, slots=True)
class Buffer(Pacing):
    """SSP and ASP: a model is made of every `size` updates, and late participants go on.

    staleness: as max_staleness() answers.
    """

    size: int
    staleness: int | None

    def is_complete(self, round_: Round) -> bool:
        """Whether `size` updates are in and, with a limit of staleness, no participant that is
        outstanding is too far behind for the next round."""
        if len(round_.updates) < self.size:
            return False
        # Without a limit the round waits for no participant, and may be as large as the fleet.
        waits_for = () if self.staleness is None else round_.outstanding
        clocks = {p: round_.trained_by(p) for p in waits_for}
        return ClockTable(clocks, self.staleness).admits(round_.number + 1)

    def max_staleness(self) -> int | None:
        return self.staleness

    def describe(self) -> str:
        behind = f", with nobody more than {self.staleness} rounds behind"
        return f"{self.size} updates or those of everybody" + (behind if self.staleness else "")

    def awaited(self, round_: Round) -> str:
        """The updates that are missing, or else the participants that are too far behind, as a
        sentence."""
        if len(round_.updates) < self.size or not round_.outstanding:
            return _count_awaited(round_, self.size)
        oldest = round_.number - (self.staleness or 0)
        behind = [p for p in round_.outstanding if round_.trained_by(p) <= oldest]
        return f"Those who are furthest behind: {names_of(behind)}."


@dataclass(frozen=True, slots=True)
class AfterFirst(Pacing):
    """A round closes a while after its first update, or with all that it wants.

    seconds: from the first update on; a site that is slower counts in a later round.
    Raises ValueError if seconds is not positive.
    """

    seconds: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds must be greater than 0, got {self.seconds}")

    def closes_at(self, round_: Round) -> float | None:
        """Session time `seconds` after the first update, or after the round was reopened; None
        before."""
        first = round_.first_update_at
        if first is None:
            return None
        # A round that was reopened for a damaged update waits for its sender as for a first one.
        return max(first, round_.reopened_at or first) + self.seconds

    def shortest_wait_s(self) -> float:
        return self.seconds

    def describe(self) -> str:
        """The condition that closes a round, in words: all updates, or those within `seconds`."""
        return (
            "the updates of all who are selected, or of those who answer within "
            f"{self.seconds:g} s of the first"
        )

    def awaited(self, round_: Round) -> str:
        counted = _count_awaited(round_, round_.num_wanted).removesuffix(".")
        return f"{counted}; at most {self.seconds:g} s after the first update."


# Rules by name. Each is made with its options as keyword arguments, and raises ValueError if one is
# wrong.
PACINGS: Mapping[str, type[Pacing]] = {"after_first": AfterFirst}


def pacing_of(rules: Rules) -> Pacing | None:
    """The pacing rule that a session's rules describe; None if they name a plug-in."""
    if rules.pacing:
        make: Callable[..., Pacing] | None = PACINGS.get(rules.pacing)
        return None if make is None else make(**rules.pacing_options)
    if rules.consistency != "bsp":
        return Buffer(rules.buffer_size, rules.staleness)
    if rules.quorum:
        return Quorum(rules.quorum)
    wanted = num_wanted(rules.num_required, rules.fraction_participants)
    return WantedUpdates(wanted if rules.over_selection else 0)


def closing_time(round_: Round, pacing: Pacing) -> float | None:
    """Session time at which the pacing rule closes a round that has enough updates; None if it
    waits for updates alone."""
    return pacing.closes_at(round_)


def names_of(participants: Sequence[str]) -> str:
    """Names of the first of these participants, as text."""
    return ", ".join(participants[:5]) + (" and others" if len(participants) > 5 else "")


def _count_awaited(round_: Round, wanted: int) -> str:
    """How many updates of the wanted ones are outstanding, and from whom, as a sentence."""
    missing = round_.outstanding
    more = min(max(wanted - len(round_.updates), 0), len(missing))
    return f"{more} of {len(round_.updates) + more} updates: {names_of(missing)}."


def round_deadline(round_: Round, rules: Rules) -> float | None:
    """Session time of a round's deadline; None without one, or if the round is overdue. At the
    deadline an EVALUATE round closes; another closes if it has the least number of updates."""
    if round_.task is Task.EVALUATE:
        return round_.opened_at + rules.evaluate_deadline_s
    if rules.deadline_s is None or round_.overdue_at is not None:
        return None
    began = round_.opened_at if round_.reopened_at is None else round_.reopened_at
    return began + rules.deadline_s


def noted_every_s(rules: Rules, pacing: Pacing, round_: Round | None = None) -> float | None:
    """Interval at which session time is recorded while this round is open; None if nothing depends
    on it."""
    is_evaluation = round_ is not None and round_.task is Task.EVALUATE
    deadline_s = rules.evaluate_deadline_s if is_evaluation else rules.deadline_s
    known = (deadline_s, rules.idle_timeout_s, pacing.shortest_wait_s())
    waits = [wait for wait in known if wait is not None]
    if not waits:
        return None
    return min(MAX_NOTED_S, max(MIN_NOTED_S, NOTED_FRACTION * min(waits)))
