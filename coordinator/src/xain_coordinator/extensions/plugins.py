"""Plug-ins: rules, controllers, pacing rules and stores of other distributions, by entry points,
and those that a program hands to the coordinator that runs in it.

A distribution names its class in the group, such as `[project.entry-points."xain.aggregators"]`
with `my_rule = "my_package:MyRule"`; installing it beside the coordinator is all. Nothing of a
plug-in is imported before its name is asked for, so one that nobody uses can break nothing.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, distributions
from typing import TypeVar

from xain_coordinator.core.rules.selection import PluginFailed as PluginFailed

AGGREGATORS = "xain.aggregators"
CONTROLLERS = "xain.controllers"
METRICS = "xain.metrics"
PACINGS = "xain.pacings"
STORES = "xain.stores"
TRACKERS = "xain.trackers"

T = TypeVar("T")


_given: dict[tuple[str, str], type] = {}


def register(group: str, name: str, kind: type) -> None:
    """Register a class by name in this process, for coordinators that run in it. A later class of
    the name replaces an earlier one. Raises PluginFailed if a distribution has the name."""
    if _installed(group).get(name):
        raise PluginFailed(f"{name!r} is the name of a plug-in that is installed")
    _given[group, name] = kind


def known(group: str, builtin: Iterable[str]) -> list[str]:
    """Names that a configuration may use, sorted; for messages."""
    own = (name for of, name in _given if of == group)
    return sorted({*builtin, *_installed(group), *own})


def load(group: str, name: str, builtin: Mapping[str, T]) -> T:
    """The object with this name: one of `builtin`, or a plug-in, whose type the caller checks.

    Raises KeyError if nothing has the name. Raises PluginFailed if two things have it: whichever
    was meant, a later installation must not quietly put another in its place, in the middle of a
    session. Raises PluginFailed too if the plug-in cannot be imported.
    """
    if (group, name) in _given and name not in builtin:
        own: T = _given[group, name]  # type: ignore[assignment]  # the caller checks it
        return own
    found = _installed(group).get(name, ())
    if name in builtin:
        if found:
            raise PluginFailed(
                f"{name!r} is built in, and {_origin(found[0])} gives another one of that name; "
                "rename the plug-in's, or uninstall it"
            )
        return builtin[name]
    if not found:
        raise KeyError(name)
    if len(found) > 1:
        origins = " and ".join(_origin(each) for each in found)
        raise PluginFailed(f"{name!r} is given by {origins}; uninstall all but one")
    try:
        loaded: T = found[0].load()
    except Exception as error:
        # Code of another distribution runs here and may raise anything; the error names its origin.
        raise PluginFailed(
            f"the plug-in {name!r} of {_origin(found[0])} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    return loaded


def _installed(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Plug-ins of a group that distributions on sys.path give, by name."""
    return _search(group, tuple(sys.path))


@cache
def _search(group: str, path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Find the plug-ins of a group on `path`. Cached: a search takes many milliseconds, and each
    round asks."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    seen: set[str] = set()
    for one in distributions(path=[*path]):
        entries = one.entry_points.select(group=group)
        # Its name takes reading its metadata, which would take most of a start if done for all.
        name = re.sub("[-_.]+", "-", one.name or "").lower() if entries else ""
        if name in seen:
            continue  # the first of a name on the path is the one that is imported
        for entry in entries:
            found[entry.name] = (*found.get(entry.name, ()), entry)
            seen.add(name)
    return found


def _origin(entry: EntryPoint) -> str:
    """Origin of a plug-in, such as "acme-rules 1.2 (acme.rules:Clever)"."""
    if entry.dist is None:
        return entry.value
    return f"{entry.dist.name} {entry.dist.version} ({entry.value})"
