"""The decisions of a participant, one situation after another."""

from copy import deepcopy
from dataclasses import replace
from random import Random

import grpc
import pytest

from xain_participant.agent.protocol import (
    FINISHING_S,
    MAX_BACKOFF_S,
    MAX_INVALID,
    MAX_RECONNECT_S,
    MIN_BACKOFF_S,
    RETRY_JITTER,
    Held,
    Protocol,
)
from xain_participant.sdk import actions as a
from xain_participant.sdk import events as e
from xain_participant.sdk.failures import Failure
from xain_participant.sdk.values import Call, State, Timer


class Talk:
    """A protocol and what it has said. Timers are left out unless a test asks for them."""

    def __init__(
        self, session: str = "s1", held: Held | None = None, *, serve: bool = False
    ) -> None:
        self.protocol = Protocol(Random(1), held, serve=serve)
        self.session = session
        self.timers: dict[Timer, float] = {}

    def hear(self, *events: e.Event) -> list[a.Action]:
        """The actions that follow from the last of the events."""
        actions: tuple[a.Action, ...] = ()
        for event in events:
            actions = self.protocol.handle(event)
            for action in actions:
                if isinstance(action, a.SetTimer):
                    self.timers[action.timer] = action.after_s
        return [action for action in actions if not isinstance(action, a.SetTimer)]

    def advertise(self, round_: int, state: State = State.ROUND, *, accepted: bool = False) -> list:
        num_counted = 1 if state is State.FINISHED else None
        event = e.Advertised(state, round_, accepted, self.session, rounds_contributed=num_counted)
        return self.hear(event)

    def refuse(self, call: Call, reason: str = "", status: str = "UNAVAILABLE") -> list:
        return self.hear(e.RefusedBy(call, reason, status, "because"))


@pytest.fixture
def joined() -> Talk:
    talk = Talk()
    talk.hear(e.Started(), e.TimerFired(Timer.CONTACT), e.Joined(talk.session, 5.0))
    return talk


@pytest.fixture
def holding(joined: Talk) -> Talk:
    """Has trained round 3 and is handing it in."""
    joined.advertise(3)
    assert joined.hear(e.Assigned(3)) == [a.Train(3)]
    assert joined.hear(e.Trained(3)) == [a.HandIn(3)]
    return joined


# --- contact ---


def test_protocol_begins_with_a_rendezvous() -> None:
    talk = Talk()
    assert talk.hear(e.Started()) == []
    assert talk.timers == {Timer.CONTACT: 0.0}
    assert talk.hear(e.TimerFired(Timer.CONTACT)) == [a.Rendezvous()]


def test_accepted_participant_watches_and_sends_a_heartbeat_at_once() -> None:
    talk = Talk()
    assert talk.hear(e.Started(), e.Joined("s1", 5.0)) == [a.StartWatch()]
    assert talk.timers[Timer.CONTACT] == 0.0
    assert talk.hear(e.TimerFired(Timer.CONTACT)) == [a.SendHeartbeat(training=False, round=-1)]
    assert talk.timers[Timer.CONTACT] <= 5.0


def test_without_an_interval_heartbeats_come_as_often_as_xains() -> None:
    talk = Talk()
    talk.hear(e.Started(), e.Joined("s1", 0.0), e.TimerFired(Timer.CONTACT))
    assert talk.timers[Timer.CONTACT] <= 10.0
    talk.hear(e.TimerFired(Timer.CONTACT))
    assert 7.5 <= talk.timers[Timer.CONTACT] <= 10.0


def test_participants_that_join_together_do_not_send_heartbeats_together() -> None:
    """A coordinator would have nothing to do for ten seconds, and then everything at once. So the
    first heartbeat after joining comes at any moment of the interval, and never later."""
    firsts = []
    for seed in range(1000):
        protocol = Protocol(Random(seed))
        protocol.handle(e.Started())
        protocol.handle(e.Joined("s1", 10.0))
        timer, beat = protocol.handle(e.TimerFired(Timer.CONTACT))
        assert isinstance(timer, a.SetTimer)
        assert isinstance(beat, a.SendHeartbeat)
        firsts.append(timer.after_s)
        then, _ = protocol.handle(e.TimerFired(Timer.CONTACT))
        assert isinstance(then, a.SetTimer)
        assert 7.5 <= then.after_s <= 10.0
    assert max(sum(int(first) == second for first in firsts) for second in range(10)) < 150
    assert max(firsts) <= 10.0


def test_later_waits_as_long_as_the_coordinator_suggests() -> None:
    """A little longer, by chance: others may have been told the same."""
    waits = set()
    for seed in range(100):
        protocol = Protocol(Random(seed))
        protocol.handle(e.Started())
        (timer,) = protocol.handle(e.AskedToWait(15.0))
        assert isinstance(timer, a.SetTimer)
        assert 15.0 <= timer.after_s <= 15.0 * (1 + RETRY_JITTER)
        waits.add(timer.after_s)
        assert protocol.handle(e.TimerFired(Timer.CONTACT)) == (a.Rendezvous(),)
    assert len(waits) > 50


def test_later_without_a_suggestion_backs_off() -> None:
    talk = Talk()
    talk.hear(e.Started(), e.AskedToWait(0.0))
    assert 0 < talk.timers[Timer.CONTACT] <= 0.2


def test_an_absent_coordinator_is_asked_again_for_ever_but_ever_more_seldom() -> None:
    """Full jitter below a ceiling that doubles from 0.2 s to 10 s."""
    talk = Talk()
    talk.hear(e.Started())
    for n in range(200):
        assert talk.hear(e.TimerFired(Timer.CONTACT)) == [a.Rendezvous()]
        assert talk.refuse(Call.RENDEZVOUS) == []
        assert 0 <= talk.timers[Timer.CONTACT] <= min(10.0, 0.2 * 2**n)
    assert talk.timers[Timer.CONTACT] > 0


def test_a_failed_heartbeat_is_repeated_before_the_next_one_is_due(joined: Talk) -> None:
    """The lease is hardly longer than the interval."""
    for _ in range(20):
        assert joined.hear(e.TimerFired(Timer.CONTACT))
        joined.refuse(Call.HEARTBEAT, status="DEADLINE_EXCEEDED")
        assert joined.timers[Timer.CONTACT] <= 5.0


def test_a_watch_does_not_replace_heartbeats(joined: Talk) -> None:
    """Only heartbeats renew the lease, so what a stream says must not put them off."""
    joined.hear(e.TimerFired(Timer.CONTACT))
    joined.timers.clear()
    joined.advertise(0, State.STANDBY)
    assert Timer.CONTACT not in joined.timers


def test_a_broken_watch_brings_the_next_heartbeat_forward(joined: Talk) -> None:
    joined.hear(e.TimerFired(Timer.CONTACT))
    assert joined.hear(e.ConnectionLost()) == []
    assert joined.timers[Timer.CONTACT] <= 0.2


def pause_after_loss(seed: int, spread_s: float, interval_s: float = 10.0) -> float:
    """Seconds that one participant of many waits before it connects again."""
    protocol = Protocol(Random(seed))
    protocol.handle(e.Started())
    protocol.handle(e.Joined("s1", interval_s, spread_s))
    (timer,) = protocol.handle(e.ConnectionLost())
    assert isinstance(timer, a.SetTimer)
    return timer.after_s


def test_a_fleet_comes_back_spread_over_the_time_that_the_coordinator_asks_for() -> None:
    """All hear at the same instant that the connection is lost; no second gets more than its share
    of them."""
    pauses = [pause_after_loss(seed, 4.0) for seed in range(1000)]
    shares = [sum(int(pause) == second for pause in pauses) for second in range(4)]
    assert sum(shares) == 1000
    assert max(shares) < 300


def test_few_come_back_at_once() -> None:
    assert max(pause_after_loss(seed, 0.0) for seed in range(100)) <= 0.2


def test_wait_does_not_outlast_the_lease() -> None:
    assert max(pause_after_loss(seed, 3600.0, 5.0) for seed in range(100)) <= 5.0


def test_heartbeats_tell_when_the_fleet_has_grown(joined: Talk) -> None:
    """The Watch stream does not, and changes nothing."""
    joined.hear(e.Advertised(State.STANDBY, 0, session_id="s1", reconnect_spread_s=4.0))
    joined.advertise(0, State.STANDBY)
    pauses = []
    for _ in range(50):
        joined.hear(e.ConnectionLost())
        pauses.append(joined.timers[Timer.CONTACT])
    assert 2.0 < max(pauses) <= 4.0


def test_attempts_that_fail_are_spread_as_well(joined: Talk) -> None:
    """From the first one on: the coordinator is away for all of them."""
    joined.hear(e.Advertised(State.STANDBY, 0, session_id="s1", reconnect_spread_s=4.0))
    pauses = []
    for _ in range(50):
        joined.hear(e.ConnectionLost())
        joined.refuse(Call.HEARTBEAT)
        pauses.append(joined.timers[Timer.CONTACT])
        joined.advertise(0, State.STANDBY)  # so that it is the first attempt each time
    assert 2.0 < max(pauses) <= 4.0


def test_a_member_looks_for_its_coordinator_every_other_second(joined: Talk) -> None:
    """However long it was away: it is found as soon as it is back."""
    for _ in range(20):
        joined.refuse(Call.HEARTBEAT)
        assert joined.timers[Timer.CONTACT] <= MAX_RECONNECT_S


def test_answer_makes_the_next_pause_short_again(joined: Talk) -> None:
    """The failures of an outage that is over do not count in the next one."""
    for _ in range(10):
        joined.refuse(Call.HEARTBEAT)
    joined.advertise(3, State.STANDBY)
    joined.refuse(Call.HEARTBEAT)
    assert joined.timers[Timer.CONTACT] <= MIN_BACKOFF_S


def test_heartbeats_go_on_while_training(joined: Talk) -> None:
    joined.advertise(3)
    joined.hear(e.Assigned(3))
    assert joined.hear(e.TimerFired(Timer.CONTACT)) == [a.SendHeartbeat(training=True, round=3)]


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("PROFILE_MISMATCH", "INVALID_ARGUMENT"),
        ("INVALID_NAME", "INVALID_ARGUMENT"),
        ("INVALID_TAGS", "INVALID_ARGUMENT"),
        ("OF_A_NEWER_COORDINATOR", "UNAUTHENTICATED"),
    ],
)
def test_a_rendezvous_refused_for_good_ends_with_the_message(reason: str, status: str) -> None:
    talk = Talk()
    talk.hear(e.Started(), e.TimerFired(Timer.CONTACT))
    assert talk.refuse(Call.RENDEZVOUS, reason, status) == [a.Leave(), a.Exit(1, "because")]


# --- a round ---


def test_a_round_from_its_advertisement_to_its_acknowledgement(joined: Talk) -> None:
    assert joined.advertise(3) == [a.BeginRound(3)]
    assert joined.hear(e.Assigned(3)) == [a.Train(3)]
    assert joined.hear(e.Trained(3)) == [a.HandIn(3)]
    assert joined.hear(e.HandedIn(3)) == [a.Drop(3, "it is handed in")]
    assert joined.advertise(3) == [], "done, even if the advertisement is older than our update"
    assert joined.advertise(4) == [a.BeginRound(4)]


def test_only_one_piece_of_work_at_a_time(joined: Talk) -> None:
    joined.advertise(3)
    assert joined.advertise(3) == []
    assert joined.advertise(4) == []
    joined.hear(e.Assigned(3))
    assert joined.advertise(4) == []


@pytest.mark.parametrize("state", [State.STANDBY, State.ROUND])
def test_accepted_round_is_not_trained_again(joined: Talk, state: State) -> None:
    """After a restart of ours: the update of the process before us has counted."""
    assert joined.advertise(3, state, accepted=True) == []
    assert joined.advertise(3) == []


def test_result_of_a_round_that_was_accepted_meanwhile_is_dropped(joined: Talk) -> None:
    """A predecessor of this process has handed in the update of the round that it trains."""
    joined.advertise(3)
    joined.hear(e.Assigned(3))
    assert joined.advertise(3, accepted=True) == []
    assert joined.hear(e.Trained(3)) == [a.Drop(3, "its round is over")]
    assert joined.hear(e.StopRequested(143)) == [a.Leave(), a.Exit(143, "asked to stop")]


def test_an_assignment_can_say_that_the_update_is_accepted(joined: Talk) -> None:
    joined.advertise(3)
    assert joined.hear(e.Assigned(3, update_accepted=True)) == []
    assert joined.hear(e.TimerFired(Timer.WORK)) == []


def test_the_assignment_names_the_round(joined: Talk) -> None:
    """The advertisement may be older."""
    joined.advertise(3)
    assert joined.hear(e.Assigned(4)) == [a.Train(4)]


def test_an_assignment_of_a_done_round_is_not_asked_for_in_a_busy_loop(holding: Talk) -> None:
    holding.hear(e.HandedIn(3))
    assert holding.advertise(4) == [a.BeginRound(4)]
    assert holding.hear(e.Assigned(3)) == []
    assert holding.timers[Timer.WORK] <= 0.2
    assert holding.hear(e.TimerFired(Timer.WORK)) == [a.BeginRound(4)]


def test_news_of_an_earlier_round_are_not_believed_without_asking(holding: Talk) -> None:
    """An advertisement may have been on its way for long. The coordinator's answer decides, and the
    held result is not given up for the advertisement."""
    assert holding.refuse(Call.HAND_IN) == []
    assert holding.advertise(2) == [a.BeginRound(2, ask=True)]
    assert holding.hear(e.Assigned(3)) == [a.HandIn(3)]
    assert a.BeginRound(2, ask=True) in holding.hear(e.HandedIn(3))
    assert holding.hear(e.Assigned(3, update_accepted=True)) == []
    assert holding.advertise(4) == [a.BeginRound(4)]


def test_rounds_may_go_backwards(holding: Talk) -> None:
    """XAIN's SDK never trained again when the coordinator had restarted from an older round."""
    holding.hear(e.HandedIn(3))
    assert holding.advertise(1) == [a.BeginRound(1, ask=True)]
    assert holding.hear(e.Assigned(1)) == [a.Train(1)]


@pytest.mark.parametrize("reason", ["NOT_IN_ROUND", "NOT_SELECTED", "ROUND_CLOSED", ""])
def test_a_beginning_that_is_refused_waits_for_the_coordinator(joined: Talk, reason: str) -> None:
    joined.advertise(3)
    assert joined.refuse(Call.BEGIN_ROUND, reason, "FAILED_PRECONDITION") == []
    joined.advertise(3, State.STANDBY)
    assert joined.hear(e.TimerFired(Timer.WORK)) == []
    assert joined.advertise(4) == [a.BeginRound(4)]


def test_a_failed_download_begins_the_round_again(joined: Talk) -> None:
    joined.advertise(3)
    joined.hear(e.Assigned(3))
    assert joined.refuse(Call.TRAIN, status="DATA_LOSS") == []
    assert joined.hear(e.TimerFired(Timer.WORK)) == [a.BeginRound(3)]


def test_a_participant_that_fails_leaves_and_exits_with_its_message(joined: Talk) -> None:
    joined.advertise(3)
    joined.hear(e.Assigned(3))
    assert joined.hear(e.TrainingFailed(3, "KeyError: 'x'", Failure("KeyError"))) == [
        a.ReportFailure(3, Failure("KeyError")),
        a.Leave(),
        a.Exit(1, "training of round 3 failed: KeyError: 'x'"),
    ]


# --- handing in ---

REFUSED_FOR_GOOD = [a.Leave(), a.Exit(1, "the update of round 3 was refused: because")]

NOT_NOW = [
    ("NOT_IN_ROUND", "FAILED_PRECONDITION"),
    ("NOT_SELECTED", "FAILED_PRECONDITION"),
    ("UPLOAD_MISSING", "FAILED_PRECONDITION"),
    ("UNAVAILABLE", "UNAVAILABLE"),
    ("", "UNAVAILABLE"),
    ("", "DEADLINE_EXCEEDED"),
    ("", "INTERNAL"),
    ("", "UNKNOWN"),
    ("", "CANCELLED"),
    ("", "FAILED_PRECONDITION"),
    ("SOMETHING_NEW", "FAILED_PRECONDITION"),
]


@pytest.mark.parametrize(("reason", "status"), NOT_NOW)
def test_a_result_that_is_not_taken_now_is_sent_after_a_pause(
    holding: Talk, reason: str, status: str
) -> None:
    assert holding.refuse(Call.HAND_IN, reason, status) == []
    assert 0 < holding.timers[Timer.WORK] <= 0.2
    assert holding.hear(e.TimerFired(Timer.WORK)) == [a.HandIn(3)]


def test_a_result_waits_while_the_round_is_paused(holding: Talk) -> None:
    holding.refuse(Call.HAND_IN, "NOT_IN_ROUND", "FAILED_PRECONDITION")
    assert holding.advertise(3, State.STANDBY) == []
    assert holding.hear(e.TimerFired(Timer.WORK)) == []
    assert holding.advertise(3) == [a.HandIn(3)]


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("ROUND_CLOSED", "FAILED_PRECONDITION"),
        ("STALE_ROUND", "FAILED_PRECONDITION"),
        ("DUPLICATE_UPDATE", "ALREADY_EXISTS"),
        ("OF_A_NEWER_COORDINATOR", "ALREADY_EXISTS"),
    ],
)
def test_a_useless_result_is_dropped(holding: Talk, reason: str, status: str) -> None:
    assert holding.refuse(Call.HAND_IN, reason, status) == [a.Drop(3, "because")]
    assert holding.hear(e.TimerFired(Timer.WORK)) == []
    assert holding.advertise(3) == []
    assert holding.advertise(4) == [a.BeginRound(4)]


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("INVALID_UPDATE", "INVALID_ARGUMENT"),
        ("OF_A_NEWER_COORDINATOR", "INVALID_ARGUMENT"),
    ],
)
def test_an_invalid_update_is_trained_again_and_at_last_its_maker_leaves(
    holding: Talk, reason: str, status: str
) -> None:
    """Three refusals are the coordinator's to judge. A participant that it asks for the round after
    them is needed there, and would keep it open for all."""
    dropped = [a.Drop(3, "because", invalid=True)]
    for _ in range(3):
        assert holding.refuse(Call.HAND_IN, reason, status) == dropped
        assert holding.hear(e.TimerFired(Timer.WORK)) == [a.BeginRound(3)]
        assert holding.hear(e.Assigned(3)) == [a.Train(3)]
        assert holding.hear(e.Trained(3)) == [a.HandIn(3)]
    assert holding.refuse(Call.HAND_IN, reason, status) == [*dropped, *REFUSED_FOR_GOOD]


def test_participant_that_is_left_out_waits_until_it_is_selected(holding: Talk) -> None:
    """After its third refusal it hears STANDBY: it stays, trains nothing, and has all its attempts
    again when it is selected."""
    for again in (True, True, False):
        holding.refuse(Call.HAND_IN, "INVALID_UPDATE", "INVALID_ARGUMENT")
        if again:
            holding.hear(e.TimerFired(Timer.WORK), e.Assigned(3), e.Trained(3))
    assert holding.advertise(3, State.STANDBY) == []
    assert holding.hear(e.TimerFired(Timer.WORK)) == []
    assert holding.advertise(7) == [a.BeginRound(7)]
    holding.hear(e.Assigned(7), e.Trained(7))
    refused = holding.refuse(Call.HAND_IN, "INVALID_UPDATE", "INVALID_ARGUMENT")
    assert refused == [a.Drop(7, "because", invalid=True)]


def test_too_large_update_is_not_trained_again(holding: Talk) -> None:
    """Another update of the same model would be as large."""
    assert holding.refuse(Call.HAND_IN, "TOO_LARGE", "RESOURCE_EXHAUSTED") == [
        a.Drop(3, "because", invalid=True),
        *REFUSED_FOR_GOOD,
    ]


def test_two_invalid_updates_of_different_rounds_are_two_accidents(holding: Talk) -> None:
    holding.refuse(Call.HAND_IN, "INVALID_UPDATE", "INVALID_ARGUMENT")
    assert holding.advertise(4) == [a.BeginRound(4)]
    holding.hear(e.Assigned(4), e.Trained(4))
    refused = holding.refuse(Call.HAND_IN, "INVALID_UPDATE", "INVALID_ARGUMENT")
    assert refused == [a.Drop(4, "because", invalid=True)]


def test_an_update_that_arrived_while_its_sending_was_queued_is_not_missed(holding: Talk) -> None:
    """The worker then finds nothing to send, and says that it is handed in."""
    assert holding.advertise(3, accepted=True) == [a.Drop(3, "it is accepted")]
    assert holding.hear(e.HandedIn(3)) == []
    assert holding.advertise(4) == [a.BeginRound(4)]


@pytest.mark.parametrize("reason", ["INVALID_NAME", "UPLOAD_NAME_TAKEN"])
def test_a_name_that_is_refused_will_always_be(holding: Talk, reason: str) -> None:
    refused = holding.refuse(Call.HAND_IN, reason, "INVALID_ARGUMENT")
    assert refused == [a.Leave(), a.Exit(1, "because")]


def test_an_acknowledgement_that_was_lost_is_made_up_by_an_advertisement(holding: Talk) -> None:
    holding.refuse(Call.HAND_IN, status="UNAVAILABLE")
    assert holding.advertise(3, accepted=True) == [a.Drop(3, "it is accepted")]
    assert holding.hear(e.TimerFired(Timer.WORK)) == []


def test_the_next_round_replaces_a_result_that_never_got_through(holding: Talk) -> None:
    holding.refuse(Call.HAND_IN, status="UNAVAILABLE")
    assert holding.advertise(4) == [a.BeginRound(4)]
    assert holding.hear(e.Assigned(4)) == [a.Drop(3, "round 4 is open"), a.Train(4)]


def test_an_assignment_of_the_held_round_hands_it_in(holding: Talk) -> None:
    """The result is there and not trained again, whatever was advertised."""
    holding.refuse(Call.HAND_IN, status="UNAVAILABLE")
    holding.advertise(4)
    assert holding.hear(e.Assigned(3)) == [a.HandIn(3)]


def test_pauses_get_longer_and_an_answer_ends_them(holding: Talk) -> None:
    for n in range(100):
        holding.refuse(Call.HAND_IN)
        assert 0 <= holding.timers[Timer.WORK] <= min(10.0, 0.2 * 2**n)
        assert holding.hear(e.TimerFired(Timer.WORK)) == [a.HandIn(3)]
    holding.hear(e.HandedIn(3))
    holding.advertise(4)
    holding.refuse(Call.BEGIN_ROUND)
    assert holding.timers[Timer.WORK] <= 0.2


FAILURES = [code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK]

# The call that is refused: what happens before, and what is asked once more afterwards.
AGAIN: dict[Call, tuple[list[e.Event], a.Action]] = {
    Call.HEARTBEAT: ([], a.SendHeartbeat(training=True, round=3)),
    Call.BEGIN_ROUND: ([], a.BeginRound(3)),
    Call.TRAIN: ([e.Assigned(3)], a.BeginRound(3)),
    Call.HAND_IN: ([e.Assigned(3), e.Trained(3)], a.HandIn(3)),
}


@pytest.mark.parametrize("call", AGAIN)
@pytest.mark.parametrize("status", FAILURES)
def test_status_without_a_reason_is_tried_again_and_drops_nothing(
    joined: Talk, call: Call, status: str
) -> None:
    """gRPC itself, a proxy or a load balancer has answered; the coordinator has said nothing."""
    before, again = AGAIN[call]
    joined.advertise(3)
    joined.hear(*before)
    assert joined.refuse(call, "", status) == []
    if status == "PERMISSION_DENIED":
        assert joined.hear(e.TimerFired(Timer.CONTACT)) == [a.Rendezvous()]
        assert joined.hear(e.Joined(joined.session, 5.0)) == []
        asked = joined.advertise(3) or joined.hear(e.TimerFired(Timer.CONTACT))
    else:
        asked = joined.hear(e.TimerFired(Timer.CONTACT if call is Call.HEARTBEAT else Timer.WORK))
    assert asked == [again]


@pytest.mark.parametrize("status", FAILURES)
def test_rendezvous_refused_without_a_reason_is_tried_again(status: str) -> None:
    """A proxy may refuse it a hundred times."""
    talk = Talk()
    talk.hear(e.Started())
    for _ in range(100):
        assert talk.hear(e.TimerFired(Timer.CONTACT)) == [a.Rendezvous()]
        assert talk.refuse(Call.RENDEZVOUS, "", status) == []
        assert talk.timers[Timer.CONTACT] <= MAX_BACKOFF_S


@pytest.mark.parametrize("status", FAILURES)
@pytest.mark.parametrize(
    ("reason", "actions"),
    [
        ("UNAVAILABLE", []),
        ("TOO_MANY_CALLS", []),
        ("NOT_A_MEMBER", []),
        ("ROUND_CLOSED", [a.Drop(3, "because")]),
        ("INVALID_UPDATE", [a.Drop(3, "because", invalid=True)]),
        ("TOO_LARGE", [a.Drop(3, "because", invalid=True), *REFUSED_FOR_GOOD]),
        ("UPLOAD_NAME_TAKEN", [a.Leave(), a.Exit(1, "because")]),
    ],
)
def test_reason_of_the_coordinator_decides_whatever_the_status(
    holding: Talk, reason: str, actions: list[a.Action], status: str
) -> None:
    """A proxy may have rewritten the status; the coordinator's reason says what is meant."""
    assert holding.refuse(Call.HAND_IN, reason, status) == actions


@pytest.mark.parametrize(("reason", "status"), NOT_NOW)
def test_same_advertisement_does_not_end_a_back_off(
    holding: Talk, reason: str, status: str
) -> None:
    """A full disk refuses each upload. The heartbeats between must not send it again."""
    holding.refuse(Call.HAND_IN, reason, status)
    for _ in range(3):
        assert holding.advertise(3) == []
    assert holding.hear(e.TimerFired(Timer.WORK)) == [a.HandIn(3)]


@pytest.mark.parametrize(
    "news",
    [
        [e.ConnectionLost()],
        [e.RefusedBy(Call.HEARTBEAT, "", "UNAVAILABLE")],
        [e.Advertised(State.STANDBY, 3, session_id="s1")],
    ],
)
def test_coordinator_that_is_back_ends_a_back_off(holding: Talk, news: list[e.Event]) -> None:
    """After a restart, or when a paused round goes on, a result is handed in at once. The next
    pause is not ended by it."""
    holding.refuse(Call.HAND_IN, "UNAVAILABLE")
    holding.hear(*news)
    assert holding.advertise(3) == [a.HandIn(3)]
    holding.refuse(Call.HAND_IN, "UNAVAILABLE")
    assert holding.advertise(3) == []


def test_pause_is_as_long_as_the_coordinator_asks_for(holding: Talk) -> None:
    """A RetryInfo counts for work and for signs of life."""
    busy = ("TOO_MANY_CALLS", "RESOURCE_EXHAUSTED", "", 60.0)
    for call, timer in ((Call.HAND_IN, Timer.WORK), (Call.HEARTBEAT, Timer.CONTACT)):
        holding.hear(e.RefusedBy(call, *busy))
        assert 60.0 <= holding.timers[timer] <= 60.0 * (1.0 + RETRY_JITTER)


# --- membership ---


@pytest.mark.parametrize("call", [Call.HEARTBEAT, Call.BEGIN_ROUND, Call.TRAIN, Call.HAND_IN])
@pytest.mark.parametrize("reason", ["NOT_A_MEMBER", ""])
def test_expired_participant_joins_again_after_any_refused_call(
    joined: Talk, call: Call, reason: str
) -> None:
    joined.advertise(3)
    steps = {Call.TRAIN: [e.Assigned(3)], Call.HAND_IN: [e.Assigned(3), e.Trained(3)]}
    joined.hear(*steps.get(call, []))
    assert joined.refuse(call, reason, "PERMISSION_DENIED") == []
    assert joined.timers[Timer.CONTACT] <= 0.2
    assert joined.hear(e.TimerFired(Timer.CONTACT)) == [a.Rendezvous()]


def test_a_result_survives_the_expiry_of_its_maker(holding: Talk) -> None:
    holding.refuse(Call.HAND_IN, "NOT_A_MEMBER", "PERMISSION_DENIED")
    assert holding.hear(e.TimerFired(Timer.WORK)) == [], "first we must be back"
    assert holding.hear(e.TimerFired(Timer.CONTACT)) == [a.Rendezvous()]
    assert holding.hear(e.Joined(holding.session, 5.0)) == [], "the stream is still there"
    assert holding.advertise(3) == [a.HandIn(3)]


def test_training_goes_on_while_its_maker_joins_again(joined: Talk) -> None:
    joined.advertise(3)
    joined.hear(e.Assigned(3))
    joined.refuse(Call.HEARTBEAT, "NOT_A_MEMBER", "PERMISSION_DENIED")
    assert joined.hear(e.Trained(3)) == []
    joined.hear(e.Joined(joined.session, 5.0))
    assert joined.advertise(3) == [a.HandIn(3)]


def test_unregistered_clients_do_not_act_on_advertisements(joined: Talk) -> None:
    joined.refuse(Call.HEARTBEAT, "NOT_A_MEMBER", "PERMISSION_DENIED")
    assert joined.advertise(3) == []


# --- sessions ---


def test_a_new_session_forgets_the_result(holding: Talk) -> None:
    """Round numbers begin anew, and the result belongs to another model."""
    holding.refuse(Call.HAND_IN, "NOT_A_MEMBER", "PERMISSION_DENIED")
    assert holding.hear(e.Joined("s2", 5.0)) == [a.Drop(3, "it belongs to another session")]
    holding.session = "s2"
    assert holding.advertise(3) == [a.BeginRound(3)]


def test_a_new_session_wants_a_rendezvous(joined: Talk) -> None:
    joined.session = "s2"
    assert joined.advertise(0) == []
    assert joined.hear(e.TimerFired(Timer.CONTACT)) == [a.Rendezvous()]


def test_done_rounds_count_within_their_session(holding: Talk) -> None:
    holding.hear(e.HandedIn(3), e.Joined("s2", 5.0))
    holding.session = "s2"
    assert holding.advertise(3) == [a.BeginRound(3)]


def test_result_of_another_session_is_dropped(joined: Talk) -> None:
    joined.advertise(3)
    joined.hear(e.Assigned(3), e.Joined("s2", 5.0))
    joined.session = "s2"
    assert joined.advertise(3) == [], "the old work still runs"
    assert joined.hear(e.Trained(3)) == [
        a.Drop(3, "its session or attempt is over"),
        a.BeginRound(3),
    ]


def test_refused_work_of_another_session_ends_nothing(joined: Talk) -> None:
    """A reason to give up in one session says nothing of the next one."""
    joined.advertise(3)
    joined.hear(e.Joined("s2", 5.0))
    joined.session = "s2"
    assert joined.advertise(3) == [], "the question of the old session is still being answered"
    assert joined.refuse(Call.BEGIN_ROUND, "INVALID_NAME", "INVALID_ARGUMENT") == [a.BeginRound(3)]


def test_invalid_updates_count_within_their_session(holding: Talk) -> None:
    """The first refused update of a new session is not the last attempt."""
    for _ in range(MAX_INVALID - 1):
        holding.refuse(Call.HAND_IN, "INVALID_UPDATE", "INVALID_ARGUMENT")
        holding.hear(e.TimerFired(Timer.WORK), e.Assigned(3), e.Trained(3))
    holding.hear(e.HandedIn(3), e.Joined("s2", 5.0))
    holding.session = "s2"
    holding.advertise(3)
    holding.hear(e.Assigned(3), e.Trained(3))
    refused = holding.refuse(Call.HAND_IN, "INVALID_UPDATE", "INVALID_ARGUMENT")
    assert refused == [a.Drop(3, "because", invalid=True)]


def test_an_acknowledgement_of_another_session_does_not_count(holding: Talk) -> None:
    holding.hear(e.Joined("s2", 5.0))
    holding.session = "s2"
    holding.advertise(3)
    assert holding.hear(e.HandedIn(3)) == [a.BeginRound(3)]


def test_a_late_word_of_the_session_before_is_not_believed(joined: Talk) -> None:
    joined.hear(e.Joined("s2", 5.0))
    assert joined.advertise(7) == []
    assert joined.advertise(7, State.FINISHED) == []
    joined.session = "s2"
    assert joined.advertise(0) == [a.BeginRound(0)]


def test_a_coordinator_without_session_ids_has_one_session(joined: Talk) -> None:
    """XAIN's has none."""
    assert joined.hear(e.Advertised(State.ROUND, 0)) == [a.BeginRound(0)]


# --- the end ---

FINISHED = [a.Exit(0, "the session is finished")]


def test_finished_is_the_end(joined: Talk) -> None:
    assert joined.advertise(9, State.FINISHED) == FINISHED
    assert joined.advertise(9) == [], "nothing follows"


@pytest.mark.parametrize(
    ("cause", "end"),
    [
        ("completed", FINISHED),
        ("no model", [a.Exit(1, "the session has ended without a result: no model")]),
    ],
)
def test_an_end_without_a_result_is_a_failure(
    joined: Talk, cause: str, end: list[a.Action]
) -> None:
    """A script that waits for the exit status must not take a failed training for a done one."""
    ended = e.Advertised(State.FINISHED, 2, False, "s1", cause, rounds_contributed=1)
    assert joined.hear(ended) == end


def test_model_that_is_no_better_than_the_baseline_has_a_status_of_its_own(joined: Talk) -> None:
    why = "Model 2 is no better than always predicting the mean"
    ended = e.Advertised(
        State.FINISHED, 2, False, "s1", "completed", rounds_contributed=1, no_better=why
    )
    assert joined.hear(ended) == [a.Exit(4, f"the session is finished: {why}")]


def test_one_of_whom_nothing_counted_ends_with_a_status_of_its_own(joined: Talk) -> None:
    """A site that was never let in, never selected, or always too late must not look done.

    A site whose update counted is done, also if the coordinator, like XAIN's, does not say so; one
    that has made initial weights only is not. A coordinator that says that nothing counted is
    right.
    """
    end = e.Advertised(State.FINISHED, 2, session_id="s1", cause="completed")
    waiting = Talk()
    waiting.hear(e.Started(), e.AskedToWait(1.0), e.Joined("s1", 5.0))
    let_in_later = deepcopy(waiting)
    let_in_later.hear(e.Advertised(State.STANDBY, 1, session_id="s1"))
    late, counted, made = deepcopy(joined), deepcopy(joined), deepcopy(joined)
    for talk, why in (
        (waiting, "it was never let in, since rounds.max_participants were connected"),
        (let_in_later, "it was never selected to train"),
        (joined, "it was never selected to train"),
        (late, "none of its updates counted; the coordinator's report says why"),
    ):
        if talk is late:
            late.advertise(1)
        assert talk.hear(end) == [a.Exit(5, f"the session is finished without this one: {why}")]
    counted.advertise(1, accepted=True)
    told = deepcopy(counted)
    assert counted.hear(end) == FINISHED
    (exit_,) = told.hear(replace(end, rounds_contributed=0))
    assert exit_.code == 5
    made.advertise(3)
    made.hear(e.Assigned(3), e.Trained(3, is_training=False), e.HandedIn(3))
    trained_too = deepcopy(made)
    (exit_,) = made.hear(end)
    assert exit_.code == 5
    assert isinstance(exit_, a.Exit)
    assert "initial weights or an evaluation, and trained nothing" in exit_.message
    was_late = deepcopy(trained_too)
    was_late.advertise(4)
    was_late.hear(e.Assigned(4), e.Trained(4), end)
    *_, exit_ = was_late.hear(e.TimerFired(Timer.WORK))
    assert isinstance(exit_, a.Exit)
    assert exit_.code == 5
    assert "none of its updates counted" in exit_.message
    trained_too.advertise(4)
    trained_too.hear(e.Assigned(4), e.Trained(4), e.HandedIn(4))
    assert trained_too.hear(end) == FINISHED


def test_initial_weights_of_an_earlier_process_are_not_trained() -> None:
    talk = Talk(held=Held("s1", 3, is_training=False))
    talk.hear(e.Started(), e.Joined("s1", 5.0))
    talk.advertise(3)
    talk.hear(e.HandedIn(3))
    *_, exit_ = talk.hear(e.Advertised(State.FINISHED, 4, session_id="s1", cause="completed"))
    assert isinstance(exit_, a.Exit)
    assert exit_.code == 5


def test_the_cause_is_remembered_while_the_last_acknowledgement_is_awaited(holding: Talk) -> None:
    holding.hear(e.Advertised(State.FINISHED, 3, False, "s1", "disk full"))
    *_, end = holding.hear(e.TimerFired(Timer.WORK))
    assert end == a.Exit(1, "the session has ended without a result: disk full")


def test_finished_is_for_unregistered_clients_too() -> None:
    talk = Talk()
    talk.hear(e.Started())
    assert talk.advertise(9, State.FINISHED) == FINISHED


def test_finished_does_not_wait_for_training(joined: Talk) -> None:
    joined.advertise(3)
    joined.hear(e.Assigned(3))
    assert joined.advertise(3, State.FINISHED) == FINISHED


@pytest.mark.parametrize(
    "answer",
    [
        e.HandedIn(3),
        e.RefusedBy(Call.HAND_IN, "ROUND_CLOSED", "FAILED_PRECONDITION"),
        e.RefusedBy(Call.HAND_IN, "INVALID_NAME", "INVALID_ARGUMENT"),
        e.TimerFired(Timer.WORK),
    ],
)
def test_finished_waits_a_moment_for_our_last_acknowledgement(
    holding: Talk, answer: e.Event
) -> None:
    """The update that completes the last round is often ours, and its answer still on its way."""
    assert holding.advertise(3, State.FINISHED) == []
    assert holding.timers.pop(Timer.WORK) == FINISHING_S
    assert holding.advertise(3, State.FINISHED) == []
    assert Timer.WORK not in holding.timers, "every advertisement would put the end off"
    assert holding.refuse(Call.HEARTBEAT, "INVALID_NAME", "INVALID_ARGUMENT") == []
    assert [action for action in holding.hear(answer) if not isinstance(action, a.Drop)] == FINISHED


def test_participant_stopped_after_the_end_exits_as_finished(holding: Talk) -> None:
    """A participant that is moved away at this moment need not be started again."""
    holding.advertise(3, State.FINISHED)
    assert holding.hear(e.StopRequested(143)) == [a.Drop(3, "the session is finished"), *FINISHED]


# --- a result that outlives the process ---


@pytest.fixture
def back() -> Talk:
    """Killed after it had trained round 3, and started again."""
    talk = Talk(held=Held("s1", 3))
    assert talk.hear(e.Started(), e.TimerFired(Timer.CONTACT)) == [a.Rendezvous()]
    return talk


def test_a_result_from_before_is_handed_in_without_training(back: Talk) -> None:
    back.hear(e.Joined("s1", 5.0))
    assert back.advertise(3) == [a.HandIn(3)]
    assert back.hear(e.HandedIn(3)) == [a.Drop(3, "it is handed in", accepted=True)]
    assert back.advertise(4) == [a.Drop(3, "its round is over"), a.BeginRound(4)]


def damaged(round_: int = 3) -> e.Advertised:
    return e.Advertised(State.ROUND, round_, session_id="s1", update_damaged=True)


@pytest.mark.parametrize("is_durable", [True, False])
def test_update_that_is_damaged_is_brought_again(joined: Talk, is_durable: bool) -> None:
    """The coordinator is asked first, since its news may be old. What is kept on the disk stays
    there until the update is in."""
    accepted = a.Drop(3, "it is handed in", accepted=is_durable)
    joined.advertise(3)
    joined.hear(e.Assigned(3), e.Trained(3, is_durable))
    assert joined.hear(e.HandedIn(3)) == [accepted]
    assert joined.advertise(3) == [], "an old advertisement asks for nothing"
    for _ in range(2):
        assert joined.hear(damaged()) == [a.BeginRound(3, ask=True)]
        assert joined.hear(e.Assigned(3)) == [a.Train(3)]
        assert joined.hear(e.Trained(3, is_durable)) == [a.HandIn(3)]
        assert joined.hear(e.HandedIn(3)) == [accepted]


def test_old_news_of_damage_is_not_believed_without_asking(joined: Talk) -> None:
    joined.advertise(3)
    joined.hear(e.Assigned(3), e.Trained(3), e.HandedIn(3))
    assert joined.hear(damaged()) == [a.BeginRound(3, ask=True)]
    assert joined.hear(e.Assigned(3, update_accepted=True)) == []
    assert joined.advertise(3, accepted=True) == []


def test_news_of_damage_while_the_update_is_handed_in_again(joined: Talk) -> None:
    joined.advertise(3)
    joined.hear(e.Assigned(3), e.Trained(3), e.HandedIn(3), damaged(), e.Assigned(3), e.Trained(3))
    assert joined.hear(damaged()) == []
    joined.hear(e.HandedIn(3))
    assert joined.advertise(3, accepted=True) == []


def test_accepted_result_is_kept_until_its_round_is_over(back: Talk) -> None:
    back.hear(e.Joined("s1", 5.0))
    back.advertise(3)
    back.hear(e.HandedIn(3))
    assert back.advertise(3, State.STANDBY, accepted=True) == []
    assert back.advertise(4, State.STANDBY) == [a.Drop(3, "its round is over")]


@pytest.mark.parametrize(
    ("news", "told"),
    [
        # A coordinator that is starting has none open yet.
        ([(3, State.STANDBY, False), (3, State.ROUND, False)], [a.HandIn(3)]),
        # Its maker was killed between the acknowledgement and its removal.
        ([(3, State.ROUND, True)], [a.Drop(3, "it is accepted", accepted=True)]),
        ([(5, State.ROUND, False)], [a.BeginRound(5)]),
    ],
)
def test_a_result_from_before_is_for_its_round(
    back: Talk, news: list[tuple[int, State, bool]], told: list[a.Action]
) -> None:
    back.hear(e.Joined("s1", 5.0))
    done = [action for one in news for action in back.advertise(*one[:2], accepted=one[2])]
    assert done == told
    if told == [a.BeginRound(5)]:
        assert back.hear(e.Assigned(5)) == [a.Drop(3, "round 5 is open"), a.Train(5)]


@pytest.mark.parametrize("session", ["s2", ""])
def test_a_result_from_before_is_not_for_another_session(back: Talk, session: str) -> None:
    """The same holds for a coordinator that does not name its session."""
    back.session = session
    dropped = a.Drop(3, "it belongs to another session")
    assert back.hear(e.Joined(session, 5.0)) == [dropped, a.StartWatch()]
    assert back.advertise(3) == [a.BeginRound(3)]


def test_a_result_of_a_finished_session_is_dropped(back: Talk) -> None:
    ended = [a.Drop(3, "the session is finished"), *FINISHED]
    assert back.advertise(9, State.FINISHED) == ended


@pytest.mark.parametrize(
    ("happened", "told"),
    [
        ([], [a.Leave()]),
        ([e.TimerFired(Timer.CONTACT)], [a.Leave()]),
        ([e.Trained(3, is_durable=True)], []),
        ([e.Trained(3, is_durable=False)], [a.Leave()]),
        ([e.Saving(3)], []),
        ([e.Saving(3), e.Trained(3, is_durable=False)], [a.Leave()]),
        # That result is not wanted, so the participant does not come back with it.
        ([e.Saving(3), e.Joined("s2", 5.0)], [a.Leave()]),
        (
            [e.Trained(3, is_durable=True), e.HandedIn(3)],
            [a.Drop(3, "it is accepted, and its sender leaves"), a.Leave()],
        ),
    ],
)
def test_participant_stopped_with_a_durable_result_stays_a_member(
    joined: Talk, happened: list[e.Event], told: list[a.Action]
) -> None:
    """The member keeps its lease: after a leave it would be replaced, and its result be useless.
    Without a result, or with one that may not be on the disk yet, it leaves."""
    joined.advertise(3)
    joined.hear(e.Assigned(3), *happened)
    assert joined.hear(e.StopRequested(143)) == [*told, a.Exit(143, "asked to stop")]


def test_participant_stopped_with_a_kept_result_stays_a_member(back: Talk) -> None:
    assert back.hear(e.StopRequested(143)) == [a.Exit(143, "asked to stop")]


def test_the_same_events_and_chance_give_the_same_actions() -> None:
    """A recorded list of events replays a failure."""

    def actions(seed: int) -> list[a.Action]:
        protocol = Protocol(Random(seed))
        events = [e.Started(), e.RefusedBy(Call.RENDEZVOUS, "", "UNAVAILABLE"), e.Joined("s1")]
        return [action for event in events for action in protocol.handle(event)]

    assert actions(1) == actions(1)
    assert actions(1) != actions(2)


# --- serve mode ---


@pytest.fixture
def serving() -> Talk:
    talk = Talk(serve=True)
    talk.hear(e.Started(), e.TimerFired(Timer.CONTACT), e.Joined(talk.session, 5.0))
    return talk


def test_serving_participant_stays_after_the_end_and_joins_the_next_session(serving: Talk) -> None:
    serving.advertise(0)
    serving.hear(e.Assigned(0))
    serving.hear(e.Trained(0))
    serving.hear(e.HandedIn(0))
    assert serving.advertise(0, State.FINISHED) == []
    assert serving.hear(e.TimerFired(Timer.CONTACT)) == [a.SendHeartbeat(training=False, round=0)]
    assert serving.advertise(0, State.FINISHED) == []
    # The coordinator has opened another session, which does not know us.
    serving.refuse(Call.HEARTBEAT, "NOT_A_MEMBER", "PERMISSION_DENIED")
    assert serving.hear(e.TimerFired(Timer.CONTACT)) == [a.Rendezvous()]
    serving.session = "s2"
    serving.hear(e.Joined("s2", 5.0))
    assert serving.advertise(0) == [a.BeginRound(0)], "round 0 of the other session is a new one"


def test_serving_participant_drops_work_of_a_finished_session(serving: Talk) -> None:
    """A straggler's result is dropped when its training is over."""
    serving.advertise(0)
    serving.hear(e.Assigned(0))
    assert serving.advertise(0, State.FINISHED) == []
    assert [type(action) for action in serving.hear(e.Trained(0))] == [a.Drop]


def test_serving_participant_whose_training_fails_stays_for_the_next_session(
    serving: Talk,
) -> None:
    failure = Failure("DataError", "no such column")
    serving.advertise(0)
    serving.hear(e.Assigned(0))
    failed = serving.hear(e.TrainingFailed(0, "DataError: no such column", failure))
    assert failed == [a.ReportFailure(0, failure)]
    assert serving.advertise(0) == [], "the round is over for it"
    assert serving.advertise(0, State.FINISHED) == []
    serving.refuse(Call.HEARTBEAT, "NOT_A_MEMBER", "PERMISSION_DENIED")
    assert serving.hear(e.TimerFired(Timer.CONTACT)) == [a.Rendezvous()]
    serving.session = "s2"
    serving.hear(e.Joined("s2", 5.0))
    assert serving.advertise(0) == [a.BeginRound(0)]


def test_serving_participant_waits_for_its_last_acknowledgement(serving: Talk) -> None:
    serving.advertise(0)
    serving.hear(e.Assigned(0))
    serving.hear(e.Trained(0, is_durable=True))
    assert serving.advertise(0, State.FINISHED) == []
    assert serving.hear(e.HandedIn(0)) == [a.Drop(0, "it is handed in", accepted=True)]
    assert serving.advertise(0, State.FINISHED) == [a.Drop(0, "the session is finished")]


def test_serving_participant_waits_for_a_session_that_its_data_fit() -> None:
    """Without serve mode, data that do not fit end the participant."""
    talk = Talk(serve=True)
    talk.hear(e.Started(), e.TimerFired(Timer.CONTACT))
    assert talk.refuse(Call.RENDEZVOUS, "PROFILE_MISMATCH", "INVALID_ARGUMENT") == []
    assert Timer.CONTACT in talk.timers
    assert talk.hear(e.TimerFired(Timer.CONTACT)) == [a.Rendezvous()]


def test_stopped_serving_participant_leaves(serving: Talk) -> None:
    serving.advertise(0, State.FINISHED)
    actions = serving.hear(e.StopRequested(143))
    assert [type(action) for action in actions] == [a.Leave, a.Exit]
