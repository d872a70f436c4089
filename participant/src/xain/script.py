"""A script as the agent sees it: a Participant that asks the body of the loop for everything.

The agent's question, Asked, becomes the round of the loop, and what the body submits becomes the
answer. Who carries the question to the script, loop.py or a simulation, is `ask`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from xain.correction import Correction
from xain.round import Round, Submitted
from xain.state import ScriptState
from xain.weights import Declared, LayoutMismatch, agreed_layout
from xain_participant.keep.variates import KeptVariates
from xain_participant.sdk.participant import Assignment, BodyFailed, Participant
from xain_wire.limits import MAX_INT32
from xain_workloads.model import Layout, Model, personal_patterns
from xain_workloads.scaffold import with_control, without_control


@dataclass(frozen=True, slots=True)
class Asked:
    """The agent's question to the script. weights: None to ask for the initial ones.
    personal: patterns of the names of tensors that do not travel."""

    assignment: Assignment
    layout: Layout
    weights: NDArray[Any] | None
    personal: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Initial:
    """The script's initial weights, (d,)."""

    vector: NDArray[Any]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Failed:
    """The body of the loop has raised."""

    error: BaseException


class ScriptParticipant(Participant):
    """Hand every piece of work to the script, and wait for its answer."""

    def __init__(
        self,
        ask: Callable[[Asked], Initial | Submitted | Failed],
        *,
        evaluates: bool,
        initialises: bool,
    ):
        self._ask = ask
        self._evaluates = evaluates
        self._initialises = initialises
        self._layout: Layout = ()
        self._init_layout: Layout = ()
        self._assignment = Assignment("", -1)
        self._personal: tuple[str, ...] = ()

    @property
    def can_evaluate(self) -> bool:
        return self._evaluates

    @property
    def can_initialise(self) -> bool:
        return self._initialises

    def on_model(self, layout: Layout, metadata: Mapping[str, str]) -> None:
        self._layout = layout
        self._personal = personal_patterns(metadata)

    def on_round(self, assignment: Assignment) -> None:
        self._assignment = assignment

    def init_weights(self) -> NDArray[Any]:
        """Ask the script for its initial weights, (d,), and note their layout."""
        initial = self._answer(None)
        assert isinstance(initial, Initial)
        self._init_layout = initial.layout
        return initial.vector

    def init_layout(self) -> Layout:
        return self._init_layout

    def train_round(
        self, weights: NDArray[Any], epochs: int, epoch_base: int
    ) -> tuple[NDArray[Any], int]:
        """Have the script train with these weights: (its vector, its number of samples)."""
        submitted = self._ask_body(weights)
        assert submitted.vector is not None
        return submitted.vector, submitted.num_samples

    def evaluate_round(self, weights: NDArray[Any]) -> None:
        self._ask_body(weights)

    def _ask_body(self, weights: NDArray[Any]) -> Submitted:
        """Have the script train or evaluate with these weights. Returns what it has submitted; its
        metrics and evaluation are reported, or withheld for too few rows."""
        submitted = self._answer(weights)
        assert isinstance(submitted, Submitted)
        self.update_metrics(**submitted.metrics)
        if submitted.evaluation is not None:
            evaluation = submitted.evaluation
            if evaluation.tallies and evaluation.num_samples < self._assignment.min_rows:
                self.withhold_evaluation()
            else:
                self.report_evaluation(
                    evaluation.metrics, evaluation.num_samples, evaluation.tallies
                )
        return submitted

    def _answer(self, weights: NDArray[Any] | None) -> Initial | Submitted:
        """Ask the script, for initial weights without `weights`. Raises BodyFailed if the loop's
        body has raised."""
        answer = self._ask(Asked(self._assignment, self._layout, weights, self._personal))
        if isinstance(answer, Failed):
            raise BodyFailed from answer.error
        return answer


class KeptByScript:
    """State that a participant keeps for its script from round to round.

    folder: its state directory; None keeps it in memory.
    """

    def __init__(self, folder: Path | None, participant_id: str) -> None:
        self._participant_id = participant_id
        self._store = ScriptState(folder, participant_id)
        self._variates = KeptVariates(folder, participant_id)

    def close(self) -> None:
        """End writing, so that another process may use the folder."""
        self._store.close()
        self._variates.close()

    def tensors(self, session_id: str) -> Mapping[str, NDArray[Any]]:
        """The tensors that do not travel, as the last round of the session has left them."""
        return self._store.load(session_id, MAX_INT32)[1]

    def round_of(
        self,
        asked: Asked,
        vector: NDArray[Any],
        declared: Declared | None,
        finish: Callable[[Submitted], None],
    ) -> Round:
        """The round that the script is asked to train or to evaluate.

        vector: the global model, (d,). finish: called with what the body of the loop submits.
        Raises LayoutMismatch if the declared model is not the session's.
        """
        if declared is not None:
            declared = declared.without(asked.personal)
        model = Model(vector, asked.layout)
        weights, layout = without_control(model).vector, without_control(model).layout
        variates = None
        if weights.size < vector.size:
            self._variates.on_round(asked.assignment)
            variates = self._variates
        elif declared is not None and declared.has_control:
            raise LayoutMismatch(
                "this script is called with scaffold=True, and the session's model has no control"
                " variate: the script that declared it must be called with it, too"
            )
        layout = agreed_layout(declared, layout, weights.size)
        return Round(
            asked.assignment,
            layout,
            weights,
            declared,
            self._store,
            self._participant_id,
            finish,
            asked.personal,
            None if variates is None else Correction(variates, model),
        )


def initial_weights(asked: Asked, declared: Declared | None) -> Initial:
    """The weights of the declared model. Raises RuntimeError if the script declares none."""
    if declared is None:
        raise RuntimeError(
            "the coordinator asks this participant for the initial weights: "
            "declare them with xain.rounds(model)"
        )
    declared = declared.without(asked.personal)
    initial = Model(declared.vector(), declared.layout)
    if declared.has_control:
        initial = with_control(initial)
    return Initial(initial.vector, initial.layout)
