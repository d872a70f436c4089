"""Sessions as their commands and pages see them."""

from collections.abc import Sequence
from typing import Any

from xain_coordinator.inspection.client import Snapshot
from xain_wire.fl import inspection_pb2 as inspection


def snapshot(
    *,
    participants: Sequence[inspection.ParticipantStatus] = (),
    rounds: Sequence[inspection.RoundStatus] = (),
    models: Sequence[inspection.ModelStatus] = (),
    **status: Any,
) -> Snapshot:
    """A session with these rounds, and fields of its status."""
    return Snapshot(
        inspection.GetStatusResponse(**status),
        inspection.ListParticipantsResponse(participants=participants),
        inspection.ListRoundsResponse(rounds=rounds),
        inspection.ListModelsResponse(models=models),
    )
