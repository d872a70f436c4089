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
from support.messaging import PATIENCE_S, discovery_of, driver_maker, until
from xain_messaging import collectives
from xain_messaging.collectives import Group
from xain_messaging.errors import CollectiveFailed, PeersMissing
from xain_messaging.proxy import Proxy

OPERATORS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (2,), (7,), (64,), (5, 3), (3, 0, 2), (11, 2, 3)]
DTYPES = ["f4", "f8", "i4", "u1", "c8", ">f4"]


def together(groups: list[Group], do: Callable[[Group], Any]) -> list[Any]:
    """What each member gets, by rank; each in a thread of its own."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(do, g) for g in groups]]


@pytest.fixture(scope="module")
def members() -> Iterator[list[Proxy]]:
    """Nine, in one process."""
    with discovery_of("in-process") as discovery:
        proxies = Proxies(discovery, driver_maker("in-process"))
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


def arrays_of(rng: np.random.Generator, number: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Small whole numbers: their sums are exact in every order."""
    return [rng.integers(0, 3, shape).astype(dtype) for _ in range(number)]


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
    op: Any,
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
    whole = arrays[0].astype(arrays[0].dtype.newbyteorder("="))
    for array in arrays[1:]:
        whole = OPERATORS[op](whole, array)
    stacked = np.stack(arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "RING_BYTES", 0 if ring else 1 << 30)

        reduced = together(groups, lambda g: g.all_reduce(arrays[g.rank], op))
        for result in reduced:
            np.testing.assert_array_equal(result, whole)
            assert result.shape == shape
            result[...] = 1

        at_root = together(groups, lambda g: g.reduce(arrays[g.rank], op, root))
        np.testing.assert_array_equal(at_root.pop(root), whole)
        assert at_root == [None] * (number - 1)

        gathered = together(groups, lambda g: g.gather(arrays[g.rank], root))
        np.testing.assert_array_equal(gathered.pop(root), stacked)
        assert gathered == [None] * (number - 1)

        for result in together(groups, lambda g: g.all_gather(arrays[g.rank])):
            np.testing.assert_array_equal(result, stacked)
            result[...] = 1

        if shape:
            parts = np.array_split(whole, number)
            for rank, part in enumerate(
                together(groups, lambda g: g.reduce_scatter(arrays[g.rank], op))
            ):
                np.testing.assert_array_equal(part, parts[rank])
                part[...] = 1

    exchanged = together(
        groups, lambda g: g.all_to_all([arrays[g.rank] + to for to in range(number)])
    )
    for rank, found in enumerate(exchanged):
        for source, array in enumerate(found):
            np.testing.assert_array_equal(array, arrays[source] + rank)
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


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
        until(lambda: not any(call.done() for call in calls), "them to begin")
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
