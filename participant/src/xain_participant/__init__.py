"""The participant: an SDK, and the agent that runs a workload against a coordinator.

from xain_participant import Participant, run

A module is loaded when one of its names is used first, so that a command does not wait for more
than it needs.
"""

from typing import TYPE_CHECKING

from xain_foundation.on_use import loaded_on_use

if TYPE_CHECKING:
    from xain_participant.agent.agent import Agent, Observer, run
    from xain_participant.keep.state import StateDirectory, StateError
    from xain_participant.sdk.participant import Participant
    from xain_participant.tables.workload_participant import WorkloadParticipant
    from xain_participant.wire.client import CoordinatorClient, Refused

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
        "agent.agent": "Agent Observer run",
        "wire.client": "CoordinatorClient Refused",
        "sdk.participant": "Participant",
        "keep.state": "StateDirectory StateError",
        "tables.workload_participant": "WorkloadParticipant",
    },
)
