"""The participant: an SDK, and the agent that runs a workload against a coordinator.

from xain_participant import Participant, run

A module is loaded when one of its names is used first, so that a command does not wait for more
than it needs.
"""

from typing import TYPE_CHECKING

from xain_foundation.on_use import loaded_on_use

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

__getattr__, __dir__ = loaded_on_use(
    __name__,
    {
        "agent": "Agent Observer run",
        "client": "CoordinatorClient Refused",
        "participant": "Participant",
        "state": "StateDirectory StateError",
        "workload_participant": "WorkloadParticipant",
    },
)
