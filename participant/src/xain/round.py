"""One round, as the body of a script's loop sees it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from numpy.typing import NDArray

from xain.correction import Correction
from xain.predictions import tallies_of
from xain.state import ScriptState
from xain.weights import (
    Declared,
    LayoutMismatch,
    from_vector,
    is_tensor,
    kept_tensors,
    named_parameters,
    to_vector,
)
from xain_participant.sdk.metrics import flatten_values
from xain_participant.sdk.participant import Assignment, Evaluation, checked_num_samples
from xain_workloads.model import Layout


class Config(Mapping[str, Any]):
    """The settings of a round: epochs, epoch_base and the section [train] of the coordinator's
    configuration. config.lr, config["lr"] and config.get("lr", 0.1) read the same setting; a table
    is a Config itself."""

    def __init__(self, values: Mapping[str, Any], at: str = "") -> None:
        self._values = dict(values)
        self._at = at

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return Config(value, f"{self._at}{name}.") if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"train.{self._at}{name} is not set in the coordinator's configuration; there are: "
                f"{', '.join(self._values) or 'none'}"
            ) from None

    def __repr__(self) -> str:
        return f"Config({self._values!r})"


@dataclass(frozen=True, slots=True)
class Submitted:
    """Result of the body of the loop. vector: (d,), or None if the round only evaluates."""

    vector: NDArray[Any] | None
    num_samples: int
    metrics: Mapping[str, float]
    evaluation: Evaluation | None


class Round:
    """One round of training or evaluation.

    number: number of the round. config: see Config.
    state: a dict that is kept at this participant from round to round, also over a restart if there
        is a state directory. Arrays, tensors, numbers, text, and lists and mappings of them.
        submit() saves it.
    participant_id: name of the participant.
    is_done: whether the round was submitted, or evaluated where nothing is to be trained.
    """

    def __init__(
        self,
        assignment: Assignment,
        layout: Layout,
        vector: NDArray[Any],
        declared: Declared | None,
        store: ScriptState,
        participant_id: str,
        finish: Callable[[Submitted], None],
        personal: Sequence[str] = (),
        correction: Correction | None = None,
    ) -> None:
        self.number = assignment.round
        self.participant_id = participant_id
        self.config = Config(
            {
                **assignment.config,
                "epochs": assignment.epochs,
                "epoch_base": assignment.epoch_base,
            }
        )
        self._assignment = assignment
        self._layout = layout
        self._vector = vector
        self._declared = declared
        self._store = store
        self._finish = finish
        self._personal = personal
        self._correction = correction
        self._evaluation: Evaluation | None = None
        self._weights: Any = None
        self.state, self._kept = store.load(assignment.session_id, assignment.round)
        self.is_done = False

    def __repr__(self) -> str:
        return f"Round({self.number}, {self.task})"

    @property
    def task(self) -> str:
        """ "train", or "evaluate" where the model is measured and not trained."""
        return self._assignment.task

    @property
    def wants_evaluation(self) -> bool:
        """Whether the coordinator asks for evaluate() in this round."""
        return self._assignment.evaluate or self.task == "evaluate"

    @property
    def weights(self) -> Any:
        """The global model, as load_state_dict() takes it: torch tensors if the script declared
        torch tensors, else numpy arrays, by name; a flat vector if there is no layout."""
        if self._weights is None:
            self._weights = from_vector(self._vector, self._layout, self._declared, self._kept)
        return self._weights

    @overload
    def evaluate(self, y_true: Mapping[str, Any], y_pred: None = None, *, samples: int) -> None: ...

    @overload
    def evaluate(self, y_true: Mapping[str, Any], y_pred: int) -> None: ...

    @overload
    def evaluate(
        self,
        y_true: Any,
        y_pred: Any,
        *,
        classes: Sequence[Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None: ...

    def evaluate(
        self,
        y_true: Any,
        y_pred: Any = None,
        *,
        samples: int | None = None,
        classes: Sequence[Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Report what the global model, before any training, predicts for held-out rows.

        y_true, y_pred, classes: see tallies_of(). Sums of them travel, no rows: the coordinator
            knows accuracy, AUC, log loss or R2 of the rows of all participants.
        metrics: other finite numbers by name, which the coordinator averages over participants. A
            mapping in the place of y_true is metrics alone, and `samples` is the number of rows.
        """
        if self.is_done:
            raise RuntimeError(f"round {self.number} is over: evaluate() comes before submit()")
        if isinstance(y_true, Mapping):
            num_rows = y_pred if samples is None else samples
            self._evaluation = Evaluation(
                checked_num_samples(num_rows, "round.evaluate() must be given"), _numbers(y_true)
            )
        else:
            tallies = tallies_of(y_true, y_pred, classes)
            self._evaluation = Evaluation(tallies.num_rows, _numbers(metrics or {}), tallies)
        if self.task == "evaluate":
            self._end(Submitted(None, 0, {}, self._evaluation))

    def submit(
        self,
        weights: Any,
        samples: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        path: float | None = None,
    ) -> None:
        """Hand in the trained weights; saves round.state.

        weights: model.state_dict(), a torch module, a mapping by name or a flat vector. Tensors
            of the declared model that do not travel are left out.
        samples: rows that it was trained on, n_k.
        metrics: finite numbers by name.
        path: with scaffold=True, the sum of the learning rates of all steps, where correct() did
            not count them.
        Raises RuntimeError if this round was submitted before, LayoutMismatch for tensors that are
        not the model's, and TypeError or ValueError for what is no weights, samples or metrics.
        """
        if self.task == "evaluate":
            raise RuntimeError(
                f"round {self.number} asks for an evaluation only: call round.evaluate(), and "
                'train only if round.task == "train"'
            )
        if self.is_done:
            raise RuntimeError(f"round {self.number} is submitted already")
        num_samples = checked_num_samples(samples, "round.submit() must be given")
        vector = to_vector(weights, self._layout, "round.submit()", self._declared, self._personal)
        if vector.size != self._vector.size:
            raise LayoutMismatch(
                f"round.submit() was given {vector.size} values; the model has {self._vector.size}"
            )
        if not self._layout:
            vector = vector.copy()  # the script's own array, which may change before it is sent
        numbers = _numbers(metrics or {})
        if self._correction is not None:
            vector, lost = self._correction.finish(vector, path)
            numbers |= lost
        kept = kept_tensors(weights, self._personal, self._declared)
        self._store.save(self._assignment.session_id, self.number, self.state, kept)
        self._end(Submitted(vector, num_samples, numbers, self._evaluation))

    def proximal_term(self, model: Any) -> Callable[[], Any]:
        """The proximal term of FedProx, mu / 2 * ||w - w_global||^2, as a function that gives its
        present value to be added to the loss of each step.

        model: a torch module. mu is train.proximal_mu; without it the term is 0.
        Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", equation 2.
        """
        mu = float(self.config.get("proximal_mu", 0.0))
        if mu == 0.0:
            return lambda: 0.0
        weights = self.weights
        pairs = [
            (parameter, weights[name].detach().clone().to(parameter))
            for name, parameter in named_parameters(model)
        ]

        def term() -> Any:
            return 0.5 * mu * sum((p - start).pow(2).sum() for p, start in pairs)

        return term

    @property
    def correction(self) -> Any:
        """The correction that SCAFFOLD adds to the gradient of each step, as `weights` has the
        tensors, with scaffold=True. A script that takes steps itself adds it, and gives submit()
        the path; torch has correct().

        Source: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated
        Learning", algorithm 1 with option II.
        """
        if self._correction is None:
            raise RuntimeError(
                "the model of this session has no control variate: xain.rounds(model,"
                " scaffold=True) gives it one"
            )
        return from_vector(self._correction.vector, self._layout, self._declared, {})

    def correct(self, model: Any, optimizer: Any) -> None:
        """Correct all steps of an optimiser by control variates, with scaffold=True.

        model: a torch module. optimizer: torch.optim.SGD of its parameters; made for this round.
        Raises TypeError for another optimiser.
        """
        added = self.correction
        assert self._correction is not None
        pairs = [(p, added[name].to(p)) for name, p in named_parameters(model)]
        self._correction.apply(optimizer, pairs)

    def _end(self, submitted: Submitted) -> None:
        """Close the round and give what was submitted to the loop."""
        self.is_done = True
        self._weights = None
        self._finish(submitted)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers. A tensor of one element, as a loss often is, counts as a number."""
    return flatten_values(
        {
            name: value.detach().cpu().numpy().item() if _is_scalar(value) else value
            for name, value in metrics.items()
        }
    )


def _is_scalar(value: Any) -> bool:
    """Whether this is a torch tensor of one element."""
    return is_tensor(value) and value.numel() == 1
