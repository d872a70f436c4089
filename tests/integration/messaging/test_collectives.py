"""Collective operations, against numpy."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.messaging.conftest import Group as Proxies
from support.messaging import PATIENCE_S, discovery_of, until
from support.peers import (
    OPERATIONS,
    OPERATORS,
    arrays_of,
    given_to,
    results_of,
    same,
)
from xain_messaging import collectives
from xain_messaging.collectives import Group
from xain_messaging.errors import CollectiveFailed, PeersMissing
from xain_messaging.links import Bounds
from xain_messaging.proxy import Proxy

SHAPES: list[tuple[int, ...]] = [
    *[(), (0,), (1,), (2,), (7,), (13,), (64,), (997,)],
    *[(5, 3), (3, 0, 2), (11, 2, 3)],
]
DTYPES = ["f4", "f8", "i8", "i4", "u1", "c8", ">f4"]


def together(groups: list[Group], do: Callable[[Group], Any]) -> list[Any]:
    """What each member gets, by rank; each in a thread of its own."""
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
def test_as_numpy(
    members: list[Proxy],
    number: int,
    shape: tuple[int, ...],
    dtype: str,
    op: str,
    ring: bool,
    data: st.DataObject,
) -> None:
    """For 1 to 9 members, odd sizes, every dtype and both algorithms: the result is numpy's, is the
    caller's own, and what was given is as it was."""
    root = data.draw(st.integers(0, number - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    arrays = arrays_of(rng, number, shape, dtype)
    copies = [array.copy() for array in arrays]
    names = [proxy.name for proxy in members[:number]]
    groups = [proxy.group(f"group-{number}", names) for proxy in members[:number]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "RING_BYTES", 0 if ring else 1 << 30)
        for operation in OPERATIONS:
            if operation == "reduce_scatter" and not shape:
                continue  # there is no axis to cut
            found = together(
                groups,
                lambda g, of=operation: getattr(g, of)(*given_to(of, arrays, g.rank, op, root)),
            )
            for result, expected in zip(
                found, results_of(operation, arrays, op, root), strict=True
            ):
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
def test_groups_that_overlap(
    members: list[Proxy], subsets: list[list[int]], calls: list[str], ring: bool
) -> None:
    """All at work at the same time, each with other members in another order: none has anything of
    another one's, though it may be ahead of it or behind."""
    jobs = []
    for i, subset in enumerate(subsets):
        names = [members[place].name for place in subset]
        arrays = [np.arange(i, i + 11) * (rank + 1) for rank in range(len(subset))]
        jobs += [(members[place].group(f"job-{i}", names), arrays) for place in subset]

    def work(group: Group, arrays: list[Any]) -> list[Any]:
        return [getattr(group, of)(*given_to(of, arrays, group.rank)) for of in calls]

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(jobs)) as pool:
        patch.setattr(collectives, "RING_BYTES", 0 if ring else 1 << 30)
        found = [pool.submit(work, *job) for job in jobs]
        for (group, arrays), future in zip(jobs, found, strict=True):
            expected = [results_of(of, arrays)[group.rank] for of in calls]
            for one, other in zip(future.result(PATIENCE_S), expected, strict=True):
                same(one, other)


# Nothing, one element, fewer elements than members, a prime number, and so many that they go
# around the ring, in parts that cannot all be of one size.
SIZES = [(0, "f4"), (1, "i8"), (5, "f8"), (97, "f4"), (70_001, "f4")]
LARGE = (1_000_003, "f8")


@pytest.mark.parametrize("driver", ["grpc", "zmq"])
def test_as_numpy_over_a_network(driver: str) -> None:
    """Every operation, of 1 to 9 members."""
    rng = np.random.default_rng(0)
    with discovery_of("in-process") as discovery:
        proxies = Proxies(discovery, driver)
        try:
            made = proxies.all(9)
            until(lambda: all(len(p.peers["worker"]) == 8 for p in made), "all to know all")
            for number in range(1, 10):
                names = [proxy.name for proxy in made[:number]]
                groups = [proxy.group("some", names) for proxy in made[:number]]
                for size, dtype in [*SIZES, LARGE] if number == 3 else SIZES:
                    arrays = arrays_of(rng, number, (size,), dtype)
                    for operation in OPERATIONS:
                        found = together(
                            groups,
                            lambda g, of=operation, arrays=arrays: getattr(g, of)(
                                *given_to(of, arrays, g.rank)
                            ),
                        )
                        for result, expected in zip(
                            found, results_of(operation, arrays), strict=True
                        ):
                            same(result, expected)
        finally:
            proxies.close()


def test_all_members_get_the_same_bits(workers: list[Proxy]) -> None:
    """Of sums that depend on their order, by tree and by ring, on every driver."""
    groups = [proxy.group("worker") for proxy in workers]
    rng = np.random.default_rng(0)
    for size in (1000, 1_000_003):
        arrays = [rng.standard_normal(size).astype(np.float32) for _ in groups]
        first, *others = together(groups, lambda g, a=arrays: g.all_reduce(a[g.rank]))
        np.testing.assert_allclose(first, sum(arrays), atol=1e-5)
        assert all(other.tobytes() == first.tobytes() for other in others)


def test_a_barrier_holds_until_the_last(workers: list[Proxy]) -> None:
    """Nobody goes on before all have come."""
    groups = [proxy.group("worker") for proxy in workers]
    passed: list[int] = []

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
def test_a_member_that_leaves_fails_the_others(workers: list[Proxy], size: int) -> None:
    """In the middle of an operation: all hear of it long before their time is over, with its name,
    and the group is of no more use; those who are left make a new one."""
    groups = [proxy.group("worker") for proxy in workers]
    array = np.ones(size, np.float32)
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(g.all_reduce, array, timeout_s=PATIENCE_S) for g in groups[:3]]
        until(lambda: all(g._under_way.locked() for g in groups[:3]), "them to begin")
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


def test_a_member_that_does_not_come_fails_the_others_in_time(workers: list[Proxy]) -> None:
    """When it does come it hears that the others have given up; and the next operation works."""
    groups = [proxy.group("worker") for proxy in workers]
    one = np.ones(3)
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(g.all_reduce, one, timeout_s=0.3) for g in groups[:3]]
        found = failures(calls)
    assert all(isinstance(failed, CollectiveFailed) for failed in found)
    with pytest.raises(CollectiveFailed, match="another member"):
        groups[3].all_reduce(one)
    for result in together(groups, lambda g: g.all_reduce(one)):
        np.testing.assert_array_equal(result, 4 * one)


def test_who_finds_no_room_for_its_part_names_who_takes_none(group: Proxies) -> None:
    """The first is not there for what the others only give: those are ahead of it for as long as
    there is room, then for their time. When it is gone they hear that long before."""
    workers = group.all(2, bounds=Bounds(max_messages=1))
    groups = [proxy.group("worker") for proxy in workers]
    one = np.ones(3)
    assert groups[1].reduce(one) is None
    with pytest.raises(CollectiveFailed, match="has not taken") as caught:
        groups[1].reduce(one, timeout_s=0.3)
    assert caught.value.missing == (workers[0].name,)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(groups[1].reduce, one)
        until(groups[1]._under_way.locked, "it to begin")
        workers[0].close(0.0)
        failed = call.exception(PATIENCE_S / 2)
    assert isinstance(failed, CollectiveFailed)
    assert "not there any more" in str(failed)
    assert failed.missing == (workers[0].name,)


def test_members_that_call_different_operations_are_told(workers: list[Proxy]) -> None:
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


def test_groups_are_independent(workers: list[Proxy]) -> None:
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


def test_a_group_is_of_those_who_are_here(workers: list[Proxy]) -> None:
    """With ourselves in it, and nobody twice."""
    own, other = workers[0].name, workers[1].name
    with pytest.raises(PeersMissing, match="nobody"):
        workers[0].group("some", [own, "nobody"])
    for names in ([other], [own, own]):
        with pytest.raises(ValueError, match=own):
            workers[0].group("some", names)
    assert workers[0].group("worker") is workers[0].group("worker")
