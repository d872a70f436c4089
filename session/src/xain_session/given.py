"""A script's own rule, controller or pacing rule, handed to the coordinator in its process.

The journal has its qualified name and a digest of its code and values, and never the object itself:
a script that is started again hands over another object, which must have the same digest.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from xain.result import SessionError
from xain_coordinator.aggregation.aggregator import AnyNumber, Float64, Tile, Weights
from xain_coordinator.extensions import plugins
from xain_session.digests import digest_of

SOURCE: Final = "source"  # name of the option that has the digest

# The setting of the name and that of the options, by the argument of xain.session().
SETTINGS: Mapping[str, tuple[str, str]] = {
    "rule": ("aggregation.rule", "aggregation.options"),
    "controller": ("rounds.controller", "rounds.controller_options"),
    "pacing": ("rounds.pacing", "rounds.pacing_options"),
}
_GROUPS: Mapping[str, str] = {
    "rule": plugins.AGGREGATORS,
    "controller": plugins.CONTROLLERS,
    "pacing": plugins.PACINGS,
}


_objects: dict[str, dict[str, Any]] = {}  # by name and digest


class Rule(AnyNumber):
    """Base for a rule of one's own: any number of updates, none of an earlier round.

    combine(tile, weights): tile (k, t) has a slice of each of k updates, weights (k,) their
    samples; returns (t,) float64. It runs in several threads at once, and what it makes of a column
    must depend on that column alone. survey() and weigh() are for rules that look at whole updates
    first; see the page on aggregation.
    """


def settings_of(what: str, given: Any, *, may_change: bool) -> dict[str, Any]:
    """Settings for an argument of xain.session(), which is a name of one that is installed, or an
    object of the script's own; for "rule" also a function of (updates, weights).

    may_change: whether an object of another digest may go on with a session. Raises SessionError.
    """
    name_key, options_key = SETTINGS[what]
    if isinstance(given, str):
        return {name_key: given}
    if isinstance(given, type):
        raise SessionError(
            f"{what} is the class {given.__qualname__}, and an object is wanted: "
            f"{what}={given.__name__}()"
        )
    kind: Any = type(given)
    if inspect.isroutine(given):
        kind = given
        if what != "rule":
            raise SessionError(
                f"{what} is the function {given.__qualname__}; only a rule may be a function"
            )
    name = f"{kind.__module__}.{kind.__qualname__}"
    digest = digest_of(given)
    made = _OfFunction(given) if inspect.isroutine(given) else given
    try:
        plugins.register(_GROUPS[what], name, _kind_of(name, digest, made, may_change=may_change))
    except plugins.PluginFailed as failed:
        raise SessionError(str(failed)) from None
    return {name_key: name, options_key: {SOURCE: digest}}


class _OfFunction(AnyNumber):
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def combine(self, tile: Tile, weights: Weights) -> Float64:
        return np.asarray(self._function(tile, weights), np.float64)


def _kind_of(name: str, digest: str, made: Any, *, may_change: bool) -> type:
    """Make a class for the coordinator's tables of classes, each of whose instances is the object.
    Made with the digest of a session that was begun with other code, it raises ValueError, unless
    may_change."""

    known = _objects.setdefault(name, {})
    known[digest] = made  # beside those of other sessions of this process

    class Given:
        def __new__(cls, source: str = digest) -> Any:
            """Return the object of this digest. Raises ValueError if there is none."""
            if may_change:
                return made
            if source not in known:
                raise ValueError(
                    f"the session was begun with {name} as its code was then, {source}, and now it "
                    f'is {digest}; to go on with the changed one, resume="changed"'
                )
            return known[source]

    return Given
