"""Members of a session, and their leases.

Joining and leaving are events. Heartbeats are soft state: they renew a lease in memory and are
never journalled, so after a restart everyone begins with a full lease.
"""

import dataclasses
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import Any

from xain_coordinator.core.vocabulary.errors import Reason, Refusal
from xain_coordinator.core.vocabulary.layered import excluding, including, including_all
from xain_coordinator.core.vocabulary.replacing import replace
from xain_coordinator.core.vocabulary.values import DataProfile, ParticipantState, Rules, Transfer
from xain_foundation.names import shortened, why_not
from xain_foundation.settings.tags import why_not as why_not_tags

# A process can take up more connections, but then does little else.
RECONNECTS_PER_S = 500
# Below it participants spread by themselves.
MIN_SPREAD_S = 0.2

# Second processes with the id of one participant that are remembered, and for how long after their
# last attempt: an operator is to see the conflict, and to see that it is over.
MAX_CONTENDERS = 8
CONTENDER_KEPT_S = 600.0

# Participants that were not let in and are remembered. Anybody can ask to join, under many names.
MAX_NOT_ADMITTED = 200
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
class Contender:
    """A second process that asked to join as a connected participant, first and last.

    origin: where it called from.
    """

    first_at: float
    last_at: float
    origin: str

    def is_second(self, heard_at: float, rules: Rules) -> bool:
        """Whether this contender is a second live process: the connected one was heard after the
        contender's first call.

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


@dataclass(frozen=True)  # without slots: see replacing.py
class Members(Mapping[str, Member]):
    """The connected participants by name, in the order in which they joined.

    num_eligible: those that may be selected.
    heard: last signs of life; soft state.
    lease_floor: session time before which no lease began, that of the last restart; soft state.
    not_admitted: why participants that asked to join are not among them, the latest at the end;
        soft state until the session is over.
    unlike: data of participants that wait because these are unlike those of the members, and when
        they last asked; soft state.
    """

    by_name: Mapping[str, Member] = field(default_factory=dict)
    num_eligible: int = 0
    heard: Mapping[str, Heard] = field(default_factory=dict, compare=False)
    lease_floor: float = field(default=0.0, compare=False)
    not_admitted: Mapping[str, str] = field(default_factory=dict, compare=False)
    unlike: Mapping[str, tuple[DataProfile, float]] = field(default_factory=dict, compare=False)

    def __getitem__(self, participant_id: str) -> Member:
        return self.by_name[participant_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    # Mapping would derive these from the three above, several times as slow.

    def __contains__(self, participant_id: object) -> bool:
        return participant_id in self.by_name

    def get(self, participant_id: str, default: Any = None, /) -> Any:
        return self.by_name.get(participant_id, default)

    def items(self) -> ItemsView[str, Member]:
        return self.by_name.items()

    def values(self) -> ValuesView[Member]:
        return self.by_name.values()

    @property
    def eligible(self) -> Iterator[str]:
        """Names of the members that may be selected, in the order in which they joined."""
        return (p for p, member in self.by_name.items() if member.is_eligible)

    def is_instance(self, participant_id: str, instance_id: str) -> bool:
        """Whether this process of the participant is connected. instance_id: "" if it has none."""
        member = self.by_name.get(participant_id)
        return member is not None and member.is_instance(instance_id)

    def conflict(self, participant_id: str, rules: Rules) -> Contender | None:
        """The latest contender: a second process with this id that asked to join while the first
        was alive; None without one."""
        sign = self.heard.get(participant_id)
        if sign is None or not sign.contenders:
            return None
        second = [one for one in sign.contenders.values() if one.is_second(sign.at, rules)]
        return max(second, key=lambda one: one.last_at, default=None)

    def expiries(self, lease_s: float) -> Iterator[tuple[str, float]]:
        """Yield each participant with the time at which its lease runs out, in order of joining."""
        for participant_id, member in self.by_name.items():
            sign = self.heard.get(participant_id)
            began = sign.at if sign is not None else member.joined_at
            yield participant_id, max(began, self.lease_floor) + lease_s

    def is_connected_after_end(self, participant_id: str, lease_s: float, now: float) -> bool:
        """Whether a member is still connected to a session that has ended.

        After the end no member is removed. A participant has gone once it has heard of the end. It
        counts as gone, too, after the silence of a lease, and after a restart of the coordinator.
        """
        sign = self.heard.get(participant_id)
        if sign is not None and sign.state is ParticipantState.FINISHED:
            return False
        began = sign.at if sign is not None else self.by_name[participant_id].joined_at
        return self.lease_floor <= began and now < began + lease_s

    def sharing_columns(self, profile: DataProfile) -> DataProfile:
        """An equal profile. If all its columns equal those of the first member's profile, it refers
        to the same tuple of them, to save memory; else it is the given profile."""
        first = next(iter(self.by_name.values()), None)
        if first is None or first.profile is None or not profile.columns:
            return profile
        if profile.columns != first.profile.columns:
            return profile
        return dataclasses.replace(profile, columns=first.profile.columns)

    # --- the members after an event ---

    def with_member(self, member: Member) -> "Members":
        """Add a participant that joins; that it was not admitted, or waited, is forgotten."""
        name = member.participant_id
        return replace(
            self,
            by_name=including(self.by_name, name, member),
            num_eligible=self.num_eligible + member.is_eligible,
            not_admitted={n: why for n, why in self.not_admitted.items() if n != name},
            unlike={n: one for n, one in self.unlike.items() if n != name},
        )

    def with_address(self, participant_id: str, address: str) -> "Members":
        """Note that a member would listen at another address as rank 0 of a process group."""
        member = dataclasses.replace(self.by_name[participant_id], group_address=address)
        return replace(self, by_name=including(self.by_name, participant_id, member))

    def without_member(self, participant_id: str) -> "Members":
        """Remove a participant and its last sign of life."""
        member = self.by_name.get(participant_id)
        return replace(
            self,
            by_name=excluding(self.by_name, participant_id),
            num_eligible=self.num_eligible - (member is not None and member.is_eligible),
            heard=excluding(self.heard, participant_id),
        )

    def with_heard(
        self,
        participant_id: str,
        at: float,
        state: ParticipantState,
        round_: int,
        transfer: Transfer | None,
    ) -> "Members":
        """Note a sign of life, which renews the lease."""
        sign = self.heard.get(participant_id)
        known = {} if sign is None else sign.contenders
        recent = {i: one for i, one in known.items() if one.last_at >= at - CONTENDER_KEPT_S}
        heard = Heard(at, state, round_, recent, transfer)
        return replace(self, heard=including(self.heard, participant_id, heard))

    def with_contender(
        self, participant_id: str, instance_id: str, origin: str, at: float
    ) -> "Members":
        """Note that a second process has asked to join with the id of a connected participant; the
        latest MAX_CONTENDERS are kept."""
        member = self.by_name[participant_id]
        sign = self.heard.get(participant_id, Heard(max(member.joined_at, self.lease_floor)))
        contenders = dict(sign.contenders)
        before = contenders.pop(instance_id, None)
        contenders[instance_id] = Contender(at if before is None else before.first_at, at, origin)
        for forgotten in list(contenders)[:-MAX_CONTENDERS]:
            del contenders[forgotten]
        heard = Heard(sign.at, sign.state, sign.round, contenders, sign.transfer)
        return replace(self, heard=including(self.heard, participant_id, heard))

    def with_not_admitted(self, participant_id: str, reason: str) -> "Members":
        """Note why a participant was not let in; of the participants that were not, the first
        MAX_NOT_ADMITTED are kept."""
        known = self.not_admitted
        if participant_id not in known and len(known) >= MAX_NOT_ADMITTED:
            return self
        return replace(self, not_admitted={**known, participant_id: reason})

    def with_unlike(self, participant_id: str, profile: DataProfile, at: float) -> "Members":
        """Note that a participant waits, whose data are unlike those of the members; the last
        MAX_NOT_ADMITTED are kept."""
        others = {name: one for name, one in self.unlike.items() if name != participant_id}
        kept = dict(list(others.items())[1 - MAX_NOT_ADMITTED :])
        noted = (self.sharing_columns(profile), at)
        return replace(self, unlike={**kept, participant_id: noted})

    def without_statistics(self) -> "Members":
        """Drop the statistics of all profiles."""
        if not any(one.profile and one.profile.statistics for one in self.by_name.values()):
            return self
        by_name = {
            name: member
            if member.profile is None
            else dataclasses.replace(member, profile=without_statistics(member.profile))
            for name, member in self.by_name.items()
        }
        return replace(self, by_name=including_all(self.by_name, by_name))


def without_statistics(profile: DataProfile) -> DataProfile:
    """The profile without its statistics."""
    return dataclasses.replace(profile, statistics="") if profile.statistics else profile


def reconnect_spread_s(num_connected: int, lease_s: float) -> float:
    """Seconds over which participants spread their return after the coordinator was away, each at a
    random moment: a part of the lease at most, since a first attempt may fail; 0 for few, whose own
    jitter suffices."""
    spread_s = num_connected / RECONNECTS_PER_S
    return min(spread_s, lease_s / 3) if spread_s >= MIN_SPREAD_S else 0.0


def check_name(name: str) -> None:
    """Refuse a name that cannot be the last part of a key in every store. Raises INVALID_NAME."""
    if (why := why_not(name)) is not None:
        raise Refusal(Reason.INVALID_NAME, f"name {shortened(name)!r} cannot be used: {why}")


def check_tags(tags: Mapping[str, str]) -> None:
    """Refuse tags that are not to be kept. Raises INVALID_TAGS."""
    if (why := why_not_tags(tags)) is not None:
        raise Refusal(Reason.INVALID_TAGS, why)
