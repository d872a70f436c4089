"""The members of a group, and the number of its next operation."""

import hashlib
import threading
from collections.abc import Sequence
from typing import TypeAlias

from xain_messaging.endpoint import Endpoint
from xain_messaging.errors import PeersMissing

ID_LENGTH = 16  # of a group

Step: TypeAlias = tuple[str, int]  # the group's id, the operation's number


class Members:
    """The processes of a group, of which we are one.

    rank: our own, from 0 on, in the order of the members; size: how many there are.
    incarnations: by name, in the order of the members.
    id: the same for the same name and processes in the same order.
    number: of the operation that is under way or comes next.
    busy: held by the thread that has an operation under way.
    """

    def __init__(self, endpoint: Endpoint, name: str, members: Sequence[str]) -> None:
        roster = endpoint.roster
        if missing := [member for member in members if member not in roster]:
            raise PeersMissing(f"of the group {name!r}, not here: {', '.join(missing)}", missing)
        if endpoint.name not in members or len(set(members)) != len(members):
            raise ValueError(
                f"the group {name!r} must name {endpoint.name!r} and nobody twice: {list(members)}"
            )
        self.name = name
        self.members = tuple(members)
        self.rank = self.members.index(endpoint.name)
        self.size = len(self.members)
        self.incarnations = {member: roster[member].incarnation for member in members}
        text = repr((name, self.members, [*self.incarnations.values()]))
        self.id = hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]
        self.number = 0
        self.busy = threading.Lock()
        self._endpoint = endpoint

    @property
    def next(self) -> Step:
        """The operation that is under way or comes next."""
        return (self.id, self.number)

    @property
    def is_under_way(self) -> bool:
        """Whether an operation is under way."""
        return self.busy.locked()

    @property
    def gone(self) -> list[str]:
        """The members that are not there any more, or are other processes by now."""
        return [name for name in self.members if self.has_gone(name)]

    def has_gone(self, name: str) -> bool:
        """Whether a member is not in the group any more, or is another process by now."""
        member = self._endpoint.roster.get(name)
        return member is None or member.incarnation != self.incarnations[name]
