"""The order in which waiting requests of several jobs are served."""

import threading
import time

from xain_parameters.node.fair_slots import FairQueue, FairSlots

A, B = 1, 2
LONG_S = 30.0


def test_jobs_get_equal_time_whatever_their_number_of_requests_and_the_length_of_each():
    """One job has 20 waiting all the time, each of 4 s; another has 2, each of 1 s."""
    queue = FairQueue[float]()
    for job, num_waiting, cost_s in ((A, 20, 4.0), (B, 2, 1.0)):
        for _ in range(num_waiting):
            queue.add(job, cost_s)
    used_s = {A: 0.0, B: 0.0}
    for _ in range(1000):
        cost_s = queue.take()
        assert cost_s is not None
        job = A if cost_s == 4.0 else B
        queue.charge(job, cost_s)
        used_s[job] += cost_s
        queue.add(job, cost_s)
        assert abs(used_s[A] - used_s[B]) <= 4.0


def test_job_that_was_idle_has_saved_nothing():
    queue = FairQueue[str]()
    for _ in range(10):
        queue.add(A, "a")
        queue.take()
        queue.charge(A, 1.0)
    order = []
    for job, item in ((A, "a"), (A, "a"), (B, "b"), (B, "b"), (B, "b")):
        queue.add(job, item)
    for _ in range(4):
        item = queue.take()
        assert item is not None
        order.append(item)
        queue.charge(A if item == "a" else B, 1.0)
    assert sorted(order) == ["a", "a", "b", "b"]


class Waiting:
    """Threads that wait for a slot, in their order, at the time 0."""

    def __init__(self, slots: FairSlots, *names: str) -> None:
        """names: each begins with that of its job, such as "a1"."""
        self.order: list[str] = []
        self._slots = slots
        self._threads = []
        for name in names:
            self._threads.append(threading.Thread(target=self._serve, args=(name,)))
            self._threads[-1].start()
            deadline = time.monotonic() + LONG_S
            while slots.num_waiting < len(self._threads):
                assert time.monotonic() < deadline
                time.sleep(0.001)  # a poll: it ends when the condition holds

    def _serve(self, name: str) -> None:
        job = ord(name[0])
        self._slots.enter(job, 0.0)
        self.order.append(name)
        self._slots.leave(job, 1.0, 0.0)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive()


def test_threads_without_a_slot_are_served_by_the_time_that_their_jobs_have_used():
    slots = FairSlots(2)
    slots.enter(ord("a"), 0.0)
    slots.enter(ord("c"), 0.0)
    waiting = Waiting(slots, "a1", "a2", "b1", "b2")
    slots.leave(ord("a"), 1.5, 0.0)  # and c has its slot still
    waiting.join()
    assert waiting.order == ["b1", "b2", "a1", "a2"]
    slots.leave(ord("c"), 1.0, 0.0)
    slots.enter(ord("a"), 0.0)
    slots.enter(ord("a"), 0.0)  # both slots are free again


def test_job_that_is_alone_waits_for_no_slot():
    slots = FairSlots(1)
    slots.enter(A, 0.0)
    for _ in range(3):
        slots.enter(A, FairSlots.alone_s)


def test_all_that_wait_are_served_when_one_job_is_left():
    slots = FairSlots(1)
    slots.enter(ord("b"), 0.0)
    waiting = Waiting(slots, "a1", "a2", "a3")
    slots.enter(ord("a"), 1.0)
    slots.leave(ord("a"), 1.0, 1.0)  # though b has the slot still
    waiting.join()
    assert sorted(waiting.order) == ["a1", "a2", "a3"]
