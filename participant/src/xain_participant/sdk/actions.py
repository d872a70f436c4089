"""Actions that the protocol asks for, in order. The outcome of an action is an event."""

from dataclasses import dataclass

from xain_participant.sdk.failures import Failure
from xain_participant.sdk.values import Timer


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send TimerFired after this long. There is one of each; setting it again moves it."""

    timer: Timer
    after_s: float


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Answer with Joined, AskedToWait or RefusedBy."""


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Answer with Advertised or RefusedBy. training: whether to say TRAINING, else READY.
    round: the last one that was begun, -1 before the first."""

    training: bool
    round: int


@dataclass(frozen=True, slots=True)
class StartWatch:
    """Send Advertised for whatever the Watch stream says, from now to the end."""


@dataclass(frozen=True, slots=True)
class BeginRound:
    """Answer with Assigned or RefusedBy. ask: for the work; what was announced may be old."""

    round: int
    ask: bool = False


@dataclass(frozen=True, slots=True)
class Train:
    """Answer with Trained, TrainingFailed or RefusedBy. If a result of this round is still on the
    disk, after a Drop with `accepted`, it is used and nothing is trained."""

    round: int


@dataclass(frozen=True, slots=True)
class HandIn:
    """Answer with HandedIn or RefusedBy."""

    round: int


@dataclass(frozen=True, slots=True)
class ReportGroupBroken:
    """Tell the coordinator that the process group of this round broke. Answer with Reported or
    RefusedBy."""

    round: int


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """Stop training: the attempt at the round is over, and this one takes its place. The Train
    ends with any outcome."""

    round: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the result of this round. invalid: the coordinator found it unusable. accepted: the
    coordinator has it; a copy on the disk stays, in case the coordinator asks for it again."""

    round: int
    why: str
    invalid: bool = False
    accepted: bool = False


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tell the coordinator that the participant's own code failed in this round."""

    round: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Leave:
    """Tell the coordinator that we go, so that it need not wait for the lease to run out."""


@dataclass(frozen=True, slots=True)
class Exit:
    """The last action. code: the process's exit status."""

    code: int
    message: str


Action = (
    SetTimer
    | Rendezvous
    | SendHeartbeat
    | StartWatch
    | BeginRound
    | Train
    | HandIn
    | ReportGroupBroken
    | EndAttempt
    | Drop
    | ReportFailure
    | Leave
    | Exit
)
