"""Controllers and pacing rules by name: those of the core, and those of plug-ins, made from the
options of `[rounds.controller_options]` and `[rounds.pacing_options]`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, TypeVar

from xain_coordinator.core.machine.strategy import Strategy
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.rules.pacing import PACINGS, Pacing, pacing_of
from xain_coordinator.core.rules.selection import CONTROLLERS, Controller, PluginFailed
from xain_coordinator.core.vocabulary.values import Rules
from xain_coordinator.extensions import plugins
from xain_coordinator.extensions.options import made_again, make_named

N = TypeVar("N", int, float)

# Wait of a plug-in's rule that does not tell its own: a crash puts its closing time off by 3 s.
UNKNOWN_WAIT_S = 30.0


def known_controllers() -> list[str]:
    """Names of the controllers that are built in or plugged in, sorted."""
    return plugins.known(plugins.CONTROLLERS, CONTROLLERS)


def known_pacings() -> list[str]:
    """Names of the pacing rules of plug-ins and of the core, sorted."""
    return plugins.known(plugins.PACINGS, PACINGS)


def make_controller(name: str, options: Mapping[str, object]) -> Controller:
    """Make a controller by its name. Raises KeyError if there is none of this name, PluginFailed if
    it is there and cannot be used, and WrongOption."""
    kind = plugins.load(plugins.CONTROLLERS, name, CONTROLLERS)
    made: Controller = make_named(kind, "controller", name, options, ("select",))
    return made


def make_pacing(name: str, options: Mapping[str, object]) -> "CheckedPacing":
    """Make a pacing rule by its name. Raises KeyError if there is none of this name, PluginFailed
    if it is there and cannot be used, and WrongOption."""
    kind = plugins.load(plugins.PACINGS, name, PACINGS)
    methods = ("is_complete", "closes_at", "describe", "awaited")
    return CheckedPacing(make_named(kind, "pacing rule", name, options, methods), name)


def strategy_of_session(rules: Rules) -> Strategy:
    """The controller and the pacing rule that a session was opened with. Raises PluginFailed if
    one is not there any more, or takes other options."""
    options = rules.controller_options
    controller = made_again(make_controller, "controller", rules.controller, options)
    pacing = pacing_of(rules)
    if pacing is None:
        pacing = made_again(make_pacing, "pacing rule", rules.pacing, rules.pacing_options)
    return Strategy(controller, pacing)


@dataclass(frozen=True, slots=True)
class CheckedPacing(Pacing):
    """A pacing rule that may be a plug-in's, whose code may raise anything: errors name the rule. A
    text that it cannot give is replaced by the error, so that `status` and `check-config` go on.

    A rule that does not inherit from Pacing may leave out the methods that came later.
    """

    rule: Pacing
    name: str

    def is_complete(self, round_: Round) -> bool:
        return bool(self._asked("is_complete", round_))

    def closes_at(self, round_: Round) -> float | None:
        return self._number("closes_at", float, round_)

    def shortest_wait_s(self) -> float | None:
        """The shortest wait that the rule announces; UNKNOWN_WAIT_S for a rule that does not
        say."""
        inherited = Pacing.shortest_wait_s
        if getattr(type(self.rule), "shortest_wait_s", inherited) is inherited:
            return UNKNOWN_WAIT_S
        return self._number("shortest_wait_s", float)

    def max_staleness(self) -> int | None:
        return self._number("max_staleness", int)  # as the journal keeps it

    def closes_initial_round(self) -> bool:
        return bool(self._asked("closes_initial_round"))

    def describe(self) -> str:
        return self._text("describe")

    def awaited(self, round_: Round) -> str:
        return self._text("awaited", round_)

    def _number(self, method: str, kind: type[N], *rounds: Round) -> N | None:
        """The finite number that a method of the rule returns, or None. Raises PluginFailed."""
        number: N | None = self._asked(method, *rounds)
        if number is not None and not (isinstance(number, int | kind) and isfinite(number)):
            raise PluginFailed(f"the pacing rule {self.name!r} answers {method}: {number!r}")
        return number

    def _text(self, method: str, *rounds: Round) -> str:
        """The text that a method of the rule returns, or the error that it has raised, as text."""
        try:
            return str(self._asked(method, *rounds))
        except PluginFailed as failed:
            return f"updates of which nothing more is known: {failed}"

    def _asked(self, method: str, *rounds: Round) -> Any:
        """The answer of a method of the rule; where the rule lacks it, of Pacing's. Raises
        PluginFailed."""
        try:
            own = getattr(self.rule, method, partial(getattr(Pacing, method), self.rule))
            return own(*rounds)
        except Exception as error:  # a rule of a plug-in may raise anything
            where = "".join(f" in round {round_.number}" for round_ in rounds)
            raise PluginFailed(
                f"the pacing rule {self.name!r} has failed{where}: {type(error).__name__}: {error}"
            ) from error
