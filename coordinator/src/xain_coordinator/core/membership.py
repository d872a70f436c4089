"""Members of a session, and their leases.

Joining and leaving are events. Heartbeats are soft state: they renew a lease in memory and are
never journalled, so after a restart everyone begins with a full lease.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from xain_coordinator.core.errors import InvalidName, InvalidTags
from xain_coordinator.core.values import DataProfile, ParticipantState, Rules, Transfer
from xain_foundation.names import why_not
from xain_messaging.tags import MAX_TAGS
from xain_messaging.tags import why_not as why_not_tags

# A process can take up more connections, but then does little else.
RECONNECTS_PER_S = 500
# Below it participants spread by themselves.
MIN_SPREAD_S = 0.2

# Second processes with the id of one participant that are remembered, and for how long after their
# last attempt: an operator is to see the conflict, and to see that it is over.
MAX_CONTENDERS = 8
CONTENDER_KEPT_S = 600.0
# The shortest time after which a second process is asked to come again.
MIN_CONTENDER_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Member:
    """A connected participant.

    is_eligible: its tags are such that it may be selected.
    can_evaluate: it has held-out data, and knows rounds that only evaluate.
    instance_id: of its process; "" if that has none.
    can_initialise: it can make initial weights.
    group_address: HOST:PORT at which it would listen as rank 0 of a process group; "" if it takes
        part in none.
    """

    participant_id: str
    profile: DataProfile | None
    joined_at: float
    tags: Mapping[str, str] = field(default_factory=dict)
    is_eligible: bool = True
    can_evaluate: bool = False
    instance_id: str = ""
    can_initialise: bool = True
    group_address: str = ""

    def is_instance(self, instance_id: str) -> bool:
        """Whether a call with this instance id is the member's own. A call without one is."""
        return not (self.instance_id and instance_id) or instance_id == self.instance_id


@dataclass(frozen=True, slots=True)
class Turn:
    """Last selection of each participant.

    at: how many selections of single participants the session had made then, or when it came.
    round: the one that it was selected for; None before the first.
    """

    at: int
    round: int | None = None


@dataclass(frozen=True, slots=True)
class Refusals:
    """Updates of a participant that were refused as unusable.

    num: of them all. in_a_row: with its failures and missed deadlines, since the last update that
        was accepted, or since it was left out. last: the round of the latest of these.
    left_out_until: it is selected again for this round and later ones; 0: it is not left out.
    """

    num: int = 0
    in_a_row: int = 0
    left_out_until: int = 0
    last: int = -1


@dataclass(frozen=True, slots=True)
class Contender:
    """A second process that asked to join as a connected participant, first and last.

    origin: where it called from.
    """

    first_at: float
    last_at: float
    origin: str

    def is_second(self, heard_at: float, rules: Rules) -> bool:
        """Whether the connected process goes on beside this one, heard for the last time then.

        A call of a process that was killed may still be on its way for as long as a heartbeat may
        be late, and is no sign of life.
        """
        return self.first_at + rules.heartbeat_timeout_s < heard_at


@dataclass(frozen=True, slots=True)
class Heard:
    """The last sign of life of a participant.

    contenders: second processes with its id, by instance id, the latest at the end.
    transfer: under way then; None if there was none.
    """

    at: float
    state: ParticipantState = ParticipantState.READY
    round: int = -1
    contenders: Mapping[str, Contender] = field(default_factory=dict)
    transfer: Transfer | None = None

    def recent_contenders(self, now: float) -> Mapping[str, Contender]:
        """Contenders without those that have not asked for long."""
        earliest = now - CONTENDER_KEPT_S
        return {i: one for i, one in self.contenders.items() if one.last_at >= earliest}


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


def is_connected_after_end(
    member: Member, sign: Heard | None, lease_floor: float, lease_s: float, now: float
) -> bool:
    """Whether a participant is still connected to a session that has ended.

    After the end no member is removed. A participant has gone once it has heard of the end. It
    counts as gone, too, after the silence of a lease, and after a restart of the coordinator.
    """
    if sign is not None and sign.state is ParticipantState.FINISHED:
        return False
    began = sign.at if sign is not None else member.joined_at
    return lease_floor <= began and now < began + lease_s


def reconnect_spread_s(num_connected: int, lease_s: float) -> float:
    """Within how long all participants are to come back after the coordinator was away, each at a
    moment of its own: 0 for few, whose own jitter suffices.

    Never long enough to cost a lease, since a first attempt may fail.
    """
    spread_s = num_connected / RECONNECTS_PER_S
    return min(spread_s, lease_s / 3) if spread_s >= MIN_SPREAD_S else 0.0


def check_name(name: str) -> None:
    """Refuse a name that cannot be the last part of a key in every store.

    Raises InvalidName.
    """
    if (why := why_not(name)) is not None:
        raise InvalidName(name, why)


def check_number_of_tags(number: int) -> None:
    """Raises InvalidTags."""
    if number > MAX_TAGS:
        raise InvalidTags(f"there are {number} tags; at most {MAX_TAGS} are taken")


def check_tags(tags: Mapping[str, str]) -> None:
    """Refuse tags that are not to be kept. Raises InvalidTags."""
    if (why := why_not_tags(tags)) is not None:
        raise InvalidTags(why)
