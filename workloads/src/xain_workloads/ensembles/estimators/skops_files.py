"""Fitted estimators as files of skops: those that arrays alone do not describe.

A file is a ZIP archive with "schema.json", which names the type of every object, and with arrays in
numpy's format. Nothing here loads an estimator but load(), and only check_types() needs skops.
"""

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from xain_workloads.ensembles.estimators import allowed, node_tables
from xain_workloads.errors import InvalidContent

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
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest of a ZIP archive


def check(
    file: bytes,
    names: Collection[str],
    num_features: int,
    classes: Collection[str] | None = None,
) -> None:
    """Refuse a file that is none of an estimator with one of these names, or has a type outside of
    scikit-learn and numpy. Nothing in the file is loaded.

    num_features: columns that trees in it may split. classes: of scikit-learn that it may have; all
    if None. Raises InvalidContent.
    """
    members = _members(file)
    schema = _schema(members)
    if not any(_is_of(schema, name) for name in names):
        found = f"{schema.get('__module__')}.{schema.get('__class__')}"
        raise InvalidContent(f"the file is a {found}, not a {' or '.join(sorted(names)[:3])}")
    for node in _nodes(schema):
        loader = node.get("__loader__")
        if loader not in _LOADERS:
            raise InvalidContent(f"the file has a {loader}, which fitted estimators have not")
        inside, kind = str(node.get("__module__")), node.get("__class__")
        if classes is not None and inside.startswith("sklearn") and kind not in classes:
            raise InvalidContent(f"the file has a {kind} of skops, which is described by arrays")
    for name, content in members.items():
        if name != _SCHEMA:
            _check_array(name, content, num_features)
    check_types(file)


def import_skops_io() -> Any:
    """The module skops.io, without PyTorch, which would take another 2 s and 460 MB for nothing.
    Raises ModuleNotFoundError."""
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
    Raises InvalidContent.
    """
    try:
        skops_io = import_skops_io()
    except ModuleNotFoundError:
        return
    try:
        found = set(skops_io.get_untrusted_types(data=file)) - set(TRUSTED)
    except Exception as error:  # skops raises whatever a damaged schema leads to
        raise InvalidContent(f"skops cannot read the file: {_text(error)}") from None
    if found:
        raise InvalidContent(f"the file has types that are not trusted: {', '.join(sorted(found))}")


def load(file: bytes) -> Any:
    """The fitted estimator in a file that has been checked. Raises InvalidContent, and
    ModuleNotFoundError."""
    skops_io = import_skops_io()
    try:
        return skops_io.loads(file, trusted=list(TRUSTED))
    except Exception as error:  # the states of objects are theirs to check
        raise InvalidContent(f"skops cannot load the file: {_text(error)}") from None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _is_of(schema: Mapping[str, Any], name: str) -> bool:
    # A class lies in a private module of the package that has it by its public name.
    inside, module = str(schema.get("__module__")), allowed.module_of(name)
    return schema.get("__class__") == name and (inside == module or inside.startswith(f"{module}."))


def _members(file: bytes) -> dict[str, bytes]:
    """Read the files of an archive. Raises InvalidContent, also for one that is compressed, so that
    no archive takes more memory than its size."""
    try:
        with ZipFile(BytesIO(file)) as archive:
            infos = archive.infolist()
            if any(info.compress_type != ZIP_STORED for info in infos):
                raise InvalidContent("the file is compressed; skops stores it as it is")
            if sum(info.file_size for info in infos) > len(file):
                raise InvalidContent("the file announces more bytes than it has")
            members = {info.filename: archive.read(info) for info in infos}
    except (BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, InvalidContent):
            raise
        raise InvalidContent(f"the file is not of skops: {_text(error)}") from None
    for name in members:
        if name != _SCHEMA and not name.endswith(".npy"):
            raise InvalidContent(f"the file has {name!r}, which is neither a schema nor an array")
    return members


def _schema(members: Mapping[str, bytes]) -> dict[str, Any]:
    """Decode the schema among the files of an archive. Raises InvalidContent."""
    try:
        schema = json.loads(members[_SCHEMA])
    except KeyError:
        raise InvalidContent("the file has no schema") from None
    except (ValueError, RecursionError) as error:
        raise InvalidContent(f"the schema is not JSON: {_text(error)}") from None
    if not isinstance(schema, dict):
        raise InvalidContent("the schema is not a JSON object")
    return schema


def _nodes(schema: object) -> Iterator[dict[str, Any]]:
    """Yield all objects of a schema that say how they are loaded, outer ones first."""
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
    """Read shape, whether the order is Fortran's, and dtype of an array in numpy's format. Raises
    ValueError, KeyError, TypeError or SyntaxError."""
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
    """Read an array in numpy's format, whose header agrees with its size. Raises InvalidContent."""
    file = BytesIO(content)
    try:
        shape, is_fortran, dtype = _header(file)
        size = dtype.itemsize
        for length in shape:
            size *= length
        if dtype.hasobject or size != len(content) - file.tell():
            raise InvalidContent(f"array {name} has another size than its header says")
        order: Any = "F" if is_fortran else "C"
        array = np.ndarray(shape, dtype, content, file.tell(), order=order).copy(order="K")
    except (ValueError, KeyError, TypeError, SyntaxError) as error:
        if isinstance(error, InvalidContent):
            raise
        raise InvalidContent(f"array {name} cannot be read: {_text(error)}") from None
    return array


def _check_array(name: str, content: bytes, num_features: int) -> None:
    """Raise InvalidContent if an array is damaged, or has nodes of a tree that lead nowhere."""
    array = _array(name, content)
    fields = set(array.dtype.names or ())
    for kind in node_tables.KINDS:
        if fields.isdisjoint((kind.left, kind.feature)):
            continue
        if array.ndim != 1:
            raise InvalidContent(f"array {name} has no nodes of a tree")
        one = np.ones(1, np.int64)
        try:
            columns = node_tables.columns_of(array)
            node_tables.check(columns, len(array) * one, num_features * one, kind)
        except InvalidContent as error:
            raise InvalidContent(f"array {name}: {error}") from None


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
