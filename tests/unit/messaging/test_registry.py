"""Who is in which group, by a clock that the test moves."""

import itertools

import pytest

from xain_messaging.discovery.registry import GRACE_S, Registry
from xain_messaging.errors import DiscoveryUnavailable, MembershipLost, NameTaken
from xain_messaging.ports import Member

LEASE_S = 10.0


class World:
    """A registry, its clock, and the groups that it said have changed."""

    def __init__(self) -> None:
        self.incarnations = itertools.count(1)
        self.now = 0.0
        self.changes: list[str] = []
        self.registry = self.new_registry()

    def new_registry(self) -> Registry:
        return Registry(self.now, lambda: next(self.incarnations), self.changes.append, LEASE_S)

    def join(
        self, name: str, role: str = "worker", address: str = "here", former: Member | None = None
    ) -> Member:
        return self.registry.join("g", role, name, address, self.now, former)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.registry.expire(self.now)

    @property
    def names(self) -> set[str]:
        return set(self.registry.roster("g"))


def test_who_does_not_renew_expires() -> None:
    """And says when the next one will."""
    world = World()
    anna, _ = world.join("anna"), world.join("ben")
    world.pass_time(6)
    assert world.registry.renew("g", "anna", anna.incarnation, world.now)
    assert world.registry.expire(world.now) == LEASE_S
    world.pass_time(5)
    assert world.names == {"anna"}
    assert world.registry.expire(world.now) == 6 + LEASE_S
    world.pass_time(10)
    assert world.names == set()
    assert world.registry.expire(world.now) is None
    assert not world.registry.renew("g", "anna", anna.incarnation, world.now)
    assert world.changes == ["g"] * 4


def test_a_name_is_taken_until_its_lease_is_over() -> None:
    """The refusal says for how long."""
    world = World()
    first = world.join("anna")
    world.pass_time(3)
    with pytest.raises(NameTaken, match=r"within 7\.0 s"):
        world.join("anna")
    world.pass_time(7)
    assert world.join("anna").incarnation > first.incarnation


def test_the_end_of_a_line_frees_the_name() -> None:
    """A moment later, long before the lease is over; for nobody if it comes back in time."""
    world = World()
    anna = world.join("anna")
    assert world.registry.line_stands("g", "anna", anna.incarnation, world.now)
    with pytest.raises(NameTaken):
        world.join("anna")
    world.registry.line_has_ended("g", "anna", anna.incarnation, world.now)
    world.pass_time(GRACE_S / 2)
    with pytest.raises(NameTaken, match=r"within 1\.0 s"):
        world.join("anna")
    assert world.registry.line_stands("g", "anna", anna.incarnation, world.now)
    world.pass_time(GRACE_S)
    assert world.names == {"anna"}
    world.registry.line_has_ended("g", "anna", anna.incarnation, world.now)
    world.now += GRACE_S
    again = world.join("anna", address="there")
    assert world.registry.roster("g")["anna"] == again
    assert not world.registry.renew("g", "anna", anna.incarnation, world.now)


def test_one_of_two_lines_is_enough() -> None:
    """A new stream may stand before the end of the old one is noticed."""
    world = World()
    anna = world.join("anna")
    for _ in range(2):
        world.registry.line_stands("g", "anna", anna.incarnation, world.now)
    world.registry.line_has_ended("g", "anna", anna.incarnation, world.now)
    with pytest.raises(NameTaken):
        world.join("anna")
    world.pass_time(GRACE_S + 1)
    assert world.names == {"anna"}


def test_ranks() -> None:
    """The lowest that is free; that of before for who comes back, unless somebody has it."""
    world = World()
    members = [world.join(f"w{i}") for i in range(4)]
    assert [member.rank for member in members] == [0, 1, 2, 3]
    for i in (1, 2):
        world.registry.leave("g", f"w{i}", members[i].incarnation)
    assert world.join("w2").rank == 2
    assert world.join("new").rank == 1
    assert world.join("w1").rank == 4
    assert world.join("m", role="master").rank == 0


def test_members_come_back_to_another_registry_as_who_they_were() -> None:
    """In any order, at once; until its first lease is over it says that it is settling."""
    world = World()
    members = [world.join(f"w{i}") for i in range(3)]
    world.now += 100
    world.registry = world.new_registry()
    assert world.registry.settled_at == world.now + LEASE_S
    assert world.join("fresh").rank == 0
    for member in reversed(members[1:]):
        assert world.join(member.name, former=member) == member
    moved = world.join("w0", former=members[0])
    assert moved.incarnation == members[0].incarnation
    assert moved.rank == 3  # somebody had taken it


def test_newcomers_wait_for_those_who_come_back() -> None:
    """A registry that may not be the first one lets in who was there before at once, and others a
    moment later: so names and ranks are whose they were."""
    world = World()
    members = [world.join(f"w{i}") for i in range(2)]
    world.now += 100
    incarnations = world.incarnations
    world.registry = Registry(
        world.now, lambda: next(incarnations), world.changes.append, LEASE_S, settle_s=2.0
    )
    with pytest.raises(DiscoveryUnavailable, match=r"in 2\.0 s"):
        world.join("w0")
    world.now += 1
    assert [world.join(member.name, former=member) for member in members] == members
    with pytest.raises(DiscoveryUnavailable, match=r"in 1\.0 s"):
        world.join("fresh")
    world.now += 1
    assert world.join("fresh").rank == 2


def test_one_that_was_replaced_cannot_come_back() -> None:
    """Its name is another process's."""
    world = World()
    first = world.join("anna")
    world.pass_time(LEASE_S)
    world.join("anna")
    with pytest.raises(MembershipLost, match="taken for dead"):
        world.join("anna", former=first)


def test_to_join_again_is_a_heartbeat() -> None:
    """Nobody hears of it unless something is different."""
    world = World()
    anna = world.join("anna")
    world.changes.clear()
    world.pass_time(LEASE_S - 1)
    assert world.join("anna", former=anna) == anna
    world.pass_time(LEASE_S - 1)
    assert world.names == {"anna"}
    assert world.changes == []
    world.join("anna", address="elsewhere", former=anna)
    assert world.changes == ["g"]


def test_barriers_count_who_waits() -> None:
    """Once each, not those who gave up or died; and can be used again."""
    world = World()
    members = {name: world.join(name) for name in ("anna", "ben", "cleo")}
    arrive = world.registry.arrive
    first = arrive("g", "epoch", "anna", 2)
    assert arrive("g", "epoch", "anna", 2) is first  # asked again
    assert not first.is_open
    world.registry.give_up("g", "epoch", "anna")
    second = arrive("g", "epoch", "ben", 2)
    world.registry.leave("g", "ben", members["ben"].incarnation)
    third = arrive("g", "epoch", "cleo", 2)
    assert [one.is_open for one in (first, second, third)] == [False] * 3
    assert arrive("g", "epoch", "anna", 2).is_open
    assert third.is_open
    assert not arrive("g", "epoch", "anna", 2).is_open


def test_a_line_stands_over_a_join_again() -> None:
    """Its end is still noticed."""
    world = World()
    anna = world.join("anna")
    world.registry.line_stands("g", "anna", anna.incarnation, world.now)
    world.join("anna", former=anna)
    with pytest.raises(NameTaken):
        world.join("anna")
    world.registry.line_has_ended("g", "anna", anna.incarnation, world.now)
    world.pass_time(GRACE_S)
    assert world.names == set()
