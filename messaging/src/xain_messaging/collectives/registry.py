"""Parts that have come for the groups of one endpoint, and which groups there are.

For a moment some members may know of a process that has come or gone, and others not yet, so that
their groups of one name have other members. A member that waits too long for a part says so to the
member that owes it, which compares the group with the one that it is at work in.
"""

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from xain_foundation.net.errors import MessagingError
from xain_messaging.collectives.members import ID_LENGTH, Members, Step
from xain_messaging.endpoint import Endpoint
from xain_messaging.errors import CollectiveFailed
from xain_messaging.format.codec import encode
from xain_messaging.format.messages import Message
from xain_messaging.links import COLLECTIVE, Delivery

# Groups of one peer whose members are all there. Parts that come before an operation has begun here
# are bounded as all that a peer sends and the program does not take, see links.py.
MAX_GROUPS = 1024

# Groups that are no more, by which parts that still come for them are known.
MAX_DROPPED = 1024

# Operations that have failed at other members before they have begun here.
MAX_FAILED = 1024

# Characters and names of what other members say.
MAX_WHY = 1000
MAX_NAMES = 100
MAX_NAME = 128
MAX_MEMBERS = 1000

TOLD = "another member says: "

Failure: TypeAlias = tuple[str, tuple[str, ...]]  # why, and who is missing


@dataclass(slots=True)
class Arrived:
    """Parts of one operation that have come. parts: by sender and step."""

    parts: dict[tuple[str, int], tuple[Message, Delivery]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)


class Waits(NamedTuple):
    """A member waits in a group of this name for a part of ours.

    members: with incarnations; numbers: of its next operation, by group.
    """

    step: Step
    name: str
    members: set[tuple[str, int]]
    numbers: dict[str, int]
    incarnation: int


class Registry:
    """Parts and failures for the groups of one endpoint, also for groups not made yet. To be
    used under its lock."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._incarnation = endpoint.member.incarnation
        self._roster = endpoint.roster  # that what is over was looked for in
        self._groups: dict[str, Members] = {}
        self._dropped: OrderedDict[str, Members] = OrderedDict()
        self._arrived: dict[Step, Arrived] = {}
        self._failed: OrderedDict[Step, Failure] = OrderedDict()
        self._waits: dict[str, Waits] = {}  # the last word of each member

    def known(self, group: Members) -> Members:
        """Return the group of the same processes that is kept, or else keep this one. Raises
        MessagingError for too many."""
        self._drop_what_is_over()
        found = self.find(group.id) or group
        if not self.has(found) and len(self._groups) >= MAX_GROUPS:
            raise MessagingError(
                f"there are {MAX_GROUPS} groups of members who are all there, and {group.name!r} "
                "would be one more; use their names again"
            )
        self.keep(found)
        return found

    def find(self, group_id: str) -> Members | None:
        """Find a group by its id, also one that was dropped."""
        return self._groups.get(group_id) or self._dropped.get(group_id)

    def has(self, group: Members) -> bool:
        """Whether a group is kept, and has not been dropped."""
        return group.id in self._groups

    def keep(self, group: Members) -> None:
        """Keep a group, also one that was dropped, when its processes are there again."""
        self._dropped.pop(group.id, None)
        self._groups[group.id] = group

    def _drop_what_is_over(self) -> None:
        """Drop groups that have lost a member: what has come for them, and what comes, is taken, or
        it would be kept by its sender for ever."""
        before, roster = self._roster, self._endpoint.roster
        if roster is before and len(self._groups) < MAX_GROUPS:
            return
        self._roster = roster
        for group in [group for group in self._groups.values() if group.gone]:
            if group.is_under_way:
                continue  # who has gone may have done its part
            del self._groups[group.id]
            for step in [step for step in self._arrived if step[0] == group.id]:
                self.forget(step)
            self._dropped[group.id] = group
            if len(self._dropped) > MAX_DROPPED:
                self._dropped.popitem(last=False)
        # What the dead have sent for groups that were never made here, and never can be.
        for step, arrived in list(self._arrived.items()):
            if step[0] in self._groups:
                continue
            for key, (_, delivery) in list(arrived.parts.items()):
                sender = roster.get(delivery.peer, before.get(delivery.peer))
                has_gone = delivery.peer in before and delivery.peer not in roster
                if has_gone or (sender and sender.incarnation > delivery.incarnation):
                    del arrived.parts[key]
                    self._endpoint.take(delivery)
            if not arrived.parts:
                del self._arrived[step]
        for name in self._waits.keys() - roster.keys():
            del self._waits[name]

    def arrived(self, step: Step) -> Arrived:
        """The parts of a step that have come so far; kept here, and filled as more of them come.
        Raises CollectiveFailed if another member says that the operation has failed."""
        if step in self._failed:
            why, missing = self._failed[step]
            raise CollectiveFailed(why if why.startswith(TOLD) else f"{TOLD}{why}", missing)
        return self._arrived.setdefault(step, Arrived())

    def forget(self, step: Step) -> None:
        """Forget an operation that is over, and take its parts that nobody has received."""
        self._failed.pop(step, None)
        arrived = self._arrived.pop(step, None)
        for _, delivery in arrived.parts.values() if arrived else ():
            self._endpoint.take(delivery)

    def check(self, group: Members) -> None:
        """Raises CollectiveFailed if a member of the group waits for our part in another one of the
        same name, and tells it; once for each time that it says so."""
        for name, waits in list(self._waits.items()):
            group_id, number = waits.step
            if waits.name != group.name[:MAX_NAME] or group_id == group.id:
                continue
            if group.incarnations.get(name) != waits.incarnation:
                continue  # of another process, or none of this group
            if waits.numbers.get(group.id, 0) > group.number:
                continue  # it has done this operation, and is only ahead
            del self._waits[name]
            other = self._groups.get(group_id)
            if other and (other.number > number or other.is_under_way):
                continue  # it has our part, or gets it
            why = _difference(group, name, waits.members)
            is_over = group_id in self._dropped  # and our group is not
            if not is_over and (gone := group.gone):  # the other member has made the next group
                raise CollectiveFailed(why, gone)
            self._tell(name, waits.incarnation, waits.step, why)
            if not is_over:
                raise CollectiveFailed(why)

    def word(self, group: Members) -> dict[str, Any]:
        """Describe a group and the numbers of its next operations for check() of others."""
        groups = [*self._groups.values(), *self._dropped.values()]
        numbers = {other.id: other.number for other in groups if other.name == group.name}
        members = [list(pair) for pair in group.incarnations.items()]
        return {"waits": group.name, "members": members, "numbers": numbers}

    def on_message(self, message: Message, delivery: Delivery) -> None:
        """Note a message of another member, which may be malformed."""
        match message.body:
            case {"group": str(group_id), "number": int(number), "to": int(to), **rest} if (
                to == self._incarnation  # not the process that was here before under our name
                and len(group_id) == ID_LENGTH
            ):
                pass
            case _:
                self._endpoint.take(delivery)
                return
        group = self._groups.get(group_id)
        operation = (group_id, number)
        match rest:
            case {"waits": str(name), "members": list(members), "numbers": dict(numbers)}:
                self._endpoint.take(delivery)
                pairs = {
                    (str(peer)[:MAX_NAME], int(process)) for peer, process in members[:MAX_MEMBERS]
                }
                ahead = {
                    str(other)[:ID_LENGTH]: int(its_next)
                    for other, its_next in islice(numbers.items(), MAX_GROUPS)
                }
                self._waits[delivery.peer] = Waits(
                    operation, name[:MAX_NAME], pairs, ahead, delivery.incarnation
                )
                return
        if (
            group_id in self._dropped
            or (group is not None and number < group.number)  # it is over here
            or operation in self._failed
        ):
            self._endpoint.take(delivery)
            return
        match rest:
            case {"failure": str(why), "missing": list(missing)}:
                self._endpoint.take(delivery)
                self.forget(operation)
                names = tuple(str(name)[:MAX_NAME] for name in missing[:MAX_NAMES])
                self._failed[operation] = (why[:MAX_WHY], names)
                waits = self._waits.get(message.source)
                if waits is not None and waits.step == operation:
                    del self._waits[message.source]  # it does not wait any more
                if len(self._failed) > MAX_FAILED:
                    self._failed.popitem(last=False)
            case {"kind": str(kind), "step": int(step), "part": _}:
                arrived = self._arrived.setdefault(operation, Arrived())
                if (message.source, step) in arrived.parts:
                    self._endpoint.take(delivery)
                    return
                arrived.kinds.add(kind)
                arrived.parts[message.source, step] = (message, delivery)
            case _:
                self._endpoint.take(delivery)

    def _tell(self, name: str, incarnation: int, step: Step, why: str) -> None:
        """Tell a member that the operation it waits in has failed, if there is room for that."""
        group_id, number = step
        where = {"group": group_id, "number": number, "to": incarnation}
        body = {**where, "failure": why, "missing": []}
        message = Message("collective", self._endpoint.name, name, body)
        with suppress(MessagingError):
            self._endpoint.try_to_post(message, COLLECTIVE, encode(message))


def _difference(group: Members, other: str, theirs: set[tuple[str, int]]) -> str:
    """Describe for both sides how the members of two groups of one name differ."""
    ours = set(group.incarnations.items())
    own = group.members[group.rank]
    parts = [
        f"only in that of {whose!r}: {_names(members)}"
        for whose, members in ((own, ours - theirs), (other, theirs - ours))
        if members
    ] or ["they are in another order"]
    return (
        f"{own!r} and {other!r} do not agree on who is in the group {group.name!r}; "
        f"{', and '.join(parts)}. Make it anew; name its members, or expect all of them when the "
        "proxy is made, to begin with the same"
    )


def _names(members: set[tuple[str, int]]) -> str:
    names = sorted(f"{name!r}" for name, _ in members)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
