"""The commands to a session."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from xain_coordinator.core.vocabulary.script import RoundConfig
from xain_coordinator.core.vocabulary.values import (
    CentralModel,
    DataProfile,
    Division,
    Evaluation,
    Finding,
    GlobalModel,
    Layout,
    ParticipantState,
    Point,
    StoredWeights,
    Transfer,
)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A participant wants to take part.

    can_evaluate: it has held-out data, and knows rounds that only evaluate.
    can_initialise: it can make initial weights.
    instance_id: tells processes with one participant id apart; "" if the sender has none.
        origin: where the call comes from, for an operator.
    group_address: HOST:PORT at which the participant would listen as rank 0 of a process group; ""
        if it takes part in none.
    can_divide: it divides its rows as a session asks for. division: by which the profile was made.
    is_enrolled: an operator has given out its name, so that nobody counts twice.
    """

    participant_id: str
    profile: DataProfile | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    can_evaluate: bool = False
    instance_id: str = ""
    origin: str = ""
    can_initialise: bool = True
    group_address: str = ""
    can_divide: bool = False
    division: Division | None = None
    is_enrolled: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A participant renews its lease, or leaves.

    waited_s: how long the call has waited for the coordinator to take it up; None if not known.
    """

    participant_id: str
    state: ParticipantState = ParticipantState.READY
    round: int = -1
    transfer: Transfer | None = None
    waited_s: float | None = None


@dataclass(frozen=True, slots=True)
class EndTrainingRound:
    """A participant hands in an update that lies in the store.

    weights: what the store holds, read and measured by us, not claimed by the sender; None if it
        holds nothing, or other bytes than the sender means.
    metrics: points for the metrics store. training: the newest value of each of their names.
    evaluation: of the model that the round started from; in an EVALUATE round all that is sent.
    layout: how to cut initial weights, where the sender declares it; with the rule "assemble", the
        tensors of the slice.
    attempt: with that rule, the attempt at the round that the slice was trained in.
    is_bounded: the samples are at most those that the sender has said to have, see samples_of().
    """

    participant_id: str
    round: int
    num_samples: int
    weights: StoredWeights | None
    metrics: tuple[Point, ...] = ()
    training: Mapping[str, float] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    layout: Layout = ()
    attempt: int = 0
    is_bounded: bool = False


@dataclass(frozen=True, slots=True)
class NoteRefusedUpdate:
    """An update of this participant was refused as unusable, for this reason.

    round: the one that it trained when it began to bring the update.
    """

    participant_id: str
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class NoteFailure:
    """A participant's own code failed in this round.

    kind: type of the exception. traceback: file names, lines and functions; "" if not told.
    """

    participant_id: str
    round: int
    kind: str
    message: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class NoteGroupBroken:
    """The process group of an attempt at a round broke, as one of its members reports. That is no
    fault of the member."""

    participant_id: str
    round: int
    attempt: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NoteDamagedUpdates:
    """Accepted updates of the open round are damaged in the store.

    reasons: how each update differs from what was accepted, by its key.
    """

    reasons: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RequestFit:
    """Request to train, for which a session with `start = "request"` waits."""


@dataclass(frozen=True, slots=True)
class CancelFit:
    """Request to end the training without a result."""


@dataclass(frozen=True, slots=True)
class RemoveParticipant:
    """Request to remove a participant, which is not let in again in this session."""

    participant_id: str


@dataclass(frozen=True, slots=True)
class NoteRevoked:
    """The certificate of a participant was revoked: it leaves, unless it has gone already."""

    participant_id: str


@dataclass(frozen=True, slots=True)
class FinishSession:
    """Request to end the training with the last model as its result.

    reason: for people; "" if none is given.
    """

    reason: str = ""


@dataclass(frozen=True, slots=True)
class ConfigureRound:
    """A script decides how a round is made, for which the session waits.

    session_id: of the session that the script drives; "": the present one. So in all three.
    """

    round: int
    config: RoundConfig
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class RecordEvaluation:
    """A script has measured the present model, whose number is `model`.

    num_samples: rows that it was measured on; 0 if that is not known.
    """

    model: int
    num_samples: int
    metrics: Mapping[str, float]
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class EndScript:
    """A script has come to the end of its loop. failure: what went wrong in it; "": nothing."""

    failure: str = ""
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline may have passed; see next_deadline.

    late_s: signs of life that came within these last seconds may not have been taken up yet.
    """

    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class InitialisationDone:
    """The initial model is in the store. findings: of the checks of the data."""

    model: GlobalModel
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class InitialisationFailed:
    """No initial model can be made from these profiles; other profiles may suffice.

    findings: as in InitialisationDone.
    """

    reason: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class AggregationDone:
    """The model made from a closed round is in the store. model.round is that round + 1."""

    model: GlobalModel


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """Model `round` has been measured on the coordinator's data.

    evaluation: None if that failed, for this reason.
    """

    round: int
    evaluation: Evaluation | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CentralDone:
    """The central model has been trained and measured, or cannot be, for the reason in it."""

    central: CentralModel


@dataclass(frozen=True, slots=True)
class RemoveModels:
    """Note that the models of these rounds are about to be removed, but for those in use."""

    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EffectFailed:
    """An effect that no retry can save: the session ends with this cause."""

    cause: str


@dataclass(frozen=True, slots=True)
class NoteRefusedParticipant:
    """A rendezvous was refused for this reason. participant_id: short and printable."""

    participant_id: str
    reason: str


Command = (
    Rendezvous
    | NoteRefusedParticipant
    | Heartbeat
    | EndTrainingRound
    | NoteRefusedUpdate
    | NoteFailure
    | NoteGroupBroken
    | NoteDamagedUpdates
    | RequestFit
    | CancelFit
    | RemoveParticipant
    | NoteRevoked
    | FinishSession
    | ConfigureRound
    | RecordEvaluation
    | EndScript
    | Tick
    | InitialisationDone
    | InitialisationFailed
    | AggregationDone
    | EvaluationDone
    | CentralDone
    | RemoveModels
    | EffectFailed
)
