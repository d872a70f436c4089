"""Digests of a script's own rules, controllers and pacing rules: of their code, and of the values
that they hold. They are the same at each start of an unchanged script."""

import dis
import functools
import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from copy import copy
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePath
from types import (
    CodeType,
    EllipsisType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any, Final

_CHARACTERS: Final = 12

# repr() of these has the whole value, and no address.
_PLAIN: Final = (
    *(bool, int, float, complex, str, bytes, bytearray, range, NoneType, EllipsisType),
    *(Decimal, Fraction, PurePath, date, time, timedelta),
)
_ITEMS: Final = (dict, MappingProxyType, list, tuple, deque, set, frozenset)
_WITHOUT_ORDER: Final = (set, frozenset)
_WRAPPED: Final = "__wrapped__"
_INSTALLED: Final = {"site-packages", "dist-packages"}


def digest_of(given: Any) -> str:
    """Compute the digest of a function, or of an object with its class.

    Of classes, base classes and functions of the script's own it has the source, and also those
    that they hold, that closures have, and that functions read by their global names; of values so
    reached: numbers, text, arrays, tensors, enums, lists, sets and mappings. Of modules, and of
    classes, functions and objects of installed libraries it has the name alone.
    """
    text = _Description(given).with_all_that_it_names(given)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:_CHARACTERS]


class _Description:
    """Describes an object as text. Neither addresses nor the order of sets are in it."""

    def __init__(self, given: Any) -> None:
        package = _package(given if inspect.isroutine(given) else type(given))
        self._given = given
        # Its code is the script's own, also if it is installed.
        self._package = None if _is_standard(package) else package
        # Numbers of objects by identity, in the order of visits, and the objects, which must live.
        self._numbered: dict[int, tuple[int, Any]] = {}
        self._waiting: deque[Any] = deque()  # numbered, and not described yet

    def with_all_that_it_names(self, value: Any) -> str:
        """The description of a value, then a line for each object that it leads to."""
        lines = [self.of(value)]
        while self._waiting:  # no recursion: functions of a script may be long chains
            lines.append(self._describe(self._waiting.popleft()))
        return "\n".join(lines)

    def of(self, value: Any) -> str:
        """Describe a value itself, or number an object, which is described later, once."""
        if isinstance(value, Enum):
            return f"{_name(type(value))}.{value.name}={self.of(value.value)}"
        if hasattr(type(value), "__array__"):
            return self._of_array(value)
        if type(value) in _PLAIN or isinstance(value, PurePath):
            return repr(value)
        # Which of these are the same object depends on the compiler. Cycles lead through others.
        if type(value) in (tuple, frozenset):
            return self._of_items(value)
        if isinstance(value, CodeType):
            return f"{value.co_code.hex()} {value.co_names} {self.of(value.co_consts)}"
        if id(value) not in self._numbered:
            self._numbered[id(value)] = (len(self._numbered), value)
            self._waiting.append(value)
        return f"<{self._numbered[id(value)][0]}>"

    def _describe(self, value: Any) -> str:
        """Describe an object that has a number: by its code, or by what it wraps or holds."""
        match value:
            case type():
                return self._of_class(value) if self._is_own(value) else _name(value)
            case FunctionType():
                return self._of_function(value) if self._is_own(value) else _name(value)
            case MethodType():
                return f"{self.of(value.__func__)} of {self.of(value.__self__)}"
            case functools.partial():
                return f"partial{self.of((value.func, value.args, value.keywords))}"
            case staticmethod() | classmethod():
                return self.of(value.__func__)
            case property():
                return self.of((value.fget, value.fset, value.fdel))
            case functools.cached_property():
                return self.of(value.func)
            case _:
                return self._of_object(value)

    # --- values ---

    def _of_array(self, value: Any) -> str:
        """Describe an array by dtype, shape and digest; by its class without a dense form."""
        from xain.weights import as_array

        try:
            array = as_array(value)
        except (TypeError, ValueError, RuntimeError):  # it has no dense form
            return _name(type(value))
        if array.dtype.hasobject:
            return f"{array.shape}{self.of(tuple(array.ravel().tolist()))}"
        dtype = getattr(value, "dtype", array.dtype)  # bfloat16 becomes float32
        return f"{dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"

    def _of_items(self, value: Any) -> str:
        """Describe the items of a collection; those without an order sorted by description."""
        if isinstance(value, dict | MappingProxyType):
            keys = sorted(((self._alone(key), key) for key in value), key=lambda pair: pair[0])
            parts = [f"{text}: {self.of(value[key])}" for text, key in keys]
        elif isinstance(value, _WITHOUT_ORDER):
            parts = sorted(map(self._alone, value))
        else:
            parts = [self.of(one) for one in value]
        return f"{type(value).__name__}({', '.join(parts)})"

    def _alone(self, value: Any) -> str:
        """Describe one of several values whose order means nothing: with no number of another."""
        alone = copy(self)
        alone._numbered, alone._waiting = dict(self._numbered), deque()
        return alone.with_all_that_it_names(value)

    def _of_object(self, value: Any) -> str:
        """Describe an object by class, items and attributes; of another library by the former
        two."""
        kind = type(value)
        text = _name(kind)
        if isinstance(value, _ITEMS):
            text = f"{text} {self._of_items(value)}"
        if value is not self._given and not self._is_own(kind):
            # Such as functions of C, and what functools.cache makes.
            wrapped = self.of(getattr(value, "__dict__", {}).get(_WRAPPED))
            return f"{text} {getattr(value, '__name__', '')} {wrapped}"
        text = f"{text} {self.of(kind)}"
        # Attributes of another library's object, such as the weights of a torch module, may be
        # drawn anew at each start.
        if value is not self._given and not all(
            self._is_own(one) or _is_standard(_package(one)) for one in kind.__mro__
        ):
            return text
        held = dict(getattr(value, "__dict__", {}))
        for one in kind.__mro__:
            for name, member in vars(one).items():
                if isinstance(member, MemberDescriptorType) and hasattr(value, name):  # a slot
                    held[f"{one.__qualname__}.{name}"] = getattr(value, name)
        return f"{text} {self._of_names(held)}"

    def _of_names(self, held: Mapping[str, Any]) -> str:
        """Values with their names, sorted by name."""
        return str([f"{name}={self.of(one)}" for name, one in sorted(held.items())])

    # --- code ---

    def _is_own(self, code: Any) -> bool:
        """Whether a class, a function or a module is the script's own code."""
        package = _package(code)
        return package == self._package or not (_is_standard(package) or _is_installed(package))

    def _of_class(self, kind: type) -> str:
        """Describe a class by its name, bases, source, methods and other members."""
        source = _source(kind)
        members = [
            f"{name}={self._of_function(one, source)}"
            if isinstance(one, FunctionType)
            else f"{name}={self.of(one)}"
            for name, one in sorted(vars(kind).items())
            # Some of the other names with underscores have the number of a line.
            if isinstance(one, FunctionType) or not name.startswith("__")
        ]
        return f"{_name(kind)} {self.of(kind.__bases__)} {source} {members}"

    def _of_function(self, function: FunctionType, source_of_class: str = "") -> str:
        """Describe a function by its name, source, defaults, closure, attributes, and the global
        values that it reads. source_of_class: source in which its own may be."""
        code = function.__code__
        source = _source(code)  # not that of the function, which would be that of what it wraps
        if function.__name__ == "<lambda>" or not (source or source_of_class):
            source += self.of(code)  # several of a line have the same source, or there is none
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        closure = {name: _content(cell) for name, cell in cells}
        values = (function.__defaults__, function.__kwdefaults__)
        parts = [closure, self._read(function), vars(function)]
        return f"{_name(function)} {source} {self.of(values)} {[*map(self._of_names, parts)]}"

    def _read(self, function: FunctionType) -> Mapping[str, Any]:
        """Collect values that a function reads by global names, also in the script's modules."""
        found: dict[str, Any] = {}
        for code in _with_inner(function.__code__):
            for one in dis.get_instructions(code):
                if one.opname != "LOAD_GLOBAL":
                    continue
                value = found[one.argval] = function.__globals__.get(one.argval)
                if isinstance(value, ModuleType) and self._is_own(value):
                    of_module = vars(value)
                    found |= {
                        f"{one.argval}.{name}": of_module[name]
                        for name in code.co_names
                        if name in of_module
                    }
        return {name: one for name, one in found.items() if self._is_content(one)}

    def _is_content(self, value: Any) -> bool:
        """Whether more than a name is known of a global value. Others may be there at one start and
        not at the next, such as the session that a notebook has opened before."""
        if value is None or isinstance(value, ModuleType):
            return False
        if hasattr(type(value), "__array__") or isinstance(value, _PLAIN + _ITEMS):
            return True
        if isinstance(value, MethodType | functools.partial):
            return True
        if _WRAPPED in getattr(value, "__dict__", {}):
            return True
        is_code = isinstance(value, type | FunctionType)
        return self._is_own(value if is_code else type(value))


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of those within it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _with_inner(one)


def _content(cell: Any) -> Any:
    """The content of a closure's cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _source(code: Any) -> str:
    """The source of a class, function or code; "" without one."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):  # typed at a prompt, or built in
        return ""


def _name(code: Any) -> str:
    """The qualified name of a class or function, with its module."""
    name = getattr(code, "__qualname__", type(code).__qualname__)
    return f"<{getattr(code, '__module__', '')}.{name}>"


def _package(code: Any) -> str:
    """The top-level package of a module, class or function."""
    name = code.__name__ if isinstance(code, ModuleType) else getattr(code, "__module__", "")
    return str(name).partition(".")[0]


def _is_standard(package: str) -> bool:
    """Whether a package is Python's, numpy or ours."""
    is_ours = package == "xain" or package.startswith("xain_")
    return is_ours or package == "numpy" or package in sys.stdlib_module_names


def _is_installed(package: str) -> bool:
    """Whether a package is installed, and not the script's own."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and not _INSTALLED.isdisjoint(Path(file).parts)
