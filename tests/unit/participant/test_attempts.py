"""The decisions of a participant in rounds that a process group trains."""

from random import Random

import pytest

from xain_participant.agent.protocol import Protocol
from xain_participant.sdk import actions as a
from xain_participant.sdk import events as e
from xain_participant.sdk.values import Call, State, Timer


class Talk:
    """A protocol that has joined, and what it has said, without timers."""

    def __init__(self) -> None:
        self.protocol = Protocol(Random(1))
        self.hear(e.Started(), e.TimerFired(Timer.CONTACT), e.Joined("s1", 5.0))

    def hear(self, *events: e.Event) -> list[a.Action]:
        """The actions that follow from the last of the events."""
        actions: tuple[a.Action, ...] = ()
        for event in events:
            actions = self.protocol.handle(event)
        return [action for action in actions if not isinstance(action, a.SetTimer)]

    def advertise(self, attempt: int, round_: int = 3, *, accepted: bool = False) -> list[a.Action]:
        return self.hear(e.Advertised(State.ROUND, round_, accepted, "s1", attempt=attempt))


@pytest.fixture
def training() -> Talk:
    """The participant trains in the first attempt at round 3."""
    talk = Talk()
    assert talk.advertise(1) == [a.BeginRound(3)]
    assert talk.hear(e.Assigned(3, attempt=1)) == [a.Train(3)]
    return talk


def test_broken_group_is_reported_once_and_the_next_attempt_is_trained(training: Talk) -> None:
    assert training.hear(e.GroupBroken(3)) == [a.ReportGroupBroken(3)]
    assert training.hear(e.Reported(3)) == []
    assert training.advertise(1) == []
    assert training.advertise(2) == [a.BeginRound(3)]


def test_report_is_repeated_until_the_coordinator_has_it(training: Talk) -> None:
    training.hear(e.GroupBroken(3))
    assert training.hear(e.RefusedBy(Call.REPORT, "", "UNAVAILABLE")) == []
    assert training.hear(e.TimerFired(Timer.WORK)) == [a.ReportGroupBroken(3)]


def test_report_is_not_repeated_when_the_next_attempt_is_known(training: Talk) -> None:
    training.hear(e.GroupBroken(3))
    assert training.advertise(2) == []
    assert training.hear(e.Reported(3)) == [a.BeginRound(3)]


def test_slice_of_an_attempt_that_is_over_is_dropped(training: Talk) -> None:
    training.hear(e.Trained(3), e.HandedIn(3))
    assert training.advertise(1, accepted=True) == []
    assert training.advertise(2) == [a.BeginRound(3)]


def test_slice_that_waits_to_be_handed_in_again_is_dropped(training: Talk) -> None:
    training.hear(e.Trained(3), e.RefusedBy(Call.HAND_IN, "", "UNAVAILABLE"))
    dropped, begun = training.advertise(2)
    assert isinstance(dropped, a.Drop)
    assert begun == a.BeginRound(3)


def test_new_attempt_ends_a_training_of_the_one_before(training: Talk) -> None:
    assert training.advertise(2) == [a.EndAttempt(3, 2)]
    assert training.hear(e.GroupBroken(3)) == [a.BeginRound(3)]
    assert training.hear(e.Assigned(3, attempt=2)) == [a.Train(3)]


@pytest.mark.parametrize("code", ["STALE_ATTEMPT", "SLICE_MISMATCH"])
def test_slice_refused_for_its_attempt_does_not_end_the_next_one(training: Talk, code: str) -> None:
    training.hear(e.Trained(3))
    assert training.hear(e.RefusedBy(Call.HAND_IN, code, "FAILED_PRECONDITION")) != []
    assert training.advertise(2) == [a.BeginRound(3)]


def test_late_news_of_an_earlier_attempt_change_nothing(training: Talk) -> None:
    training.advertise(2)
    training.hear(e.GroupBroken(3), e.Assigned(3, attempt=2))
    assert training.advertise(1, accepted=True) == []
    assert training.hear(e.Trained(3)) == [a.HandIn(3)]


def test_late_assignment_of_an_earlier_attempt_is_not_trained() -> None:
    talk = Talk()
    talk.advertise(1)
    talk.advertise(2)
    assert talk.hear(e.Assigned(3, attempt=1)) == []
    assert talk.hear(e.TimerFired(Timer.WORK)) == [a.BeginRound(3)]


def test_attempts_of_the_next_round_begin_at_one_again(training: Talk) -> None:
    training.advertise(2)
    training.hear(e.GroupBroken(3), e.Assigned(3, attempt=2), e.Trained(3), e.HandedIn(3))
    assert training.advertise(1, round_=4) == [a.BeginRound(4)]
    assert training.hear(e.Assigned(4, attempt=1)) == [a.Train(4)]
