"""Records of rounds, and the result of a session."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

W = TypeVar("W")  # of weights: tensors or arrays by name, or a flat vector, as the first model was


@dataclass(frozen=True, slots=True)
class Site:
    """A participant of a round.

    name: of the participant. counted: whether its update is in the model. why_not: why it is not.
    samples: of its update. metrics: of its training. evaluation: of the model that the round
        started from, at this site.
    """

    name: str
    counted: bool
    why_not: str = ""
    samples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)


class Record(Generic[W]):
    """A round that is over.

    session: identity of the session. round: number of the round. model: number of the model that
        it has made.
    samples: of all updates that count. num_updates: of these.
    sites: those that took part, by name, and those that were selected and do not count; empty where
        there are more than 200.
    metrics: of training: means over the sites, weighted by samples; and after evaluate() those of
        the script's evaluation of the new model.
    evaluation: figures over the rows of all sites, of the model that the round started from.
    seconds: from the opening of the round to its model.
    """

    def __init__(
        self,
        round_: int,
        *,
        session: str,
        samples: int,
        num_updates: int,
        sites: Mapping[str, Site],
        metrics: Mapping[str, float],
        evaluation: Mapping[str, float],
        seconds: float,
        evaluated: Mapping[str, float] | None,
        fetch: Callable[[int], W],
        tell: Callable[[int, int, Mapping[str, float]], None],
    ) -> None:
        """evaluated: what the script said of the model before; None: nothing yet."""
        self.session = session
        self.round = round_
        self.model = round_ + 1
        self.samples = samples
        self.num_updates = num_updates
        self.sites = sites
        self.evaluation = evaluation
        self.seconds = seconds
        self._of_training = dict(metrics)
        self._evaluated = evaluated
        self._fetch = fetch
        self._tell = tell

    def __repr__(self) -> str:
        return f"Record(round={self.round}, num_updates={self.num_updates}, {self.metrics})"

    @cached_property
    def weights(self) -> W:
        """The model that the round has made, as the first model was given; fetched when it is first
        asked for."""
        return self._fetch(self.model)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Means of the training at the sites; metrics of evaluate() prevail."""
        return {**self._of_training, **(self._evaluated or {})}

    @property
    def evaluated(self) -> Mapping[str, float] | None:
        """Metrics that the script has told of this model, also before it was started again; None:
        none yet."""
        return self._evaluated

    def evaluate(self, samples: int = 0, **metrics: float) -> None:
        """Tell the session what the new model is worth: its journal, status and report have it, and
        it counts for the best model and for patience. A model is evaluated once: after a restart
        the call changes nothing if it says the same, and raises SessionError if it says
        something else; where that is costly, ask `evaluated` first.

        samples: rows that it was measured on; 0: not known.
        """
        if not metrics:
            raise TypeError("evaluate() takes metrics by name: record.evaluate(accuracy=0.9)")
        told = {}
        for name, value in metrics.items():
            try:
                told[name] = float(value)
            except (TypeError, ValueError):
                raise TypeError(f"the metric {name!r} is {value!r}; it must be a number") from None
            if not math.isfinite(told[name]):
                raise ValueError(
                    f"the metric {name!r} is {value!r}, by which no models can be compared: leave "
                    "it out, or say a value that stands for a model that has run away"
                )
        self._tell(self.model, samples, told)
        self._evaluated = told


@dataclass(frozen=True, slots=True)
class Best(Generic[W]):
    """The best of the models that were evaluated. model: its number."""

    model: int
    metric: str
    value: float
    weights: W


@dataclass(frozen=True, slots=True)
class Result(Generic[W]):
    """The result of a session.

    weights: the last model. model: its number.
    metrics: of the last model: of the training that made it, and, in their place where they have
        the same names, of its evaluation by the sites and by the script.
    best: by the `metric` of the session; None without one, if no model was evaluated, or if none
        was better than the best constant prediction.
    history: the records of all rounds, as mappings: round, model, num_updates, num_samples,
        seconds, the metrics of training by name, and "evaluation", a mapping: as in a record, the
        figures of the model that the round started from; empty where no site has evaluated it.
    cause: why the session ended. seconds: how long it was open, at this start of the script.
    session: identity of the session.
    """

    weights: W
    model: int
    metrics: Mapping[str, float]
    best: Best[W] | None
    history: Sequence[Mapping[str, Any]]
    cause: str
    seconds: float = 0.0
    session: str = ""
