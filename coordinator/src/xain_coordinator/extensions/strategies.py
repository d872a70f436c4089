"""Controllers and pacing rules by name: those of the core, and those of plug-ins, made from the
options of `[rounds.controller_options]` and `[rounds.pacing_options]`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

from xain_coordinator.core.pacing import PACINGS, Pacing, pacing_of
from xain_coordinator.core.round import Round
from xain_coordinator.core.selection import CONTROLLERS, Controller, ControllerFailed
from xain_coordinator.core.strategy import Strategy
from xain_coordinator.core.values import Option, Rules
from xain_coordinator.extensions import plugins
from xain_coordinator.extensions.options import make

T = TypeVar("T")


def known_controllers() -> list[str]:
    """Built in or plugged in, sorted."""
    return plugins.known(plugins.CONTROLLERS, CONTROLLERS)


def known_pacings() -> list[str]:
    """Built in or plugged in, sorted."""
    return plugins.known(plugins.PACINGS, PACINGS)


def make_controller(name: str, options: Mapping[str, object]) -> Controller:
    """Raises KeyError if there is no such controller, PluginFailed if it is there and cannot be
    used, and WrongOption."""
    kind = plugins.load(plugins.CONTROLLERS, name, CONTROLLERS)
    made: Controller = _made(kind, "controller", name, options, ("select",))
    return made


def make_pacing(name: str, options: Mapping[str, object]) -> Pacing:
    """Raises KeyError if there is no such pacing rule, PluginFailed if it is there and cannot be
    used, and WrongOption."""
    kind = plugins.load(plugins.PACINGS, name, PACINGS)
    methods = ("is_complete", "closes_at", "describe", "awaited")
    made: Pacing = _made(kind, "pacing rule", name, options, methods)
    return made


def strategy_of_session(rules: Rules) -> Strategy:
    """The controller and the pacing rule that a session was opened with.

    Raises ControllerFailed if one is not there any more, or takes other options.
    """
    options = rules.controller_options
    controller = _of_session(make_controller, "controller", rules.controller, options)
    pacing = pacing_of(rules)
    if pacing is None:
        plugged = _of_session(make_pacing, "pacing rule", rules.pacing, rules.pacing_options)
        pacing = _Checked(plugged, rules.pacing)
    return Strategy(controller, pacing)


def _made(
    kind: Any, what: str, name: str, options: Mapping[str, object], methods: tuple[str, ...]
) -> Any:
    if not isinstance(kind, type):
        raise plugins.PluginFailed(f"the plug-in {name!r} is no {what}: it is not a class")
    made: Any = make(kind, f"{what} {name!r}", options)
    for method in methods:
        if not callable(getattr(made, method, None)):
            raise plugins.PluginFailed(f"the plug-in {name!r} is no {what}: it has no {method}()")
    return made


def _of_session(
    make_one: Callable[[str, Mapping[str, Option]], T],
    what: str,
    name: str,
    options: Mapping[str, Option],
) -> T:
    try:
        return make_one(name, options)
    except KeyError:
        why = "it is not installed"
    except ValueError as error:
        why = str(error)
    raise ControllerFailed(
        f"the session's {what} is {name!r}, and it cannot be had: {why}; install what the "
        "session was opened with, or open another one with --new-session"
    )


@dataclass(frozen=True, slots=True)
class _Checked:
    """A pacing rule of a plug-in, whose code may raise anything: errors name the rule. A text that
    it cannot give is replaced by the error, so that `status` and `check-config` go on."""

    rule: Pacing
    name: str

    def is_complete(self, round_: Round) -> bool:
        return bool(self._asked("is_complete", round_))

    def closes_at(self, round_: Round) -> float | None:
        at = self._asked("closes_at", round_)
        if at is not None and not (isinstance(at, int | float) and isfinite(at)):
            raise ControllerFailed(f"the pacing rule {self.name!r} closes a round at {at!r}")
        return at

    def describe(self) -> str:
        return self._text("describe")

    def awaited(self, round_: Round) -> str:
        return self._text("awaited", round_)

    def _text(self, method: str, *rounds: Round) -> str:
        try:
            return str(self._asked(method, *rounds))
        except ControllerFailed as failed:
            return f"updates of which nothing more is known: {failed}"

    def _asked(self, method: str, *rounds: Round) -> Any:
        try:
            return getattr(self.rule, method)(*rounds)
        except Exception as error:
            where = "".join(f" in round {round_.number}" for round_ in rounds)
            raise ControllerFailed(
                f"the pacing rule {self.name!r} has failed{where}: {type(error).__name__}: {error}"
            ) from error
