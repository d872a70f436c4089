"""The members that a client of a remote service reports."""

from xain_membership.ports import Member, Roster
from xain_membership.remote import Joining, RemoteMembership


class Told(RemoteMembership):
    """A member, `a`, of a service that says what the test says. rosters: that it has told."""

    def __init__(self) -> None:
        self.rosters: list[Roster] = []
        super().__init__(Joining("g", "r", "a", "here", self.rosters.append, self.fail))

    def hear(self, is_settling: bool = False, **listed: int) -> None:
        """Incarnations by name; a itself is always listed."""
        members = {name: Member(name, "r", 0, "here", number) for name, number in listed.items()}
        self._tell({"a": Member("a", "r", 0, "here", 1), **members}, is_settling=is_settling)

    @property
    def last(self) -> dict[str, int]:
        return {name: member.incarnation for name, member in self.rosters[-1].items()}

    def fail(self, error: Exception) -> None:
        raise error

    def _ask_to_join(self, timeout_s: float) -> Member:
        raise NotImplementedError

    def _begin(self, deadline: float) -> None:
        raise NotImplementedError

    def _wait_at(self, barrier: str, num_members: int, deadline: float, call: int) -> bool:
        raise NotImplementedError

    def _end(self, timeout_s: float) -> None:
        raise NotImplementedError


def test_replaced_process_is_not_told_of():
    """A service that has lost all may list it while the other is on its way back, which is there
    until then; and which has gone if it is not back by the time when all are."""
    a = Told()
    a.hear(b=21)
    for listed in (20, 21, 20):
        a.hear(is_settling=True, b=listed)
    assert a.last == {"a": 1, "b": 21}
    assert len(a.rosters) == 1
    a.hear(b=20)
    assert a.last == {"a": 1}
    a.hear(b=20)
    assert a.last == {"a": 1}
    a.hear(b=22)
    assert a.last == {"a": 1, "b": 22}


def test_a_member_is_there_itself_until_it_hears_that_it_is_not():
    """An earlier process of its name may be listed."""
    a = Told()
    a.hear(b=21)
    a.hear(a=0, b=21)
    assert a.last == {"a": 1, "b": 21}
