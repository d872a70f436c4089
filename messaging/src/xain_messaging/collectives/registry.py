"""What has come for the groups of one endpoint, and which groups there are."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

from xain_messaging.collectives.agreement import (
    MAX_NAME,
    MAX_SHARED,
    Differs,
    Question,
    difference,
)
from xain_messaging.collectives.members import ID_LENGTH, Members, Place
from xain_messaging.endpoint import Endpoint
from xain_messaging.errors import CollectiveFailed, MessagingError
from xain_messaging.links import Delivery
from xain_messaging.messages import Message

# Of one peer, with members who are all there. What comes before an operation has begun here is
# bounded as all that a peer sends and nobody takes, see links.py.
MAX_GROUPS = 1024

# Groups that are no more, by which what still comes for them is known.
MAX_DROPPED = 1024

# Operations that have failed at others before they have begun here. Who does not know it any more
# waits for its own time.
MAX_FAILED = 1024

# Of what others say: why an operation has failed, and how many are missing.
MAX_WHY = 1000
MAX_NAMES = 100

TOLD = "another member says: "

Failure: TypeAlias = tuple[str, tuple[str, ...]]  # why, and who is missing


@dataclass(slots=True)
class Arrived:
    """What has come of one operation. parts: by sender and step."""

    parts: dict[tuple[str, int], tuple[Message, Delivery]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)


class Registry:
    """What has come for the groups of one endpoint, also for those that it has not made yet. To be
    used under its lock."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._incarnation = endpoint.member.incarnation
        self._roster = endpoint.roster  # that what is over was looked for in
        self._groups: dict[str, Members] = {}
        self._dropped: OrderedDict[str, Members] = OrderedDict()
        self._arrived: dict[Place, Arrived] = {}
        self._failed: OrderedDict[Place, Failure] = OrderedDict()
        self._questions: dict[str, Question] = {}  # the last of each member
        endpoint.hear_collectives(self._on_message)

    def known(self, group: Members) -> Members:
        """The one of these processes that is kept, or else this one, which is kept from now on.
        Raises MessagingError for too many."""
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
        """Also one that was dropped."""
        return self._groups.get(group_id) or self._dropped.get(group_id)

    def has(self, group: Members) -> bool:
        """It has not been dropped."""
        return group.id in self._groups

    def keep(self, group: Members) -> None:
        """Also one that was dropped, when its members are there again as who they were."""
        self._dropped.pop(group.id, None)
        self._groups[group.id] = group

    def _drop_what_is_over(self) -> None:
        """Nobody takes part in it any more: what has come for it, and what comes, is taken, or it
        would be kept by its sender for ever."""
        before, roster = self._roster, self._endpoint.roster
        if roster is before and len(self._groups) < MAX_GROUPS:
            return
        self._roster = roster
        for group in [group for group in self._groups.values() if group.gone]:
            if group.is_under_way:
                continue  # who has gone may have done its part
            del self._groups[group.id]
            for place in [place for place in self._arrived if place[0] == group.id]:
                self.forget(place)
            self._dropped[group.id] = group
            if len(self._dropped) > MAX_DROPPED:
                self._dropped.popitem(last=False)
        # What the dead have sent for groups that were never made here, and never can be.
        for place, arrived in list(self._arrived.items()):
            if place[0] in self._groups:
                continue
            for key, (_, delivery) in list(arrived.parts.items()):
                sender = roster.get(delivery.peer, before.get(delivery.peer))
                has_gone = delivery.peer in before and delivery.peer not in roster
                if has_gone or (sender and sender.incarnation > delivery.incarnation):
                    del arrived.parts[key]
                    self._endpoint.take(delivery)
            if not arrived.parts:
                del self._arrived[place]
        for name in self._questions.keys() - roster.keys():
            del self._questions[name]

    def arrived(self, place: Place) -> Arrived:
        """Raises CollectiveFailed if another member says that the operation has failed."""
        if place in self._failed:
            why, missing = self._failed[place]
            raise CollectiveFailed(why if why.startswith(TOLD) else f"{TOLD}{why}", missing)
        return self._arrived.setdefault(place, Arrived())

    def forget(self, place: Place) -> None:
        """The operation is over; what comes of it later is nobody's."""
        self._failed.pop(place, None)
        arrived = self._arrived.pop(place, None)
        for _, delivery in arrived.parts.values() if arrived else ():
            self._endpoint.take(delivery)

    def check(self, group: Members) -> None:
        """Raises CollectiveFailed if a member of the group waits for our part in another one of the
        same name; once for each time that it asks. Differs if it has to be told."""
        for name, question in list(self._questions.items()):
            group_id, number = question.place
            if question.name != group.name or group_id == group.id:
                continue
            if group.incarnations.get(name) != question.incarnation:
                continue  # of another process, or none of this group
            if question.numbers.get(group.id, 0) > group.number:
                continue  # it has done this operation, and is only ahead
            other = self.find(group_id)
            del self._questions[name]
            if other and (other.number > number or other.is_under_way):
                continue  # it has our part, or gets it
            why = difference(group, name, question)
            if gone := group.gone:  # it knows, and has made the next one
                raise CollectiveFailed(why, gone)
            raise Differs(why, name, question.place, is_over=group_id in self._dropped)

    def _on_message(self, message: Message, delivery: Delivery) -> None:
        """Whatever it says: it comes from outside."""
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
        place = (group_id, number)
        match rest:
            case {"asks": str(name), "members": list(members), "numbers": list(numbers)}:
                self._endpoint.take(delivery)
                sender = self._endpoint.roster.get(delivery.peer)
                if sender is None or sender.incarnation != delivery.incarnation:
                    return  # none of a group of ours; and there may be any number of such names
                self._questions[delivery.peer] = Question.read(
                    place, name, members, numbers, delivery.incarnation
                )
                return
        if (
            group_id in self._dropped
            or (group is not None and number < group.number)  # it is over here
            or place in self._failed
        ):
            self._endpoint.take(delivery)
            return
        match rest:
            case {"failure": str(why), "missing": list(missing)}:
                self._endpoint.take(delivery)
                self.forget(place)
                names = tuple(str(name)[:MAX_NAME] for name in missing[:MAX_NAMES])
                self._failed[place] = (why[:MAX_WHY], names)
                question = self._questions.get(message.source)
                if question is not None and question.place == place:
                    del self._questions[message.source]  # it does not wait any more
                if len(self._failed) > MAX_FAILED:
                    self._failed.popitem(last=False)
            case {"kind": str(kind), "step": int(step), "part": _}:
                arrived = self._arrived.setdefault(place, Arrived())
                if (message.source, step) in arrived.parts:
                    self._endpoint.take(delivery)
                    return
                arrived.kinds.add(kind)
                arrived.parts[message.source, step] = (message, delivery)
            case _:
                self._endpoint.take(delivery)

    def numbers(self, name: str, member: str) -> list[tuple[str, int]]:
        """Of what comes next in the newest groups of this name that this member is in."""
        groups = [*self._dropped.values(), *self._groups.values()]
        shared = [g for g in groups if g.name == name and member in g.incarnations]
        return [(group.id, group.number) for group in shared[-MAX_SHARED:]]
