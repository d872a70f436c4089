"""A message copies no participants of a session, however many there are, and mostly looks at no
others: in BSP, with data profiles that are alike and updates under their senders' own names."""

import statistics
import tracemalloc
from collections.abc import Iterator, Sequence
from copy import copy

import pytest
from tests.unit.core.bench import PROFILE, make_rules, model_from, stored

from xain_coordinator.core.machine.decider import Decision, decide
from xain_coordinator.core.machine.evolve import open_session
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary.effects import InitialiseModel
from xain_coordinator.core.vocabulary.keys import update_key
from xain_coordinator.core.vocabulary.layered import _Layered
from xain_coordinator.core.vocabulary.values import DataProfile, Phase

NUM = 1000
NAMES = tuple(f"site-{i:04}" for i in range(NUM))

# Bytes that may be made for a message. As many pointers as there are participants take 8,000.
MAX_BYTES = 6000
# Entries that a message looks at, or looks up. A scan of the participants is twenty times that.
MAX_LOOKS = 50

# Each set of some of these is the profile of one participant.
CLASSES = tuple("abcdefghij")


def profile_of_its_own(number: int) -> DataProfile:
    classes = tuple(name for bit, name in enumerate(CLASSES) if (number + 1) >> bit & 1)
    return DataProfile(num_samples=10, num_features=4, classes=classes)


class Looks:
    """How many entries of the session's mappings have been looked at."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num = 0
        pairs, find = _Layered.pairs, _Layered.get

        def counting_pairs(mapping):
            for pair in pairs(mapping):
                self.num += 1
                yield pair

        def counting_find(mapping, key, default=None):
            self.num += 1
            return find(mapping, key, default)

        patch.setattr(_Layered, "pairs", counting_pairs)
        patch.setattr(_Layered, "get", counting_find)


class Costs:
    """Peak additional memory of each message, and number of entries that it looked at."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []
        self.num_looks: list[int] = []

    def require_no_copies(self) -> None:
        _require_small(self.num_bytes, MAX_BYTES)

    def require_no_scans(self) -> None:
        _require_small(self.num_looks, MAX_LOOKS)


def _require_small(costs: Sequence[int], most: int) -> None:
    """Now and then a table grows, and is copied; not with each message."""
    assert statistics.median(costs) < most
    assert statistics.mean(costs) < 2 * most


class Fleet:
    """A session of NUM participants, who have gathered, and its history."""

    def __init__(self, looks: Looks, profiles: Sequence[DataProfile]) -> None:
        self.looks = looks
        rules = make_rules(
            min_participants=NUM // 2,
            max_participants=NUM,
            start_participants=NUM,
            refused_limit=3,
            refused_rounds=3,
        )
        self.session, _ = open_session("s1", rules, 0.0)
        self.history = History()
        arrivals = zip(NAMES, profiles, strict=True)
        self.joining = self.costs_of([c.Rendezvous(name, profile) for name, profile in arrivals])
        effect = InitialiseModel("workload", (PROFILE,))
        self.send(c.InitialisationDone(model_from(effect)))
        assert self.session.phase is Phase.COLLECTING

    def send(self, command: c.Command) -> Decision:
        decision = decide(self.session, command, 1.0)
        for event in decision.events:
            self.history.apply(event)
        self.session = decision.session
        return decision

    def costs_of(self, commands: Sequence[c.Command]) -> Costs:
        costs = Costs()
        for command in commands:
            looks = self.looks.num
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            self.send(command)
            _, peak = tracemalloc.get_traced_memory()
            costs.num_bytes.append(peak - before)
            costs.num_looks.append(self.looks.num - looks)
        return costs

    def refusals(self) -> list[c.Command]:
        """An update of each that cannot be used."""
        return [c.NoteRefusedUpdate(name, self.session.round, "not finite") for name in NAMES]

    def updates(self) -> list[c.Command]:
        """Updates of all participants but one, so that the round stays open."""
        return [end(self.session, name) for name in NAMES[:-1]]


def end(session: Session, name: str) -> c.EndTrainingRound:
    key = update_key(session.round, name)
    return c.EndTrainingRound(name, session.round, 1, stored(key, name))


@pytest.fixture(scope="module")
def looks() -> Iterator[Looks]:
    tracemalloc.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            yield Looks(patch)
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def gathered(looks: Looks) -> Fleet:
    return Fleet(looks, [PROFILE] * NUM)


@pytest.fixture
def fleet(gathered: Fleet) -> Fleet:
    """One that changes without the other."""
    fleet = copy(gathered)
    fleet.history = gathered.history.copy()
    return fleet


def test_a_rendezvous_copies_nobody(fleet):
    fleet.joining.require_no_copies()
    fleet.joining.require_no_scans()


def test_joining_with_a_unique_profile_copies_no_other(looks):
    """The profile is compared with those of all others all the same."""
    Fleet(looks, [profile_of_its_own(number) for number in range(NUM)]).joining.require_no_copies()


def test_a_heartbeat_copies_nobody(fleet):
    costs = fleet.costs_of([c.Heartbeat(name) for name in NAMES])
    costs.require_no_copies()
    costs.require_no_scans()


def test_a_refused_update_copies_no_other(fleet):
    costs = fleet.costs_of(fleet.refusals())
    assert len(fleet.session.selection.faults) == NUM
    costs.require_no_copies()
    costs.require_no_scans()


def test_an_update_copies_no_other(fleet):
    """Unread history copies nothing, and senders with earlier refusals are not looked at."""
    for command in fleet.refusals():
        fleet.send(command)
    costs = fleet.costs_of(fleet.updates())
    assert len(fleet.session.opened.updates) == NUM - 1
    costs.require_no_copies()
    costs.require_no_scans()
