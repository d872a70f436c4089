"""Effects: work outside of the core, run when the events are durable. The result of an effect is a
command."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from xain_coordinator.core.vocabulary.values import DataProfile, GlobalModel, Option, Point, Update
from xain_workloads.comparing.gains import Budget


@dataclass(frozen=True, slots=True)
class InitialiseModel:
    """Make and store model 0; answer with InitialisationDone.

    initial: as in Rules; "workload" computes the model from the profiles, the others store an empty
        one, from which round 0 makes the initial weights.
    made: metadata of the model, if it is made again. The profiles have no statistics then.
    names: of the participants whose profiles they are; empty for profiles that come from elsewhere.
    """

    initial: str
    profiles: tuple[DataProfile, ...]
    made: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Combine the updates in this order, store the result as the model of `round` + 1, and answer
    with AggregationDone.

    updates: by name; their num_samples are the weights of the average.
    base: the global model there is; its layout and metadata go on, and so does its optimiser.
    total_samples: in asynchronous modes, those of all sites that train; what the updates do not
        weigh of them stays with `base`. 0: the model is made of the updates alone.
    staleness: by update, how many models have been published since the one that it was trained
        from; empty: none of them has any.
    options: of the rule.
    learning_rate: the result is a gradient, and a step of this rate from `base` against it is what
        the rule gives; None: the rule's result is no gradient.
    control_share: of the updates in the mean of all control variates; None: there are none.
    optimizer: what steps from `base` towards the result; "": the result is the model.
    """

    round: int
    rule: str
    updates: tuple[Update, ...]
    base: GlobalModel
    staleness: tuple[int, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    optimizer: str = ""
    optimizer_options: Mapping[str, Option] = field(default_factory=dict)
    learning_rate: float | None = None
    total_samples: int = 0
    control_share: float | None = None


@dataclass(frozen=True, slots=True)
class EvaluateModel:
    """Measure a model on the coordinator's own data, and answer with EvaluationDone, whatever
    happens: a failure must not hold up the session."""

    model: GlobalModel


@dataclass(frozen=True, slots=True)
class FitCentral:
    """Train the central model on the coordinator's own rows, compare it with the global model of
    this number, and answer with CentralDone, whatever happens."""

    round: int
    budget: Budget


@dataclass(frozen=True, slots=True)
class RecordMetrics:
    """Write these points. A lost point never fails anything."""

    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Notify:
    """The advertised state has changed: wake the watchers."""


Effect = InitialiseModel | Aggregate | EvaluateModel | FitCentral | RecordMetrics | Notify
