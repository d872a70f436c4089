"""Conversion between a script's weights and the flat vector that travels.

A script's weights are a torch module, a mapping of names to torch tensors or numpy arrays, or a
flat vector. Which of a model's tensors travel:

- trainable parameters, as kind "weight";
- buffers of floating point, such as the running mean of a batch normalisation, as kind "statistic";
- not frozen parameters and integer counters: each participant keeps its own;
- not the tensors that the coordinator's `[model] personal` names.

A mapping has no buffers: its entries of floating point travel, and those called running_mean or
running_var are statistics. torch is never imported here: a script that has torch tensors has it.

A tensor travels under its plain name: without the prefixes of DataParallel and torch.compile, so
that a site with a wrapped model trains with sites without, and for the adapters of PEFT under the
name that PEFT saves it by. The script sees the names that it has declared.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.model import (
    Layout,
    TensorSpec,
    flatten,
    is_personal,
    require_personal,
    size_of,
    unflatten,
)

_STATISTICS = ("running_mean", "running_var")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
# Prefixes of names: of DataParallel before those of a model, of torch.compile before those of a
# part.
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.")


class LayoutMismatch(ValueError):
    """The tensors of a script are not those of the session. The text names the tensor."""


@dataclass(frozen=True, slots=True)
class Declared:
    """The weights that a script has declared with xain.rounds(initial).

    layout: what travels, in the order of the vector, by plain names; empty for a flat vector.
    values: the tensors of now, by the script's names, also of those that do not travel.
    aliases: a tied tensor's other names, each with the script's name of the tensor that travels.
    names: plain names by the script's names, of all tensors.
    dtypes: types of the tensors that travel, by the script's names.
    num_elements: d.
    is_torch: whether the script works with torch tensors.
    has_control: whether the model gets a control variate of SCAFFOLD.
    """

    layout: Layout
    values: Callable[[], Any]
    num_elements: int
    is_torch: bool
    aliases: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    has_control: bool = False

    def vector(self) -> NDArray[Any]:
        """The initial weights, (d,)."""
        return to_vector(self.values(), self.layout, "xain.rounds()", self)

    def without(self, patterns: Sequence[str]) -> "Declared":
        """The same weights, except that the tensors of these names do not travel. Raises ValueError
        if a pattern matches none of the tensors, or all match."""
        if not patterns:
            return self
        require_personal([spec.name for spec in self.layout], patterns)
        layout = tuple(spec for spec in self.layout if not is_personal(spec.name, patterns))
        return replace(self, layout=layout, num_elements=size_of(layout))


def declare(initial: Any) -> Declared:
    """Find the tensors of a script's initial weights that travel.

    initial: a torch module, a mapping of tensors or arrays, a flat vector, or a callable without
        arguments that returns one of them.
    Raises TypeError for anything else, and ValueError for tensors that cannot travel.
    """
    if not is_module(initial) and not isinstance(initial, Mapping) and callable(initial):
        initial = initial()
    if is_module(initial):
        return _declare_module(initial)
    if isinstance(initial, Mapping):
        return _declare_mapping(initial)
    if isinstance(initial, np.ndarray) or is_tensor(initial):
        if is_tensor(initial) or initial.dtype.kind == "f":
            _require_travels("xain.rounds() was given a vector that", initial)
        vector = _flat(initial, "xain.rounds()")
        return Declared((), lambda: initial, vector.size, is_tensor(initial))
    raise TypeError(
        "xain.rounds() takes a torch module, a mapping of names to arrays, a flat vector, or a "
        f"function that returns one of them, not {type(initial).__name__}"
    )


def _declare_module(module: Any) -> Declared:
    """The tensors of a torch module that travel: trainable parameters, tied ones once, and buffers
    of floating point. Raises ValueError."""
    state = module.state_dict()
    trained: dict[int, str] = {}  # id of a parameter: a tied one travels once
    aliases: dict[str, str] = {}
    kinds: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad or name not in state:
            continue
        first = trained.setdefault(id(parameter), name)
        if first == name:
            kinds[name] = "weight"
        else:
            aliases[name] = first
    for name, buffer in module.named_buffers():
        if name in state and buffer.is_floating_point():
            kinds[name] = "statistic"
    if "weight" not in kinds.values():
        raise ValueError("the model has no parameter that requires a gradient: nothing to train")
    for name in kinds:
        _require_travels(f"tensor {name!r}", state[name])
    names = plain_names(kinds, state)
    names |= _names_of_adapters(module, {name: state[name] for name in kinds})
    layout = tuple(_spec(names[name], state[name], kind) for name, kind in kinds.items())
    dtypes = {name: state[name].dtype for name in kinds}
    return Declared(layout, module.state_dict, size_of(layout), True, aliases, dtypes, names)


def _names_of_adapters(module: Any, travels: Mapping[str, Any]) -> dict[str, str]:
    """The names by which PEFT saves the tensors of a model's active adapter, by the model's names;
    empty if it is not of PEFT."""
    peft = sys.modules.get("peft")
    if peft is None:
        return {}
    found = [one for one in module.modules() if isinstance(one, peft.PeftModel)]
    if not found or not isinstance(found[0].active_adapter, str):
        return {}
    saved = peft.get_peft_model_state_dict(
        found[0], adapter_name=found[0].active_adapter, save_embedding_layers=False
    )
    by_memory = {tensor.data_ptr(): name for name, tensor in saved.items()}
    return {
        name: by_memory[tensor.data_ptr()]
        for name, tensor in travels.items()
        if tensor.data_ptr() in by_memory
    }


def _declare_mapping(mapping: Mapping[str, Any]) -> Declared:
    """The tensors of a mapping that travel: those of floating point. Raises TypeError and
    ValueError."""
    kinds, dtypes = {}, {}
    for name, value in mapping.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor is {name!r}; it must be text")
        if not is_tensor(value):
            value = np.asarray(value)
        if _is_floating(value, name):
            _require_travels(f"tensor {name!r}", value)
            kinds[name] = "statistic" if name.rpartition(".")[2] in _STATISTICS else "weight"
            dtypes[name] = value.dtype
    if not kinds:
        raise ValueError("the initial weights have no tensor of floating point: nothing to train")
    names = plain_names(kinds, mapping)
    layout = tuple(_spec(names[name], mapping[name], kind) for name, kind in kinds.items())
    is_torch = any(map(is_tensor, mapping.values()))
    return Declared(layout, lambda: mapping, size_of(layout), is_torch, dtypes=dtypes, names=names)


def plain_names(travels: Iterable[str], others: Iterable[str] = ()) -> dict[str, str]:
    """The plain names of tensors, by their names: without the prefixes of wrappers.

    All names stay as they are if two of the tensors that travel would have the same one.
    """
    plain = {name: _WRAPPERS.sub("", name) for name in travels}
    taken = set(plain.values())
    if len(taken) < len(plain):
        return {name: name for name in (*plain, *others)}
    for name in others:
        if name not in plain and (stripped := _WRAPPERS.sub("", name)) not in taken:
            plain[name] = stripped
    return {**{name: name for name in others}, **plain}


def plain_layout(layout: Layout) -> Layout:
    """The same layout, by plain names."""
    names = plain_names(spec.name for spec in layout)
    return tuple(replace(spec, name=names[spec.name]) for spec in layout)


def _is_floating(value: Any, name: str) -> bool:
    """Whether a tensor or array is of floating point. Raises ValueError if it is neither that nor
    of whole numbers. name: of it, in the message."""
    if is_tensor(value):
        if value.is_complex():
            raise ValueError(f"tensor {name!r} is complex, which cannot travel")
        return bool(value.is_floating_point())
    if value.dtype.kind not in "fiub":
        raise ValueError(f"tensor {name!r} is of {value.dtype}, which cannot travel")
    return bool(value.dtype.kind == "f")


def _spec(name: str, value: Any, kind: str) -> TensorSpec:
    """The layout's entry of a tensor or array; torch tensors travel as float32, or float64."""
    if is_tensor(value):
        dtype = "float64" if str(value.dtype) == "torch.float64" else "float32"
    else:
        value = np.asarray(value)
        dtype = value.dtype.name
    return TensorSpec(
        name, tuple(value.shape), dtype, "statistic" if kind == "statistic" else "weight"
    )


def _require_travels(what: str, value: Any) -> None:
    """Raise ValueError if a tensor or array cannot travel. what: its name in the message."""
    if why := _why_it_stays(value):
        raise ValueError(
            f"{what} {why}, which cannot travel; what is trained must be dense, of the type "
            f"{', '.join(_FLOATS[:-1])} or {_FLOATS[-1]}, and have at least one value"
        )


def _why_it_stays(value: Any) -> str:
    """Why a tensor or array cannot travel, as the end of a sentence; "" if it can."""
    if is_tensor(value):
        if type(value).__name__.startswith("Uninitialized"):
            return "has no shape before the model has seen a batch"
        if str(value.layout) != "torch.strided":
            return f"is sparse ({str(value.layout).removeprefix('torch.')})"
        if value.device.type == "meta":
            return "is on the device meta, where it has no values"
    dtype = str(value.dtype).removeprefix("torch.")
    if getattr(value.dtype, "name", dtype) not in _FLOATS:
        return f"is of {dtype}"
    return "is empty" if 0 in value.shape else ""


def agreed_layout(declared: Declared | None, layout: Layout, size: int) -> Layout:
    """The tensors that a script works with, by plain names: those of the session's model, or those
    of its own where that is a flat vector.

    declared: by the script; None: nothing. layout, size: of the session's model, without a control
        variate.
    Raises LayoutMismatch if they are of different models.
    """
    layout = plain_layout(layout)
    if declared is None:
        return layout
    if declared.layout and layout:
        _require_same(declared.layout, layout)
    if declared.num_elements != size:
        raise LayoutMismatch(
            f"this script's model has {declared.num_elements} values, the session's {size}"
        )
    return layout if declared.layout and layout else declared.layout


def _require_same(ours: Layout, theirs: Layout) -> None:
    """Compare the script's tensors with those of the session, by name in any order. Raises
    LayoutMismatch for the first tensor that differs."""
    own, session = {s.name: s for s in ours}, {s.name: s for s in theirs}
    for name, spec in session.items():
        if name not in own:
            raise LayoutMismatch(
                f"the session's model has a tensor {name!r} of shape {spec.shape}, "
                "which this script's model has not"
            )
        if own[name].shape != spec.shape:
            raise LayoutMismatch(
                f"tensor {name!r} has shape {own[name].shape} in this script and {spec.shape} in "
                "the session's model"
            )
    for name, spec in own.items():
        if name not in session:
            raise LayoutMismatch(
                f"this script's model has a tensor {name!r} of shape {spec.shape}, which the "
                "session's model has not"
            )


def to_vector(
    weights: Any,
    layout: Layout,
    source: str,
    declared: Declared | None = None,
    personal: Sequence[str] = (),
) -> NDArray[Any]:
    """Join a script's weights into one vector, (d,).

    layout: by plain names; empty if the session has none. source: name of the caller for messages.
    personal: patterns of the plain names of tensors that stay here.
    Raises LayoutMismatch also for a tensor that the model has not, and TypeError for an argument
    that is no weights.
    """
    trained: Layout = ()  # of a module that was not declared: what of it would travel
    names = {} if declared is None else dict(declared.names)
    if is_module(weights):
        if weights.state_dict().keys() != names.keys():
            found = _declare_module(weights)
            trained, names = found.layout, dict(found.names)
        weights = weights.state_dict()
    if isinstance(weights, np.ndarray) or is_tensor(weights):
        return _flat(weights, source)
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"{source} takes model.state_dict(), a mapping of names to arrays or a flat vector, "
            f"not {type(weights).__name__}"
        )
    layout = layout or declare(weights).layout
    expected = {spec.name for spec in layout}
    given = _by_plain_name(weights, names, expected)
    if trained:
        travels = [spec.name for spec in trained]
    else:
        ours = set(names.values())
        travels = [name for name, value in given.items() if name not in ours and _is_float(value)]
    for name in travels:
        if name not in expected and not is_personal(name, personal):
            raise LayoutMismatch(
                f"{source} was given a tensor {name!r}, which the session's model has not; leave "
                "it out, and what is frozen: xain.trainable(model) does"
            )
    arrays = {}
    for spec in layout:
        if spec.name not in given:
            raise LayoutMismatch(f"{source} was given no tensor {spec.name!r}")
        array = _to_numpy(given[spec.name], f"tensor {spec.name!r}")
        if array.shape != spec.shape:
            raise LayoutMismatch(
                f"{source} was given tensor {spec.name!r} with shape {array.shape}, "
                f"expected {spec.shape}"
            )
        arrays[spec.name] = array
    return flatten(arrays, layout)


def _by_plain_name(
    weights: Mapping[str, Any], names: Mapping[str, str], expected: Iterable[str]
) -> dict[str, Any]:
    """Rename the tensors of a mapping to plain names.

    names: plain names by those of the script's model. expected: plain names, which a script may use
    too.
    """
    known = {**{name: name for name in expected}, **names}
    known |= plain_names(name for name in weights if name not in known)
    return {known[name]: value for name, value in weights.items()}


def _is_float(value: Any) -> bool:
    """Whether a value is an array of numbers with fractions, which would travel."""
    if is_tensor(value):
        return bool(value.is_floating_point() or value.is_complex())
    return np.asarray(value).dtype.kind in "fc"


def from_vector(
    vector: NDArray[Any],
    layout: Layout,
    declared: Declared | None,
    kept: Mapping[str, NDArray[Any]],
) -> Any:
    """Convert a vector to the script's weights: a mapping by the script's names, or a flat vector
    if there is no layout.

    layout: by plain names. kept: tensors that this participant keeps for itself, by plain names,
    with their last values.
    Tensors that do not travel have the module's own values, so that load_state_dict() finds all.
    """
    is_torch = declared.is_torch if declared is not None else "torch" in sys.modules
    if not layout:
        return to_tensor(vector) if is_torch else vector
    own: Mapping[str, Any] = declared.values() if declared is not None else {}
    names = {} if declared is None else {plain: name for name, plain in declared.names.items()}
    arrays: dict[str, Any] = {
        names.get(plain, plain): array for plain, array in unflatten(vector, layout).items()
    }
    if is_torch:
        dtypes = declared.dtypes if declared is not None else {}
        arrays = {name: to_tensor(array, dtypes.get(name)) for name, array in arrays.items()}
    ours = {
        names.get(plain, plain): to_tensor(array) if is_torch else array
        for plain, array in kept.items()
    }
    others = {**own, **ours}
    aliases = declared.aliases if declared is not None else {}
    others |= {alias: arrays[name] for alias, name in aliases.items() if name in arrays}
    return {**{name: arrays.get(name, value) for name, value in others.items()}, **arrays}


def kept_tensors(
    weights: Any, personal: Sequence[str], declared: Declared | None = None
) -> dict[str, NDArray[Any]]:
    """The integer tensors and the personal tensors of a script's weights, by plain names, copied:
    they do not travel."""
    if is_module(weights):
        weights = weights.state_dict()
    if not isinstance(weights, Mapping):
        return {}
    names = {} if declared is None else declared.names
    found = {}
    for name, value in _by_plain_name(weights, names, ()).items():
        dtype = (
            str(value.dtype)
            if is_tensor(value) or isinstance(value, np.ndarray | np.generic)
            else ""
        )
        if "int" in dtype or is_personal(name, personal):
            found[name] = np.array(_to_numpy(value, name))
    return found


def trainable(model: Any) -> dict[str, Any]:
    """The tensors of a torch module that travel: trainable parameters and buffers of floating
    point. For a large frozen model with small trained parts, such as LoRA adapters."""
    declared = _declare_module(model)
    state = declared.values()
    return {name: state[name] for name in declared.dtypes}


def is_tensor(value: object) -> bool:
    """Whether this is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_module(value: object) -> bool:
    """Whether this is a torch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _flat(value: Any, source: str) -> NDArray[Any]:
    """Convert a flat vector to a numpy array. Raises TypeError for another shape."""
    vector = _to_numpy(value, "the vector")
    if vector.ndim != 1:
        raise TypeError(
            f"{source} was given an array of shape {vector.shape}; an array must be a flat vector, "
            "several arrays go into a mapping by name"
        )
    return vector


def as_array(value: Any) -> NDArray[Any]:
    """An array of a tensor, a sequence or an array, in float32 where numpy lacks the type."""
    if not is_tensor(value):
        return np.asarray(value)
    value = value.detach().cpu()
    array: NDArray[Any] = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return array


def _to_numpy(value: Any, what: str) -> NDArray[Any]:
    """A tensor or array of numbers as a numpy array. what: it, in the message. Raises TypeError."""
    array = as_array(value)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{what} has type {array.dtype}; it must be numbers")
    return array


def to_tensor(array: NDArray[Any], dtype: Any = None) -> Any:
    """A torch tensor on the memory of an array. dtype: of torch, or its name."""
    torch: Any = import_module("torch")
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return tensor if dtype is None else tensor.to(dtype)


def named_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """The parameters of a torch module that require a gradient.

    Raises TypeError if it is none."""
    if not is_module(model):
        raise TypeError(f"a torch module is needed, not {type(model).__name__}")
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
