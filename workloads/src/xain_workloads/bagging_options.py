"""Options of bagging, and the estimators that can be bagged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from json import loads
from typing import Any, get_args

from xain_workloads.class_weights import require_class_weight
from xain_workloads.dataset import Task
from xain_workloads.options import from_mapping, require_choice, require_range

_LINEAR = "sklearn.linear_model"
_ENSEMBLE = "sklearn.ensemble"

# Public modules of estimators. An estimator outside of these tables is never imported.
CLASSIFIERS: Mapping[str, str] = {
    "AdaBoostClassifier": _ENSEMBLE,
    "BernoulliNB": "sklearn.naive_bayes",
    "ComplementNB": "sklearn.naive_bayes",
    "DecisionTreeClassifier": "sklearn.tree",
    "DummyClassifier": "sklearn.dummy",
    "ExtraTreeClassifier": "sklearn.tree",
    "ExtraTreesClassifier": _ENSEMBLE,
    "GaussianNB": "sklearn.naive_bayes",
    "GaussianProcessClassifier": "sklearn.gaussian_process",
    "GradientBoostingClassifier": _ENSEMBLE,
    "HistGradientBoostingClassifier": _ENSEMBLE,
    "KNeighborsClassifier": "sklearn.neighbors",
    "LinearDiscriminantAnalysis": "sklearn.discriminant_analysis",
    "LinearSVC": "sklearn.svm",
    "LogisticRegression": _LINEAR,
    "LogisticRegressionCV": _LINEAR,
    "MLPClassifier": "sklearn.neural_network",
    "MultinomialNB": "sklearn.naive_bayes",
    "NearestCentroid": "sklearn.neighbors",
    "NuSVC": "sklearn.svm",
    "Perceptron": _LINEAR,
    "QuadraticDiscriminantAnalysis": "sklearn.discriminant_analysis",
    "RandomForestClassifier": _ENSEMBLE,
    "RidgeClassifier": _LINEAR,
    "RidgeClassifierCV": _LINEAR,
    "SGDClassifier": _LINEAR,
    "SVC": "sklearn.svm",
}
REGRESSORS: Mapping[str, str] = {
    "ARDRegression": _LINEAR,
    "AdaBoostRegressor": _ENSEMBLE,
    "BayesianRidge": _LINEAR,
    "DecisionTreeRegressor": "sklearn.tree",
    "DummyRegressor": "sklearn.dummy",
    "ElasticNet": _LINEAR,
    "ElasticNetCV": _LINEAR,
    "ExtraTreeRegressor": "sklearn.tree",
    "ExtraTreesRegressor": _ENSEMBLE,
    "GammaRegressor": _LINEAR,
    "GaussianProcessRegressor": "sklearn.gaussian_process",
    "GradientBoostingRegressor": _ENSEMBLE,
    "HistGradientBoostingRegressor": _ENSEMBLE,
    "HuberRegressor": _LINEAR,
    "KNeighborsRegressor": "sklearn.neighbors",
    "KernelRidge": "sklearn.kernel_ridge",
    "Lars": _LINEAR,
    "LarsCV": _LINEAR,
    "Lasso": _LINEAR,
    "LassoCV": _LINEAR,
    "LassoLars": _LINEAR,
    "LassoLarsCV": _LINEAR,
    "LinearRegression": _LINEAR,
    "LinearSVR": "sklearn.svm",
    "MLPRegressor": "sklearn.neural_network",
    "NuSVR": "sklearn.svm",
    "OrthogonalMatchingPursuit": _LINEAR,
    "PoissonRegressor": _LINEAR,
    "QuantileRegressor": _LINEAR,
    "RandomForestRegressor": _ENSEMBLE,
    "Ridge": _LINEAR,
    "RidgeCV": _LINEAR,
    "SGDRegressor": _LINEAR,
    "SVR": "sklearn.svm",
    "TheilSenRegressor": _LINEAR,
    "TweedieRegressor": _LINEAR,
}

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

    estimator: name of a classifier or regressor of scikit-learn. parameters: its arguments.
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

    estimator: str = "DecisionTreeClassifier"
    parameters: dict[str, Any] = field(default_factory=dict)
    estimators: int = 10
    fit_rounds: int = 1
    task: str = ""
    vote: str = STACKED
    publish: bool = False
    seed: int = 0
    class_weight: str = ""

    def __post_init__(self) -> None:
        require_choice("estimator", self.estimator, {*CLASSIFIERS, *REGRESSORS})
        task = "classification" if self.estimator in CLASSIFIERS else "regression"
        if not self.task:
            object.__setattr__(self, "task", task)
        require_choice("task", self.task, get_args(Task))
        if self.task != task:
            raise ValueError(f"task is {self.task!r}; {self.estimator} is made for {task}")
        require_range("estimators", self.estimators, at_least=1, at_most=1000)
        require_choice("vote", self.vote, VOTES)
        require_range("fit_rounds", self.fit_rounds, at_least=1)
        require_range("seed", self.seed, at_least=0)
        require_class_weight(self.class_weight, self.task)
        if "random_state" in self.parameters:
            raise ValueError("parameters has 'random_state'; set the option seed")
        self._check_parameters()

    @property
    def is_stacked(self) -> bool:
        """Whether a linear model weighs the votes."""
        return self.vote == STACKED

    @property
    def rounds(self) -> int:
        """Rounds of a training for which none are set, so that a later one changes little."""
        return self.fit_rounds + STEPS[self.task] if self.is_stacked else _VOTING_ROUNDS

    def estimator_class(self, name: str = "") -> Any:
        """A class of scikit-learn: that of the estimator, or of another name in the tables.

        Raises ModuleNotFoundError without scikit-learn."""
        name = name or self.estimator
        return getattr(import_module({**CLASSIFIERS, **REGRESSORS}[name]), name)

    def _check_parameters(self) -> None:
        """Compare the parameters with the estimator's own, where scikit-learn is installed."""
        try:
            kind = self.estimator_class()
        except ModuleNotFoundError:
            return
        try:
            kind(**self.parameters)._validate_params()
        except (TypeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise ValueError(f"parameters do not fit {self.estimator}: {text}") from None
        if self.class_weight and "sample_weight" not in signature(kind.fit).parameters:
            raise ValueError(
                f"class_weight is {self.class_weight!r}; {self.estimator} takes no weights of rows:"
                " choose another estimator, or leave it out"
            )


def options_of_model(metadata: Mapping[str, str]) -> BaggingOptions:
    """Options in the metadata of an ensemble. Raises ValueError."""
    options = loads(metadata.get("options", "{}"))
    return from_mapping(BaggingOptions, options, workload="bagging")
