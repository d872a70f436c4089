"""Collective operations of several processes, and of those that die in them."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from integration.messaging.conftest import Group
from support.messaging import PATIENCE_S, until
from support.peers import OPERATIONS, PeerProcess, arrays_of, collective, given_to, results_of, same
from xain_membership.ports import Discovery
from xain_messaging.errors import CollectiveFailed
from xain_messaging.links import Bounds
from xain_messaging.proxy import Proxy

NAMES = [f"worker-{i}" for i in range(4)]
LARGE = 1_000_003  # elements, and no number of members divides it


# Of an operation: nobody hears of a failure only because that is over.
LONG_S = 100 * PATIENCE_S


@pytest.fixture(params=["grpc", "zmq"])
def pair_of_kinds(
    request: pytest.FixtureRequest, discovery_at: Callable[[str], Discovery]
) -> Iterator[Group]:
    """On each driver; how they find each other makes no difference here."""
    made = Group(discovery_at("server"), request.param)
    yield made
    made.close()


def know(proxies: list[Proxy], number: int) -> None:
    until(
        lambda: all(len(proxy.peers.get("worker", ())) == number for proxy in proxies),
        f"everybody to know {number} others",
    )


def test_as_numpy_between_processes(pair_of_kinds):
    """Every operation, with nothing, fewer elements than members, a prime number, and megabytes."""
    group = pair_of_kinds
    here = group("worker", name=NAMES[0])
    others = [group.process("worker", {"worker": i + 1}, name=NAMES[i + 1]) for i in range(3)]
    know([here], 3)
    rng = np.random.default_rng(0)
    small = itertools.product([0, 1, 3, 97], ["f4", "f8", "i8"])
    for size, dtype in [*small, (LARGE, "f4")]:
        arrays = arrays_of(rng, 4, (size,), dtype)
        for operation in OPERATIONS:
            for rank, process in enumerate(others, 1):
                process.begin(
                    collective, "some", NAMES, operation, *given_to(operation, arrays, rank)
                )
            found = [collective(here, "some", NAMES, operation, *given_to(operation, arrays, 0))]
            found += [process.given() for process in others]
            for result, expected in zip(found, results_of(operation, arrays), strict=True):
                same(result, expected)


@contextmanager
def pool_for(proxies: list[Proxy]) -> Iterator[ThreadPoolExecutor]:
    """When the test has failed nobody waits for what is under way, as long as that may take."""
    with ThreadPoolExecutor() as pool:
        try:
            yield pool
        except BaseException:  # whatever it is
            for proxy in proxies:
                proxy.close(0.0)
            raise


def failure_of(call: "Future[Any]") -> CollectiveFailed:
    failed = call.exception(PATIENCE_S)
    assert isinstance(failed, CollectiveFailed)
    return failed


def test_a_member_that_is_killed_fails_the_others(group_of_processes):
    """SIGKILL in the middle of an operation: everybody hears of it long before the time is over,
    with its name; those who are left go on as a new group, and so do all when it is back. Twice:
    who comes then may find nothing of what was for the one before in its way, since there is no
    room for both."""
    group = group_of_processes
    array = np.ones(LARGE)
    bounds = Bounds(max_bytes=array.nbytes * 9 // 8)
    workers = group.all(3, timeout_s=LONG_S, bounds=bounds)

    def come() -> PeerProcess:
        made = group.process("worker", {"worker": 3}, name=NAMES[3], bounds=bounds)
        know(workers, 3)
        return made

    def together(operation: str, argument: Any, *processes: PeerProcess) -> list[Any]:
        for process in processes:
            process.begin(collective, "worker", None, operation, argument)
        with pool_for(workers) as pool:
            calls = [pool.submit(getattr(p.group("worker"), operation), argument) for p in workers]
            found = [call.result(PATIENCE_S) for call in calls]
            return found + [process.given() for process in processes]

    def all_reduce(*processes: PeerProcess) -> list[float]:
        """The first element, at each."""
        return [float(a[0]) for a in together("all_reduce", array[:3], *processes)]

    # Of the first nobody can have a result without it; of the second some can, but not the third.
    for operation, arguments in (("all_reduce", (array,)), ("all_to_all", ([array] * 4,))):
        victim = come()
        assert all_reduce(victim) == [4] * 4
        groups = [proxy.group("worker") for proxy in workers]
        assert groups[0].members[3] == NAMES[3]
        position = (groups[0].id, groups[0].number)

        def victim_is_in_it(position: tuple[str, int] = position) -> bool:
            workers[0].receive_by_id("nothing", 0.01)  # to receive what comes
            arrived = workers[0]._collectives.registry._arrived.get(position)
            return arrived is not None and any(sender == NAMES[3] for sender, _ in arrived.parts)

        victim.begin(collective, "worker", None, operation, *arguments)
        with pool_for(workers) as pool:
            calls = [pool.submit(getattr(g, operation), *arguments) for g in groups[1:]]
            until(victim_is_in_it, "the one that will die to be in the operation")
            victim.end()
            calls.append(pool.submit(getattr(groups[0], operation), *arguments))
            assert failure_of(calls[1]).missing == (NAMES[3],)
            for call in calls:
                if operation == "all_reduce" or call.exception(PATIENCE_S) is not None:
                    assert failure_of(call).missing == (NAMES[3],)
        know(workers, 2)
        assert all_reduce() == [3] * 3
    for found in together("all_to_all", [array] * 4, come()):
        same(found, [array] * 4)
