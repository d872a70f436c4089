"""Events that the adapter posts to the protocol."""

from dataclasses import dataclass

from xain_participant.sdk.failures import Failure
from xain_participant.sdk.values import Call, State, Timer


@dataclass(frozen=True, slots=True)
class Started:
    """The participant wants to take part. The first event."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time set by SetTimer is over."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class Joined:
    """Rendezvous: accepted. heartbeat_interval_s: 0 if the coordinator gives none.
    reconnect_spread_s: as in Advertised. stays: the session is one of a study, and a training that
    fails is not the end of the participant."""

    session_id: str
    heartbeat_interval_s: float = 0.0
    reconnect_spread_s: float = 0.0
    stays: bool = False


@dataclass(frozen=True, slots=True)
class AskedToWait:
    """Rendezvous: no slot is free. retry_after_s: 0 if the coordinator gives no time.

    why: what else keeps the participant out until an operator acts; "" for a slot.
    """

    retry_after_s: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Advertised:
    """The coordinator's state, from a heartbeat or the Watch stream.

    session_id: empty if the coordinator has none.
    cause: why the session is finished; empty if the coordinator does not say.
    reconnect_spread_s: within how long after a lost connection all participants are to come back,
    each at a moment of its own; None if nothing is said of it.
    update_damaged: the accepted update is damaged at the coordinator, and must be sent again.
    attempt: at the round, if a process group trains it; else 0. A higher one starts it again.
    warning: what the coordinator finds wrong with us; empty if nothing is.
    rounds_contributed: rounds of training that an update of ours counted in; None: not told.
    no_better: why the last model is no better than the best constant prediction; empty: it is, or
    was not compared.
    findings: of the coordinator's checks of the data, each with its level; empty if they are known.
    findings_digest: of all findings that the coordinator tells this participant."""

    state: State
    round: int
    update_accepted: bool = False
    session_id: str = ""
    cause: str = ""
    reconnect_spread_s: float | None = None
    update_damaged: bool = False
    warning: str = ""
    attempt: int = 0
    rounds_contributed: int | None = None
    no_better: str = ""
    findings: tuple[str, ...] = ()
    findings_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Assigned:
    """BeginRound was answered. round: the one that is to be trained. attempt: as in Advertised."""

    round: int
    update_accepted: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Saving:
    """Train has made a result, and the adapter makes it durable. Trained follows."""

    round: int


@dataclass(frozen=True, slots=True)
class Trained:
    """Train has made a result, which the adapter keeps until it is told to Drop it.
    is_durable: whether the result outlives the process. is_training: whether samples were trained
    on; not for initial weights and evaluations."""

    round: int
    is_durable: bool = False
    is_training: bool = True


@dataclass(frozen=True, slots=True)
class TrainingFailed:
    """The participant's own code raised. A repetition is not expected to help.

    message: for us. failure: for the coordinator.
    """

    round: int
    message: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class GroupBroken:
    """Train has ended without a result, since the process group broke."""

    round: int


@dataclass(frozen=True, slots=True)
class Reported:
    """ReportGroupBroken was acknowledged."""

    round: int


@dataclass(frozen=True, slots=True)
class HandedIn:
    """HandIn was acknowledged: the update is durable."""

    round: int


@dataclass(frozen=True, slots=True)
class RefusedBy:
    """A call of the participant was refused, or failed.

    reason: the coordinator's code; empty if the failure did not come from the coordinator.
    status: name of the gRPC status.
    retry_after_s: time after which the coordinator asks to be called again; 0 if it gives none.
    """

    call: Call
    reason: str
    status: str
    message: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The Watch stream broke off, so the coordinator may be another process by now.

    The adapter opens no new stream by itself: the protocol sends a sign of life first, and asks for
    the stream after the answer.
    """


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The process was asked to stop. code: the exit status, unless the session is finished."""

    code: int = 0


Event = (
    Started
    | TimerFired
    | Joined
    | AskedToWait
    | Advertised
    | Assigned
    | Saving
    | Trained
    | TrainingFailed
    | GroupBroken
    | Reported
    | HandedIn
    | RefusedBy
    | ConnectionLost
    | StopRequested
)
