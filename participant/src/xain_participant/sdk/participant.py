"""The class that a user writes: it trains a flat vector of weights on local data.

    class Mean(Participant):
        def init_weights(self):
            return np.zeros(3, dtype=np.float32)

        def train_round(self, weights, epochs, epoch_base):
            return 0.5 * (weights + self.data.mean(axis=0)), len(self.data)

Everything else, from joining to handing in, is the agent's work: see agent.run().
"""

import operator
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from xain_participant.sdk.metrics import Measured, flatten_values
from xain_wire.limits import MAX_INT32, MAX_POINTS
from xain_workloads.comparing.gains import Budget, LocalModel
from xain_workloads.comparing.importance import Importance
from xain_workloads.measures.tallies import Tallies
from xain_workloads.model import Layout, size_of
from xain_workloads.tables.division import Division
from xain_workloads.tables.profile import DataProfile

if TYPE_CHECKING:
    from xain_participant.sdk.estimators import Votes

Task = Literal["train", "evaluate", "initialise"]

# Held-out rows below which their evaluation stays here. A coordinator may raise it.
MIN_ROWS = 5


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The part of a participant in a process group, which trains one model in a round.

    attempt: at the round, from 1. rank: from 0; the participant trains the stage of this number.
    address: HOST:PORT at which the member of rank 0 listens; "" if the attempt is over.
    """

    attempt: int
    rank: int
    world_size: int
    address: str


class GroupBroken(Exception):
    """The process group broke, which is no failure of the participant that notices it. The round
    starts again."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The work of one round, as the coordinator assigns it.

    session_id: empty if the coordinator names none.
    epochs: passes over the data. epoch_base: passes made in the rounds before.
    evaluate: whether to measure the model on held-out data before training from it.
    min_rows: held-out rows below which nothing of their evaluation leaves the participant.
    config: the section [train] of the coordinator's configuration.
    participant_id: name under which the participant takes part.
    process_group: that trains the round, if the coordinator puts the model together from slices.
    local: of the local model that is wanted beside the evaluation of the last model; None: none is.
    counted_round: in which an update with the participant's control variate counted last; -1: none.
    importance_limit_s: seconds for the importances that are wanted of the last model; 0: none are.
    best: weights of the best model so far, (d,), which is measured with the last one for the local
        model and for importances; None if there is none but the last. best_round: its number.
    """

    session_id: str
    round: int
    task: Task = "train"
    epochs: int = 1
    epoch_base: int = 0
    evaluate: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    participant_id: str = ""
    process_group: ProcessGroup | None = None
    min_rows: int = MIN_ROWS
    local: Budget | None = None
    importance_limit_s: float = 0.0
    best: NDArray[Any] | None = field(default=None, compare=False)
    counted_round: int = -1
    best_round: int = -1


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of a global model on held-out data.

    num_samples: rows that it was measured on. tallies: of these rows; None if nothing is known of
    their predictions. withheld: they are too few to be told of, and nothing else is sent.
    local: measured on the same rows; None if none is wanted.
    importances: on the same rows, of the last model and of the best before it; empty if none are
        wanted.
    """

    num_samples: int
    metrics: Mapping[str, float]
    tallies: Tallies | None = None
    withheld: bool = False
    local: LocalModel | None = None
    importances: tuple[Importance, ...] = ()


class BodyFailed(Exception):
    """The body of a script's loop raised its __cause__, which the script shows by itself."""


class Participant(ABC):
    """Trains locally. All methods but votes() are called from one thread, never two at once.

    It keeps its state in attributes that it makes when they are first needed, so a subclass may
    forget super().__init__().
    """

    @abstractmethod
    def init_weights(self) -> NDArray[Any]:
        """The initial weights, (d,); asked for if the coordinator has no model yet.

        By default one participant is asked, and all begin from its weights.
        """

    @property
    def can_initialise(self) -> bool:
        """Whether init_weights() may be called: without it, another participant is asked."""
        return True

    def init_layout(self) -> Layout:
        """Layout of the vector of init_weights(), as named tensors; called right after it.

        Every participant is told this layout with every model (see on_model). The default declares
        nothing. A tensor of the kind "statistic" is averaged and kept out of server optimisers.
        """
        return ()

    @abstractmethod
    def train_round(
        self, weights: NDArray[Any], epochs: int, epoch_base: int
    ) -> tuple[NDArray[Any], int]:
        """Train on local data, starting from the global model.

        weights: (d,), yours to change in place and to keep. Its memory is used again for the model
        of a later round when no array refers to it any more, and not before.
        epochs: passes over the data. epoch_base: passes made in the rounds before.
        Returns the new weights, (d,), and the number of samples they were trained on. They are not
        copied: leave the array alone until the next call, for it may have to be sent again.
        """

    def profile(self) -> DataProfile | None:
        """The profile of the data that is sent before training; None sends none.

        A participant whose profile has no samples does not join."""
        return None

    def on_model(self, layout: Layout, metadata: Mapping[str, str]) -> None:  # noqa: B027  # optional
        """Receive the model's layout and metadata, before each init_weights() and train_round().
        layout: of the flat vector, empty if not declared."""

    def on_round(self, assignment: Assignment) -> None:  # noqa: B027  # optional
        """Receive the assignment of a round; called after on_model() and before the round's
        work."""

    @property
    def process_group_address(self) -> str:
        """HOST:PORT at which the participant would listen as rank 0 of a process group. Without
        HOST the coordinator takes the one that the participant calls from. The default, "", takes
        part in no process group."""
        return ""

    def slice_layout(self) -> Layout:
        """Tensors of the update of a round that a process group trains: consecutive tensors of the
        model. Called right after train_round(), which has returned these tensors alone.

        In such a round train_round() raises GroupBroken if the group breaks.
        """
        return ()

    def end_attempt(self, round_: int = -1, attempt: int = 0) -> None:  # noqa: B027  # optional
        """Stop training in a process group, since this attempt takes the place of the one before.
        Called from another thread; train_round() then raises GroupBroken, also if it is called for
        the earlier attempt only after this. At the end it is called without arguments."""

    @property
    def can_evaluate(self) -> bool:
        """Whether there is held-out data, so that evaluate_round() may be called."""
        return False

    @property
    def can_divide(self) -> bool:
        """Whether divide() may be called; a study that divides the rows takes no others."""
        return False

    def divide(self, division: Division | None) -> None:
        """Divide the rows into those to train on and those to measure models on, from now on.
        Called before profile(), and not while a round goes on. None: as without a study."""
        raise NotImplementedError(f"{type(self).__name__} does not divide its rows")

    @property
    def needs_model(self) -> bool:
        """Whether the round that on_round() told of needs the values of the global model.

        Without them train_round() is given an empty vector of bytes, and nothing is downloaded.
        """
        return True

    @property
    def can_predict(self) -> bool:
        """Whether votes() may be called: fitted estimators of a global model stay here."""
        return False

    def votes(self, trainings: Sequence[tuple[str, int]], features: NDArray[Any]) -> "Votes":
        """Vote for rows, at any time and from another thread than all other methods.

        See KeptEstimators.votes().
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no estimators")

    def evaluate_round(self, weights: NDArray[Any]) -> None:
        """Measure the global model, (d,), and call report_evaluation(). Nothing is trained."""
        raise NotImplementedError(f"{type(self).__name__} cannot evaluate a model")

    def report_evaluation(
        self,
        metrics: Mapping[str, Any],
        num_samples: int,
        tallies: Tallies | None = None,
        local: LocalModel | None = None,
        importances: Sequence[Importance] = (),
    ) -> None:
        """Send these metrics of the global model with the result of this round; the last call of a
        round counts.

        metrics: finite numbers by name, or nested sequences of them, as for update_metrics(). The
            coordinator averages them over participants.
        num_samples: rows of held-out data that the model was measured on.
        tallies: of these rows, which the coordinator adds up, so that it knows the accuracy, AUC,
            R2 and so on of the rows of all.
        local, importances: of the same rows, if the assignment wants them.
        """
        self.__dict__["_evaluation"] = Evaluation(
            checked_num_samples(num_samples, "report_evaluation() must be given"),
            flatten_values(metrics),
            tallies,
            local=local,
            importances=tuple(importances),
        )

    def withhold_evaluation(self) -> None:
        """Tell in the place of an evaluation that too few rows were measured to tell of them."""
        self.__dict__["_evaluation"] = Evaluation(0, {}, withheld=True)

    def update_metrics(self, **values: Any) -> None:
        """Send these numbers with the update of this round, as one point in time.

        values: finite numbers by name, or nested sequences of them, which become name_0, name_1.
        Only the newest MAX_POINTS calls of a round are kept.
        Raises TypeError for other types, bool among them, and ValueError for NaN and infinity.
        """
        point = Measured(time.time_ns(), flatten_values(values))
        if point.values:
            self._points().append(point)

    def _points(self) -> deque[Measured]:
        """The points of the round so far; the newest MAX_POINTS are kept."""
        points: deque[Measured] = self.__dict__.setdefault(
            "_measured_points", deque(maxlen=MAX_POINTS)
        )
        return points


def take_metrics(participant: Participant) -> list[Measured]:
    """Take the metrics of update_metrics() since the last call, oldest first."""
    points = participant._points()
    taken = list(points)
    points.clear()
    return taken


def take_evaluation(participant: Participant) -> Evaluation | None:
    """Take the evaluation that report_evaluation() was given since the last call."""
    evaluation: Evaluation | None = participant.__dict__.pop("_evaluation", None)
    return evaluation


def call_init_weights(
    participant: Participant, dtype: np.dtype[Any]
) -> tuple[NDArray[np.floating[Any]], Layout]:
    """Call init_weights() and init_layout(), and check both: weights, (d,), and layout.

    dtype: for weights that are not floats. Raises TypeError for weights that are no vector, and
    ValueError if weights and layout differ in size.
    """
    weights = _checked_vector(participant.init_weights(), "init_weights()")
    layout = tuple(participant.init_layout())
    if layout and size_of(layout) != len(weights):
        raise ValueError(
            f"init_weights() returned {len(weights)} elements, and init_layout() describes "
            f"{size_of(layout)}"
        )
    # An empty global model has no dtype worth keeping: the first weights choose.
    return _cast(weights, weights.dtype if weights.dtype.kind == "f" else dtype), layout


def call_train_round(
    participant: Participant, weights: NDArray[Any], epochs: int, epoch_base: int
) -> tuple[NDArray[np.floating[Any]], int]:
    """Call train_round(), and check its result: update, (d,) in the global model's dtype, and n_k.

    Raises TypeError or ValueError that says which part of the result is wrong. Whether the vector
    fits the model, the coordinator decides.
    """
    dtype = weights.dtype
    result = participant.train_round(weights, epochs, epoch_base)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            "train_round() must return a pair (weights, number of samples), "
            f"not {type(result).__name__}"
        )
    vector = _checked_vector(result[0], "train_round()")
    if dtype == np.uint8 and vector.dtype != dtype:
        raise TypeError(
            f"train_round() must return bytes (uint8) for a model of bytes, not {vector.dtype}"
        )
    vector = _cast(vector, dtype)
    return vector, checked_num_samples(result[1])


def _checked_vector(weights: object, source: str) -> NDArray[Any]:
    """Return the weights if they are a flat vector of real numbers; else raise TypeError. source:
    the method that returned them."""
    if not isinstance(weights, np.ndarray):
        raise TypeError(
            f"{source} must return weights as a numpy array, not {type(weights).__name__}"
        )
    if weights.dtype.kind not in "iuf":
        raise TypeError(f"{source} must return weights of real numbers, not {weights.dtype}")
    if weights.ndim != 1:
        raise TypeError(
            f"{source} must return weights as a flat vector, not of shape {weights.shape}; "
            "np.ravel() flattens one array, np.concatenate([a.ravel() for a in ...]) several"
        )
    return weights


def checked_num_samples(value: object, source: str = "train_round() must return") -> int:
    """Return the number of samples if it is a whole number that an int32 holds, 0 included; else
    raise TypeError or ValueError. source: the beginning of the message."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{source} the number of samples as an integer, not bool")
    try:
        num_samples = operator.index(value)  # type: ignore[arg-type]  # it checks
    except TypeError:
        raise TypeError(
            f"{source} the number of samples as an integer, not {type(value).__name__}"
        ) from None
    if not 0 <= num_samples <= MAX_INT32:
        told = source.replace("must return", "returned").replace("must be given", "was given")
        raise ValueError(f"{told} {num_samples} samples; it must be between 0 and {MAX_INT32}")
    return num_samples


def _cast(weights: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.floating[Any]]:
    """Convert weights to a contiguous little-endian array; an overflow becomes infinite."""
    # An overflow becomes infinite, and is refused where the values of all updates are checked.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(weights, dtype=dtype.newbyteorder("<"))
