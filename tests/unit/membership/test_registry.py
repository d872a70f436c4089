"""Members of groups, by a clock that the test moves."""

import itertools

import msgspec
import pytest

from xain_foundation.net.errors import MessagingError
from xain_membership.errors import DiscoveryUnavailable, MembershipLost, NameTaken
from xain_membership.ports import Member
from xain_membership.registry import GRACE_S, MAX_BARRIERS, Registry, State

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

    def leave(self, member: Member) -> None:
        self.registry.leave("g", member.name, member.incarnation)

    def begin(self, member: Member, stream: str = "a stream") -> bool:
        who = ("g", member.name, member.incarnation)
        return self.registry.stream_begun(*who, self.now, stream)

    def end(self, member: Member, stream: str = "a stream") -> None:
        self.registry.stream_ended("g", member.name, member.incarnation, self.now, stream)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.registry.expire(self.now)

    @property
    def names(self) -> set[str]:
        return set(self.registry.roster("g"))


@pytest.fixture
def world() -> World:
    return World()


def test_member_that_does_not_renew_expires(world):
    """expire() says when the next member will."""
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


def test_a_name_is_taken_until_its_lease_is_over(world):
    first = world.join("anna")
    world.pass_time(3)
    with pytest.raises(NameTaken, match=r"within 7\.0 s"):
        world.join("anna")
    world.pass_time(7)
    assert world.join("anna").incarnation > first.incarnation


def test_end_of_a_connection_frees_the_name(world):
    """A moment later, long before the lease is over; for nobody if it comes back in time."""
    anna = world.join("anna")
    assert world.begin(anna)
    with pytest.raises(NameTaken):
        world.join("anna")
    world.end(anna)
    world.pass_time(GRACE_S / 2)
    with pytest.raises(NameTaken, match=r"within 1\.0 s"):
        world.join("anna")
    assert world.begin(anna)
    world.pass_time(GRACE_S)
    assert world.names == {"anna"}
    world.end(anna)
    world.pass_time(GRACE_S)
    again = world.join("anna", address="there")
    assert world.registry.roster("g")["anna"] == again
    assert not world.registry.renew("g", "anna", anna.incarnation, world.now)


def test_newest_connection_counts(world):
    """The newest may begin before the end of the last is noticed, which then means nothing; and a
    member that was away is another one to its old connections."""
    anna = world.join("anna")
    for connection in ("older", "newer"):
        assert world.begin(anna, connection)
    world.end(anna, "older")
    world.pass_time(GRACE_S + 1)
    assert world.names == {"anna"}
    world.pass_time(LEASE_S)
    assert world.join("anna", former=anna) == anna
    world.end(anna, "newer")
    world.pass_time(GRACE_S + 1)
    assert world.names == {"anna"}
    assert world.begin(anna, "newest")
    world.end(anna, "newest")
    world.pass_time(GRACE_S + 1)
    assert world.names == set()


def test_ranks(world):
    """The lowest that is free; that of before for who comes back, unless somebody has it."""
    members = [world.join(f"w{i}") for i in range(4)]
    assert [member.rank for member in members] == [0, 1, 2, 3]
    for i in (1, 2):
        world.leave(members[i])
    assert world.join("w2").rank == 2
    assert world.join("new").rank == 1
    assert world.join("w1").rank == 4
    assert world.join("m", role="master").rank == 0


def test_members_come_back_to_another_registry_with_their_identity(world):
    """In any order, at once; until its first lease is over it says that it is settling."""
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


def test_newcomers_wait_for_returning_members(world):
    """A registry that may not be the first one lets in who was there before at once, and others a
    moment later: so names and ranks are whose they were."""
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


def test_replaced_member_cannot_come_back(world):
    first = world.join("anna")
    world.pass_time(LEASE_S)
    world.join("anna")
    with pytest.raises(MembershipLost, match="taken for dead"):
        world.join("anna", former=first)


@pytest.mark.parametrize("others", [[], ["ben"]])
def test_one_whose_successor_has_left_cannot_come_back(world, others):
    """Peers that have heard of that one do not listen to this one any more; that the group was
    empty meanwhile changes nothing. The last one may come back."""
    first = world.join("anna")
    world.pass_time(LEASE_S)
    for name in others:
        world.join(name)
    second = world.join("anna", role="another")
    world.leave(second)
    with pytest.raises(MembershipLost, match="taken for dead"):
        world.join("anna", former=first)
    assert world.names == set(others)
    assert world.join("anna", role="another", former=second) == second


def test_the_later_of_two_processes_stays(world):
    """Where the earlier one has come back first to a registry that knows of neither."""
    first = world.join("anna")
    world.pass_time(LEASE_S)
    second = world.join("anna")
    world.registry = world.new_registry()
    world.join("anna", former=first)
    assert not arrive(world, "anna")
    assert world.join("anna", former=second) == second
    assert not world.registry.state.groups["g"].waiting
    assert not world.registry.renew("g", "anna", first.incarnation, world.now)
    with pytest.raises(MembershipLost):
        world.join("anna", former=first)


def test_bounded_number_of_former_members_is_remembered(world):
    """The oldest are forgotten."""
    world.registry.max_former = 2
    first = [world.join(f"w{i}") for i in range(3)]
    for _ in range(2):
        for name in sorted(world.names):
            world.leave(world.registry.roster("g")[name])
        for i in range(3):
            world.join(f"w{i}")
    world.pass_time(LEASE_S)
    assert world.join("w0", former=first[0]) == first[0]
    for i in (1, 2):
        with pytest.raises(MembershipLost):
            world.join(f"w{i}", former=first[i])


def test_to_join_again_is_a_heartbeat(world):
    """Others do not hear of it unless something is different."""
    anna = world.join("anna")
    world.changes.clear()
    world.pass_time(LEASE_S - 1)
    assert world.join("anna", former=anna) == anna
    world.pass_time(LEASE_S - 1)
    assert world.names == {"anna"}
    assert world.changes == []
    world.join("anna", address="elsewhere", former=anna)
    assert world.changes == ["g"]


def arrive(
    world: World, name: str, num_members: int = 2, barrier: str = "epoch", call: int = 1
) -> bool:
    until = world.now + 100
    return world.registry.arrive("g", barrier, name, num_members, call, world.now, until)


def test_barriers_count_members_that_wait(world):
    """Members that gave up, died, or are late do not count; the barrier can be used again."""
    members = {name: world.join(name) for name in ("anna", "ben", "cleo")}
    assert not arrive(world, "anna")
    assert not world.registry.give_up("g", "epoch", "anna", 1)
    assert not arrive(world, "ben")
    world.leave(members["ben"])
    assert not arrive(world, "cleo")
    world.now += 101
    assert not arrive(world, "anna", call=2)
    assert not arrive(world, "cleo", num_members=3, call=2)
    assert arrive(world, "cleo", call=2)
    assert arrive(world, "anna", call=2)
    assert world.registry.give_up("g", "epoch", "anna", 2)
    assert not arrive(world, "anna", call=3)


def test_a_newer_call_at_a_barrier_ends_the_older(world):
    """The end of the older, which is noticed later, leaves the newer there."""
    for name in ("anna", "ben"):
        world.join(name)
    assert not arrive(world, "anna", call=1)
    assert not arrive(world, "anna", call=2)
    with pytest.raises(MessagingError, match="a newer call"):
        arrive(world, "anna", call=1)
    assert not world.registry.give_up("g", "epoch", "anna", 1)
    assert arrive(world, "ben")
    assert arrive(world, "anna", call=2)


def test_a_call_that_comes_again_does_not_wait_for_the_next_opening(world):
    """The answer was lost, also if its member was taken for dead meanwhile; but another process of
    that name and a later call wait."""
    members = {name: world.join(name) for name in ("anna", "ben")}
    assert not arrive(world, "anna", call=2)
    assert arrive(world, "ben", call=2)
    for member in members.values():  # all connections have broken
        world.leave(member)
    assert world.join("anna", former=members["anna"]) == members["anna"]
    assert arrive(world, "anna", call=2)
    assert not arrive(world, "anna", call=2, barrier="another")
    assert not arrive(world, "anna", call=3)
    world.leave(members["anna"])
    world.join("anna")
    assert not arrive(world, "anna", call=2)


def test_openings_are_forgotten_when_their_calls_have_their_answers(world):
    """Openings for calls that still wait, and for other calls, are kept."""
    for name in ("anna", "ben"):
        world.join(name)
    for call in (1, 2):
        assert not arrive(world, "anna", barrier=f"b{call}", call=call)
        assert arrive(world, "ben", barrier=f"b{call}", call=call)
    world.registry.forget_opened("g", "anna", 1, {2})
    assert set(world.registry.state.opened) == {"g/b2/anna", "g/b1/ben", "g/b2/ben"}
    assert arrive(world, "anna", barrier="b2", call=2)


def test_a_call_that_comes_again_changes_nothing_while_it_waits(world):
    """The later give-up time is not written, which saves a write to a Redis."""
    world.join("anna")
    assert not arrive(world, "anna")
    before = msgspec.json.encode(world.registry.state)
    world.now += 1
    assert not arrive(world, "anna")
    assert msgspec.json.encode(world.registry.state) == before


def test_a_member_waits_at_a_few_barriers_at_a_time(world):
    """A member cannot take the room of others; there is room again when one has opened."""
    for name in ("anna", "ben"):
        world.join(name)
    for i in range(MAX_BARRIERS):
        assert not arrive(world, "anna", barrier=f"b{i}")
    with pytest.raises(DiscoveryUnavailable, match="waits at 4 barriers already"):
        arrive(world, "anna", barrier="another")
    assert not arrive(world, "anna", barrier="b0")  # again
    assert arrive(world, "ben", barrier="b0")
    assert not arrive(world, "anna", barrier="another")


def test_the_state_of_a_registry_goes_through_json(world):
    """A registry that reads it decides as the one that wrote it."""
    anna, ben = world.join("anna"), world.join("ben")
    assert not arrive(world, "anna")
    world.leave(ben)
    text = msgspec.json.encode(world.registry.state)
    world.registry = world.new_registry()
    world.registry.state = msgspec.json.decode(text, type=State)
    assert world.names == {"anna"}
    assert world.join("ben").rank == ben.rank
    assert arrive(world, "ben")
    assert arrive(world, "anna")
    with pytest.raises(MembershipLost):
        world.join("ben", former=ben)
    assert world.registry.is_member("g", "anna", anna.incarnation)


def test_a_stream_begun_over_a_join_again(world):
    """The end of that stream is still noticed."""
    anna = world.join("anna")
    world.begin(anna)
    world.join("anna", former=anna)
    with pytest.raises(NameTaken):
        world.join("anna")
    world.end(anna)
    world.pass_time(GRACE_S)
    assert world.names == set()
