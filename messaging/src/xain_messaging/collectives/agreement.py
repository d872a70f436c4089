"""Whether two members mean the same processes by the name of a group.

For a moment some may know of one that has come or gone, and others not yet. Whoever waits too long
for a part asks its member, which compares the question with the group that it is at work in.
"""

from typing import NamedTuple

from xain_messaging.collectives.members import Members, Place
from xain_messaging.errors import CollectiveFailed

# What is kept of a question, which comes from outside.
MAX_GROUP_NAME = 1000
MAX_NAME = 128  # which is the length of the longest
MAX_ASKED = 1000  # members of the group of one who asks
MAX_SHARED = 100  # groups of one name, of which is told how far they are


class Question(NamedTuple):
    """A member waits in this operation of a group of this name, for a part of ours.

    members: names and incarnations. numbers: of the operations that it comes to next in the groups
        of this name that we share. incarnation: its own.
    """

    place: Place
    name: str
    members: list[tuple[str, int]]
    numbers: dict[str, int]
    incarnation: int

    @classmethod
    def read(
        cls,
        place: Place,
        name: str,
        members: list[object],
        numbers: list[object],
        incarnation: int,
    ) -> "Question":
        """However much has come."""
        return cls(
            place,
            name[:MAX_GROUP_NAME],
            _pairs(members[:MAX_ASKED]),
            dict(_pairs(numbers[:MAX_SHARED])),
            incarnation,
        )


class Differs(CollectiveFailed):
    """A member is in another group of the same name, and waits there.

    is_over: that other group is no more, so that only that member has to be told.
    """

    def __init__(self, why: str, member: str, place: Place, *, is_over: bool) -> None:
        super().__init__(why)
        self.member = member
        self.place = place
        self.is_over = is_over


def difference(group: Members, other: str, question: Question) -> str:
    """As text for both sides."""
    ours, theirs = set(group.incarnations.items()), set(question.members)
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


def _pairs(items: list[object]) -> list[tuple[str, int]]:
    """Those that are a name and a number."""
    pairs = []
    for item in items:
        match item:
            case [str(name), int(number)]:
                pairs.append((name[:MAX_NAME], number))
    return pairs
