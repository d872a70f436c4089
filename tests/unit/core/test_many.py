"""What a message does to a session takes as much, however many participants there are."""

import statistics
import tracemalloc
from collections.abc import Iterator, Sequence
from copy import copy

import pytest
from tests.unit.core.bench import PROFILE, make_rules, model_from, stored

from xain_coordinator.core import commands as c
from xain_coordinator.core.decider import Decision, decide
from xain_coordinator.core.effects import InitialiseModel
from xain_coordinator.core.keys import update_key
from xain_coordinator.core.session import Session, open_session
from xain_coordinator.core.values import Phase
from xain_coordinator.history import History

NUM = 1000
NAMES = tuple(f"site-{i:04}" for i in range(NUM))

# Of what is made for a message. As many pointers as there are participants are twice that.
MAX_BYTES = 4000


class Fleet:
    """A session of NUM participants, who have gathered, and its history."""

    def __init__(self) -> None:
        rules = make_rules(min_participants=NUM // 2, max_participants=NUM, start_participants=NUM)
        self.session, _ = open_session("s1", rules, 0.0)
        self.history = History()
        self.join_bytes = [self.bytes_of(c.Rendezvous(name, PROFILE)) for name in NAMES]
        effect = InitialiseModel("workload", (PROFILE,))
        self.send(c.InitialisationDone(model_from(effect)))
        assert self.session.phase is Phase.COLLECTING

    def send(self, command: c.Command) -> Decision:
        decision = decide(self.session, command, 1.0)
        for event in decision.events:
            self.history.apply(event)
        self.session = decision.session
        return decision

    def bytes_of(self, command: c.Command) -> int:
        """What was in memory at the most beyond what there was before."""
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        self.send(command)
        _, peak = tracemalloc.get_traced_memory()
        return peak - before


@pytest.fixture(scope="module")
def gathered() -> Iterator[Fleet]:
    tracemalloc.start()
    yield Fleet()
    tracemalloc.stop()


@pytest.fixture
def fleet(gathered: Fleet) -> Fleet:
    """One that changes without the other."""
    fleet = copy(gathered)
    fleet.history = gathered.history.copy()
    return fleet


def end(session: Session, name: str) -> c.EndTrainingRound:
    key = update_key(session.round, name)
    return c.EndTrainingRound(name, name, session.round, 1, stored(key, name))


def require_small(num_bytes: Sequence[int]) -> None:
    """Now and then a table grows, and is copied; not with each message."""
    assert statistics.median(num_bytes) < MAX_BYTES
    assert statistics.mean(num_bytes) < 2 * MAX_BYTES


def test_a_rendezvous_copies_nobody(fleet: Fleet) -> None:
    require_small(fleet.join_bytes)


def test_a_heartbeat_copies_nobody(fleet: Fleet) -> None:
    require_small([fleet.bytes_of(c.Heartbeat(name)) for name in NAMES])


def test_an_update_copies_no_other(fleet: Fleet) -> None:
    """Nor does its history, while nobody looks at it."""
    require_small([fleet.bytes_of(end(fleet.session, name)) for name in NAMES[:-1]])
