"""The events of a session.

Durable events are journalled before any effect or reply; folding them gives the session back. Soft
events keep leases fresh and live in memory only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self, get_args

from xain_coordinator.core.vocabulary.script import RoundConfig
from xain_coordinator.core.vocabulary.values import (
    CentralModel,
    DataProfile,
    Evaluation,
    Finding,
    GlobalModel,
    Lineage,
    ParticipantState,
    Plan,
    Rules,
    Task,
    Transfer,
    Update,
)


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """lineage: None if the first model is made for this session. unix_s: time of the wall clock; 0
    if it was not written down."""

    session_id: str
    rules: Rules
    at: float
    lineage: Lineage | None = None
    unix_s: int = 0


@dataclass(frozen=True, slots=True)
class HeartbeatChanged:
    """The coordinator was started again with other times for heartbeats, which are in force now."""

    time_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ParticipantJoined:
    """can_evaluate: it has held-out data, and knows rounds that only evaluate. instance_id: of the
    process that has joined; "" if it has none. can_initialise: it can make initial weights.
    group_address: at which it would listen as rank 0 of a process group; "" if it has none."""

    participant_id: str
    profile: DataProfile | None
    at: float
    tags: Mapping[str, str] = field(default_factory=dict)
    can_evaluate: bool = False
    instance_id: str = ""
    can_initialise: bool = True
    group_address: str = ""


@dataclass(frozen=True, slots=True)
class GroupAddressChanged:
    """A connected participant has another address for process groups: its process is another one,
    which knows nothing of a group that it was a member of."""

    participant_id: str
    group_address: str


@dataclass(frozen=True, slots=True)
class ParticipantLeft:
    """cause: "expired", "left", "revoked", "removed", or "outvoted": more participants have data
    that are unlike its own."""

    participant_id: str
    cause: str


@dataclass(frozen=True, slots=True)
class ParticipantRemoved:
    """An operator has removed a participant, which is not let in again."""

    participant_id: str


@dataclass(frozen=True, slots=True)
class FitRequested:
    """A request to fit was accepted; the session starts when enough participants are there."""

    at: float


@dataclass(frozen=True, slots=True)
class ParticipantsGathered:
    """Enough participants have joined for the session to start.

    at: None in a journal that was begun before this was written down.
    """

    at: float | None = None


@dataclass(frozen=True, slots=True)
class ModelRequested:
    """The initial model is to be made from these profiles, even if participants join or leave
    meanwhile.

    profiles: in full, as of a model that was made elsewhere. Empty if participants are named.
    participants: members whose profiles they are. The journal has those with their joining, and all
        statistics of a large session would be too much for one record.
    """

    profiles: tuple[DataProfile, ...] = ()
    participants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InitialisationRefused:
    """No model can be made from the profiles that were asked for; the session waits for others.

    findings: of the checks of these data.
    """

    reason: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInitialised:
    """at: None in a journal that was begun before this was written down. findings: of the checks of
    the data that the model is made for."""

    model: GlobalModel
    at: float | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingPlanned:
    """The rounds of the training are decided, for the sites with which the first round opens."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """selected: first those who still train an earlier round. num_wanted: None for all of them.
    absent: participants that the script has chosen by name, and that cannot be selected yet."""

    round: int
    selected: tuple[str, ...]
    epochs: int
    at: float
    num_wanted: int | None = None
    task: Task = Task.TRAIN
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParticipantsSelected:
    """Further participants are selected, in addition to those selected before."""

    round: int
    selected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundPaused:
    """The round pauses, since too few participants are connected. It keeps its number, selection
    and accepted updates.

    at: None in a journal that was begun before this was written down.
    """

    round: int
    at: float | None = None


@dataclass(frozen=True, slots=True)
class RoundResumed:
    round: int


@dataclass(frozen=True, slots=True)
class UpdateAccepted:
    """round: in which the update counts. staleness: how many rounds earlier it was trained for.

    metrics: of training. evaluation: of the model that the update was trained from. at: None in a
    journal of an earlier version.
    """

    round: int
    update: Update
    staleness: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    at: float | None = None


@dataclass(frozen=True, slots=True)
class EvaluationAccepted:
    """A participant has measured the last model, in its EVALUATE round.

    evaluation: with 0 samples if its sender has measured nothing.
    """

    round: int
    participant_id: str
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class UpdateRefused:
    """An update cannot be used. round: the one that its sender trains."""

    participant_id: str
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrainingFailed:
    """A participant's own code failed in the round that it trains. Another participant replaces it.

    kind: type of the exception. traceback: file names, lines and functions; "" if not told.
    """

    participant_id: str
    round: int
    kind: str
    message: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class GroupBroken:
    """A member stopped training in this attempt because its process group broke, or because its
    slice does not fit the slices of others."""

    participant_id: str
    round: int
    attempt: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RoundRestarted:
    """A round of the rule "assemble" starts again from the same global model. Slices that came in
    are dropped.

    selected: their order gives the ranks. reason: why the attempt before is over.
    missed: participants that owed a slice at the deadline.
    """

    round: int
    attempt: int
    selected: tuple[str, ...]
    at: float
    reason: str = ""
    missed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParticipantReturned:
    """A connected participant whose code failed in the open round has joined again, and may be
    selected once more in this round. Its process may be another one, which was mended."""

    participant_id: str


@dataclass(frozen=True, slots=True)
class UpdateDamaged:
    """An accepted update of the open round was found damaged in the store, and no longer counts.

    The round collects updates again. Its first damaged update also starts its deadline anew.
    """

    participant_id: str
    round: int
    num_samples: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class ParticipantLeftOut:
    """A participant is left out until round `until`, after too many refusals, failures and missed
    deadlines in a row: others are selected before it. Another participant replaces it in the open
    round."""

    participant_id: str
    until: int


@dataclass(frozen=True, slots=True)
class RoundOverdue:
    """The deadline has passed with too few updates. The round now needs only the least number, and
    all other participants are selected too.

    missed: participants that owed an update at the deadline.
    """

    round: int
    at: float
    missed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """The round takes no more updates; the accepted ones are aggregated.

    at: None in a journal that was begun before this was written down.
    cause: "complete" or "deadline".
    missed: with the cause "deadline", participants that owed an update and may not bring it later.
    """

    round: int
    at: float | None = None
    cause: Literal["complete", "deadline"] = "complete"
    missed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelPublished:
    """round: the one that made the model, which is numbered round + 1.

    inherits: the model has the layout and the metadata of the model before it, and `model` is
        without them: preprocessing may take 1 MiB, and a week has thousands of models.
    """

    round: int
    model: GlobalModel
    at: float
    inherits: bool = False

    @classmethod
    def after(cls, before: GlobalModel, model: GlobalModel, at: float) -> Self:
        """The event that publishes a model; a layout and metadata equal to those of the model
        before it are left out."""
        number = model.round - 1
        is_alike = model.layout == before.layout and model.metadata == before.metadata
        if not is_alike or not (model.layout or model.metadata):
            return cls(number, model, at)
        return cls(number, replace(model, layout=(), metadata={}), at, inherits=True)

    def published(self, before: GlobalModel | None) -> GlobalModel:
        """The published model; a layout and metadata that were left out come from the model before
        it."""
        if not self.inherits:
            return self.model
        assert before is not None, "a model inherits from none"
        return replace(self.model, layout=before.layout, metadata=before.metadata)


@dataclass(frozen=True, slots=True)
class ModelEvaluated:
    """The coordinator has measured model `round` on its own data.

    evaluation: None if that failed, for this reason.
    """

    round: int
    evaluation: Evaluation | None
    at: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RoundConfigured:
    """A script has decided how a round is made, before it opens."""

    round: int
    config: RoundConfig
    at: float


@dataclass(frozen=True, slots=True)
class ScriptEvaluated:
    """A script has measured model `round`.

    evaluation: metrics, and rows; 1 if they are not known, so that the evaluation counts.
    """

    round: int
    evaluation: Evaluation
    at: float


@dataclass(frozen=True, slots=True)
class ScriptEnded:
    """A script has come to the end of its loop. Nothing is decided by it any more."""

    at: float


@dataclass(frozen=True, slots=True)
class CentralMeasured:
    """The coordinator has trained and measured the central model."""

    central: CentralModel
    at: float


@dataclass(frozen=True, slots=True)
class ModelsRemoved:
    """The objects of these models are about to be removed, as [storage] keep_models says. The event
    comes first, so that no reader takes a removed model for a lost one."""

    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SessionFinished:
    """The one terminal state. cause: "completed", or what went wrong.

    ended_because: of a completed session that has made fewer models than its rules say: why.
    not_admitted: why participants that have asked to join were never let in, by participant.
    """

    cause: str
    at: float
    ended_because: str = ""
    not_admitted: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Session time, recorded so that deadlines are as close after a crash as before."""

    at: float


DurableEvent = (
    SessionOpened
    | HeartbeatChanged
    | TimePassed
    | ParticipantJoined
    | GroupAddressChanged
    | ParticipantLeft
    | ParticipantRemoved
    | FitRequested
    | ParticipantsGathered
    | ModelRequested
    | InitialisationRefused
    | ModelInitialised
    | TrainingPlanned
    | RoundOpened
    | ParticipantsSelected
    | RoundPaused
    | RoundResumed
    | UpdateAccepted
    | EvaluationAccepted
    | UpdateRefused
    | TrainingFailed
    | GroupBroken
    | RoundRestarted
    | ParticipantReturned
    | UpdateDamaged
    | ParticipantLeftOut
    | RoundOverdue
    | RoundClosed
    | ModelPublished
    | ModelEvaluated
    | RoundConfigured
    | ScriptEvaluated
    | ScriptEnded
    | CentralMeasured
    | ModelsRemoved
    | SessionFinished
)


@dataclass(frozen=True, slots=True)
class ParticipantHeard:
    """Soft state: a participant's lease begins anew."""

    participant_id: str
    state: ParticipantState
    round: int
    at: float
    transfer: Transfer | None = None


@dataclass(frozen=True, slots=True)
class Restarted:
    """Soft state: the coordinator was restarted; every lease begins anew, since no heartbeat could
    be received."""

    at: float


@dataclass(frozen=True, slots=True)
class InstanceRefused:
    """Soft state: a second process has asked to join as a participant that is connected.

    origin: where it called from.
    """

    participant_id: str
    instance_id: str
    origin: str
    at: float


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """Soft state: a participant that asked to join was refused, or asked to come again later."""

    participant_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class WaitsAsUnlike:
    """Soft state: an enrolled participant was asked to come again later, as its data are unlike
    those of the members. profile: its data, without statistics."""

    participant_id: str
    profile: DataProfile
    reason: str
    at: float


SoftEvent = ParticipantHeard | Restarted | InstanceRefused | NotAdmitted | WaitsAsUnlike
SOFT_EVENTS: frozenset[type] = frozenset(get_args(SoftEvent))
Event = DurableEvent | SoftEvent
