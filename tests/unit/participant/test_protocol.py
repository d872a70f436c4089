"""The decisions of a participant, one situation after another: rounds, results, sessions."""

from typing import TypeAlias

import grpc
import pytest

from support.talk import CONTACT, HOLDING, JOINED, TRAINING, WORK, Talk, refused, told
from xain_participant.agent.protocol import MAX_BACKOFF_S, MAX_INVALID, RETRY_JITTER
from xain_participant.sdk import actions as a
from xain_participant.sdk import events as e
from xain_participant.sdk.failures import Failure
from xain_participant.sdk.values import Call, State, Timer

# Events that a participant hears, and the actions that follow.
Steps: TypeAlias = list[tuple[e.Event, list[a.Action]]]

STANDBY = told(3, State.STANDBY)
ACCEPTED = told(3, update_accepted=True)
DAMAGED = told(3, update_damaged=True)
EXPIRED = refused(Call.HEARTBEAT, "NOT_A_MEMBER", "PERMISSION_DENIED")
INVALID = refused(Call.HAND_IN, "INVALID_UPDATE", "INVALID_ARGUMENT")
PAUSED = refused(Call.HAND_IN, "NOT_IN_ROUND", "FAILED_PRECONDITION")
AWAY = refused(Call.HAND_IN)
OTHER = e.Joined("s2", 5.0)
FINISHED = [a.Exit(0, "the session is finished")]
REFUSED_FOR_GOOD = [a.Leave(), a.Exit(1, "the update of round 3 was refused: because")]


def invalid(round_: int) -> a.Drop:
    return a.Drop(round_, "because", invalid=True)


def other(round_: int, state: State = State.ROUND) -> e.Advertised:
    """An advertisement of the second session."""
    return told(round_, state, "s2")


ROUNDS: dict[str, tuple[tuple[e.Event, ...], Steps]] = {
    "acknowledged round is not begun again": (
        JOINED,
        [
            (told(3), [a.BeginRound(3)]),
            (e.Assigned(3), [a.Train(3)]),
            (e.Trained(3), [a.HandIn(3)]),
            (e.HandedIn(3), [a.Drop(3, "it is handed in")]),
            (told(3), []),  # done, even if the advertisement is older than our update
            (told(4), [a.BeginRound(4)]),
        ],
    ),
    "only one piece of work is begun at a time": (
        JOINED,
        [
            (told(3), [a.BeginRound(3)]),
            (told(3), []),
            (told(4), []),
            (e.Assigned(3), [a.Train(3)]),
            (told(4), []),
        ],
    ),
    # After a restart of ours: the update of the process before us has counted.
    "accepted round is not trained again": (JOINED, [(ACCEPTED, []), (told(3), [])]),
    "accepted round is not trained after a pause": (
        JOINED,
        [(told(3, State.STANDBY, update_accepted=True), []), (told(3), [])],
    ),
    # A predecessor of this process has handed in the update of the round that it trains.
    "result of a round that was accepted meanwhile is dropped": (
        TRAINING,
        [
            (ACCEPTED, []),
            (e.Trained(3), [a.Drop(3, "its round is over")]),
            (e.StopRequested(143), [a.Leave(), a.Exit(143, "asked to stop")]),
        ],
    ),
    "assignment that says that the update is accepted ends the work": (
        (*JOINED, told(3)),
        [(e.Assigned(3, update_accepted=True), []), (WORK, [])],
    ),
    "round of the assignment is trained, though the advertisement is older": (
        (*JOINED, told(3)),
        [(e.Assigned(4), [a.Train(4)])],
    ),
    # An advertisement may have been on its way for long: the coordinator's answer decides.
    "news of an earlier round are not believed without asking": (
        HOLDING,
        [
            (AWAY, []),
            (told(2), [a.BeginRound(2, ask=True)]),
            (e.Assigned(3), [a.HandIn(3)]),
            (e.HandedIn(3), [a.Drop(3, "it is handed in"), a.BeginRound(2, ask=True)]),
            (e.Assigned(3, update_accepted=True), []),
            (told(4), [a.BeginRound(4)]),
        ],
    ),
    # XAIN's SDK never trained again when the coordinator had restarted from an older round.
    "earlier round is trained when the coordinator assigns it": (
        (*HOLDING, e.HandedIn(3)),
        [(told(1), [a.BeginRound(1, ask=True)]), (e.Assigned(1), [a.Train(1)])],
    ),
    **{
        f"beginning refused with {reason!r} waits for the coordinator": (
            (*JOINED, told(3)),
            [
                (refused(Call.BEGIN_ROUND, reason, "FAILED_PRECONDITION"), []),
                (STANDBY, []),
                (WORK, []),
                (told(4), [a.BeginRound(4)]),
            ],
        )
        for reason in ("NOT_IN_ROUND", "NOT_SELECTED", "ROUND_CLOSED", "")
    },
    "failed download begins the round again": (
        TRAINING,
        [(refused(Call.TRAIN, status="DATA_LOSS"), []), (WORK, [a.BeginRound(3)])],
    ),
    "failed training is reported and ends the participant": (
        TRAINING,
        [
            (
                e.TrainingFailed(3, "KeyError: 'x'", Failure("KeyError")),
                [
                    a.ReportFailure(3, Failure("KeyError")),
                    a.Leave(),
                    a.Exit(1, "training of round 3 failed: KeyError: 'x'"),
                ],
            )
        ],
    ),
}

RESULTS: dict[str, tuple[tuple[e.Event, ...], Steps]] = {
    "result waits while the round is paused": (
        (*HOLDING, PAUSED),
        [(STANDBY, []), (WORK, []), (told(3), [a.HandIn(3)])],
    ),
    # The worker then finds nothing to send, and says that it is handed in.
    "update that arrived while its sending was queued is not missed": (
        HOLDING,
        [
            (ACCEPTED, [a.Drop(3, "it is accepted")]),
            (e.HandedIn(3), []),
            (told(4), [a.BeginRound(4)]),
        ],
    ),
    "lost acknowledgement is made up by an advertisement": (
        (*HOLDING, AWAY),
        [(ACCEPTED, [a.Drop(3, "it is accepted")]), (WORK, [])],
    ),
    "next round replaces a result that never got through": (
        (*HOLDING, AWAY),
        [(told(4), [a.BeginRound(4)]), (e.Assigned(4), [a.Drop(3, "round 4 is open"), a.Train(4)])],
    ),
    "assignment of the held round hands it in, whatever was advertised": (
        (*HOLDING, AWAY, told(4)),
        [(e.Assigned(3), [a.HandIn(3)])],
    ),
    # Another update of the same model would be as large.
    "too large update is not trained again": (
        HOLDING,
        [
            (
                refused(Call.HAND_IN, "TOO_LARGE", "RESOURCE_EXHAUSTED"),
                [invalid(3), *REFUSED_FOR_GOOD],
            )
        ],
    ),
    "invalid updates of two rounds are two accidents": (
        (*HOLDING, INVALID),
        [
            (told(4), [a.BeginRound(4)]),
            (e.Assigned(4), [a.Train(4)]),
            (e.Trained(4), [a.HandIn(4)]),
            (INVALID, [invalid(4)]),
        ],
    ),
    # STANDBY follows its third refusal; once selected again, it has all its attempts.
    "participant that is left out waits until it is selected": (
        (*HOLDING, *(INVALID, WORK, e.Assigned(3), e.Trained(3)) * 2, INVALID),
        [
            (STANDBY, []),
            (WORK, []),
            (told(7), [a.BeginRound(7)]),
            (e.Assigned(7), [a.Train(7)]),
            (e.Trained(7), [a.HandIn(7)]),
            (INVALID, [invalid(7)]),
        ],
    ),
    "result survives the expiry of its maker": (
        (*HOLDING, refused(Call.HAND_IN, "NOT_A_MEMBER", "PERMISSION_DENIED")),
        [
            (WORK, []),  # first we must be back
            (CONTACT, [a.Rendezvous()]),
            (e.Joined("s1", 5.0), []),  # the stream is still there
            (told(3), [a.HandIn(3)]),
        ],
    ),
    "training goes on while its maker joins again": (
        (*TRAINING, EXPIRED),
        [(e.Trained(3), []), (e.Joined("s1", 5.0), []), (told(3), [a.HandIn(3)])],
    ),
    "expired participant does not act on advertisements": ((*JOINED, EXPIRED), [(told(3), [])]),
    # The coordinator is asked first, since the news may be old; a copy on the disk stays there.
    **{
        f"damaged update is brought again, durable {durable}": (
            TRAINING,
            [
                (e.Trained(3, durable), [a.HandIn(3)]),
                (e.HandedIn(3), [a.Drop(3, "it is handed in", accepted=durable)]),
                (told(3), []),  # an old advertisement asks for nothing
                *(
                    (DAMAGED, [a.BeginRound(3, ask=True)]),
                    (e.Assigned(3), [a.Train(3)]),
                    (e.Trained(3, durable), [a.HandIn(3)]),
                    (e.HandedIn(3), [a.Drop(3, "it is handed in", accepted=durable)]),
                )
                * 2,
            ],
        )
        for durable in (True, False)
    },
    "old news of damage are not believed without asking": (
        (*HOLDING, e.HandedIn(3)),
        [
            (DAMAGED, [a.BeginRound(3, ask=True)]),
            (e.Assigned(3, update_accepted=True), []),
            (ACCEPTED, []),
        ],
    ),
    "news of damage while the update is handed in again change nothing": (
        (*HOLDING, e.HandedIn(3), DAMAGED, e.Assigned(3), e.Trained(3)),
        [(DAMAGED, []), (e.HandedIn(3), [a.Drop(3, "it is handed in")]), (ACCEPTED, [])],
    ),
}

# Round numbers begin anew in another session, and a result belongs to another model.
SESSIONS: dict[str, tuple[tuple[e.Event, ...], Steps]] = {
    "new session forgets the result": (
        (*HOLDING, refused(Call.HAND_IN, "NOT_A_MEMBER", "PERMISSION_DENIED")),
        [(OTHER, [a.Drop(3, "it belongs to another session")]), (other(3), [a.BeginRound(3)])],
    ),
    "new session asks for a rendezvous": (JOINED, [(other(0), []), (CONTACT, [a.Rendezvous()])]),
    "done rounds count within their session": (
        (*HOLDING, e.HandedIn(3), OTHER),
        [(other(3), [a.BeginRound(3)])],
    ),
    "result of another session is dropped": (
        (*TRAINING, OTHER),
        [
            (other(3), []),  # the old work still runs
            (e.Trained(3), [a.Drop(3, "its session or attempt is over"), a.BeginRound(3)]),
        ],
    ),
    # A reason to give up in one session says nothing of the next one.
    "refused work of another session ends nothing": (
        (*JOINED, told(3), OTHER),
        [
            (other(3), []),  # the question of the old session is still being answered
            (refused(Call.BEGIN_ROUND, "INVALID_NAME", "INVALID_ARGUMENT"), [a.BeginRound(3)]),
        ],
    ),
    "invalid updates count within their session": (
        (
            *HOLDING,
            *(INVALID, WORK, e.Assigned(3), e.Trained(3)) * (MAX_INVALID - 1),
            *(e.HandedIn(3), OTHER, other(3), e.Assigned(3), e.Trained(3)),
        ),
        [(INVALID, [invalid(3)])],
    ),
    "acknowledgement of another session does not count": (
        (*HOLDING, OTHER, other(3)),
        [(e.HandedIn(3), [a.BeginRound(3)])],
    ),
    "late word of the session before is not believed": (
        (*JOINED, OTHER),
        [(told(7), []), (told(7, State.FINISHED), []), (other(0), [a.BeginRound(0)])],
    ),
    # XAIN's coordinator has no ids of sessions.
    "coordinator without session ids has one session": (
        JOINED,
        [(e.Advertised(State.ROUND, 0), [a.BeginRound(0)])],
    ),
    "nothing follows the end": (JOINED, [(told(9, State.FINISHED), FINISHED), (told(9), [])]),
    # A participant that is moved away at this moment need not be started again.
    "participant stopped after the end exits as finished": (
        (*HOLDING, told(3, State.FINISHED)),
        [(e.StopRequested(143), [a.Drop(3, "the session is finished"), *FINISHED])],
    ),
    "cause is remembered while the last acknowledgement is awaited": (
        (*HOLDING, told(3, State.FINISHED, cause="disk full")),
        [
            (
                WORK,
                [
                    a.Drop(3, "the session is finished"),
                    a.Exit(1, "the session has ended without a result: disk full"),
                ],
            )
        ],
    ),
}


@pytest.mark.parametrize("name", ROUNDS | RESULTS | SESSIONS)
def test_each_event_has_its_actions(name):
    heard, steps = (ROUNDS | RESULTS | SESSIONS)[name]
    talk = Talk(*heard)
    for event, actions in steps:
        assert talk.hear(event) == actions, event


# --- results that are refused ---

NOT_NOW = [
    ("NOT_IN_ROUND", "FAILED_PRECONDITION"),
    ("NOT_SELECTED", "FAILED_PRECONDITION"),
    ("UPLOAD_MISSING", "FAILED_PRECONDITION"),
    ("UNAVAILABLE", "UNAVAILABLE"),
    ("", "UNAVAILABLE"),
    ("", "FAILED_PRECONDITION"),
    ("SOMETHING_NEW", "FAILED_PRECONDITION"),
]


@pytest.fixture
def holding() -> Talk:
    return Talk(*HOLDING)


@pytest.mark.parametrize(("reason", "status"), NOT_NOW)
def test_result_that_is_not_taken_now_is_sent_after_a_pause(holding, reason, status):
    """A full disk refuses each upload: the heartbeats between must not send it again."""
    assert holding.hear(refused(Call.HAND_IN, reason, status)) == []
    assert 0 < holding.timers[Timer.WORK] <= 0.2
    for _ in range(3):
        assert holding.hear(told(3)) == []
    assert holding.hear(WORK) == [a.HandIn(3)]


@pytest.mark.parametrize("reason", ["ROUND_CLOSED", "STALE_ROUND", "DUPLICATE_UPDATE", "NEWER"])
def test_useless_result_is_dropped(holding, reason):
    assert holding.hear(refused(Call.HAND_IN, reason, "ALREADY_EXISTS")) == [a.Drop(3, "because")]
    assert holding.hear(WORK) == []
    assert holding.hear(told(3)) == []
    assert holding.hear(told(4)) == [a.BeginRound(4)]


@pytest.mark.parametrize("reason", ["INVALID_UPDATE", "OF_A_NEWER_COORDINATOR"])
def test_invalid_update_is_trained_again_and_at_last_its_maker_leaves(holding, reason):
    """Three refusals are the coordinator's to judge. A participant that it asks for the round after
    them is needed there, and would keep it open for all."""
    event = refused(Call.HAND_IN, reason, "INVALID_ARGUMENT")
    for _ in range(3):
        assert holding.hear(event) == [invalid(3)]
        assert holding.hear(WORK) == [a.BeginRound(3)]
        assert holding.hear(e.Assigned(3)) == [a.Train(3)]
        assert holding.hear(e.Trained(3)) == [a.HandIn(3)]
    assert holding.hear(event) == [invalid(3), *REFUSED_FOR_GOOD]


def test_assignment_of_a_done_round_is_asked_for_again_after_a_pause(holding):
    assert holding.hear(e.HandedIn(3), told(4)) == [a.BeginRound(4)]
    assert holding.hear(e.Assigned(3)) == []
    assert holding.timers[Timer.WORK] <= 0.2
    assert holding.hear(WORK) == [a.BeginRound(4)]


def test_pauses_get_longer_and_an_answer_ends_them(holding):
    for n in range(100):
        holding.hear(AWAY)
        assert 0 <= holding.timers[Timer.WORK] <= min(10.0, 0.2 * 2**n)
        assert holding.hear(WORK) == [a.HandIn(3)]
    holding.hear(e.HandedIn(3), told(4), refused(Call.BEGIN_ROUND))
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
def test_status_without_a_reason_is_tried_again_and_drops_nothing(call, status):
    """gRPC itself, a proxy or a load balancer has answered; the coordinator has said nothing."""
    before, again = AGAIN[call]
    talk = Talk(*JOINED, told(3), *before)
    assert talk.hear(refused(call, "", status)) == []
    if status == "PERMISSION_DENIED":
        assert talk.hear(CONTACT) == [a.Rendezvous()]
        assert talk.hear(e.Joined("s1", 5.0)) == []
        asked = talk.hear(told(3)) or talk.hear(CONTACT)
    else:
        asked = talk.hear(CONTACT if call is Call.HEARTBEAT else WORK)
    assert asked == [again]


@pytest.mark.parametrize("status", FAILURES)
def test_rendezvous_refused_without_a_reason_is_tried_again(status):
    """A proxy may refuse it a hundred times."""
    talk = Talk(e.Started())
    for _ in range(100):
        assert talk.hear(CONTACT) == [a.Rendezvous()]
        assert talk.hear(refused(Call.RENDEZVOUS, "", status)) == []
        assert talk.timers[Timer.CONTACT] <= MAX_BACKOFF_S


@pytest.mark.parametrize("status", FAILURES)
@pytest.mark.parametrize(
    ("reason", "actions"),
    [
        ("UNAVAILABLE", []),
        ("TOO_MANY_CALLS", []),
        ("NOT_A_MEMBER", []),
        ("ROUND_CLOSED", [a.Drop(3, "because")]),
        ("INVALID_UPDATE", [invalid(3)]),
        ("TOO_LARGE", [invalid(3), *REFUSED_FOR_GOOD]),
        ("UPLOAD_NAME_TAKEN", [a.Leave(), a.Exit(1, "because")]),
        ("INVALID_NAME", [a.Leave(), a.Exit(1, "because")]),
    ],
)
def test_reason_of_the_coordinator_decides_whatever_the_status(holding, reason, actions, status):
    """A proxy may have rewritten the status; the coordinator's reason says what is meant."""
    assert holding.hear(refused(Call.HAND_IN, reason, status)) == actions


@pytest.mark.parametrize("news", [e.ConnectionLost(), refused(Call.HEARTBEAT), STANDBY])
def test_coordinator_that_is_back_ends_a_back_off(holding, news):
    """After a restart, or when a paused round goes on, a result is handed in at once. The next
    pause is not ended by it."""
    holding.hear(AWAY, news)
    assert holding.hear(told(3)) == [a.HandIn(3)]
    holding.hear(AWAY)
    assert holding.hear(told(3)) == []


def test_pause_is_as_long_as_the_coordinator_asks_for(holding):
    """A RetryInfo counts for work and for signs of life."""
    busy = ("TOO_MANY_CALLS", "RESOURCE_EXHAUSTED", "", 60.0)
    for call, timer in ((Call.HAND_IN, Timer.WORK), (Call.HEARTBEAT, Timer.CONTACT)):
        holding.hear(e.RefusedBy(call, *busy))
        assert 60.0 <= holding.timers[timer] <= 60.0 * (1.0 + RETRY_JITTER)
