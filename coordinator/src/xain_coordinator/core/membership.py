"""Who is here.

Joining and leaving are events. Heartbeats are soft state: they renew a lease in memory and are
never journalled, so after a restart everyone begins with a full lease.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from xain_coordinator.core.errors import InvalidName
from xain_coordinator.core.values import DataProfile, ParticipantState
from xain_messaging.names import MAX_BYTES, why_not


@dataclass(frozen=True, slots=True)
class Member:
    """A connected participant."""

    participant_id: str
    profile: DataProfile | None
    joined_at: float


@dataclass(frozen=True, slots=True)
class Heard:
    """The last sign of life of a participant."""

    at: float
    state: ParticipantState = ParticipantState.READY
    round: int = -1


def expiries(
    members: Mapping[str, Member], heard: Mapping[str, Heard], lease_floor: float, lease_s: float
) -> Iterator[tuple[str, float]]:
    """(participant, when its lease runs out), in order of joining.

    lease_floor: no lease began earlier than this; the time of the last restart.
    """
    for participant_id, member in members.items():
        sign = heard.get(participant_id)
        began = sign.at if sign is not None else member.joined_at
        yield participant_id, max(began, lease_floor) + lease_s


def check_name(name: str) -> None:
    """Refuse a name that cannot be the last part of a key in every store.

    Raises InvalidName.
    """
    if (why := why_not(name)) is not None:
        raise InvalidName(name if len(name) <= MAX_BYTES else f"{name[:16]}...", why)
