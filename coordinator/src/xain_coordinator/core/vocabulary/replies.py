"""The replies to commands that were carried out, and to questions."""

from dataclasses import dataclass

from xain_coordinator.core.vocabulary.values import (
    Division,
    GlobalModel,
    Phase,
    ProcessGroup,
    StoredWeights,
    Task,
)
from xain_workloads.comparing.gains import Budget


@dataclass(frozen=True, slots=True)
class Accepted:
    """The participant is a member. heartbeat_time_s: interval of its heartbeats."""

    heartbeat_time_s: float


@dataclass(frozen=True, slots=True)
class Later:
    """Ask again after retry_after_s. why: the data are unlike those of the members; "": no slot is
    free."""

    retry_after_s: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Divide:
    """Divide the rows as the session asks for, and ask again with the profile of the new part.

    division: None: as without a study.
    """

    division: Division | None


@dataclass(frozen=True, slots=True)
class IdInUse:
    """Another process is connected under this participant id.

    heard_s: seconds since that process was heard. lease_s: seconds until its lease is over.
    retry_after_s: None if that process has been heard since the sender asked first.
    """

    heard_s: float
    lease_s: float
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat was received. The reply tells nothing of the session, so it need not be
    durable."""


@dataclass(frozen=True, slots=True)
class Advertisement:
    """The state as one participant sees it.

    phase: COLLECTING or AGGREGATING only for those selected.
    update_accepted: its update for this round is in.
    update_damaged: its accepted update is damaged in the store, and must be handed in again.
    warning: what is wrong with the participant; "" if nothing is.
    attempt: at the round, with the rule "assemble"; else 0.
    """

    phase: Phase
    round: int
    update_accepted: bool
    update_damaged: bool = False
    warning: str = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """Work of a participant: the task, the round, the model to start from, and the epochs.

    train_config: as in Rules.
    script_config: JSON objects of a script that prevail over it; a later one over those before it.
    evaluate: whether the model is to be measured on held-out data first.
    process_group: with the rule "assemble", the part in the attempt at the round.
    local: of the local model that is wanted beside the evaluation; None: none is.
    counted_round: in which the participant's control variate counted last; -1: in none.
    importance_limit_s: seconds for the importances that are wanted beside it; 0: none are.
    best_round: number of the best model so far, which is measured for these with the last one; -1
        if there is none but the last.
    """

    round: int
    epochs: int
    epoch_base: int
    model: GlobalModel
    update_accepted: bool
    train_config: str = ""
    script_config: tuple[str, ...] = ()
    task: Task = Task.TRAIN
    evaluate: bool = False
    process_group: ProcessGroup | None = None
    local: Budget | None = None
    counted_round: int = -1
    importance_limit_s: float = 0.0
    best_round: int = -1


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to bring an update, and what is to be known of it until it is handed in.

    key: under which it is written.
    model: that it is trained from; None if there is none yet.
    epochs: that it is trained for.
    is_slice: it is a slice of the model's vector.
    """

    key: str
    model: GlobalModel | None
    epochs: int
    is_slice: bool


@dataclass(frozen=True, slots=True)
class AlreadyUploaded:
    """The same update has been accepted already; nothing is to be written."""

    weights: StoredWeights


@dataclass(frozen=True, slots=True)
class Done:
    """The command was carried out. Also the reply to an identical second update."""


Reply = (
    Accepted
    | Later
    | Divide
    | IdInUse
    | Heard
    | Advertisement
    | Assignment
    | Ticket
    | AlreadyUploaded
    | Done
)
