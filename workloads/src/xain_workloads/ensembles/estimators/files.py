"""Fitted estimators as files: a description in JSON, and arrays.

A file names classes of the tables in allowed.py and holds their attributes: numbers, texts, arrays
and other estimators. Reading it makes objects of these classes and runs nothing else. The nodes of
all trees are a few arrays, see node_tables.py. An estimator with attributes of other kinds is a
file of skops in an array.

Format: MAGIC, the length of the description as uint32, the description, and the bytes of the
arrays one after another. Numbers are little-endian. The description has "arrays", with dtype,
shape and order of each; "estimator"; "trees" and "predictors", arrays by column. In JSON a value
that is no plain one is an object with one key that says its kind:

- {"a": array}, {"n": [dtype, value]}: an array, and a single number of numpy
- {"t": [...]}, {"d": [[key, value], ...]}, {"o": [shape, [...]]}: a tuple, a dictionary, an array
  of objects
- {"e": [name, attributes]}: an estimator. {"E": [name, count, attributes, {name: [...]}]}: a list
  of estimators, with the attributes that all have alike, and those that each has for itself
- {"T": number}, {"P": number}: a tree, and one of histogram boosting
- {"l": [name, arguments]}, {"f": name}: a loss, a score of columns
- {"y": dtype}, {"D": dtype}: a type of numpy, and a dtype
- {"k": array}: a file of skops, of an estimator in allowed.SKOPS

Files of version 0.1 are files of skops alone; load() writes them anew, and checks that.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from inspect import signature
from math import prod
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.ensembles.estimators import allowed, node_tables, skops_files
from xain_workloads.errors import InvalidContent

MAGIC = b"XENESTI1"
_LENGTH = Struct("<I")
_DTYPE = re.compile(r"[<|](b1|[iu][1248]|f[248]|U[1-9][0-9]{0,4})")
_MAX_DIMENSIONS = 8
_MAX_COLUMNS = 1 << 20  # of gradient boosting, which predicts two rows when it is loaded
# A list of estimators has once what all have alike, so a file stands for more than it holds: for as
# many bytes of arrays and values of the description as these, and so many for each byte of it.
_MIN_BYTES, _BYTES = 1 << 20, 32
# Small files may repeat more: neighbours one against the rest hold the same rows for each class.
_REPEATED, _MAX_REPEATED = 512, 1 << 28
_MIN_VALUES, _VALUES = 100_000, 2
_KERNELS = frozenset(("linear", "poly", "rbf", "sigmoid"))

# Attributes that only a fit reads, and those that repeat others. Neighbours ("nn_fit") are found
# again where they are needed.
_LEFT_OUT = frozenset(("_curve_scorer", "_loss_function_", "_optimizer", "named_estimators_"))


# --- writing ---


def dump(estimator: Any) -> bytes:
    """Write a fitted estimator as a file, whose bytes depend on the estimator alone.

    Generators of random numbers, which only a fit needs, are left out. Raises ModuleNotFoundError
    for an estimator that needs skops, without it.
    """
    writer = _Writer()
    described: dict[str, Any] = {"estimator": writer.node(estimator)}
    for key, objects, table_of in (
        ("trees", writer.trees, node_tables.table_of),
        ("predictors", writer.predictors, node_tables.predictor_table_of),
    ):
        if objects:
            table = table_of(objects)
            described[key] = {name: writer.array(column) for name, column in table.items()}
    described["arrays"] = [[*head] for head, _ in writer.arrays]
    text = json.dumps(described, separators=(",", ":")).encode()
    parts = [MAGIC, _LENGTH.pack(len(text)), text, *(content for _, content in writer.arrays)]
    return b"".join(parts)


class _Writer:
    """Arrays and trees that the description of an estimator refers to."""

    def __init__(self) -> None:
        self.arrays: list[tuple[tuple[str, tuple[int, ...], str], bytes]] = []
        self.trees: list[Any] = []
        self.predictors: list[Any] = []
        self._numbers: dict[tuple[Any, bytes], int] = {}

    def array(self, array: NDArray[Any]) -> int:
        """Add an array, unless an equal one is there; returns its number. Raises
        NotImplementedError for another dtype."""
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        if not _DTYPE.fullmatch(array.dtype.str) or array.ndim > _MAX_DIMENSIONS:
            raise NotImplementedError(array.dtype)
        key = ((array.dtype.str, array.shape, order), array.tobytes(order))  # type: ignore[arg-type]  # a str
        if key not in self._numbers:
            self._numbers[key] = len(self.arrays)
            self.arrays.append(key)
        return self._numbers[key]

    def node(self, value: Any) -> Any:
        """Describe a value for JSON, and add its arrays and trees. Raises NotImplementedError."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                return {"o": [value.shape, self.node(value.ravel().tolist())]}
            return {"a": self.array(value)}
        if isinstance(value, np.generic):
            self.array(np.asarray(value))  # raises NotImplementedError
            return {"n": [value.dtype.str, value.item()]}
        if type(value) is list:
            return _compressed([self.node(one) for one in value])
        if type(value) is tuple:
            return {"t": [self.node(one) for one in value]}
        if type(value) is dict:
            return {"d": [[self.node(key), self.node(one)] for key, one in value.items()]}
        return self._object(value)

    def _object(self, value: Any) -> Any:
        """Describe a type, function, loss, tree or estimator. Raises NotImplementedError."""
        kind = type(value)
        if isinstance(value, type) and issubclass(value, np.number):
            return {"y": np.dtype(value).str}
        if isinstance(value, np.dtype) and _DTYPE.fullmatch(value.str):
            return {"D": value.str}
        if isinstance(value, np.random.RandomState | np.random.Generator):
            return None
        if allowed.FUNCTIONS.get(getattr(value, "__name__", "")):
            return {"f": value.__name__}
        if kind.__name__ in allowed.LOSSES:
            return {"l": [kind.__name__, _arguments(value)]}
        if kind.__name__ == "Tree" and value.n_outputs == 1:
            self.trees.append(value)
            return {"T": len(self.trees) - 1}
        if kind.__name__ == "TreePredictor" and not value.nodes["is_categorical"].any():
            self.predictors.append(value)
            return {"P": len(self.predictors) - 1}
        if (name := allowed.name_of(kind)) is None:
            raise NotImplementedError(kind)
        return self._estimator(name, value)

    def _estimator(self, name: str, value: Any) -> Any:
        """Describe an estimator by its attributes, or by a skops file if one has no description."""
        before = len(self.arrays), len(self.trees), len(self.predictors)
        state = value.__getstate__() if hasattr(value, "get_params") else vars(value)
        try:
            attributes = {
                key: self.node(None if key == "nn_fit" else one)
                for key, one in state.items()
                if key not in _LEFT_OUT and key != allowed.NEIGHBOURS.get(name)
            }
            return {"e": [name, attributes]}
        except NotImplementedError:
            if name in allowed.PARTS:
                raise
        # Arrays and trees that were written for it are not needed.
        for key, _ in zip(list(self._numbers)[before[0] :], self.arrays[before[0] :], strict=True):
            del self._numbers[key]
        del self.arrays[before[0] :], self.trees[before[1] :], self.predictors[before[2] :]
        return {"k": self.array(np.frombuffer(skops_files.dump(value), np.uint8))}


def _compressed(nodes: list[Any]) -> Any:
    """Join descriptions of estimators of one class to one node, with equal attributes once."""
    if len(nodes) < 2 or not all(type(node) is dict and "e" in node for node in nodes):
        return nodes
    (name, first), *others = (node["e"] for node in nodes)
    if any(one[0] != name or list(one[1]) != list(first) for one in others):
        return nodes
    shared, own = {}, {}
    for key, value in first.items():
        text = repr(value)  # tells 1 from 1.0 and True
        if all(one[1][key] is value or repr(one[1][key]) == text for one in others):
            shared[key] = value
        else:
            own[key] = [node["e"][1][key] for node in nodes]
    if not own:
        return nodes
    return {"E": [name, len(nodes), shared, own]}


def _arguments(loss: Any) -> dict[str, Any]:
    """Arguments that a loss is made with again."""
    _, given = loss.closs.__reduce__()[:2]
    match type(loss).__name__:
        case "HalfMultinomialLoss":
            return {"n_classes": int(loss.n_classes)}
        case "HuberLoss":
            return {"quantile": float(loss.quantile)}
        case "PinballLoss":
            return {"quantile": float(given[0])}
        case "HalfTweedieLoss" | "HalfTweedieLossIdentity":
            return {"power": float(given[0])}
    return {}


# --- checks ---


def check(file: bytes, names: Collection[str], num_features: int) -> None:
    """Refuse a file that is none of an estimator with one of these names, or that could lead
    scikit-learn out of its bounds. No estimator is loaded, and scikit-learn is not needed.

    names: in the tables of allowed.py. num_features: columns of the rows that it predicts.
    Raises InvalidContent.
    """
    if not file.startswith(MAGIC):
        skops_files.check(file, names, num_features)
        return
    try:
        read = _Read(file)
        found = read.root
        if found.keys() == {"k"}:
            read.check(found)
            skops_files.check(read.skops(found["k"]), names, num_features)
            return
        name, attributes = _named(found)
        if name not in names:
            expected = " or ".join(sorted(names))
            raise InvalidContent(f"the file is a {name}, the model is made of {expected}")
        width = attributes.get("n_features_in_", num_features)
        if width != num_features:
            raise InvalidContent(f"the {name} is of {width} columns, rows have {num_features}")
        read.check(found)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, InvalidContent):
            raise
        raise InvalidContent(f"the file cannot be read: {_text(error)}") from None


def load(file: bytes) -> Any:
    """Make the fitted estimator of a file that has been checked. Raises InvalidContent, and
    ModuleNotFoundError."""
    try:
        is_written_anew = not file.startswith(MAGIC)
        read = _Read(dump(skops_files.load(file)) if is_written_anew else file)
        if is_written_anew:  # in a file of skops arrays are not held against each other
            read.check(read.root)
        return read.made(read.root)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the states of objects are theirs to check
        if isinstance(error, InvalidContent):
            raise
        raise InvalidContent(f"the estimator cannot be made: {_text(error)}") from None


class _Read:
    """The parts of a file. Raises InvalidContent, ValueError, TypeError or LookupError, as its
    methods do."""

    def __init__(self, file: bytes) -> None:
        """Parse description and heads of arrays, and check the trees. Raises InvalidContent."""
        start = len(MAGIC) + _LENGTH.size
        if len(file) < start:
            raise InvalidContent("the file is cut off")
        (length,) = _LENGTH.unpack_from(file, len(MAGIC))
        described = json.loads(file[start : start + length])
        self._file = file
        self._bytes_left = _MIN_BYTES + max(
            _BYTES * len(file), min(_REPEATED * len(file), _MAX_REPEATED)
        )
        self._values_left = _MIN_VALUES + _VALUES * len(file)
        self._heads: list[tuple[int, np.dtype[Any], tuple[int, ...], Any]] = []
        at = start + length
        for dtype, shape, order in described["arrays"]:
            if not _DTYPE.fullmatch(dtype) or order not in ("C", "F"):
                raise InvalidContent(f"the file has an array of {dtype!r}")
            if len(shape) > _MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
                raise InvalidContent("the file has an array with a wrong shape")
            self._heads.append((at, np.dtype(dtype), tuple(shape), order))
            at += prod(shape) * np.dtype(dtype).itemsize
        if at != len(file):
            raise InvalidContent(f"the file has {len(file)} bytes, not the {at} that it announces")
        self.root: dict[str, Any] = described["estimator"]
        self._trees = self._table(described, "trees")
        self._predictors = self._table(described, "predictors")
        node_tables.check_table(self._trees) if self._trees else None
        node_tables.check_predictor_table(self._predictors) if self._predictors else None
        self._made_trees: list[Any] | None = None
        self._made_predictors: list[Any] | None = None

    def array(self, number: int) -> NDArray[Any]:
        """Copy an array out of the file. Raises InvalidContent if copies take too many bytes."""
        if type(number) is not int or number < 0:
            raise InvalidContent("the file names an array that it does not have")
        at, dtype, shape, order = self._heads[number]
        self._bytes_left -= prod(shape) * dtype.itemsize
        if self._bytes_left < 0:
            raise InvalidContent("the file repeats its arrays more often than an estimator does")
        return np.ndarray(shape, dtype, self._file, at, order=order).copy(order="K")

    def skops(self, number: int) -> bytes:
        """A file of skops in an array."""
        return self.array(number).tobytes()

    def _table(self, described: Mapping[str, Any], key: str) -> node_tables.Columns:
        return {name: self.array(number) for name, number in described.get(key, {}).items()}

    def _count(self, values: int = 1) -> None:
        self._values_left -= values
        if self._values_left < 0:
            raise InvalidContent("the file repeats its values more often than an estimator does")

    def _expanded(self, node: Any) -> Iterator[Any]:
        """Yield the estimators of a list with all their attributes. Raises InvalidContent."""
        if isinstance(node, list):
            yield from node
            return
        if not isinstance(node, dict) or node.keys() != {"E"}:
            raise InvalidContent("the file has another value where a list of estimators must be")
        name, count, shared, own = node["E"]
        if type(count) is not int or not own or any(len(one) != count for one in own.values()):
            raise InvalidContent("the file has a list of estimators of another length than it says")
        for at in range(count):
            self._count(len(shared) + len(own))
            yield {"e": [name, {**shared, **{key: values[at] for key, values in own.items()}}]}

    # --- checks ---

    def check(self, node: Any) -> None:
        """Raise InvalidContent if a part of a description is of no kind of the format, or if an
        estimator has trees of more columns than it checks rows for."""
        self._count()
        if isinstance(node, list):
            for one in node:
                self.check(one)
            return
        if not isinstance(node, dict):
            return
        if len(node) != 1:
            raise InvalidContent("the file has a value of no known kind")
        ((kind, value),) = node.items()
        match kind:
            case "t":
                self.check(value)
            case "d":
                for key, one in value:
                    self.check([key, one])
            case "o":
                self.check(value[1])
            case "e":
                self._check_estimator(*_named(node))
            case "E":
                for one in self._expanded(node):
                    self.check(one)
            case "k":
                # Trees are written as arrays: none in a file of skops may split a column.
                skops_files.check(self.skops(value), allowed.SKOPS, 0, allowed.IN_SKOPS)
            case "l":
                allowed.LOSSES[value[0]]
            case "f":
                allowed.FUNCTIONS[value]
            case "n" | "y" | "D":
                if not _DTYPE.fullmatch(value[0] if kind == "n" else value):
                    raise InvalidContent("the file has a number of an unknown type")
            case "a":
                self.array(value)
            case _:
                raise InvalidContent(f"the file has a value of the kind {kind[:10]!r}")

    def _check_estimator(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Raise InvalidContent if attributes could lead native code out of its bounds."""
        attributes = dict(attributes)
        width = attributes.get("n_features_in_")
        if attributes.get("_in_fit", False) is not False:
            raise InvalidContent(f"the {name} has _in_fit, with which it checks no rows")
        if attributes.get("_preprocessor") is not None:
            raise InvalidContent(f"the {name} has a _preprocessor, and columns are numbers")
        if name == "FunctionTransformer" and any(
            attributes.get(key) is not None for key in ("func", "inverse_func")
        ):
            raise InvalidContent("a FunctionTransformer has a function")
        if name in allowed.TREES and "tree_" in attributes:
            number = _number(attributes.pop("tree_"), "T")
            if self._trees[node_tables.NUM_FEATURES][number] != width:
                raise InvalidContent("a tree is of other columns than its estimator")
            if attributes.get("n_outputs_") != 1:
                raise InvalidContent("a tree has more than one output")
        elif name in allowed.HISTOGRAM_BOOSTING and "_predictors" in attributes:
            widths = self._predictors[node_tables.NUM_FEATURES]
            for one in [one for stage in attributes.pop("_predictors") for one in stage]:
                if type(width) is not int or widths[_number(one, "P")] > width:
                    raise InvalidContent("a tree is of other columns than its estimator")
        elif name in allowed.FORESTS | allowed.GRADIENT_BOOSTING and "estimators_" in attributes:
            members = attributes["estimators_"]
            if isinstance(members, dict) and members.keys() == {"o"}:
                members = members["o"][1]
            for one in self._expanded(members):
                kind, own = _named(one)
                is_tree = kind in allowed.TREES and "tree_" in own
                if not is_tree or own.get("n_features_in_") != width:
                    raise InvalidContent(f"a {name} has members that are no trees of its columns")
            if name in allowed.GRADIENT_BOOSTING and not (
                type(width) is int and 0 < width <= _MAX_COLUMNS
            ):
                raise InvalidContent(f"a {name} has {width} columns, at most {_MAX_COLUMNS} may be")
            if name in allowed.GRADIENT_BOOSTING and attributes.get("init_") != "zero":
                kind, own = _named(attributes["init_"])
                if kind not in allowed.INIT or own.get("n_features_in_", width) != width:
                    raise InvalidContent(f"a {name} has a {kind} as init_")
        elif name in allowed.SUPPORT_VECTORS and "support_vectors_" in attributes:
            self._check_support_vectors(name, attributes)
        elif name in allowed.NEIGHBOURS and "_fit_X" in attributes:
            self._check_neighbours(name, attributes)
        elif name == "KMeans" and "cluster_centers_" in attributes:
            if self.array(attributes["cluster_centers_"]["a"]).shape[1:] != (width,):
                raise InvalidContent("the centers of KMeans are of other columns than it")
        elif name == "OneHotEncoder" and "categories_" in attributes:
            self._check_one_hot(attributes)
        self.check(list(attributes.values()))

    def _check_support_vectors(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Raise InvalidContent unless the arrays fit together that native code reads."""
        vectors, coefficients, intercept, counts, support = (
            self.array(attributes[key]["a"])
            for key in ("support_vectors_", "_dual_coef_", "_intercept_", "_n_support", "support_")
        )
        classes, num = len(counts), len(vectors)
        pairs = max(classes * (classes - 1) // 2, 1)
        are_right = (
            vectors.shape == (num, attributes["n_features_in_"])
            and coefficients.shape == (max(classes - 1, 1), num)
            and (intercept.shape, support.shape) == ((pairs,), (num,))
            and counts.dtype.kind == "i"
            and (counts >= 0).all()
            and (counts <= num).all()
            and (support >= 0).all()
            and (counts.sum() == num or name not in allowed.CLASSIFIERS)
            and "_impl" not in attributes  # of the class
            # "precomputed", or what can be called, would read columns by support_.
            and attributes["kernel"] in _KERNELS
            and attributes.get("_sparse") is False
        )
        for key in ("_probA", "_probB"):
            are_right &= self.array(attributes[key]["a"]).shape in ((0,), (pairs,))
        if not are_right:
            raise InvalidContent("the arrays of support vectors do not fit together")

    def _check_neighbours(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Raise InvalidContent unless native code finds a class for each row that was fitted."""
        rows, target = (self.array(attributes[key]["a"]) for key in ("_fit_X", "_y"))
        if rows.shape != (len(target), attributes["n_features_in_"]) or not len(target):
            raise InvalidContent("the rows of neighbours are others than their targets")
        if name in allowed.CLASSIFIERS:
            num_classes = len(self.array(attributes["classes_"]["a"]))
            are_codes = target.ndim == 1 and target.dtype.kind == "i"
            if not are_codes or target.min() < 0 or target.max() >= num_classes:
                raise InvalidContent("a row of neighbours is of none of their classes")

    def _check_one_hot(self, attributes: Mapping[str, Any]) -> None:
        """Raise InvalidContent unless there is a column for each category."""
        counts = [len(self.array(one["a"])) for one in attributes["categories_"]]
        are_left_out = attributes.get("_infrequent_enabled") is not False or any(
            attributes.get(key) is not None for key in ("drop_idx_", "_drop_idx_after_grouping")
        )
        if attributes["_n_features_outs"] != counts or are_left_out:
            raise InvalidContent("a OneHotEncoder has other columns than categories")

    # --- objects ---

    def made(self, node: Any) -> Any:
        """Make the value that a description stands for, of a file that has been checked."""
        self._count()
        if isinstance(node, list):
            return [self.made(one) for one in node]
        if not isinstance(node, dict):
            return node
        ((kind, value),) = node.items()
        match kind:
            case "a":
                return self.array(value)
            case "n":
                return np.dtype(value[0]).type(value[1])
            case "t":
                return tuple(self.made(one) for one in value)
            case "d":
                return {self.made(key): self.made(one) for key, one in value}
            case "o":
                flat = self.made(value[1])
                made = np.empty(len(flat), object)
                for at, one in enumerate(flat):  # some estimators are sequences
                    made[at] = one
                return made.reshape(value[0])
            case "e":
                return self._estimator(*_named(node))
            case "E":
                return [self.made(one) for one in self._expanded(node)]
            case "T":
                if self._made_trees is None:
                    self._made_trees = node_tables.trees_of(self._trees)
                return self._made_trees[value]
            case "P":
                if self._made_predictors is None:
                    self._made_predictors = node_tables.predictors_of(self._predictors)
                return self._made_predictors[value]
            case "l":
                return allowed.loss_of(value[0])(**value[1])
            case "f":
                return allowed.function_of(value)
            case "y":
                return np.dtype(value).type
            case "D":
                return np.dtype(value)
            case "k":
                return skops_files.load(self.skops(value))
        raise InvalidContent(f"the file has a value of the kind {kind[:10]!r}")

    def _estimator(self, name: str, attributes: Mapping[str, Any]) -> Any:
        """Make an estimator without fitting it, and set its attributes. Raises InvalidContent."""
        kind = allowed.class_of(name)
        for key in attributes:
            # A method would be another one, and checks of rows are methods.
            if hasattr(kind, key) and key not in signature(kind).parameters:
                raise InvalidContent(f"the {name} has an attribute {key!r}, which its class has")
        made = kind.__new__(kind)
        state = {key: self.made(value) for key, value in attributes.items()}
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
        else:
            made.__dict__.update(state)
        if name in allowed.NEIGHBOURS and "_fit_method" in state:
            _add_tree(made)
        if name in allowed.GRADIENT_BOOSTING and "estimators_" in state:
            # Native code adds the trees of a stage to as many columns, without a check.
            for rows in (1, 2):
                first = made._raw_predict_init(np.zeros((rows, made.n_features_in_), np.float32))
                if first.shape != (rows, *made.estimators_.shape[1:]):
                    raise InvalidContent(f"a {name} has other trees in a stage than it predicts")
        return made


def _add_tree(neighbours: Any) -> None:
    """Give an estimator of neighbours the tree of its rows, as its fit makes it."""
    from sklearn.neighbors import BallTree, KDTree

    kind = {"ball_tree": BallTree, "kd_tree": KDTree}.get(neighbours._fit_method)
    neighbours._tree = kind and kind(
        neighbours._fit_X,
        neighbours.leaf_size,
        metric=neighbours.effective_metric_,
        **neighbours.effective_metric_params_,
    )


def _named(node: Any) -> tuple[str, Mapping[str, Any]]:
    """Take name and attributes out of an estimator's description. Raises InvalidContent."""
    if not isinstance(node, dict) or node.keys() != {"e"}:
        raise InvalidContent("the file has another value where an estimator must be")
    name, attributes = node["e"]
    if name not in allowed.NAMES or not isinstance(attributes, dict):
        raise InvalidContent(f"the file names {str(name)[:60]!r}, which is no known estimator")
    return name, attributes


def _number(node: Any, kind: str) -> int:
    """Take the number of a tree out of its description. Raises InvalidContent."""
    if not isinstance(node, dict) or node.keys() != {kind} or type(node[kind]) is not int:
        raise InvalidContent("the file has another value where a tree must be")
    number: int = node[kind]
    if number < 0:
        raise InvalidContent("the file names a tree that it does not have")
    return number


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
