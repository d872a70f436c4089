"""The participant: an SDK, and the agent that runs a workload against a coordinator.

from xain_participant import Participant, run
"""

from xain_participant.agent import Agent, Observer, Progress, run
from xain_participant.client import CoordinatorClient, Refused
from xain_participant.participant import Participant
from xain_participant.state import StateDirectory, StateError
from xain_participant.workload_participant import WorkloadParticipant

__all__ = [
    "Agent",
    "CoordinatorClient",
    "Observer",
    "Participant",
    "Progress",
    "Refused",
    "StateDirectory",
    "StateError",
    "WorkloadParticipant",
    "run",
]
