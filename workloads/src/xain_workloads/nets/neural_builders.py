"""Functions that make torch modules, imported by name: "package.module:function".

The name of a builder comes with the model from the coordinator. An import runs code, so a process
imports the builders that its owner has allowed and nothing else: `[training] builders` of a
participant, `[workload] options.builder` in a coordinator's own configuration, `--allow-builder` of
`xain-coordinator predict`, or allow_builders() in a script.
"""

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from xain_workloads.errors import DataError

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_allowed: set[str] = set()  # patterns, of this process


def require_name(name: str) -> None:
    """Raise ValueError unless the name has the form of a builder's name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f'builder is {name!r}; it must be "package.module:function"')


def allow_builders(patterns: Iterable[str]) -> None:
    """Let this process import the builders whose names match, such as "mypkg.*"."""
    _allowed.update(patterns)


def allowed() -> frozenset[str]:
    """Patterns of the builders that this process may import."""
    return frozenset(_allowed)


def load_builder(name: str) -> Callable[[int, int], Any]:
    """The function of that name. Raises DataError if it is not allowed, or cannot be imported."""
    require_name(name)
    if not any(fnmatchcase(name, pattern) for pattern in _allowed):
        raise DataError(
            f"the builder {name!r} is not allowed here, so it is not imported; if you trust its"
            f' code, name it: [training] builders = ["{name}"] in the configuration of a'
            f" participant, --allow-builder {name} for xain-coordinator predict"
        )
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise DataError(f"the builder {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise DataError(f"the builder {name!r} is no function")
    return found  # type: ignore[no-any-return]  # checked when it is called
