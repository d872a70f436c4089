"""How a participant ends, what it goes on with after a restart, and what it does when it serves."""

from copy import deepcopy
from dataclasses import replace
from typing import TypeAlias

import pytest

from support.talk import CONTACT, HOLDING, JOINED, TRAINING, WORK, Talk, killed_with, refused, told
from xain_participant.agent.protocol import FINISHING_S
from xain_participant.sdk import actions as a
from xain_participant.sdk import events as e
from xain_participant.sdk.failures import Failure
from xain_participant.sdk.values import Call, State, Timer

Steps: TypeAlias = list[tuple[e.Event, list[a.Action]]]
FINISHED = [a.Exit(0, "the session is finished")]
STANDBY = told(3, State.STANDBY)
OVER = told(0, State.FINISHED)


@pytest.mark.parametrize(
    ("news", "end"),
    [
        ({"cause": "completed"}, a.Exit(0, "the session is finished")),
        # A script that waits for the exit status must not take a failed training for a done one.
        ({"cause": "no model"}, a.Exit(1, "the session has ended without a result: no model")),
        (
            {"cause": "completed", "no_better": "Model 2 is no better than the mean"},
            a.Exit(4, "the session is finished: Model 2 is no better than the mean"),
        ),
    ],
    ids=["completed", "no result", "no better than the baseline"],
)
def test_end_of_the_session_has_its_status(news, end):
    assert Talk(*JOINED).hear(told(2, State.FINISHED, **news)) == [end]


def test_one_of_whom_nothing_counted_ends_with_a_status_of_its_own():
    """A site that was never let in, never selected, or always too late must not look done.

    A site whose update counted is done, also if the coordinator, like XAIN's, does not say so; one
    that has made initial weights only is not. A coordinator that says that nothing counted is
    right.
    """
    end = e.Advertised(State.FINISHED, 2, session_id="s1", cause="completed")
    waiting = Talk(e.Started(), e.AskedToWait(1.0), e.Joined("s1", 5.0))
    for talk, why in (
        (waiting, "it was never let in, since rounds.max_participants were connected"),
        (Talk(*JOINED), "it was never selected to train"),
        (Talk(*JOINED, told(1)), "none of its updates counted; the coordinator's report says why"),
    ):
        let_in_later = deepcopy(talk)
        assert talk.hear(end) == [a.Exit(5, f"the session is finished without this one: {why}")]
        if talk is waiting:
            (exit_,) = let_in_later.hear(told(1, State.STANDBY), end)
            assert "never selected" in str(exit_)
    counted = Talk(*JOINED, told(1, update_accepted=True))
    (exit_,) = deepcopy(counted).hear(replace(end, rounds_contributed=0))
    assert exit_.code == 5
    assert counted.hear(end) == FINISHED
    made = (*TRAINING, e.Trained(3, is_training=False), e.HandedIn(3))
    (exit_,) = Talk(*made).hear(end)
    assert exit_.code == 5
    assert "initial weights or an evaluation, and trained nothing" in exit_.message
    *_, exit_ = Talk(*made, told(4), e.Assigned(4), e.Trained(4), end).hear(WORK)
    assert exit_.code == 5
    assert "none of its updates counted" in exit_.message
    trained_too = Talk(*made, told(4), e.Assigned(4), e.Trained(4), e.HandedIn(4))
    assert trained_too.hear(end) == FINISHED


def test_initial_weights_of_an_earlier_process_are_not_trained():
    talk = killed_with("s1", 3, is_training=False)
    talk.hear(e.Joined("s1", 5.0), told(3), e.HandedIn(3))
    *_, exit_ = talk.hear(e.Advertised(State.FINISHED, 4, session_id="s1", cause="completed"))
    assert exit_.code == 5


@pytest.mark.parametrize(
    "answer",
    [
        e.HandedIn(3),
        refused(Call.HAND_IN, "ROUND_CLOSED", "FAILED_PRECONDITION"),
        refused(Call.HAND_IN, "INVALID_NAME", "INVALID_ARGUMENT"),
        WORK,
    ],
)
def test_finished_waits_a_moment_for_our_last_acknowledgement(answer):
    """The update that completes the last round is often ours, and its answer still on its way."""
    talk = Talk(*HOLDING)
    assert talk.hear(told(3, State.FINISHED)) == []
    assert talk.timers.pop(Timer.WORK) == FINISHING_S
    assert talk.hear(told(3, State.FINISHED)) == []
    assert Timer.WORK not in talk.timers, "every advertisement would put the end off"
    assert talk.hear(refused(Call.HEARTBEAT, "INVALID_NAME", "INVALID_ARGUMENT")) == []
    assert [action for action in talk.hear(answer) if not isinstance(action, a.Drop)] == FINISHED


# --- a result that outlives the process ---

KEPT: dict[str, Steps] = {
    "kept result is handed in, and kept until its round is over": [
        (told(3), [a.HandIn(3)]),
        (e.HandedIn(3), [a.Drop(3, "it is handed in", accepted=True)]),
        (told(3, State.STANDBY, update_accepted=True), []),
        (told(4, State.STANDBY), [a.Drop(3, "its round is over")]),
        (told(4), [a.BeginRound(4)]),
    ],
    # A coordinator that is starting has none open yet.
    "kept result waits for its round": [(STANDBY, []), (told(3), [a.HandIn(3)])],
    # Its maker was killed between the acknowledgement and its removal.
    "kept result that was accepted is sent no more": [
        (told(3, update_accepted=True), [a.Drop(3, "it is accepted", accepted=True)])
    ],
    "kept result of a round that is over is dropped": [
        (told(5), [a.BeginRound(5)]),
        (e.Assigned(5), [a.Drop(3, "round 5 is open"), a.Train(5)]),
    ],
}


@pytest.mark.parametrize("name", KEPT)
def test_result_from_before_is_for_its_round(name):
    talk = killed_with("s1", 3)
    talk.hear(e.Joined("s1", 5.0))
    for event, actions in KEPT[name]:
        assert talk.hear(event) == actions, event


@pytest.mark.parametrize("session", ["s2", ""])
def test_result_from_before_is_not_for_another_session(session):
    """The same holds for a coordinator that does not name its session."""
    talk = killed_with("s1", 3)
    dropped = a.Drop(3, "it belongs to another session")
    assert talk.hear(e.Joined(session, 5.0)) == [dropped, a.StartWatch()]
    assert talk.hear(told(3, session=session)) == [a.BeginRound(3)]


@pytest.mark.parametrize(
    ("happened", "actions"),
    [
        ([CONTACT], [a.Leave()]),
        ([e.Saving(3)], []),
        # The result is not wanted, so the participant does not come back with it.
        ([e.Saving(3), e.Joined("s2", 5.0)], [a.Leave()]),
        (
            [e.Trained(3, is_durable=True), e.HandedIn(3)],
            [a.Drop(3, "it is accepted, and its sender leaves"), a.Leave()],
        ),
    ],
)
def test_participant_stopped_with_a_durable_result_stays_a_member(happened, actions):
    """The member keeps its lease: after a leave it would be replaced, and its result be useless.
    test_protocol_machine.py has all other moments."""
    talk = Talk(*TRAINING, *happened)
    assert talk.hear(e.StopRequested(143)) == [*actions, a.Exit(143, "asked to stop")]


# --- rounds that a process group trains ---


def attempt(number: int, round_: int = 3, **more: bool) -> e.Advertised:
    return told(round_, attempt=number, **more)


FIRST = (*JOINED, attempt(1), e.Assigned(3, attempt=1))
SECOND = (*FIRST, attempt(2), e.GroupBroken(3), e.Assigned(3, attempt=2))
ATTEMPTS: dict[str, tuple[tuple[e.Event, ...], Steps]] = {
    "broken group is reported once, and the next attempt is trained": (
        FIRST,
        [
            (e.GroupBroken(3), [a.ReportGroupBroken(3)]),
            (e.Reported(3), []),
            (attempt(1), []),
            (attempt(2), [a.BeginRound(3)]),
        ],
    ),
    "report is repeated until the coordinator has it": (
        (*FIRST, e.GroupBroken(3)),
        [(refused(Call.REPORT), []), (WORK, [a.ReportGroupBroken(3)])],
    ),
    "report is not repeated when the next attempt is known": (
        (*FIRST, e.GroupBroken(3)),
        [(attempt(2), []), (e.Reported(3), [a.BeginRound(3)])],
    ),
    "slice of an attempt that is over is dropped": (
        (*FIRST, e.Trained(3), e.HandedIn(3)),
        [(attempt(1, update_accepted=True), []), (attempt(2), [a.BeginRound(3)])],
    ),
    "slice that waits to be handed in again is dropped": (
        (*FIRST, e.Trained(3), refused(Call.HAND_IN)),
        [(attempt(2), [a.Drop(3, "its round starts again"), a.BeginRound(3)])],
    ),
    "new attempt ends a training of the one before": (
        FIRST,
        [
            (attempt(2), [a.EndAttempt(3, 2)]),
            (e.GroupBroken(3), [a.BeginRound(3)]),
            (e.Assigned(3, attempt=2), [a.Train(3)]),
        ],
    ),
    **{
        f"slice refused as {reason} does not end the next attempt": (
            (*FIRST, e.Trained(3), refused(Call.HAND_IN, reason, "FAILED_PRECONDITION")),
            [(attempt(2), [a.BeginRound(3)])],
        )
        for reason in ("STALE_ATTEMPT", "SLICE_MISMATCH")
    },
    "late news of an earlier attempt change nothing": (
        SECOND,
        [(attempt(1, update_accepted=True), []), (e.Trained(3), [a.HandIn(3)])],
    ),
    "late assignment of an earlier attempt is not trained": (
        (*JOINED, attempt(1), attempt(2)),
        [(e.Assigned(3, attempt=1), []), (WORK, [a.BeginRound(3)])],
    ),
    "attempts of the next round begin at one again": (
        (*SECOND, e.Trained(3), e.HandedIn(3)),
        [(attempt(1, 4), [a.BeginRound(4)]), (e.Assigned(4, attempt=1), [a.Train(4)])],
    ),
}


# --- serve mode ---

ROUND_0 = (*JOINED, told(0), e.Assigned(0))
GONE = refused(Call.HEARTBEAT, "NOT_A_MEMBER", "PERMISSION_DENIED")
# The coordinator has opened another session, which does not know us.
NEXT_SESSION: Steps = [
    (OVER, []),
    (GONE, []),
    (CONTACT, [a.Rendezvous()]),
    (e.Joined("s2", 5.0), []),
    (told(0, session="s2"), [a.BeginRound(0)]),
]
FAILURE = Failure("DataError", "no such column")
SERVING: dict[str, tuple[tuple[e.Event, ...], Steps]] = {
    "participant joins the next session after the end": (
        (*ROUND_0, e.Trained(0), e.HandedIn(0), OVER),
        [(CONTACT, [a.SendHeartbeat(training=False, round=0)]), *NEXT_SESSION],
    ),
    # A straggler's result is dropped when its training is over.
    "work of a finished session is dropped": (
        (*ROUND_0, OVER),
        [(e.Trained(0), [a.Drop(0, "its session or attempt is over")])],
    ),
    "participant whose training fails stays for the next session": (
        ROUND_0,
        [
            (
                e.TrainingFailed(0, "DataError: no such column", FAILURE),
                [a.ReportFailure(0, FAILURE)],
            ),
            (told(0), []),  # the round is over for it
            *NEXT_SESSION,
        ],
    ),
    "last acknowledgement is waited for": (
        (*ROUND_0, e.Trained(0, is_durable=True), OVER),
        [
            (e.HandedIn(0), [a.Drop(0, "it is handed in", accepted=True)]),
            (OVER, [a.Drop(0, "the session is finished")]),
        ],
    ),
    # Without serve mode, data that do not fit end the participant.
    "participant waits for a session that its data fit": (
        (e.Started(), CONTACT),
        [
            (refused(Call.RENDEZVOUS, "PROFILE_MISMATCH", "INVALID_ARGUMENT"), []),
            (CONTACT, [a.Rendezvous()]),
        ],
    ),
    "stopped participant leaves": (
        (*JOINED, OVER),
        [(e.StopRequested(143), [a.Leave(), a.Exit(143, "asked to stop")])],
    ),
}


@pytest.mark.parametrize("name", ATTEMPTS | SERVING)
def test_attempts_and_sessions_end_and_the_next_begin(name):
    heard, steps = (ATTEMPTS | SERVING)[name]
    talk = Talk(*heard, serve=name in SERVING)
    for event, actions in steps:
        assert talk.hear(event) == actions, event
