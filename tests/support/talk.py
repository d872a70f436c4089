"""A participant's protocol, and the events that tests tell it."""

from random import Random
from typing import Any

from xain_participant.agent.protocol import Held, Protocol
from xain_participant.sdk import actions as a
from xain_participant.sdk import events as e
from xain_participant.sdk.values import Call, State, Timer

CONTACT, WORK = e.TimerFired(Timer.CONTACT), e.TimerFired(Timer.WORK)


def told(round_: int, state: State = State.ROUND, session: str = "s1", **more: Any) -> e.Advertised:
    """An advertisement; of a session that is over, one in which an update has counted."""
    if state is State.FINISHED:
        more = {"rounds_contributed": 1, **more}
    return e.Advertised(state, round_, session_id=session, **more)


def refused(call: Call, reason: str = "", status: str = "UNAVAILABLE") -> e.RefusedBy:
    return e.RefusedBy(call, reason, status, "because")


JOINED: tuple[e.Event, ...] = (e.Started(), CONTACT, e.Joined("s1", 5.0))
TRAINING = (*JOINED, told(3), e.Assigned(3))
HOLDING = (*TRAINING, e.Trained(3))  # it has trained round 3 and is handing it in


class Talk:
    """A protocol that has heard some events, and the timers that it has set."""

    def __init__(self, *heard: e.Event, seed: int = 1, **options: Any) -> None:
        self.protocol = Protocol(Random(seed), **options)
        self.timers: dict[Timer, float] = {}
        self.hear(*heard)

    def hear(self, *events: e.Event) -> list[a.Action]:
        """The actions that follow from the last of the events, without timers."""
        actions: tuple[a.Action, ...] = ()
        for event in events:
            actions = self.protocol.handle(event)
            for action in actions:
                if isinstance(action, a.SetTimer):
                    self.timers[action.timer] = action.after_s
        return [action for action in actions if not isinstance(action, a.SetTimer)]


def killed_with(session: str, round_: int, **more: bool) -> Talk:
    """A participant that was killed after it had trained a round, and was started again."""
    talk = Talk(held=Held(session, round_, **more))
    assert talk.hear(e.Started(), CONTACT) == [a.Rendezvous()]
    return talk
