"""Options of bagging."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from json import loads
from typing import Any, get_args

from xain_workloads.class_weights import require_class_weight
from xain_workloads.ensembles.estimators import allowed, described
from xain_workloads.options import from_mapping, require_choice, require_range
from xain_workloads.tables.dataset import Task

# Fitted in place of a classifier where a bootstrap has rows of one class only.
ONE_CLASS = "DummyClassifier"

STACKED = "stacked"
VOTES = ("hard", "soft", STACKED)
_VOTING_ROUNDS = 5
# Rounds of Newton's method after which the linear model of stacked votes changes no more.
STEPS = {"classification": 5, "regression": 1}


@dataclass(frozen=True, slots=True)
class BaggingOptions:
    """Options of the workload "bagging".

    estimator: name of a classifier or regressor of scikit-learn, whose arguments are parameters, or
        the description of a pipeline or of nested estimators; see estimators/described.py.
    estimators: fitted by each participant in a round.
    fit_rounds: rounds that fit estimators, with vote = "stacked". All later rounds train the linear
        model of their votes.
    task: "classification" or "regression", which follows from the estimator.
    vote: "stacked" takes a linear model of the votes and the columns, "soft" the class with the
        largest mean probability, "hard" the class that most estimators predict. Regression takes
        the mean in place of the latter two.
    publish: whether fitted estimators are sent to the coordinator and to all participants. If not,
        they stay at the participants, which are asked for predictions.
    seed: of the bootstraps of all participants, 0 or more.
    class_weight: "balanced" weighs rows by the inverse of the count of their class at all sites.
    Raises ValueError that names the field.
    """

    estimator: str | dict[str, Any] = "DecisionTreeClassifier"
    parameters: dict[str, Any] = field(default_factory=dict)
    estimators: int = 10
    fit_rounds: int = 1
    task: str = ""
    vote: str = STACKED
    publish: bool = False
    seed: int = 0
    class_weight: str = ""

    def __post_init__(self) -> None:
        """Fill in the task, and check all options. Raises ValueError."""
        task = self.description.task
        if not self.task:
            object.__setattr__(self, "task", task)
        require_choice("task", self.task, get_args(Task))
        if self.task != task:
            name = self.description.last.name
            raise ValueError(f"task is {self.task!r}; {name} is made for {task}")
        require_range("estimators", self.estimators, at_least=1, at_most=1000)
        require_choice("vote", self.vote, VOTES)
        require_range("fit_rounds", self.fit_rounds, at_least=1)
        require_range("seed", self.seed, at_least=0)
        require_class_weight(self.class_weight, self.task)
        self._check_parameters()

    @property
    def is_stacked(self) -> bool:
        """Whether a linear model weighs the votes."""
        return self.vote == STACKED

    @property
    def rounds(self) -> int:
        """Rounds of a training for which none are set, so that a later one changes little."""
        return self.fit_rounds + STEPS[self.task] if self.is_stacked else _VOTING_ROUNDS

    @property
    def description(self) -> described.Description:
        """The estimator. Raises ValueError that says what is wrong with it."""
        return described.read(self.estimator, self.parameters)

    @property
    def kind(self) -> str:
        """Name of the class of the estimator."""
        return self.description.name

    def rows_held_by(self) -> list[str]:
        """Names of the estimators that hold rows which they are fitted on."""
        return sorted({one.name for one in self.description.all()} & allowed.HOLD_ROWS)

    def _check_parameters(self) -> None:
        """Compare the parameters with the estimator's own, where scikit-learn is installed."""
        try:
            made = self.description.make()
        except ModuleNotFoundError:
            return
        if self.class_weight and not described.takes_weights(made):
            raise ValueError(
                f"class_weight is {self.class_weight!r}; {self.kind} takes no weights of rows:"
                " choose another estimator, or leave it out"
            )


def options_of_model(metadata: Mapping[str, str]) -> BaggingOptions:
    """Options in the metadata of an ensemble. Raises ValueError."""
    options = loads(metadata.get("options", "{}"))
    return from_mapping(BaggingOptions, options, workload="bagging")
