"""Sessions that wait for a request: serve mode of the coordinator."""

import pytest
from tests.unit.core.bench import IDLE_S, START_TIMEOUT_S, TIMED, Bench, make_rules, replay

from support.refusals import refused_as
from xain_coordinator.core.machine.answers import MAX_NEWCOMERS
from xain_coordinator.core.machine.decider import next_wait
from xain_coordinator.core.view.history import History
from xain_coordinator.core.view.view import waiting_for, warnings
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import Phase

RULES = make_rules(rounds=1, min_participants=2, start="request", **TIMED)


@pytest.fixture
def bench() -> Bench:
    return Bench(RULES)


def test_session_opens_no_round_before_the_fit_is_requested(bench):
    bench.join("a", "b")
    assert bench.session.phase is Phase.STANDBY
    assert not bench.happened(e.ParticipantsGathered)
    bench.send(c.RequestFit())
    assert len(bench.happened(e.FitRequested)) == 1
    bench.end_all()
    assert bench.session.phase is Phase.FINISHED
    assert replay(bench.journal) == bench.session


def test_waiting_for_a_request_has_no_timeout(bench):
    """The idle timeout is counted from the request."""
    assert next_wait(bench.session) is None, "the journal does not grow meanwhile"
    bench.tick(at=10 * IDLE_S)
    assert bench.session.phase is Phase.STANDBY
    bench.send(c.RequestFit())
    assert bench.session.gives_up_at == bench.now + IDLE_S
    bench.tick(at=bench.now + IDLE_S)
    assert bench.session.phase is Phase.FINISHED


def test_second_request_is_refused_in_every_phase(bench):
    bench.send(c.RequestFit())
    with refused_as("ALREADY_FITTING", match="is fitting"):
        bench.send(c.RequestFit())
    bench.join("a", "b")
    with refused_as("ALREADY_FITTING", match="is fitting"):
        bench.send(c.RequestFit())
    bench.end_all()
    with refused_as("ALREADY_FITTING", match="a fit opens a new session"):
        bench.send(c.RequestFit())


def test_fit_ends_if_no_initial_model_can_be_made():
    """The one who requested it hears why; a session that starts by itself waits for others."""
    bench = Bench(RULES, answers=False)
    bench.send(c.RequestFit())
    bench.join("a", "b")
    bench.send(c.InitialisationFailed("the last layer gives 16 numbers"))
    assert bench.session.phase is Phase.FINISHED
    assert "the last layer gives 16 numbers" in bench.session.cause


def test_cancelled_fit_ends_without_a_result(bench):
    """In the middle of a round; nothing can be cancelled before the request or after the end."""
    bench.refuses(c.CancelFit(), "NOT_FITTING")
    bench.send(c.RequestFit())
    bench.join("a", "b")
    assert bench.session.phase is Phase.COLLECTING
    bench.send(c.CancelFit())
    assert (bench.session.phase, bench.session.cause) == (Phase.FINISHED, "cancelled by a request")
    assert replay(bench.journal) == bench.session
    bench.refuses(c.CancelFit(), "NOT_FITTING")


def test_session_that_starts_by_itself_refuses_a_request():
    bench = Bench(make_rules(rounds=1))
    with refused_as("ALREADY_FITTING", match="starts by itself"):
        bench.send(c.RequestFit())


def test_newcomers_after_the_end_are_heard_and_bounded(bench):
    bench.send(c.RequestFit())
    bench.join("a", "b")
    bench.end_all()
    bench.heartbeat(*(f"new{i}" for i in range(MAX_NEWCOMERS + 10)), "a")
    assert len(bench.session.members.heard) <= MAX_NEWCOMERS + 2 * len(bench.session.members)
    assert "a" in bench.session.members.heard


def test_participant_that_stays_after_the_end_is_connected(bench):
    """One that leaves says so, or is silent for a lease."""
    bench.send(c.RequestFit())
    bench.join("a", "b")
    bench.end_all()

    def connected():
        session = bench.session
        return [
            name
            for name in session.members
            if session.members.is_connected_after_end(name, RULES.lease_s, bench.now)
        ]

    for name in ("a", "b"):
        assert bench.heartbeat(name).phase is Phase.FINISHED
    assert connected() == ["a", "b"]
    bench.leave("b")
    assert connected() == ["a"]
    bench.now += RULES.lease_s
    assert connected() == []


EXPECTED = make_rules(
    rounds=1,
    min_participants=1,
    start_participants=3,
    expected_participants=("a", "b", "c"),
    start="request",
    **TIMED,
)


def test_requested_fit_waits_for_the_expected_from_the_request_on():
    """However long ago those that are there have joined. The wait is the declared one, and the fit
    then begins with them."""
    bench = Bench(EXPECTED)
    bench.join("a", "b")
    bench.pass_time(10 * START_TIMEOUT_S)
    bench.send(c.RequestFit())
    due = bench.now + START_TIMEOUT_S
    assert bench.session.starts_at == due
    assert waiting_for(bench.session) == (
        "1 more participant, or 60 s after the request. Missing: c."
    )
    bench.pass_time(START_TIMEOUT_S - 1)
    assert not bench.session.gathered
    bench.tick(at=due)
    assert bench.selected == ("a", "b")


def test_status_names_the_missing_until_they_have_joined():
    """A participant that dies in the fit is missing, too, and one that comes later is not; after
    the end the warning says who was missing then."""
    bench = Bench(EXPECTED)
    bench.join("a", "b")
    bench.send(c.RequestFit())
    bench.pass_time(START_TIMEOUT_S)
    assert told(bench) == ["1 of 3 expected participants are missing: c."]
    bench.join("c")
    assert told(bench) == []
    bench.expire("b")
    assert told(bench) == ["1 of 3 expected participants are missing: b."]
    bench.end_all()
    assert bench.session.phase is Phase.FINISHED
    assert bench.session.missing == ("b",)
    assert told(bench) == ["1 of 3 expected participants are missing: b."]
    assert replay(bench.journal) == bench.session


def told(bench: Bench) -> list[str]:
    """Warnings of missing participants."""
    return [text for text in warnings(bench.session, History()) if "expected" in text]
