"""The participant: an SDK, and the agent that runs a workload against a coordinator.

from xain_participant import Participant, run

A module is loaded when one of its names is used first, so that a command does not wait for more
than it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xain_participant.agent import Agent, Observer, run
    from xain_participant.client import CoordinatorClient, Refused
    from xain_participant.participant import Participant
    from xain_participant.state import StateDirectory, StateError
    from xain_participant.workload_participant import WorkloadParticipant

__all__ = [
    "Agent",
    "CoordinatorClient",
    "Observer",
    "Participant",
    "Refused",
    "StateDirectory",
    "StateError",
    "WorkloadParticipant",
    "run",
]

_MODULES = {
    "CoordinatorClient": "client",
    "Participant": "participant",
    "Refused": "client",
    "StateDirectory": "state",
    "StateError": "state",
    "WorkloadParticipant": "workload_participant",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'agent')}"), name)
