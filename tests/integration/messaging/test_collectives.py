"""Collective operations, against numpy."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.messaging.conftest import Group as Proxies
from support.messaging import PATIENCE_S, discovery_of, until
from support.peers import OPERATIONS, OPERATORS, arrays_of, given_to, results_of, same
from xain_foundation.net.errors import MessagingError
from xain_messaging.collectives import Group
from xain_messaging.collectives.algorithms import tree_broadcast
from xain_messaging.collectives.members import ID_LENGTH
from xain_messaging.collectives.operation import Operation
from xain_messaging.collectives.registry import MAX_GROUPS, MAX_NAME
from xain_messaging.errors import CollectiveFailed, PeersMissing
from xain_messaging.format.codec import encode, snapshot
from xain_messaging.format.messages import Message
from xain_messaging.links import COLLECTIVE, Bounds
from xain_messaging.proxy import Proxy

SHAPES: list[tuple[int, ...]] = [
    *[(), (0,), (1,), (2,), (7,), (13,), (64,), (997,)],
    *[(5, 3), (3, 0, 2), (11, 2, 3)],
]
DTYPES = ["f4", "f8", "i8", "i4", "u1", "c8", ">f4"]


def together(groups: list[Group], do: Callable[[Group], Any]) -> list[Any]:
    """The result of each member, by rank; each in a thread of its own."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(do, g) for g in groups]]


@pytest.fixture(scope="module")
def members() -> Iterator[list[Proxy]]:
    """Nine, in one process."""
    with discovery_of("in-process") as discovery:
        proxies = Proxies(discovery, "in-process")
        made = proxies.all(9)
        until(lambda: all(len(p.peers["worker"]) == 8 for p in made), "all to know all")
        yield made
        proxies.close()


@pytest.fixture
def workers(group: Proxies) -> list[Proxy]:
    """Four, on each driver."""
    made = group.all(4)
    until(lambda: all(len(p.peers["worker"]) == 3 for p in made), "all to know all")
    return made


@given(
    number=st.integers(1, 9),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(sorted(OPERATORS)),
    ring=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_as_numpy(members, number, shape, dtype, op, ring, data):
    """The result is numpy's and the caller's own, and the arguments do not change, for 1 to 9
    members, odd sizes, every dtype and both algorithms."""
    root = data.draw(st.integers(0, number - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    arrays = arrays_of(rng, number, shape, dtype)
    copies = [array.copy() for array in arrays]
    names = [proxy.name for proxy in members[:number]]
    groups = [proxy.group(f"group-{number}", names) for proxy in members[:number]]
    for group in groups:
        group.ring_bytes = 0 if ring else 1 << 30
    for operation in OPERATIONS:
        if operation == "reduce_scatter" and not shape:
            continue  # there is no axis to cut
        found = together(
            groups,
            lambda g, of=operation: getattr(g, of)(*given_to(of, arrays, g.rank, op, root)),
        )
        for result, expected in zip(found, results_of(operation, arrays, op, root), strict=True):
            same(result, expected)
        for result in found:
            for array in result if isinstance(result, list) else [result]:
                if array is not None:
                    array[...] = 1
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


@given(
    subsets=st.lists(st.lists(st.integers(0, 8), min_size=1, unique=True), min_size=2, max_size=4),
    calls=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4),
    ring=st.booleans(),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_groups_that_overlap(members, subsets, calls, ring):
    """All at work at the same time, each with other members in another order: none has anything of
    another one's, though it may be ahead of it or behind."""
    jobs = []
    for i, subset in enumerate(subsets):
        names = [members[position].name for position in subset]
        arrays = [np.arange(i, i + 11) * (rank + 1) for rank in range(len(subset))]
        jobs += [(members[position].group(f"job-{i}", names), arrays) for position in subset]
    for group, _ in jobs:
        group.ring_bytes = 0 if ring else 1 << 30

    def work(group: Group, arrays: list[Any]) -> list[Any]:
        return [getattr(group, of)(*given_to(of, arrays, group.rank)) for of in calls]

    with ThreadPoolExecutor(len(jobs)) as pool:
        found = [pool.submit(work, *job) for job in jobs]
        for (group, arrays), future in zip(jobs, found, strict=True):
            expected = [results_of(of, arrays)[group.rank] for of in calls]
            for one, other in zip(future.result(PATIENCE_S), expected, strict=True):
                same(one, other)


def test_all_members_get_the_same_bits(workers):
    """The sums depend on their order, by tree and by ring, on every driver."""
    groups = [proxy.group("worker") for proxy in workers]
    rng = np.random.default_rng(0)
    for size in (1000, 1_000_003):
        arrays = [rng.standard_normal(size).astype(np.float32) for _ in groups]
        first, *others = together(groups, lambda g, a=arrays: g.all_reduce(a[g.rank]))
        np.testing.assert_allclose(first, sum(arrays), atol=1e-5)
        assert all(other.tobytes() == first.tobytes() for other in others)


def test_a_barrier_holds_until_the_last(workers):
    """No member goes on before all have come."""
    groups = [proxy.group("worker") for proxy in workers]
    passed = []

    def wait(g: Group) -> None:
        g.barrier()
        passed.append(g.rank)

    with ThreadPoolExecutor() as pool:
        early = [pool.submit(wait, g) for g in groups[1:]]
        with pytest.raises(TimeoutError):
            early[0].result(0.2)
        assert not passed
        wait(groups[0])
        for future in early:
            future.result(PATIENCE_S)


def failures(calls: list["Future[Any]"]) -> list[BaseException | None]:
    return [call.exception(PATIENCE_S) for call in calls]


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_member_that_leaves_fails_the_others(workers, size):
    """In the middle of an operation: all hear of it long before their time is over, with its name,
    and the group is of no more use; those who are left make a new one."""
    groups = [proxy.group("worker") for proxy in workers]
    array = np.ones(size, np.float32)
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(g.all_reduce, array, timeout_s=PATIENCE_S) for g in groups[:3]]
        until(lambda: all(g.is_under_way for g in groups[:3]), "them to begin")
        before = time.monotonic()
        workers[3].close(0.0)
        for failed in failures(calls):
            assert isinstance(failed, CollectiveFailed)
            assert failed.missing == (workers[3].name,)
        assert time.monotonic() - before < PATIENCE_S
    with pytest.raises(CollectiveFailed, match=workers[3].name):
        groups[0].barrier()
    until(lambda: all(len(p.peers["worker"]) == 2 for p in workers[:3]), "it to be gone")
    smaller = [proxy.group("worker") for proxy in workers[:3]]
    assert [int(a[0]) for a in together(smaller, lambda g: g.all_reduce(array))] == [3, 3, 3]


@pytest.mark.parametrize("impatient", [0, 1, 2])
def test_a_member_that_does_not_come_fails_the_others_in_time(workers, impatient):
    """The operation fails as soon as one member has no more time, be it the one that waits for the
    late one or not. The late one hears that the others have given up, and the next operation
    works."""
    groups = [proxy.group("worker") for proxy in workers]
    one = np.ones(3)
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(g.all_reduce, one, timeout_s=0.3 if g.rank == impatient else PATIENCE_S)
            for g in groups[:3]
        ]
        found = failures(calls)
    assert all(isinstance(failed, CollectiveFailed) for failed in found)
    with pytest.raises(CollectiveFailed, match="another member"):
        groups[3].all_reduce(one)
    for result in together(groups, lambda g: g.all_reduce(one)):
        np.testing.assert_array_equal(result, 4 * one)


def test_member_without_room_for_its_part_names_the_one_that_takes_none(group):
    """The first member does not call what the others only give: they are ahead as long as there is
    room, then for their time, or until they hear that it is gone."""
    workers = group.all(2, bounds=Bounds(max_messages=1))
    groups = [proxy.group("worker") for proxy in workers]
    one = np.ones(3)
    assert groups[1].reduce(one) is None
    with pytest.raises(CollectiveFailed, match="has not taken") as caught:
        groups[1].reduce(one, timeout_s=0.3)
    assert caught.value.missing == (workers[0].name,)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(groups[1].reduce, one)
        until(lambda: groups[1].is_under_way, "it to begin")
        workers[0].close(0.0)
        failed = call.exception(PATIENCE_S / 2)
    assert isinstance(failed, CollectiveFailed)
    assert "not there any more" in str(failed)
    assert failed.missing == (workers[0].name,)


def test_the_time_of_an_operation_is_all_that_it_takes(group, monkeypatch):
    """A member without time left does not wait for room to tell the others."""
    monkeypatch.setattr("xain_messaging.collectives.operation.ABORT_S", 2 * PATIENCE_S)
    workers = group.all(3, bounds=Bounds(max_messages=1))
    for other in workers[1:]:
        workers[0].isend(Message("in the way", workers[0].name, other.name))
    with ThreadPoolExecutor() as pool:
        call = pool.submit(workers[0].group("worker").all_reduce, np.ones(3), timeout_s=0.2)
        assert isinstance(call.exception(PATIENCE_S), CollectiveFailed)


def test_member_that_leaves_after_its_part_does_no_harm(workers):
    """The part counts, also for later members; the next operation would need it again."""
    groups = [proxy.group("worker") for proxy in workers]
    one = np.ones(3)
    assert groups[3].reduce(one) is None
    workers[3].close()
    until(lambda: all(len(p.peers["worker"]) == 2 for p in workers[:3]), "it to be gone")
    found = together(groups[:3], lambda g: g.reduce(one))
    np.testing.assert_array_equal(found[0], 4 * one)
    with pytest.raises(CollectiveFailed) as caught:
        groups[1].all_reduce(one)
    assert caught.value.missing == (workers[3].name,)


@given(
    number=st.integers(2, 9),
    operation=st.sampled_from(OPERATIONS),
    size=st.sampled_from([1, 7, 1003]),
    ring=st.booleans(),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_a_member_that_dies_at_any_step(number, operation, size, ring, data):
    """Whichever of 2 to 9 it is: all others have the right result, or hear of it long before their
    time is over. If it had its own result when it died they all have theirs."""
    victim = data.draw(st.integers(0, number - 1))
    root = data.draw(st.integers(0, number - 1))
    step = data.draw(st.integers(0, 2 * number))
    arrays = [np.arange(size) * (rank + 1) for rank in range(number)]
    num_sent = itertools.count()
    with (
        discovery_of("in-process") as discovery,
        pytest.MonkeyPatch.context() as patch,
        closing(Proxies(discovery, "in-process")) as proxies,
    ):
        made = proxies.all(number)
        until(lambda: all(len(p.peers["worker"]) == number - 1 for p in made), "all")
        groups = [proxy.group("worker") for proxy in made]
        for group in groups:
            group.ring_bytes = 0 if ring else 1 << 30
        endpoint = made[victim].endpoint
        post = endpoint.post

        def die_or_post(*arguments: Any) -> None:
            if next(num_sent) == step:
                made[victim].close(0.0)
            post(*arguments)

        def work(group: Group) -> Any:
            try:
                return getattr(group, operation)(
                    *given_to(operation, arrays, group.rank, root=root)
                )
            finally:
                if group.rank == victim:
                    made[victim].close(0.0)

        patch.setattr(endpoint, "post", die_or_post)
        with ThreadPoolExecutor(number) as pool:
            calls = [pool.submit(work, group) for group in groups]
            found = failures(calls)
    expected = results_of(operation, arrays, root=root)
    for rank, failed in enumerate(found):
        if failed is None:
            same(calls[rank].result(), expected[rank])
            continue
        assert isinstance(failed, CollectiveFailed)
        if rank == victim:
            assert "has been closed" in str(failed)
        else:
            assert found[victim] is not None, failed
            assert failed.missing == (made[victim].name,)
            assert "in time" not in str(failed)


def test_parts_for_a_dead_member_do_not_hold_up_its_successor(group):
    """The parts are not awaited and take no room: where one fits, the next one still does."""
    options = {"bounds": Bounds(max_bytes=1_000_000)}
    workers = group.all(3, **options)
    names = [proxy.name for proxy in workers]
    part = np.zeros(75_000)  # 0.6 MB
    groups = [proxy.group("worker") for proxy in workers]
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(g.all_to_all, [part] * 3) for g in groups[:2]]
        link = workers[1].endpoint._links[names[2]]
        until(lambda: link.num_kept > 0, "a part for the one that dies")
        workers[2].close(0.0)
        assert all(isinstance(failed, CollectiveFailed) for failed in failures(calls))
    workers[2] = group("worker", {"worker": 2}, name=names[2], **options)
    until(lambda: all(len(p.peers.get("worker", ())) == 2 for p in workers), "it to be back")
    groups = [proxy.group("worker", names) for proxy in workers]
    for _ in range(2):
        for found in together(groups, lambda g: g.all_to_all([part] * 3)):
            same(found, [part] * 3)


def test_late_member_has_all_parts_of_the_others(members):
    """The parts, within the bounds of a peer, come one by one, and for groups that the member has
    not made yet."""
    root, number = members[0], 600
    givers = dict(zip("AB", members[1:3], strict=True))
    before = len(root._collectives.registry._arrived)
    for name, proxy in givers.items():
        group = proxy.group(name, [root.name, proxy.name])
        for i in range(number):
            group.reduce(np.array([i]))

    def all_is_there() -> bool:
        root.receive_by_id("nothing", 0.0)  # to receive what comes
        return len(root._collectives.registry._arrived) == before + 2 * number

    until(all_is_there, "all parts")
    for name, proxy in givers.items():
        group = root.group(name, [root.name, proxy.name])
        for i in range(number):
            found = group.reduce(np.array([1]))
            assert found is not None
            assert found[0] == i + 1


def test_parts_of_dead_members_are_not_kept(group):
    """The group was not made before the members had gone, and cannot be made any more."""
    anna, ben = group("worker", name="anna"), group("worker", name="ben")
    until(lambda: "worker" in anna.peers, "ben")
    assert anna.group("alone", ["anna"]).size == 1
    ben.group("both", ["anna", "ben"]).reduce(np.ones(3))

    def has_come() -> bool:
        anna.receive_by_id("nothing", 0.01)  # to receive what comes
        return bool(num_parts())

    def num_parts() -> int:
        return sum(len(arrived.parts) for arrived in anna._collectives.registry._arrived.values())

    until(has_come, "the part")
    ben.close()
    until(lambda: "worker" not in anna.peers, "ben to be gone")
    anna.group("alone", ["anna"])
    assert not anna._collectives.registry._arrived


WRONG_CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("all_to_all", ([np.ones(1)],)),
    ("broadcast", (np.ones(3), 3)),
    ("broadcast", (None,)),
    ("scatter", ([np.ones(1)],)),
    ("scatter", (None,)),
    ("gather", (np.ones(3), 3)),
    ("reduce", (np.ones(3), "sum", -1)),
    ("reduce", (np.ones(100_000), "sum", -1)),
    ("all_reduce", (np.ones(3), "mean")),
    ("reduce_scatter", (np.float64(1),)),
]


@pytest.mark.parametrize(("operation", "arguments"), WRONG_CALLS)
def test_a_call_with_wrong_arguments_counts(members, operation, arguments):
    """The others hear of it, and what is called next is the same at all."""
    names = [proxy.name for proxy in members[:3]]
    groups = [proxy.group(f"wrong {operation}", names) for proxy in members[:3]]
    right = given_to(operation, [np.ones(3)] * 3, 0)
    with ThreadPoolExecutor() as pool:
        wrong = pool.submit(getattr(groups[0], operation), *arguments)
        assert isinstance(wrong.exception(PATIENCE_S), ValueError)
        calls = [pool.submit(getattr(g, operation), *right) for g in groups[1:]]
        for failed in failures(calls):
            if operation.startswith("all"):
                assert isinstance(failed, CollectiveFailed)
                assert "ValueError at 'worker-0'" in str(failed)
    for result in together(groups, lambda g: g.all_reduce(np.ones(3))):
        np.testing.assert_array_equal(result, 3 * np.ones(3))


def test_a_time_that_is_none_leaves_a_group_as_it_was(members):
    """The refused call does not count."""
    names = [proxy.name for proxy in members[:2]]
    groups = [proxy.group("timely", names) for proxy in members[:2]]
    with pytest.raises(TypeError):
        groups[0].barrier(timeout_s="5")
    for result in together(groups, lambda g: g.all_reduce(np.ones(3))):
        np.testing.assert_array_equal(result, 2 * np.ones(3))


def test_groups_are_not_without_end(group):
    """A name for every step would be kept for ever; those of members who have gone are not."""
    workers = group.all(3)
    for _ in range(2):
        groups = [
            workers[0].group(f"step {i}", [p.name for p in workers]) for i in range(MAX_GROUPS)
        ]
    with pytest.raises(MessagingError, match="use their names again"):
        workers[0].group("another", [p.name for p in workers])
    workers[2].close(0.0)
    until(lambda: len(workers[0].peers["worker"]) == 1, "it to be gone")
    smaller = workers[0].group("another", [p.name for p in workers[:2]])
    assert smaller.gone == []
    assert all(one.gone == [workers[2].name] for one in groups)


def test_members_that_call_different_operations_are_told(workers):
    """Shape and dtype count."""
    groups = [proxy.group("worker") for proxy in workers]
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(g.all_reduce, np.zeros(3 if g.rank else 4), timeout_s=PATIENCE_S)
            for g in groups
        ]
        found = failures(calls)
    assert all(isinstance(failed, CollectiveFailed) for failed in found)
    assert any("(4,)" in str(failed) and "(3,)" in str(failed) for failed in found)


def test_groups_are_independent(workers):
    """Several at once, of the same members and of some, in any order."""
    all_ = [proxy.group("worker") for proxy in workers]
    names = [workers[1].name, workers[3].name]
    some = [proxy.group("some", names) for proxy in (workers[1], workers[3])]
    barrier = threading.Barrier(2)

    def in_some(g: Group) -> Any:
        barrier.wait(PATIENCE_S)
        return g.all_reduce(np.array([g.rank + 1]))[0]

    with ThreadPoolExecutor() as pool:
        of_all = [pool.submit(g.all_reduce, np.array([1])) for g in all_[:3]]
        of_some = [pool.submit(in_some, g) for g in some]
        assert [future.result(PATIENCE_S) for future in of_some] == [3, 3]
        of_all.append(pool.submit(all_[3].all_reduce, np.array([1])))
        assert [future.result(PATIENCE_S)[0] for future in of_all] == [4] * 4


def test_members_that_disagree_on_the_group_are_told(workers):
    """The error has the difference and comes long before the time is over, at all of both groups.
    Once they agree again, each has what it called."""
    names = [proxy.name for proxy in workers]
    groups = [proxy.group("worker", names if i else names[:3]) for i, proxy in enumerate(workers)]
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(g.all_reduce, np.ones(3), timeout_s=PATIENCE_S) for g in groups[:3]]
        for failed in failures(calls):
            assert isinstance(failed, CollectiveFailed)
            assert f"only in that of '{names[1]}': '{names[3]}'" in str(failed)
            assert failed.missing == ()

        def add(proxy: Proxy) -> Any:
            while True:  # what one has failed in alone fails at the others too
                with suppress(CollectiveFailed):
                    return proxy.group("worker", names[:3]).all_reduce(np.ones(3))

        again = [pool.submit(add, proxy) for proxy in workers[:3]]
        for future in again:
            np.testing.assert_array_equal(future.result(PATIENCE_S), 3 * np.ones(3))


def test_member_that_waits_in_an_old_group_is_told(group):
    """A member that has made the next group tells it, and goes on, whichever asks first."""
    workers = group.all(3)
    groups = [proxy.group("worker") for proxy in workers]
    with ThreadPoolExecutor() as pool:
        late = pool.submit(groups[1].all_reduce, np.ones(3), timeout_s=PATIENCE_S)
        until(lambda: groups[1].is_under_way, "it to begin")
        workers[2].close(0.0)
        until(lambda: all(len(p.peers["worker"]) == 1 for p in workers[:2]), "it to be gone")
        new = workers[0].group("worker")
        assert new.size == 2
        early = pool.submit(new.all_reduce, np.ones(3), timeout_s=PATIENCE_S)
        failed = late.exception(PATIENCE_S)
        assert isinstance(failed, CollectiveFailed)
        assert f"only in that of '{workers[1].name}': '{workers[2].name}'" in str(failed)
        found = workers[1].group("worker").all_reduce(np.ones(3))
        for result in (found, early.result(PATIENCE_S)):
            np.testing.assert_array_equal(result, 2 * np.ones(3))


def test_slow_member_has_the_result_of_the_others(group, monkeypatch):
    """One of the others waits for it in the next group by then."""
    workers = group.all(3)
    groups = [proxy.group("worker") for proxy in workers]
    goes_on, broadcast = threading.Event(), tree_broadcast

    def slow_broadcast(operation: Operation, array: Any, root: int) -> Any:
        if operation.rank == 2:
            assert goes_on.wait(PATIENCE_S)
        return broadcast(operation, array, root)

    monkeypatch.setattr("xain_messaging.collectives.group.tree_broadcast", slow_broadcast)
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(g.all_reduce, np.ones(3), timeout_s=PATIENCE_S) for g in groups]
        for done in calls[:2]:
            np.testing.assert_array_equal(done.result(PATIENCE_S), 3 * np.ones(3))
        names = [workers[0].name, workers[2].name]
        early = pool.submit(workers[0].group("worker", names).barrier, PATIENCE_S)
        said = workers[2]._collectives.registry._waits
        until(lambda: names[0] in said, "it to say that it waits")
        goes_on.set()
        np.testing.assert_array_equal(calls[2].result(PATIENCE_S), 3 * np.ones(3))
        workers[2].group("worker", names).barrier(PATIENCE_S)
        early.result(PATIENCE_S)


def test_an_interrupted_operation_ends_at_the_others(members):
    """The other members are told, and do not wait for its part until their time is over."""

    class Interrupts:
        def __array__(self, *_: object, **options: object) -> np.ndarray:
            raise KeyboardInterrupt

    names = [proxy.name for proxy in members[:2]]
    one, other = (proxy.group("interrupted", names) for proxy in members[:2])
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(other.all_reduce, np.ones(3))
        with pytest.raises(KeyboardInterrupt):
            one.all_reduce(Interrupts())
        with pytest.raises(CollectiveFailed, match="KeyboardInterrupt"):
            call.result(PATIENCE_S)


def test_names_in_the_word_of_a_waiting_member_are_bounded(members):
    """Names and numbers that are no member's are kept up to a length."""
    a, b = members[:2]
    long = "x" * 10_000
    to = {"group": "g" * ID_LENGTH, "number": 0, "to": b.endpoint.member.incarnation}
    said = {
        "waits": long,
        "members": [[long, 1]],
        "numbers": {f"{i}{long}": i for i in range(2000)},
    }
    message = Message("collective", a.name, b.name, {**to, **said})
    with a.endpoint.lock:
        a.endpoint.try_to_post(message, COLLECTIVE, encode(message))
    kept = b._collectives.registry._waits
    until(lambda: a.name in kept and kept[a.name].step[0] == to["group"], "it to come")
    waits = kept[a.name]
    assert (len(waits.name), {len(name) for name, _ in waits.members}) == (MAX_NAME, {MAX_NAME})
    assert len(waits.numbers) == MAX_GROUPS
    assert {len(group) for group in waits.numbers} == {ID_LENGTH}


def test_a_part_that_waits_for_room_is_copied_once(group, monkeypatch):
    """However often is looked for room."""
    monkeypatch.setattr("xain_messaging.collectives.operation.LOOK_S", 0.01)
    copied = []

    def copy(frames: Any) -> Any:
        copied.append(frames)
        return snapshot(frames)

    monkeypatch.setattr("xain_messaging.collectives.operation.snapshot", copy)
    workers = group.all(2, bounds=Bounds(max_messages=1))
    one = workers[1].group("worker")
    one.reduce(np.ones(3))
    with pytest.raises(CollectiveFailed, match="has not taken"):
        one.reduce(np.ones(3), timeout_s=0.3)
    assert len(copied) == 2


def test_a_second_thread_is_refused_and_does_not_count(group):
    """The members that are at work do not hear of the second thread."""
    groups = [proxy.group("worker") for proxy in group.all(2)]
    with ThreadPoolExecutor() as pool:
        call = pool.submit(groups[0].barrier)
        until(lambda: groups[0].is_under_way, "it to begin")
        with pytest.raises(CollectiveFailed, match="does not count"):
            groups[0].barrier()
        groups[1].barrier()
        call.result(PATIENCE_S)
    assert [g.number for g in groups] == [1, 1]


def test_group_is_of_present_members(workers):
    """The caller is in it, and no member twice."""
    own, other = workers[0].name, workers[1].name
    with pytest.raises(PeersMissing, match="nobody"):
        workers[0].group("some", [own, "nobody"])
    for names in ([other], [own, own]):
        with pytest.raises(ValueError, match=own):
            workers[0].group("some", names)
    assert workers[0].group("worker") is workers[0].group("worker")
