"""ps-lite's key-value semantics."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support.waiting import wait_until
from xain_parameters.client.kv import SHORT_KEYS, KVWorker
from xain_parameters.errors import Closed, Invalid, Unavailable
from xain_parameters.messages import Push, Refused


@pytest.fixture
def kv(group) -> Iterator[KVWorker]:
    with group.worker() as server:
        made = KVWorker(server)
        yield made
        made.close()


def test_repeated_pushes_are_summed(kv):
    """ps-lite's own test: many keys, pushed repeatedly, pulled once; the last key too."""
    keys = np.sort(np.random.default_rng(1).integers(0, 1 << 62, 10_000).astype(np.uint64))
    keys[-1] = 2**64 - 1
    keys[0] = 0
    vals = np.arange(len(keys), dtype=np.float32)
    for timestamp in [kv.push(keys, vals) for _ in range(50)]:
        assert kv.wait(timestamp) is None
    out = np.empty(len(keys), np.float32)
    assert kv.wait(kv.pull(keys, out)) is out
    np.testing.assert_array_equal(out, 50 * vals)


def test_keys_may_have_values_of_different_lengths(kv):
    keys, lens = [3, 5, 9], [2, 1, 2]
    vals = np.arange(5, dtype=np.float32)
    kv.wait(kv.push(keys, vals, lens))
    np.testing.assert_array_equal(kv.wait(kv.push_pull(keys, vals, lens=lens)), 2 * vals)
    np.testing.assert_array_equal(kv.wait(kv.pull(keys, lens=lens)), 2 * vals)
    kv.wait(kv.push([1, 2], np.ones(6, np.float32)))  # three for each
    np.testing.assert_array_equal(kv.wait(kv.pull([1, 2], lens=3)), np.ones(6))


def test_wrong_keys_and_values_are_refused_at_once(kv):
    one = np.ones(1, np.float32)
    for wrong in (
        lambda: kv.push([2, 1], np.ones(2, np.float32)),
        lambda: kv.push([1, 1], np.ones(2, np.float32)),
        lambda: kv.push([1, 2, 3], np.ones(4, np.float32)),
        lambda: kv.push([1, 2], np.ones(2, np.float32), [1, 2]),
        lambda: kv.push([1], np.ones(1)),
        lambda: kv.push([0.5], one),
        lambda: kv.pull([1, 2], one),
        lambda: kv.pull([1, 2], lens=-1),
        lambda: kv.push_pull([1], one, np.ones(2, np.float32)),
    ):
        with pytest.raises(Invalid):
            wrong()


def test_keys_with_the_bytes_of_a_known_list_are_refused_at_once(kv):
    """The client remembers lists of unsigned keys by their bytes. The same bytes as signed keys are
    another list, which is not ascending."""
    keys, vals = np.array([1, 2**64 - 1], np.uint64), np.ones(2, np.float32)
    for _ in range(2):
        kv.wait(kv.push(keys, vals))
    for wrong in (keys.view(np.int64), keys[::-1]):
        with pytest.raises(Invalid, match="ascending"):
            kv.push(wrong, vals)
        with pytest.raises(Invalid, match="ascending"):
            kv.pull(wrong)
    assert (kv.wait(kv.pull(keys)) == 2).all()


def test_pulled_values_are_an_array_of_the_callers_own(kv):
    first = kv.wait(kv.pull([1, 2]))
    first += 1
    np.testing.assert_array_equal(kv.wait(kv.pull([1, 2])), [0, 0])
    assert len(kv.wait(kv.pull([]))) == 0


def test_failed_push_of_several_lengths_leaves_no_push_open(group):
    """The next clock comes, and no other length has been pushed. A length that found no server
    fails the clock, and none waits for those behind it."""
    with group.worker() as server:
        kv = KVWorker(server)
        clocks = server.clocks()
        next(clocks)
        with pytest.raises(Invalid, match="not finite"):
            kv.wait(kv.push([1, 2], np.array([1, np.nan, 1], np.float32), [1, 2]))
        with pytest.raises(Invalid, match="not finite"):
            kv.wait(kv.push_pull([1, 2], np.array([np.nan, 1, 1], np.float32), lens=[1, 2]))
        assert next(clocks) == 1
        assert not kv.wait(kv.pull([1, 2], lens=[1, 2])).any()
        group.refuse = lambda where, head: (
            Refused(0, "busy", "") if isinstance(head, Push) else None
        )
        server._core._requests.timeout_s = 0.2
        failing = kv.push([1, 2], np.ones(3, np.float32), [1, 2])
        with pytest.raises(Unavailable):
            kv.wait(failing)
        with pytest.raises(Unavailable):
            next(clocks)
        kv.close()


def test_empty_keys_finish_at_once(kv):
    nothing = np.empty(0, np.float32)
    called = threading.Event()
    kv.wait(kv.push([], nothing, callback=called.set))
    assert called.is_set()
    assert len(kv.wait(kv.pull([], nothing))) == 0


def test_callback_runs_before_wait_returns_and_errors_come_from_wait(group, kv):
    order = []
    timestamp = kv.push([1], np.ones(1, np.float32), callback=lambda: order.append("callback"))
    kv.wait(timestamp)
    order.append("wait")
    assert order == ["callback", "wait"]
    assert kv.wait(timestamp) is None
    failing = kv.push([1], np.full(1, np.nan, np.float32), callback=lambda: order.append("never"))
    with pytest.raises(Invalid, match="kv0/1"):
        kv.wait(failing)
    assert order == ["callback", "wait"]


def test_wait_ends_after_its_timeout_and_may_be_repeated(group, kv):
    kv.wait(kv.pull([1]))
    free = threading.Event()

    def block(where: str, head: object) -> Refused | None:
        return None if free.is_set() else Refused(0, "busy", "")

    group.refuse = block
    timestamp = kv.push([1], np.ones(1, np.float32))
    with pytest.raises(Unavailable, match="no answer"):
        kv.wait(timestamp, timeout_s=0.05)
    free.set()
    assert kv.wait(timestamp) is None
    assert kv.wait(kv.pull([1])) == 1


def test_higher_priorities_go_first_and_equals_in_their_order(group, kv):
    """While the only thread of the worker is busy, requests wait by priority."""
    kv._queue.num_threads = 1
    kv.wait(kv.pull([1]))
    free = threading.Event()
    group.refuse = lambda where, head: None if free.is_set() else Refused(0, "busy", "")
    one = np.ones(1, np.float32)
    blocked = kv.push([1], one)
    while kv._queue._waiting:  # the thread has it before more come
        time.sleep(0.001)  # a poll: it ends when the queue is empty
    order = []
    later = [
        kv.push([10], one, callback=lambda: order.append("low 1"), priority=0),
        kv.push([11], one, callback=lambda: order.append("low 2"), priority=0),
        kv.push([12], one, callback=lambda: order.append("high"), priority=5),
    ]
    free.set()
    for timestamp in (blocked, *later):
        kv.wait(timestamp)
    assert order == ["high", "low 1", "low 2"]


def test_several_clients_of_one_process_share_their_app_only(group):
    keys = np.arange(100)
    ones = np.ones(100, np.float32)

    def work(number: int) -> None:
        with group.worker(f"w{number}") as server:
            for app in (0, 1):
                kv = KVWorker(server, app)
                for _ in range(5):
                    kv.wait(kv.push(keys, (app + 1) * ones))
                kv.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    with group.worker() as server:
        for app in (0, 1):
            kv = KVWorker(server, app)
            assert (kv.wait(kv.pull(keys)) == 20 * (app + 1)).all()
            kv.close()


def test_closed_worker_ends_its_requests(group):
    with group.worker() as server:
        kv = KVWorker(server)
        kv.wait(kv.pull([1]))
        group.refuse = lambda where, head: (
            Refused(0, "busy", "") if isinstance(head, Push) else None
        )
        timestamps = [kv.push([1], np.ones(1, np.float32)) for _ in range(10)]
        server.close()
        kv.close()
        for timestamp in timestamps:
            with pytest.raises(Closed):
                kv.wait(timestamp)


def test_values_that_are_not_waited_for_are_kept_up_to_a_bound(group):
    with group.worker() as server, KVWorker(server) as kv:
        kv.max_kept, kv._queue.num_threads = 3, 1
        timestamps = [kv.pull([1, 2**64 - 1]) for _ in range(10)]
        kv.wait(kv.pull([1]))  # after all others; it is one of the three until here
        assert [kv.wait(each) is None for each in timestamps] == 8 * [True] + 2 * [False]
        assert not kv._requests


def test_failed_request_is_never_told_as_a_success(group):
    """The errors of the last ones are kept. An older request that was not waited for raises too,
    and one that was waited for is None again."""
    wrong, right = np.full(1, np.nan, np.float32), np.ones(1, np.float32)
    with group.worker() as server, KVWorker(server) as kv:
        kv.max_kept, kv._queue.num_threads = 8, 1
        failed = [kv.push([1], wrong) for _ in range(5)]
        succeeded = [kv.push([1], right) for _ in range(4)]
        kv.wait(kv.pull([1]))  # after all others
        for timestamp in failed[:2]:
            with pytest.raises(Unavailable, match=f"request {timestamp}: its outcome is not known"):
                kv.wait(timestamp)
        for timestamp in failed[2:]:
            with pytest.raises(Invalid, match="not finite"):
                kv.wait(timestamp)
            assert kv.wait(timestamp) is None
        assert [kv.wait(each) for each in succeeded] == 4 * [None]
        assert not kv._requests


def test_worker_is_closed_by_with(group):
    with group.worker() as server:
        with KVWorker(server) as kv:
            assert kv.wait(kv.pull([1])) == 0
        with pytest.raises(Closed):
            kv.wait(kv.pull([1]))


def test_small_request_runs_in_the_thread_that_waits_for_it(group, kv, monkeypatch):
    """No other thread has to be woken. One that nobody waits for is begun by the worker, and so are
    a large one, one behind another, and one whose callback must not run in the waiting thread."""
    core = kv._server._core
    real, ran = core.pull_keys, []

    def pull_keys(*arguments):
        ran.append(threading.get_ident())
        return real(*arguments)

    kv.wait(kv.pull([1]))
    monkeypatch.setattr(core, "pull_keys", pull_keys)
    here = threading.get_ident()
    kv._queue.hold_s = 1e-9
    unasked = kv.pull([1])
    wait_until(lambda: kv._requests[unasked].is_done)
    assert kv.wait(unasked) == 0
    kv._queue.hold_s = 1e9
    kv.wait(kv.pull(np.arange(SHORT_KEYS + 1)))
    kv.wait(kv.pull([1], callback=lambda: None))
    assert here not in ran
    kv.wait(kv.pull([1]))
    assert ran.pop() == here
    for timestamp in [kv.pull([1]), kv.pull([1])]:
        wait_until(lambda: kv._requests[timestamp].is_done)  # noqa: B023  # called at once
    assert here not in ran


def test_threads_of_the_worker_sleep_when_nothing_is_asked(kv):
    """Threads look for requests that nobody waits for only for a while after the last one."""
    kv._queue.awake_s = 0.0
    kv.wait(kv.pull([1]))
    wait_until(lambda: kv._queue._num_asleep == len(kv._queue._threads))
    assert not kv._queue._is_looking
    assert kv.wait(kv.pull([1])) == 0
