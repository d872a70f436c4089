"""Classes of scikit-learn that descriptions and files of estimators may name.

Names stand for public classes in the modules below. A class outside of these tables is never
imported, and none of them runs code that a file brings.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

_LINEAR = "sklearn.linear_model"
_ENSEMBLE = "sklearn.ensemble"
_SELECTION = "sklearn.model_selection"
_MULTICLASS = "sklearn.multiclass"
_SEMI = "sklearn.semi_supervised"
_DECOMPOSITION = "sklearn.decomposition"
_PREPROCESSING = "sklearn.preprocessing"
_FEATURES = "sklearn.feature_selection"

CLASSIFIERS: Mapping[str, str] = {
    "AdaBoostClassifier": _ENSEMBLE,
    "BaggingClassifier": _ENSEMBLE,
    "BernoulliNB": "sklearn.naive_bayes",
    "CalibratedClassifierCV": "sklearn.calibration",
    "CategoricalNB": "sklearn.naive_bayes",
    "ComplementNB": "sklearn.naive_bayes",
    "DecisionTreeClassifier": "sklearn.tree",
    "DummyClassifier": "sklearn.dummy",
    "ExtraTreeClassifier": "sklearn.tree",
    "ExtraTreesClassifier": _ENSEMBLE,
    "FixedThresholdClassifier": _SELECTION,
    "GaussianNB": "sklearn.naive_bayes",
    "GaussianProcessClassifier": "sklearn.gaussian_process",
    "GradientBoostingClassifier": _ENSEMBLE,
    "HistGradientBoostingClassifier": _ENSEMBLE,
    "KNeighborsClassifier": "sklearn.neighbors",
    "LabelPropagation": _SEMI,
    "LabelSpreading": _SEMI,
    "LinearDiscriminantAnalysis": "sklearn.discriminant_analysis",
    "LinearSVC": "sklearn.svm",
    "LogisticRegression": _LINEAR,
    "LogisticRegressionCV": _LINEAR,
    "MLPClassifier": "sklearn.neural_network",
    "MultinomialNB": "sklearn.naive_bayes",
    "NearestCentroid": "sklearn.neighbors",
    "NuSVC": "sklearn.svm",
    "OneVsOneClassifier": _MULTICLASS,
    "OneVsRestClassifier": _MULTICLASS,
    "OutputCodeClassifier": _MULTICLASS,
    "PassiveAggressiveClassifier": _LINEAR,
    "Perceptron": _LINEAR,
    "QuadraticDiscriminantAnalysis": "sklearn.discriminant_analysis",
    "RadiusNeighborsClassifier": "sklearn.neighbors",
    "RandomForestClassifier": _ENSEMBLE,
    "RidgeClassifier": _LINEAR,
    "RidgeClassifierCV": _LINEAR,
    "SGDClassifier": _LINEAR,
    "SVC": "sklearn.svm",
    "SelfTrainingClassifier": _SEMI,
    "StackingClassifier": _ENSEMBLE,
    "VotingClassifier": _ENSEMBLE,
}
REGRESSORS: Mapping[str, str] = {
    "ARDRegression": _LINEAR,
    "AdaBoostRegressor": _ENSEMBLE,
    "BaggingRegressor": _ENSEMBLE,
    "BayesianRidge": _LINEAR,
    "CCA": "sklearn.cross_decomposition",
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
    "LassoLarsIC": _LINEAR,
    "LinearRegression": _LINEAR,
    "LinearSVR": "sklearn.svm",
    "MLPRegressor": "sklearn.neural_network",
    "NuSVR": "sklearn.svm",
    "OrthogonalMatchingPursuit": _LINEAR,
    "OrthogonalMatchingPursuitCV": _LINEAR,
    "PLSCanonical": "sklearn.cross_decomposition",
    "PLSRegression": "sklearn.cross_decomposition",
    "PassiveAggressiveRegressor": _LINEAR,
    "PoissonRegressor": _LINEAR,
    "QuantileRegressor": _LINEAR,
    "RANSACRegressor": _LINEAR,
    "RandomForestRegressor": _ENSEMBLE,
    "Ridge": _LINEAR,
    "RidgeCV": _LINEAR,
    "SGDRegressor": _LINEAR,
    "SVR": "sklearn.svm",
    "StackingRegressor": _ENSEMBLE,
    "TheilSenRegressor": _LINEAR,
    "TransformedTargetRegressor": "sklearn.compose",
    "TweedieRegressor": _LINEAR,
    "VotingRegressor": _ENSEMBLE,
}
# Steps before the last one of a pipeline.
TRANSFORMERS: Mapping[str, str] = {
    "Binarizer": _PREPROCESSING,
    "FactorAnalysis": _DECOMPOSITION,
    "FastICA": _DECOMPOSITION,
    "GaussianRandomProjection": "sklearn.random_projection",
    "IncrementalPCA": _DECOMPOSITION,
    "KBinsDiscretizer": _PREPROCESSING,
    "KMeans": "sklearn.cluster",
    "KernelPCA": _DECOMPOSITION,
    "MaxAbsScaler": _PREPROCESSING,
    "MinMaxScaler": _PREPROCESSING,
    "NMF": _DECOMPOSITION,
    "Normalizer": _PREPROCESSING,
    "Nystroem": "sklearn.kernel_approximation",
    "PCA": _DECOMPOSITION,
    "PolynomialFeatures": _PREPROCESSING,
    "PowerTransformer": _PREPROCESSING,
    "QuantileTransformer": _PREPROCESSING,
    "RBFSampler": "sklearn.kernel_approximation",
    "RFE": _FEATURES,
    "RobustScaler": _PREPROCESSING,
    "SelectFdr": _FEATURES,
    "SelectFpr": _FEATURES,
    "SelectFromModel": _FEATURES,
    "SelectFwe": _FEATURES,
    "SelectKBest": _FEATURES,
    "SelectPercentile": _FEATURES,
    "SimpleImputer": "sklearn.impute",
    "StandardScaler": _PREPROCESSING,
    "TruncatedSVD": _DECOMPOSITION,
    "VarianceThreshold": _FEATURES,
}
PIPELINE = "Pipeline"
# Parts of fitted estimators, which no description names.
PARTS: Mapping[str, str] = {
    "FunctionTransformer": _PREPROCESSING,  # of TransformedTargetRegressor, without a function
    "IsotonicRegression": "sklearn.isotonic",
    "KernelCenterer": _PREPROCESSING,
    "LabelBinarizer": _PREPROCESSING,
    "LabelEncoder": _PREPROCESSING,
    "OneHotEncoder": _PREPROCESSING,
    PIPELINE: "sklearn.pipeline",
    "_BinMapper": "sklearn.ensemble._hist_gradient_boosting.binning",
    "_CalibratedClassifier": "sklearn.calibration",
    "_ConstantPredictor": _MULTICLASS,
    "_SigmoidCalibration": "sklearn.calibration",
    "_TemperatureScaling": "sklearn.calibration",
}
# Scores of columns, which are the value of the parameter "score_func".
FUNCTIONS: Mapping[str, str] = dict.fromkeys(
    ("chi2", "f_classif", "f_regression", "mutual_info_classif", "mutual_info_regression"),
    _FEATURES,
)
# Losses of boosting and of generalised linear models.
LOSSES: Mapping[str, str] = dict.fromkeys(
    (
        "AbsoluteError",
        "ExponentialLoss",
        "HalfBinomialLoss",
        "HalfGammaLoss",
        "HalfMultinomialLoss",
        "HalfPoissonLoss",
        "HalfSquaredError",
        "HalfTweedieLoss",
        "HalfTweedieLossIdentity",
        "HuberLoss",
        "PinballLoss",
    ),
    "sklearn._loss.loss",
)
ESTIMATORS: Mapping[str, str] = {**CLASSIFIERS, **REGRESSORS}
TREES = frozenset(
    (
        "DecisionTreeClassifier",
        "DecisionTreeRegressor",
        "ExtraTreeClassifier",
        "ExtraTreeRegressor",
    )
)
FORESTS = frozenset(
    (
        "ExtraTreesClassifier",
        "ExtraTreesRegressor",
        "RandomForestClassifier",
        "RandomForestRegressor",
    )
)
GRADIENT_BOOSTING = frozenset(("GradientBoostingClassifier", "GradientBoostingRegressor"))
# The parameter "init" of gradient boosting: each makes a row of predictions for each row, whatever
# its attributes are. Native code writes to as many rows as are predicted.
INIT = TREES.union(
    ("DummyClassifier", "DummyRegressor"),
    (name for name, module in ESTIMATORS.items() if module == _LINEAR),
) - {"RANSACRegressor"}
HISTOGRAM_BOOSTING = frozenset(("HistGradientBoostingClassifier", "HistGradientBoostingRegressor"))

SUPPORT_VECTORS = frozenset(("NuSVC", "NuSVR", "SVC", "SVR"))
# Estimators of neighbours, and the attribute with the tree of rows, which is made again of them.
NEIGHBOURS: Mapping[str, str] = {
    "KNeighborsClassifier": "_tree",
    "KNeighborsRegressor": "_tree",
    "RadiusNeighborsClassifier": "_tree",
}
# Estimators and transformers that hold rows which they were fitted on, or values of each row.
HOLD_ROWS = SUPPORT_VECTORS | {
    "CCA",
    "GaussianProcessClassifier",
    "GaussianProcessRegressor",
    "KNeighborsClassifier",
    "KNeighborsRegressor",
    "KernelPCA",
    "KernelRidge",
    "LabelPropagation",
    "LabelSpreading",
    "Nystroem",
    "PLSCanonical",
    "PLSRegression",
    "QuantileTransformer",
    "RadiusNeighborsClassifier",
}

_CLASSES: Mapping[str, str] = {**ESTIMATORS, **TRANSFORMERS, **PARTS}
NAMES = frozenset(_CLASSES)
# Estimators that may be files of skops, as arrays do not describe all of their parts, and the
# classes of scikit-learn in such a file: none of them has native code that follows an array.
SKOPS = frozenset(
    (
        "GaussianProcessClassifier",
        "GaussianProcessRegressor",
        "OneVsOneClassifier",
        "OneVsRestClassifier",
    )
)
IN_SKOPS = SKOPS | {
    "ConstantKernel",
    "LabelBinarizer",
    "Product",
    "RBF",
    "_BinaryGaussianProcessClassifierLaplace",
    "_ConstantPredictor",
}


def class_of(name: str) -> Any:
    """The class with this name. Raises KeyError; ModuleNotFoundError without scikit-learn, and
    AttributeError with a version of it that does not have the class."""
    return getattr(import_module(_CLASSES[name]), name)


def module_of(name: str) -> str:
    """The public module of the class with this name. Raises KeyError."""
    return _CLASSES[name]


def name_of(kind: type) -> str | None:
    """The name of a class in the tables; None if it is in none of them."""
    name, module = kind.__name__, _CLASSES.get(kind.__name__)
    inside = kind.__module__
    is_known = module is not None and (inside == module or inside.startswith(f"{module}."))
    return name if is_known else None


def function_of(name: str) -> Any:
    """The function with this name. Raises as class_of() does."""
    return getattr(import_module(FUNCTIONS[name]), name)


def loss_of(name: str) -> Any:
    """The class of losses with this name. Raises as class_of() does."""
    return getattr(import_module(LOSSES[name]), name)
