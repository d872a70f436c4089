"""Ensembles as bytes: a frame for each fitted estimator, which is a file of skops.

A model is all frames in the order in which they were added. An update is the frames that a
participant has added in a round. Nothing here loads an estimator or needs skops, but check_types().

Format: MAGIC, the number of frames as uint32, and for each frame the vote's weight, its owner, its
number and the length of the file as uint64, and the file. Numbers are little-endian. A file is a
ZIP archive with "schema.json", which names the type of every object, and with arrays in numpy's
format. A model of stacked votes has a linear model behind the frames; see stacking.Stack.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from struct import Struct
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from xain_workloads.bagging_options import CLASSIFIERS, ONE_CLASS, REGRESSORS, BaggingOptions

MAGIC = b"XENSEMB2"
_MAGIC_0_1 = b"XENSEMB1"  # of version 0.1, whose frames have no owner and no number
KEY = "ensemble"  # in the metadata of a model: {"num_features": p}

# skops imports every package of scikit-learn, and this one imports PyTorch.
_IMPORTS_TORCH = "sklearn.externals.array_api_compat.torch"

# Types of fitted estimators that skops loads only if they are named as trusted. All others that it
# loads are those of scikit-learn and numpy in its own list.
TRUSTED = (
    "numpy.dtype",
    "sklearn._loss.loss.HalfTweedieLossIdentity",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.gaussian_process._gpc._BinaryGaussianProcessClassifierLaplace",
    "sklearn.gaussian_process.kernels.ConstantKernel",
    "sklearn.gaussian_process.kernels.Product",
    "sklearn.gaussian_process.kernels.RBF",
    "sklearn.metrics._dist_metrics.EuclideanDistance64",
    "sklearn.neighbors._kd_tree.KDTree",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.neural_network._stochastic_optimizers.SGDOptimizer",
    "sklearn.tree._tree.Tree",
)

# Kinds of nodes in a schema that a fitted estimator has. Functions and methods are none of them.
_LOADERS = frozenset(
    (
        "DictNode",
        "JsonNode",
        "ListNode",
        "LossNode",
        "NdArrayNode",
        "ObjectNode",
        "RandomGeneratorNode",
        "RandomStateNode",
        "SliceNode",
        "TreeNode",
        "TupleNode",
        "TypeNode",
    )
)
_SCHEMA = "schema.json"
_COUNT = Struct("<I")
_FRAME = Struct("<QQQQ")
_FRAME_0_1 = Struct("<QQ")
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest of a ZIP archive


class InvalidEnsemble(ValueError):
    """Bytes are no ensemble that fits the model. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A fitted estimator as a file of skops.

    weight: of its vote, the rows of its participant. owner: a number of the participant's own, and
    number: of the estimator there. Both together say of which bootstrap it is; both are 0 in
    ensembles of version 0.1.
    """

    weight: int
    file: bytes
    owner: int = 0
    number: int = 0


# --- frames ---


def pack(frames: Sequence[Frame]) -> bytes:
    """The bytes of an ensemble."""
    parts = [MAGIC, _COUNT.pack(len(frames))]
    for frame in frames:
        head = _FRAME.pack(frame.weight, frame.owner, frame.number, len(frame.file))
        parts += [head, frame.file]
    return b"".join(parts)


def unpack(data: bytes) -> list[Frame]:
    """The frames of an ensemble with nothing behind them. Raises InvalidEnsemble."""
    frames, tail = split(data)
    if tail:
        raise InvalidEnsemble(f"{len(tail)} bytes follow the last frame of the ensemble")
    return frames


def split(data: bytes) -> tuple[list[Frame], bytes]:
    """The frames of an ensemble, and the bytes behind them. Raises InvalidEnsemble."""
    at = len(MAGIC) + _COUNT.size
    if not data.startswith((MAGIC, _MAGIC_0_1)) or len(data) < at:
        raise InvalidEnsemble("the bytes are no ensemble")
    frame = _FRAME if data.startswith(MAGIC) else _FRAME_0_1
    (count,) = _COUNT.unpack_from(data, len(MAGIC))
    frames = []
    for number in range(count):
        if len(data) < at + frame.size:
            raise InvalidEnsemble(f"the ensemble ends within frame {number} of {count}")
        weight, *known, length = frame.unpack_from(data, at)
        at += frame.size
        if length > len(data) - at:
            raise InvalidEnsemble(f"the ensemble ends within frame {number} of {count}")
        frames.append(Frame(weight, data[at : at + length], *known))
        at += length
    return frames, data[at:]


def added(updates: Iterable[tuple[bytes, int]]) -> Iterator[Frame]:
    """The frames of updates as they are in the ensemble.

    updates: bytes and number of samples, which becomes the weight of each frame.
    Raises InvalidEnsemble.
    """
    for data, num_samples in updates:
        yield from (replace(frame, weight=num_samples) for frame in unpack(data))


def num_features_of(metadata: Mapping[str, str]) -> int:
    """Columns of the rows that an ensemble predicts. Raises ValueError."""
    try:
        return int(json.loads(metadata[KEY])["num_features"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"the model's metadata do not describe an ensemble: {error}") from error


# --- checks ---


def check_update(
    data: bytes, options: BaggingOptions, num_features: int, *, epochs: int = 1
) -> None:
    """Refuse an update that is not as many estimators of the model's type as a round adds.

    No estimator is loaded. Raises InvalidEnsemble.
    """
    frames = unpack(data)
    expected = options.estimators * epochs
    if len(frames) != expected:
        raise InvalidEnsemble(f"the update has {len(frames)} estimators, a round adds {expected}")
    for number, frame in enumerate(frames):
        try:
            check_file(frame.file, options, num_features)
        except InvalidEnsemble as error:
            raise InvalidEnsemble(f"estimator {number}: {error}") from None


def check_file(file: bytes, options: BaggingOptions, num_features: int) -> None:
    """Refuse a file that is not an estimator of the model's type, or has a type outside of
    scikit-learn and numpy. Nothing in the file is loaded. Raises InvalidEnsemble."""
    members = _members(file)
    schema = _schema(members)
    allowed = (
        (options.estimator, ONE_CLASS) if options.task == "classification" else (options.estimator,)
    )
    found = f"{schema.get('__module__')}.{schema.get('__class__')}"
    modules = {**CLASSIFIERS, **REGRESSORS}
    if not any(_is_of(schema, modules[name], name) for name in allowed):
        raise InvalidEnsemble(f"the file is a {found}, the model is made of {options.estimator}")
    for node in _nodes(schema):
        loader = node.get("__loader__")
        if loader not in _LOADERS:
            raise InvalidEnsemble(f"the file has a {loader}, which fitted estimators have not")
    for name, content in members.items():
        if name != _SCHEMA:
            _check_array(name, content, num_features)
    check_types(file)


def import_skops_io() -> Any:
    """The module skops.io, without PyTorch, which would take another 2 s and 460 MB for nothing.

    Raises ModuleNotFoundError.
    """
    is_hidden = _IMPORTS_TORCH not in sys.modules
    if is_hidden:
        sys.modules[_IMPORTS_TORCH] = None  # type: ignore[assignment]  # makes its import fail
    try:
        import skops.io

        return skops.io
    finally:
        if is_hidden:
            del sys.modules[_IMPORTS_TORCH]


def check_types(file: bytes) -> None:
    """Refuse a file with types outside of TRUSTED and of skops' own list of scikit-learn's types.

    skops reads the schema alone for it. Does nothing where skops is not installed.
    Raises InvalidEnsemble.
    """
    try:
        skops_io = import_skops_io()
    except ModuleNotFoundError:
        return
    try:
        found = set(skops_io.get_untrusted_types(data=file)) - set(TRUSTED)
    except Exception as error:  # skops raises whatever a damaged schema leads to
        raise InvalidEnsemble(f"skops cannot read the file: {_text(error)}") from None
    if found:
        raise InvalidEnsemble(
            f"the file has types that are not trusted: {', '.join(sorted(found))}"
        )


def load(file: bytes, options: BaggingOptions, num_features: int) -> Any:
    """The fitted estimator in a file. Raises InvalidEnsemble, and ModuleNotFoundError."""
    check_file(file, options, num_features)
    skops_io = import_skops_io()
    try:
        return skops_io.loads(file, trusted=list(TRUSTED))
    except Exception as error:  # the states of objects are theirs to check
        raise InvalidEnsemble(f"skops cannot load the file: {_text(error)}") from None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _is_of(schema: Mapping[str, Any], module: str, name: str) -> bool:
    # A class lies in a private module of the package that has it by its public name.
    inside = str(schema.get("__module__"))
    return schema.get("__class__") == name and (inside == module or inside.startswith(f"{module}."))


def _members(file: bytes) -> dict[str, bytes]:
    """The files in an archive. Raises InvalidEnsemble, also for one that is compressed, so that no
    archive takes more memory than its size."""
    try:
        with ZipFile(BytesIO(file)) as archive:
            infos = archive.infolist()
            if any(info.compress_type != ZIP_STORED for info in infos):
                raise InvalidEnsemble("the file is compressed; skops stores it as it is")
            if sum(info.file_size for info in infos) > len(file):
                raise InvalidEnsemble("the file announces more bytes than it has")
            members = {info.filename: archive.read(info) for info in infos}
    except (BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, InvalidEnsemble):
            raise
        raise InvalidEnsemble(f"the file is not of skops: {_text(error)}") from None
    for name in members:
        if name != _SCHEMA and not name.endswith(".npy"):
            raise InvalidEnsemble(f"the file has {name!r}, which is neither a schema nor an array")
    return members


def _schema(members: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        schema = json.loads(members[_SCHEMA])
    except KeyError:
        raise InvalidEnsemble("the file has no schema") from None
    except (ValueError, RecursionError) as error:
        raise InvalidEnsemble(f"the schema is not JSON: {_text(error)}") from None
    if not isinstance(schema, dict):
        raise InvalidEnsemble("the schema is not a JSON object")
    return schema


def _nodes(schema: object) -> Iterator[dict[str, Any]]:
    """All objects of a schema that say how they are loaded, outer ones first."""
    waiting = [schema]
    while waiting:
        at = waiting.pop()
        if isinstance(at, dict):
            if "__loader__" in at:
                yield at
            waiting.extend(reversed(list(at.values())))
        elif isinstance(at, list):
            waiting.extend(reversed(at))


# Python up to 3.12 may fail with SystemError when two threads parse literals, as numpy does with
# the header of an array (python/cpython#106905): it is then read again.
_ATTEMPTS = 10


def _header(file: BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the order is Fortran's, and dtype. Raises ValueError, KeyError, TypeError or
    SyntaxError."""
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[version]
    start = file.tell()
    for _ in range(_ATTEMPTS - 1):
        with suppress(SystemError):
            return read(file)
        file.seek(start)
    return read(file)


def _array(name: str, content: bytes) -> NDArray[Any]:
    """An array in numpy's format, whose header agrees with its size. Raises InvalidEnsemble."""
    file = BytesIO(content)
    try:
        shape, is_fortran, dtype = _header(file)
        size = dtype.itemsize
        for length in shape:
            size *= length
        if dtype.hasobject or size != len(content) - file.tell():
            raise InvalidEnsemble(f"array {name} has another size than its header says")
        order: Any = "F" if is_fortran else "C"
        array = np.ndarray(shape, dtype, content, file.tell(), order=order).copy(order="K")
    except (ValueError, KeyError, TypeError, SyntaxError) as error:
        if isinstance(error, InvalidEnsemble):
            raise
        raise InvalidEnsemble(f"array {name} cannot be read: {_text(error)}") from None
    return array


def _check_array(name: str, content: bytes, num_features: int) -> None:
    """Raises InvalidEnsemble. scikit-learn follows the nodes of a tree without looking where they
    lead, so they must lead on, and to columns that there are."""
    array = _array(name, content)
    fields = array.dtype.names or ()
    if "left_child" not in fields:
        return
    if array.ndim != 1 or not {"right_child", "feature"} <= set(fields):
        raise InvalidEnsemble(f"array {name} has no nodes of a tree")
    here = np.arange(len(array))
    is_leaf = array["left_child"] == -1
    for side in ("left_child", "right_child"):
        child = array[side]
        if not np.where(is_leaf, child == -1, (child > here) & (child < len(array))).all():
            raise InvalidEnsemble(f"array {name} has a node whose {side} is none of the tree's")
    column = array["feature"]
    if not (is_leaf | ((column >= 0) & (column < num_features))).all():
        raise InvalidEnsemble(f"array {name} has a node that splits none of the columns")


# --- writing ---


def dump(estimator: Any) -> bytes:
    """A fitted estimator as a file of skops, whose bytes depend on the estimator alone.

    skops names objects and arrays by their addresses; here they are numbered in their order.
    """
    members = _members(import_skops_io().dumps(estimator))
    schema = _schema(members)
    numbers: dict[object, int] = {}
    names: dict[str, str] = {}
    for node in _nodes(schema):
        if "__id__" in node:
            node["__id__"] = numbers.setdefault(node["__id__"], len(numbers))
        if node.get("type") == "numpy" or node.get("file") in members:
            node["file"] = names.setdefault(node["file"], f"{len(names)}.npy")
    written = BytesIO()
    with ZipFile(written, "w", ZIP_STORED) as archive:
        for old, new in names.items():
            archive.writestr(ZipInfo(new, _TIME), _without_gaps(_array(old, members[old])))
        archive.writestr(ZipInfo(_SCHEMA, _TIME), json.dumps(schema))
    return written.getvalue()


def _without_gaps(array: NDArray[Any]) -> bytes:
    """An array in numpy's format, with zeros for the bytes between the fields of a record."""
    if array.dtype.names:
        clean = np.zeros(array.nbytes, np.uint8).view(array.dtype).reshape(array.shape)
        for name in array.dtype.names:
            clean[name] = array[name]
        array = clean
    file = BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()
