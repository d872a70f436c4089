"""Immutable values that commands, events and effects consist of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import Literal

from xain_foundation.conditional_events import Expression as Expression
from xain_workloads.comparing.gains import LocalModel as LocalModel
from xain_workloads.comparing.importance import Importance as Importance
from xain_workloads.measures.figures import Figure as Figure
from xain_workloads.measures.tallies import Tallies as Tallies
from xain_workloads.model import ENDED, STEPS, TOLD
from xain_workloads.model import Layout as Layout
from xain_workloads.passes import ONE_PASS
from xain_workloads.passes import Plan as Plan
from xain_workloads.passes import Stride as Stride
from xain_workloads.tables.checks.findings import Finding as Finding
from xain_workloads.tables.division import Division as Division
from xain_workloads.tables.profile import DataProfile as DataProfile
from xain_workloads.tables.schema import OPEN_SCHEMA
from xain_workloads.tables.schema import Schema as Schema

Consistency = Literal["bsp", "ssp", "asp"]
BYTES = "uint8"  # dtype of a model that is no vector of numbers; updates have any length
Option = bool | int | float | str  # of a rule of aggregation, of an optimiser, of a controller


class Phase(StrEnum):
    """Phase of a session. Participants see COLLECTING and AGGREGATING both as ROUND."""

    STANDBY = "standby"
    COLLECTING = "collecting"
    AGGREGATING = "aggregating"
    FINISHED = "finished"


class Task(StrEnum):
    """The task of the selected participants in a round."""

    TRAIN = "train"
    EVALUATE = "evaluate"  # measure the model on held-out data; nothing is aggregated
    INITIALISE = "initialise"  # one participant makes the initial weights


@dataclass(frozen=True, slots=True)
class Transfer:
    """Progress of a participant's transfer: of its update if is_upload, else of the model.

    percent: 0 to 100.
    """

    is_upload: bool
    percent: int


class ParticipantState(StrEnum):
    """State of a participant, as its heartbeats report it."""

    READY = "ready"
    TRAINING = "training"
    FINISHED = "finished"  # it leaves


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """A stored vector. size_bytes and digest are those of the stored object, header included;
    digest is its xxh3-128 in hex."""

    key: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Measurements of an uploaded object. first_bad: index of the first element that is not
    finite, None if all are."""

    ref: WeightsRef
    dtype: str
    shape: tuple[int, ...]
    first_bad: int | None = None


@dataclass(frozen=True)  # without slots: a cached property needs a __dict__
class GlobalModel:
    """The model that round `round` starts from; the last one is numbered `rounds`.

    shape (0,) is the empty model: round 0 then makes the initial weights.
    state: what the server's optimiser goes on from, by name; vectors as long as the model.
    """

    round: int
    ref: WeightsRef
    dtype: str
    shape: tuple[int, ...]
    layout: Layout = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, WeightsRef] = field(default_factory=dict)

    @cached_property
    def is_empty(self) -> bool:
        """True if there is nothing to train from yet."""
        return self.shape == (0,)

    @property
    def steps_per_pass(self) -> int:
        """Rounds of a pass of a session that an earlier version opened, whose rules do not tell
        them; 1 in all others."""
        return int(self.metadata.get(STEPS, 1))

    @property
    def ended_because(self) -> str:
        """Why no training follows on the model, as the rule that made it says; "" if some does."""
        return self.metadata.get(ENDED, "")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences of the rule that made the model."""
        return tuple(self.metadata.get(TOLD, "").splitlines())


@dataclass(frozen=True, slots=True)
class Base:
    """Start of the training of a round. epoch_base: epochs trained before it."""

    model: GlobalModel
    epochs: int
    epoch_base: int
    opened_at: float


@dataclass(frozen=True, slots=True)
class Update:
    """An accepted local update.

    num_samples: n_k, non-negative.
    layout: how to cut initial weights; empty if the participant does not declare it.
    accepted_at: session time in seconds, for pacing rules; None in a journal of an earlier version.
    """

    participant_id: str
    weights: StoredWeights
    num_samples: int
    layout: Layout = ()
    accepted_at: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of a global model, measured on held-out data.

    num_samples: rows that the model was measured on; at least 1, unless nothing was measured.
    metrics: finite numbers by name.
    tallies: of the rows of one site, as it has sent them.
    figures: of tallies, with their intervals, where the metrics are derived; see
        evaluation.together().
    withheld: the site has fewer rows than it may tell of, and has sent nothing else.
    local: of the same rows, with the evaluation of the last model; None if nothing is known.
    importances: of the same rows, of the last model and of the best one before it.
    """

    num_samples: int
    metrics: Mapping[str, float]
    tallies: Tallies | None = None
    figures: Mapping[str, Figure] = field(default_factory=dict)
    withheld: bool = False
    local: LocalModel | None = None
    importances: tuple[Importance, ...] = ()

    @property
    def has_averages_only(self) -> bool:
        """Whether rows were measured of which no sums came."""
        return self.num_samples > 0 and self.tallies is None and not self.figures


@dataclass(frozen=True, slots=True)
class CentralModel:
    """The central model: trained by the coordinator on its own rows alone, and compared with the
    global model of number `round` on those that it holds out.

    evaluation: of that global model on the held-out rows, with the central one as its local model.
    file: that has the central model; "" if none has.
    """

    round: int
    evaluation: Evaluation
    file: str = ""


class Names(tuple[str, ...]):
    """Ordered set of names with fast membership tests."""

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self)

    def __contains__(self, name: object) -> bool:
        return name in self._known


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """One participant's part in an attempt at a round of the rule "assemble".

    address: HOST:PORT at which the member of rank 0 listens; "" if the attempt is over, or that
        member has gone.
    """

    attempt: int
    rank: int
    world_size: int
    address: str


@dataclass(frozen=True, slots=True)
class Point:
    """One metric point. `at_ns` is None where the writer should stamp it."""

    measurement: str
    fields: Mapping[str, int | float | str]
    tags: Mapping[str, str] = field(default_factory=dict)
    at_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Lineage:
    """Origin of the first model of a session, if it was not made for this session.

    source: "SESSION/ROUND", a global model of the same store, or the path of a file.
    num_rounds, num_epochs, num_passes: trained by the sessions that this one extends; 0 if it
        extends none, and passes where rounds were counted.
    configured_rounds, configured_passes: rounds.rounds and rounds.passes of the first of them; 0 if
        it extends none, or has not had this one.
    began_with: source of the first of them; "" if it made its own model, or this extends none.
    """

    source: str
    num_rounds: int = 0
    num_epochs: int = 0
    configured_rounds: int = 0
    began_with: str = ""
    num_passes: int = 0
    configured_passes: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A session as a part of a study.

    study: name of the study, the same in all its sessions.
    task: "train", or "measure" a model that there is.
    label: how the model is trained, for people: "fold 3".
    position: number and total of the steps of this kind, from 1; (0, 0) for one alone.
    sites: participants that take part; empty: all.
    division: how each participant divides its rows; None: as without a study.
    model: the one to be measured, as Lineage.source.
    options: settings that differ from those of the study, as JSON by dotted key.
    budget: rounds of training, or passes where these are configured; 0: as configured.
    """

    study: str
    task: Literal["train", "measure"]
    label: str
    position: tuple[int, int] = (0, 0)
    sites: tuple[str, ...] = ()
    division: Division | None = None
    model: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    budget: int = 0

    @property
    def shown(self) -> str:
        """The position in the study, for people: "fold 3 of 5"."""
        number, total = self.position
        told = self.label
        if total:
            told += f" of {total}" if told.endswith(f" {number}") else f", {number} of {total}"
        return told if self.task == "train" else f"{told}, measured"


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of a session. It keeps them to its end, whatever the configuration says
    after a restart.

    fraction_participants: exact, in (0, 1].
    num_required: N, how many must be connected for a round to be open.
    start_participants: how many to wait for before the first round; `start_timeout_s` after the
        first arrival, or after the request if that is later, N are enough.
    expected_participants: names; the first round waits for as many by default, and those that are
        not there are told of.
    initial: where the initial weights come from. "first": one participant makes them in round 0,
        and `rounds` rounds of training follow. "empty": all make some in round 0, one of the
        `rounds`. "workload": the coordinator computes them from the data profiles.
    deadline_s: after it a round makes do with min_participants updates.
    idle_timeout_s: how long the session waits for participants, for the updates of a round that is
        overdue, or for a model to be made, before it ends.
    pacing: name of the rule that says when a round closes; "": it follows from `consistency` and
        `quorum`.
    pacing_options: all that the pacing rule is made with.
    quorum: with which updates a round is complete; "": with all that it wants.
    over_selection: how many more than wanted are selected, as a fraction of those.
    staleness: by how many rounds an update may be behind, None for any number; what the pacing rule
        answered when the session was opened.
    buffer_size: updates that make a model, in SSP and ASP.
    aggregation_options: all that the rule has, so that a later default changes no session.
    optimizer: what makes the step from one model to the next; "": the rule's result is the model.
    controller_options: what the controller is made with, all of it.
    tags: a participant takes part if it has each of these, with one of its values. Empty: all do.
    refused_limit: a participant with so many refused updates, failures or missed deadlines in a row
        is left out of selection; 0: none is.
    refused_rounds: for how many rounds after the one in which that happens.
    workload: name of the one that makes the initial model; "": none, or not written down.
    workload_options: JSON object of those that were given; "": none.
    start: "participants": the session starts as soon as enough have gathered. "request": not before
        a fit is requested.
    passes: over all rows; 0: `rounds` are trained. Rounds, and epochs where `plans_epochs`, follow
        from them and from the sites when the first round opens; until then `rounds` has passes.
    stride: what a round of the workload is.
    preprocessing: JSON object of how columns are prepared for a workload; "": by the defaults.
    max_lost_share: share of the samples that three rounds in a row may lose without a warning.
    max_share: share of a round's samples that one of three sites or more may bring without one.
    train_config: JSON object that every assignment carries, the section [train]; "": none.
    schema: what the data of all participants have in common; what it leaves open, the profile of
        the first participant decides.
    evaluate_every: every k-th global model is evaluated, and the last one; 0: none. Where a round
        is a step, that of every k-th pass over the data. Without participants that can evaluate,
        and without data of the coordinator, it changes nothing.
    evaluate_metric: by which models are compared; "": the first of figures.DEFAULTS that follows
        from tallies.
    evaluate_min_rows: sites with fewer held-out rows keep what they measure.
    evaluate_threshold: criterion by which a model of two classes gets its threshold; see
        thresholds.Criterion. "": the larger probability counts.
    evaluate_local: at the end each site also trains a model of its own rows alone.
    evaluate_importance: at the end each site also permutes the columns of its held-out rows.
    evaluate_minimised: whether less of the named metric is better.
    evaluate_patience: the session stops when no model for so many passes, or rounds where a round
        makes several, was better than the best one before by more than evaluate_min_delta; 0: it
        does not.
    evaluate_patience_rows: held-out rows that both models must be measured on for that.
    evaluate_data: the coordinator evaluates too, on a set of its own.
    evaluate_deadline_s: how long the evaluation of the last model may take.
    study: JSON object of the settings of the study that the session is a part of, by dotted key;
        "": it is of none.
    step: the part.
    scripted: a script configures each round before it opens, and says when the session ends.

    What has come later has a default, with which a session of an earlier version goes on as it did.
    """

    rounds: int
    epochs: int
    min_participants: int
    fraction_participants: Fraction
    num_required: int
    max_participants: int
    start_participants: int
    start_timeout_s: float
    controller: str
    aggregation: str
    seed: int
    heartbeat_time_s: float
    heartbeat_timeout_s: float
    initial: Literal["first", "empty", "workload"]
    deadline_s: float | None = None
    idle_timeout_s: float | None = None
    quorum: Expression = ""
    over_selection: Fraction = Fraction(0)
    consistency: Consistency = "bsp"
    staleness: int | None = 0
    buffer_size: int = 1
    aggregation_options: Mapping[str, Option] = field(default_factory=dict)
    optimizer: str = ""
    optimizer_options: Mapping[str, Option] = field(default_factory=dict)
    controller_options: Mapping[str, Option] = field(default_factory=dict)
    tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    expected_participants: tuple[str, ...] = ()
    refused_limit: int = 0
    refused_rounds: int = 0
    max_lost_share: float = 1.0
    max_share: float = 1.0
    train_config: str = ""
    schema: Schema = OPEN_SCHEMA
    evaluate_every: int = 1
    evaluate_metric: str = ""
    evaluate_minimised: bool = False
    evaluate_patience: int = 0
    evaluate_min_delta: float = 0.0
    evaluate_data: bool = False
    evaluate_deadline_s: float = 600.0
    workload: str = ""
    workload_options: str = ""
    preprocessing: str = ""
    start: Literal["participants", "request"] = "participants"
    pacing: str = ""
    pacing_options: Mapping[str, Option] = field(default_factory=dict)
    evaluate_min_rows: int = 5
    evaluate_threshold: str = ""
    evaluate_local: bool = False
    study: str = ""
    step: Step | None = None
    passes: int = 0
    plans_epochs: bool = False
    stride: Stride = ONE_PASS
    evaluate_patience_rows: int = 0
    evaluate_importance: bool = False
    scripted: bool = False

    def evaluates(self, number: int, steps: int = 1) -> bool:
        """Whether the global model of this number is evaluated, even if it is not the last. steps:
        rounds that a whole model takes."""
        every = self.evaluate_every * steps
        return every > 0 and number % every == 0

    @property
    def carries_over(self) -> bool:
        """Whether late participants go on with their round while the next one is open."""
        return self.staleness != 0

    @property
    def num_rounds(self) -> int:
        """Number of all rounds: those of training, and with "first" the one that makes the initial
        weights. The last model has this number."""
        return self.num_initial + self.rounds

    @property
    def num_initial(self) -> int:
        """Rounds before those of training: 1 if one participant makes the initial weights."""
        return int(self.initial == "first")

    @property
    def stays(self) -> bool:
        """Whether participants may stay after the end, for the next session."""
        return self.start == "request" or self.step is not None

    @property
    def sites(self) -> tuple[str, ...]:
        """Participants that take part; empty: all."""
        return () if self.step is None else self.step.sites

    @property
    def division(self) -> Division | None:
        """How each participant divides its rows; None: as its own settings say."""
        return None if self.step is None else self.step.division

    def is_eligible(self, participant_id: str, tags: Mapping[str, str]) -> bool:
        """Whether a participant with these tags may be selected, and counts towards N."""
        if self.sites and participant_id not in self.sites:
            return False
        return all(tags.get(key) in values for key, values in self.tags.items())

    @property
    def weighs_classes(self) -> bool:
        """Whether rows weigh by their class in training."""
        return '"class_weight": "balanced"' in self.workload_options  # the core reads no JSON

    @property
    def max_connected(self) -> int:
        """Number of participants that may be connected: max_participants that may be selected, and
        as many others where tags or sites leave some out."""
        return (2 if self.tags or self.sites else 1) * self.max_participants

    @property
    def lease_s(self) -> float:
        """Lease: a participant without a heartbeat for longer than this has left."""
        return self.heartbeat_time_s + self.heartbeat_timeout_s
