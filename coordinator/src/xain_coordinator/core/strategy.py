"""Strategy of a session: the controller and the pacing rule, which plug-ins may bring."""

from dataclasses import dataclass

from xain_coordinator.core.pacing import Pacing, Quorum, WantedUpdates, pacing_of
from xain_coordinator.core.selection import Controller, ControllerFailed, builtin_controller
from xain_coordinator.core.session import Session
from xain_coordinator.core.values import Rules


@dataclass(frozen=True, slots=True)
class Strategy:
    """controller: selects participants. pacing: says when a round closes."""

    controller: Controller
    pacing: Pacing

    def pacing_of_round(self, session: Session) -> Pacing:
        """The pacing rule of the open round.

        Initial weights are awaited from all participants that are to make some, since without a
        model there is nothing to train, unless a quorum says how many are enough.
        """
        if session.is_untrained and not isinstance(self.pacing, Quorum):
            return WantedUpdates()
        return self.pacing


def builtin_strategy(rules: Rules) -> Strategy:
    """The strategy of rules that name no plug-in. Raises ControllerFailed if they do."""
    pacing = pacing_of(rules)
    if pacing is None:
        raise ControllerFailed(f"no pacing rule of the core is called {rules.pacing!r}")
    return Strategy(builtin_controller(rules.controller, rules.controller_options), pacing)
