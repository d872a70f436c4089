"""Estimators by descriptions, which name classes of the tables in allowed.py.

A description is the name of an estimator, or a mapping of one of two forms:

- {"estimator": NAME, "parameters": {...}}
- {"pipeline": [DESCRIPTION, ...]}, transformers and an estimator behind them

A parameter that is an estimator is such a mapping, or the name alone; a list of them names the
estimators of a vote or a stacking. A number, a text or a list is what it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

from xain_foundation.settings.hints import hint
from xain_workloads.ensembles.estimators.allowed import (
    CLASSIFIERS,
    ESTIMATORS,
    FUNCTIONS,
    GRADIENT_BOOSTING,
    INIT,
    PIPELINE,
    REGRESSORS,
    TRANSFORMERS,
    class_of,
    function_of,
)

Described = str | Mapping[str, Any]
MAX_DEPTH = 8  # of estimators in each other

_ONE_TARGET = "it is made for several targets, and a table has one"
# Estimators of scikit-learn that no table of rows with one target suits.
REFUSED: Mapping[str, str] = {
    "ClassifierChain": _ONE_TARGET,
    "IsotonicRegression": "it takes one column; HistGradientBoostingRegressor has monotonic_cst",
    "MultiOutputClassifier": _ONE_TARGET,
    "MultiOutputRegressor": _ONE_TARGET,
    "MultiTaskElasticNet": f"{_ONE_TARGET}; take ElasticNet",
    "MultiTaskElasticNetCV": f"{_ONE_TARGET}; take ElasticNetCV",
    "MultiTaskLasso": f"{_ONE_TARGET}; take Lasso",
    "MultiTaskLassoCV": f"{_ONE_TARGET}; take LassoCV",
    "RadiusNeighborsRegressor": "it predicts no number for a row without neighbours within its "
    "radius; take KNeighborsRegressor",
    "RegressorChain": _ONE_TARGET,
    "TunedThresholdClassifierCV": "a threshold is chosen for the whole model: "
    + hint("xain-coordinator", 'evaluate.threshold = "youden"'),
}
# Parameters that fit prepared tables, where none are given: tables have one target, columns
# of categories add up to one, a row may have no neighbours, and other rows lie out of the range.
DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "CCA": {"n_components": 1},
    "MinMaxScaler": {"clip": True},
    "PLSCanonical": {"n_components": 1},
    "QuadraticDiscriminantAnalysis": {"solver": "eigen", "shrinkage": 0.1},
    "RadiusNeighborsClassifier": {"outlier_label": "most_frequent"},
}
_INSTEAD = {"reg_param"}  # of the defaults of QuadraticDiscriminantAnalysis
# Estimators of counts, and transformers behind which columns have no negative numbers.
COUNTS = frozenset(("CategoricalNB", "ComplementNB", "MultinomialNB", "NMF"))
_NOT_NEGATIVE = frozenset(("Binarizer", "KBinsDiscretizer", "MinMaxScaler"))
_FORMS = "a name, {estimator = NAME, parameters = {...}} or {pipeline = [...]} does"
_ONE = "estimator"
_ESTIMATORS = frozenset((_ONE, "regressor", "final_estimator", "transformer"))
_WORDS = frozenset(("deprecated", "drop", "passthrough"))
_OF_TWO = frozenset(("FixedThresholdClassifier",))
_DIVIDES = frozenset(("OneVsOneClassifier", "OneVsRestClassifier", "OutputCodeClassifier"))
_NONE = (None, "from_dtype")
_BOTH = frozenset(("LinearDiscriminantAnalysis", "PLSRegression"))  # transformers, too


@dataclass(frozen=True, slots=True)
class Description:
    """A description that has been read. name: of a class, "Pipeline" among them.

    steps: of a pipeline. parameters: with descriptions in place of estimators.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple["Description", ...] = ()

    @property
    def last(self) -> "Description":
        """The step that predicts: the last one of a pipeline."""
        return self.steps[-1].last if self.steps else self

    @property
    def task(self) -> str:
        """ "classification" or "regression"; "" of a transformer."""
        name = self.last.name
        if name in CLASSIFIERS:
            return "classification"
        return "regression" if name in REGRESSORS else ""

    def make(self, state: int | None = None, *, with_groups: bool = False) -> Any:
        """An unfitted estimator. state: of all random numbers. with_groups: of rows, which early
        stopping would divide: an estimator stops early only if its own parameters say so.

        Raises ValueError that names wrong parameters, and ModuleNotFoundError without scikit-learn.
        """
        made = self._made(with_groups)
        if state is not None:
            known = made.get_params()
            made.set_params(**{key: state for key in known if _last(key) == "random_state"})
        return made

    def _made(self, with_groups: bool) -> Any:
        """Make the estimator, with its steps if it is a pipeline. Raises ValueError if scikit-learn
        has none such, or the parameters do not fit."""
        if self.steps:
            steps = [step._made(with_groups) for step in self.steps]
            return class_of(PIPELINE)(_with_names(steps))
        values = {key: _value(key, value, with_groups) for key, value in self.parameters.items()}
        try:
            kind = class_of(self.name)
        except AttributeError:
            raise ValueError(f"this version of scikit-learn has no {self.name}") from None
        known = signature(kind).parameters
        defaults = DEFAULTS.get(self.name, {})
        if defaults.keys() <= known.keys() and not {*defaults, *_INSTEAD} & values.keys():
            values.update(defaults)
        if with_groups and "early_stopping" in known:
            values.setdefault("early_stopping", False)
        missing = [key for key in known if _is_missing(self.name, key, known[key], values)]
        if missing:
            raise ValueError(f"{self.name} needs the parameter {missing[0]!r}")
        try:
            made = kind(**values)
            made._validate_params()
        except (TypeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise ValueError(f"parameters do not fit {self.name}: {text}") from None
        return made

    @property
    def inner(self) -> tuple["Description", ...]:
        """The steps, or the estimators among the parameters."""
        values = [one if isinstance(one, tuple) else (one,) for one in self.parameters.values()]
        found = (one for value in values for one in value if isinstance(one, Description))
        return self.steps or tuple(found)

    def all(self) -> Iterator["Description"]:
        """Yield the description and all within it."""
        yield self
        for one in self.inner:
            yield from one.all()

    def of_counts(self) -> str:
        """The name of an estimator that takes no negative numbers and gets the columns of the
        table as they are; "" if there is none."""
        if self.name in COUNTS:
            return self.name
        for one in self.inner:
            if name := one.of_counts():
                return name
            if self.steps and one.name in _NOT_NEGATIVE:
                return ""
        return ""


def read(described: Described, parameters: Mapping[str, Any] | None = None) -> Description:
    """Read a description. parameters: of the estimator, where the description is a name. Raises
    ValueError that says what is wrong with it."""
    if isinstance(described, str):
        return _read({"estimator": described, "parameters": dict(parameters or {})}, (), 0)
    if parameters:
        raise ValueError("parameters stand within the description of the estimator")
    return _read(described, (), 0)


def of_two_classes(description: Description) -> str:
    """The name of an estimator that can be fitted to two classes only, outside of those that
    divide classes; "" if there is none."""
    if description.name in _OF_TWO:
        return description.name
    if description.name in _DIVIDES:
        return ""
    return next(filter(None, map(of_two_classes, description.inner)), "")


def takes_weights(made: Any) -> bool:
    """Whether an estimator can be fitted with weights of rows, and all within it; of a pipeline
    its last step alone."""
    steps = getattr(made, "steps", None)
    if steps:
        return takes_weights(steps[-1][1])
    inner = [one for _, one in getattr(made, "estimators", None) or ()]
    inner += [getattr(made, name, None) for name in ("estimator", "regressor")]
    inner = [one for one in inner if hasattr(one, "get_params")]
    own = signature(made.fit).parameters
    takes = "sample_weight" in own or type(made).__name__.startswith(("Stacking", "Voting"))
    return takes and all(takes_weights(one) for one in inner)


def fit(made: Any, rows: Any, target: Any, weights: Any = None) -> Any:
    """Fit an estimator, with weights of rows if there are any. Returns it."""
    if weights is None:
        return made.fit(rows, target)
    prefix, last = "", made
    while steps := getattr(last, "steps", None):
        prefix, last = f"{prefix}{steps[-1][0]}__", steps[-1][1]
    return made.fit(rows, target, **{f"{prefix}sample_weight": weights})


def _read(described: object, others: Sequence[Mapping[str, str]], depth: int) -> Description:
    """Check a description and read it, with all that it nests. Raises ValueError.

    others: tables of names that are known beside those of estimators.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"estimators are nested deeper than {MAX_DEPTH}")
    if isinstance(described, str):
        described = {"estimator": described}
    if not isinstance(described, Mapping):
        raise ValueError(f"{described!r} describes no estimator; {_FORMS}")
    if described.keys() == {"pipeline"}:
        steps = described["pipeline"]
        if not isinstance(steps, list | tuple) or not steps:
            raise ValueError(f"pipeline is {steps!r}; it must be a list of descriptions")
        before = [_read(step, (TRANSFORMERS,), depth + 1) for step in steps[:-1]]
        for step in before:
            if step.steps or (step.name not in TRANSFORMERS and step.name not in _BOTH):
                raise ValueError(f"{step.name} is no transformer, which steps of a pipeline are")
        return Description(PIPELINE, {}, (*before, _read(steps[-1], others, depth + 1)))
    name, parameters = described.get("estimator"), described.get("parameters", {})
    if described.keys() - {"estimator", "parameters"} or not isinstance(name, str):
        raise ValueError(f"{dict(described)!r} describes no estimator; {_FORMS}")
    if name in REFUSED:
        raise ValueError(f"{name} cannot be fitted: {REFUSED[name]}")
    if not any(name in table for table in (ESTIMATORS, *others)):
        known = sorted(set().union(ESTIMATORS, *others))
        raise ValueError(f"estimator is {name!r}; choose one of: {', '.join(known)}")
    if not isinstance(parameters, Mapping):
        raise ValueError(f"the parameters of {name} are {parameters!r}; they must be a table")
    if "random_state" in parameters:
        raise ValueError("parameters has 'random_state'; set the option seed")
    if name.startswith("HistGradient") and parameters.get("categorical_features") not in _NONE:
        raise ValueError(f"{name} gets columns of numbers; leave categorical_features out")
    init = parameters.get("init")
    inner = init.get("estimator") if isinstance(init, Mapping) else "DummyRegressor"
    if name in GRADIENT_BOOSTING and inner not in INIT:
        raise ValueError(f"init of {name} must be a tree, a linear model, a Dummy* or 'zero'")
    found = {key: _parameter(key, value, depth + 1) for key, value in parameters.items()}
    made = Description(name, found)
    for one in () if name.startswith("Stacking") else made.inner:
        if made.task and one.task and one.task != made.task:
            raise ValueError(f"{one.last.name} is made for {one.task}, {name} for {made.task}")
    return made


def _parameter(key: str, value: Any, depth: int) -> Any:
    """Read the value of a parameter, which may be a description or a list of them."""
    if isinstance(value, Mapping) and ("estimator" in value or "pipeline" in value):
        return _read(value, (TRANSFORMERS,), depth)
    if key in _ESTIMATORS and isinstance(value, str) and value not in _WORDS:
        return _read(value, (TRANSFORMERS,), depth)
    if key == "estimators":
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"estimators is {value!r}; it must be a list of descriptions")
        return tuple(_read(one, (), depth) for one in value)
    if key == "score_func" and value not in FUNCTIONS:
        raise ValueError(f"score_func is {value!r}; choose one of: {', '.join(sorted(FUNCTIONS))}")
    return value


def _value(key: str, value: Any, with_groups: bool) -> Any:
    """Make the value of a parameter: an estimator or function in place of its description."""
    if isinstance(value, Description):
        return value._made(with_groups)
    if key == "estimators":
        return _with_names([one._made(with_groups) for one in value])
    return function_of(value) if key == "score_func" else value


def _with_names(made: Sequence[Any]) -> list[tuple[str, Any]]:
    """Name estimators by their classes in lower case, numbered where a name repeats."""
    names = [type(one).__name__.lower() for one in made]
    repeated = {name for name in names if names.count(name) > 1}
    return [
        (f"{name}-{at}" if name in repeated else name, one)
        for at, (name, one) in enumerate(zip(names, made, strict=True), start=1)
    ]


def _is_missing(name: str, key: str, known: Parameter, given: Mapping[str, Any]) -> bool:
    is_needed = known.default is Parameter.empty or (name, key) == ("SelfTrainingClassifier", _ONE)
    return is_needed and key not in given


def _last(key: str) -> str:
    return key.rpartition("__")[2]
