"""Strategy of a session: the controller and the pacing rule, which plug-ins may bring."""

from dataclasses import dataclass

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.rules.pacing import Pacing, WantedUpdates, pacing_of
from xain_coordinator.core.rules.selection import Controller, PluginFailed, builtin_controller
from xain_coordinator.core.vocabulary.values import Rules


@dataclass(frozen=True, slots=True)
class Strategy:
    """controller: selects participants. pacing: says when a round closes."""

    controller: Controller
    pacing: Pacing

    def pacing_of_round(self, session: Session) -> Pacing:
        """The pacing rule of the open round, which may make initial weights."""
        is_asked = not session.is_untrained or self.pacing.closes_initial_round()
        return self.pacing if is_asked else WantedUpdates()


def builtin_strategy(rules: Rules) -> Strategy:
    """The controller and the pacing rule of the core that the rules name. Raises PluginFailed
    if one of them is a plug-in's."""
    pacing = pacing_of(rules)
    if pacing is None:
        raise PluginFailed(f"no pacing rule of the core is called {rules.pacing!r}")
    return Strategy(builtin_controller(rules.controller, rules.controller_options), pacing)
