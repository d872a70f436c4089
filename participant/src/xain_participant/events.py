"""What has happened, as the adapter tells the protocol."""

from dataclasses import dataclass

from xain_participant.failures import Failure
from xain_participant.values import Call, State, Timer


@dataclass(frozen=True, slots=True)
class Started:
    """The participant wants to take part. The first event."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time set by SetTimer is over."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class Joined:
    """Rendezvous: accepted. heartbeat_interval_s: 0 if the coordinator leaves it to us.
    reconnect_spread_s: as in Advertised."""

    session_id: str
    heartbeat_interval_s: float = 0.0
    reconnect_spread_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AskedToWait:
    """Rendezvous: there is no place now. retry_after_s: 0 if the coordinator leaves it to us."""

    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Advertised:
    """What a heartbeat or the Watch stream says. session_id: empty if the coordinator has none.
    cause: why the session is finished; empty if the coordinator does not say.
    reconnect_spread_s: within how long after a lost connection all participants are to come back,
    each at a moment of its own; None if nothing is said of it.
    update_damaged: the accepted update is damaged at the coordinator, and must be sent again.
    warning: what the coordinator finds wrong with us; empty if nothing is."""

    state: State
    round: int
    update_accepted: bool = False
    session_id: str = ""
    cause: str = ""
    reconnect_spread_s: float | None = None
    update_damaged: bool = False
    warning: str = ""


@dataclass(frozen=True, slots=True)
class Assigned:
    """BeginRound was answered. round: the one that is to be trained."""

    round: int
    update_accepted: bool = False


@dataclass(frozen=True, slots=True)
class Saving:
    """Train has made a result, and the adapter writes it to where it outlives the process. Trained
    follows."""

    round: int


@dataclass(frozen=True, slots=True)
class Trained:
    """Train has made a result, which the adapter keeps until it is told to Drop it.
    is_durable: it does so even if the process ends."""

    round: int
    is_durable: bool = False


@dataclass(frozen=True, slots=True)
class TrainingFailed:
    """The participant's own code raised. That a repetition helps is not to be expected.

    message: for us. failure: for the coordinator.
    """

    round: int
    message: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class HandedIn:
    """HandIn was acknowledged: the update is durable."""

    round: int


@dataclass(frozen=True, slots=True)
class RefusedBy:
    """A call failed. reason: the coordinator's code for it, empty if it did not come from there.
    status: name of the gRPC status. retry_after_s: when the coordinator asks to be called again; 0
    if it leaves that to us."""

    call: Call
    reason: str
    status: str
    message: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The Watch stream broke off, so the coordinator may be another process by now. Whoever posts
    this does not connect again by itself: that begins with the next sign of life, and the stream
    after its answer."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody here wants to stop. code: the exit status that says who, unless the session is
    finished."""

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
    | HandedIn
    | RefusedBy
    | ConnectionLost
    | StopRequested
)
