"""Commands of an operator to the session."""

from tests.unit.core.bench import Bench, make_rules, replay

from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import Phase
from xain_wire.metadata import COMPLETED


def test_removed_participant_leaves_and_is_not_let_in_again():
    """The round goes on with another one, and the session tells why somebody is missing."""
    bench = Bench(make_rules(min_participants=2))
    bench.join("a", "b", "c")
    bench.send(c.RemoveParticipant("a"))
    assert bench.happened(e.ParticipantLeft) == [e.ParticipantLeft("a", "removed")]
    bench.refuses(c.Rendezvous("a"), "REMOVED_BY_OPERATOR")
    bench.refuses(c.Heartbeat("a"), errors.NotAMember)
    assert set(bench.session.members) == {"b", "c"}
    assert bench.session.members.not_admitted == {"a": "an operator has removed it"}
    assert replay(bench.journal) == bench.session


def test_participant_that_is_away_can_be_removed_once():
    bench = Bench(make_rules())
    bench.send(c.RemoveParticipant("a"))
    bench.send(c.RemoveParticipant("a"))
    assert bench.happened(e.ParticipantRemoved) == [e.ParticipantRemoved("a")]
    bench.refuses(c.RemoveParticipant("a/b"), "INVALID_NAME")


def test_participant_whose_certificate_was_revoked_may_come_with_another_one():
    bench = Bench(make_rules())
    bench.send(c.NoteRevoked("a"))
    bench.join("a")
    bench.send(c.NoteRevoked("a"))
    assert bench.happened(e.ParticipantLeft) == [e.ParticipantLeft("a", "revoked")]
    bench.join("a")
    assert "a" in bench.session.members
    assert replay(bench.journal) == bench.session


def test_operator_finishes_a_session_with_the_last_model():
    bench = Bench(make_rules(rounds=5))
    bench.join("a")
    bench.end_all()
    assert bench.session.num_trained == 1
    bench.send(c.FinishSession("the budget is spent"))
    assert (bench.session.phase, bench.session.cause) == (Phase.FINISHED, COMPLETED)
    because = bench.session.evaluation.ended_because
    assert because == "finished by an operator: the budget is spent"
    bench.refuses(c.FinishSession(), "NOT_FITTING")
    bench.refuses(c.RemoveParticipant("a"), "NOT_FITTING")
    bench.send(c.NoteRevoked("a"))
    assert replay(bench.journal) == bench.session


def test_session_that_is_finished_before_a_model_was_trained_has_no_result():
    bench = Bench(make_rules())
    bench.send(c.FinishSession())
    cause = "finished by an operator, before a model was trained"
    assert (bench.session.phase, bench.session.cause) == (Phase.FINISHED, cause)
