"""A server node without sockets and disk, called by several threads as a server does."""

import threading

import numpy as np
import pytest
from msgspec.structs import replace

from support.node_host import Host
from support.parameter_state import table
from xain_parameters.keys import END
from xain_parameters.messages import (
    Done,
    Message,
    Probe,
    Pull,
    Push,
    Refused,
    Rows,
    Section,
    Several,
)
from xain_parameters.node.ports import Source
from xain_parameters.node.protocol import ServerNode
from xain_parameters.replica import Replica
from xain_parameters.specs import CutView, RangeView, View

LONG_S = 20.0
TABLE, OTHER = (table(number, bound=8, is_dense=True) for number in (1, 2))
WHOLE = RangeView(1, 0, END - 1, 1, ("b",))


class Node:
    """The server "b" with a lease, and its answers."""

    def __init__(self) -> None:
        self.host = Host()
        self.node = ServerNode("b", self.host)
        self.node.renew(1e9)

    def see(self, number: int, *ranges: RangeView, **changes: object) -> None:
        given: dict[str, object] = {"tables": (TABLE,), "addresses": {"b": "y"}} | changes
        # What is given are fields by name, of several types.
        self.node.take_view(View(1, number, ranges=ranges, **given), 0.0)

    def ask(self, worker: str, head: Pull | Push, values: object = None) -> Message:
        """The answer to a request, which comes at once."""
        message = Message(head, None, values)
        self.node.handle(Source(worker, 1), message, 0.0)
        # The messages it has sent are answers, each with the number of its request.
        return next(each for each in self.host.sent if each.head.request == head.request)


@pytest.fixture
def node() -> Node:
    return Node()


def pull(request: int, number: int = 1, opened: int = 0, table: int = 1) -> Pull:
    return Pull(request, (1, number), 1, table, opened, 0, 8)


def push(request: int, clock: int, *, is_held: bool = True) -> Push:
    return Push(request, (1, 1), 1, 1, clock, clock, 0, is_held, start=0, stop=8)


ONES = np.ones((8, 1), np.float32)


def test_loaded_range_and_a_view_at_the_same_time_do_not_wait_for_each_other():
    """A probe came before the range was loaded, so loading it looks into what the node keeps."""
    host = Host()
    node = ServerNode("b", host)
    range_ = RangeView(1, 0, END - 1, 3, ("a", "b"))
    addresses = {"a": "x", "b": "y"}

    def view(number):
        return View(2, number, (TABLE,), (range_,), addresses, rolled_back_to=1)

    node.take_view(view(1), 0.0)
    node.handle(Source("a", 1), Message(Probe(1, 3, 1)), 0.0)
    is_loading, may_load = threading.Event(), threading.Event()

    def on_open_log():
        is_loading.set()
        may_load.wait(LONG_S)

    host.on_open_log = on_open_log
    replica = Replica(range_, [TABLE], 2)
    steps = [lambda: node.loaded(1, 2, replica, 0.0), lambda: node.take_view(view(2), 0.0)]
    threads = [threading.Thread(target=step, daemon=True) for step in steps]
    threads[0].start()
    assert is_loading.wait(LONG_S)
    threads[1].start()
    threads[1].join(0.3)  # with the defect it has the lock of the node by now
    may_load.set()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_table_and_checkpoint_begun_while_a_range_is_loaded_are_taken_up(node):
    node.see(1, WHOLE, rolled_back_to=1)
    changes = {"tables": (TABLE, OTHER), "cut": CutView(2, ())}
    node.see(2, WHOLE, rolled_back_to=1, **changes)
    node.node.loaded(1, 1, Replica(WHOLE, [TABLE], 1), 0.0)
    assert isinstance(node.ask("w", pull(1, 2, table=2)).head, Rows)
    assert node.host.saved == [(1, 2)]


def test_request_for_a_table_that_a_range_does_not_know_yet_is_busy(node):
    """Ranges take a view one after the other."""
    halves = (RangeView(1, 0, 2**63 - 1, 1, ("b",)), RangeView(2, 2**63, END - 1, 1, ("b",)))
    node.see(1, *halves)
    replica = node.node.replica_of(1)
    is_declaring, may_declare = threading.Event(), threading.Event()
    declare = replica.declare

    def slow(table):
        is_declaring.set()
        may_declare.wait(LONG_S)
        return declare(table)

    replica.declare = slow
    thread = threading.Thread(target=lambda: node.see(2, *halves, tables=(TABLE, OTHER)))
    thread.start()
    assert is_declaring.wait(LONG_S)
    low, high = replica.span.indices(8)
    head = Pull(5, (1, 2), 1, 2, 0, low, high)
    answer = node.ask("w", head).head
    may_declare.set()
    thread.join(LONG_S)
    assert isinstance(answer, Refused)
    assert answer.why == "busy"
    node.host.sent.clear()
    assert isinstance(node.ask("w", head).head, Rows)


def test_late_push_of_a_closed_clock_is_refused(node):
    """Others have seen the clock without it: the worker was taken for dead, and came back."""
    node.see(1, WHOLE)
    assert isinstance(node.ask("w", push(1, 4), ONES).head, Done)
    assert (node.ask("v", pull(2, opened=6)).values == 1).all()
    refused = node.ask("w", push(3, 5), ONES).head
    assert isinstance(refused, Refused)
    assert refused.why == "evicted"
    assert isinstance(node.ask("w", push(4, 4), ONES).head, Done), "it is known already"
    assert isinstance(node.ask("w", push(5, 6), ONES).head, Done)
    assert (node.ask("v", pull(6, opened=6)).values == 1).all()


def test_range_takes_no_push_after_one_that_could_not_be_applied(node):
    """The server is about to end: log and backups must not get two entries of the same number."""
    node.see(1, WHOLE)
    replica = node.node.replica_of(1)
    part = replica._parts[1]
    apply = part.push

    def fail(*arguments):
        raise MemoryError("no memory to grow")

    part.push = fail
    with pytest.raises(MemoryError):
        node.ask("w", push(1, 0, is_held=False), ONES)
    part.push = apply
    for request, worker in ((2, "w"), (3, "v")):
        refused = node.ask(worker, push(request, 0, is_held=False), ONES).head
        assert isinstance(refused, Refused)
        assert refused.why == "busy"


def test_push_that_waits_while_its_clock_is_closed_is_refused(node):
    node.see(1, WHOLE)
    hosted = node.node._hosted[1]
    answers = []
    with hosted.lock:  # another request of the range is being handled
        thread = threading.Thread(target=lambda: answers.append(node.ask("w", push(1, 5), ONES)))
        thread.start()
        node.see(2, WHOLE, ended={"w": 5})
        assert (node.ask("v", pull(2, 2, opened=6)).values == 0).all()
    thread.join(LONG_S)
    assert isinstance(answers[0].head, Refused)
    assert (node.ask("v", pull(3, 2, opened=6)).values == 0).all()


def test_range_without_a_server_is_told_with_each_view(node):
    """A server whose lease was over is alive and has the range still."""
    other = RangeView(2, 1 << 63, END - 1, 5, ())
    node.see(
        1, RangeView(1, 0, (1 << 63) - 1, 1, ("b",)), RangeView(2, 1 << 63, END - 1, 4, ("a",))
    )
    assert node.host.returned == []
    lost = RangeView(1, 0, (1 << 63) - 1, 2, ())
    node.see(2, lost, other)
    node.see(3, lost, other)
    assert node.host.returned == [(1, {1: 2}, {2: 5})] * 2
    node.see(4, RangeView(1, 0, (1 << 63) - 1, 3, ("b",)), other)
    assert node.host.returned[2] == (1, {}, {2: 5})
    assert node.node.replica_of(1) is not None


HALVES = (RangeView(1, 0, END // 2 - 1, 1, ("b",)), RangeView(2, END // 2, END - 1, 1, ("b",)))


def several(each: Pull | Push, *rows: tuple[int, int, int]) -> Several:
    """rows: (range, start, stop)."""
    num_bytes = 4 if isinstance(each, Push) else 0
    return Several(
        each.request,
        each,
        tuple(
            Section(number, start, stop, 0, num_bytes * (stop - start))
            for number, start, stop in rows
        ),
    )


def test_request_for_several_ranges_has_one_answer(node):
    """Rows of all in their order; and a push that comes again changes nothing at any of them."""
    node.see(1, *HALVES)
    values = np.arange(6, dtype=np.float32)
    rows = (2, 6, 8), (1, 0, 4)
    pushed = replace(push(1, 0), start=0, stop=0)
    for request in (1, 2):
        head = several(replace(pushed, request=request), *rows)
        node.node.handle(Source("w", 1), Message(head, None, values.view(np.uint8)), 0.0)
        assert node.host.sent[-1].head == Done(request)
    opened = replace(pull(3, opened=1), start=0, stop=0)
    node.node.handle(Source("w", 1), Message(several(opened, *rows)), 0.0)
    answer = node.host.sent[-1]
    assert answer.head == Rows(3)
    assert [body[1].reshape(-1).tolist() for body in answer.bodies] == [[0, 1], [2, 3, 4, 5]]
    assert len(node.host.sent) == 3


def test_range_that_refuses_refuses_the_request_for_several(node):
    """Other ranges may have taken their part of a push, which is known when it comes again."""
    node.see(1, HALVES[0])
    values = np.ones(8, np.float32)
    rows = (1, 0, 4), (2, 4, 8)
    pushed = replace(push(1, 0), start=0, stop=0)
    node.node.handle(
        Source("w", 1), Message(several(pushed, *rows), None, values.view(np.uint8)), 0.0
    )
    refused = node.host.sent[-1].head
    assert isinstance(refused, Refused)
    assert (refused.request, refused.why) == (1, "moved")
    node.node.handle(Source("w", 1), Message(several(replace(pull(2), stop=0), *rows)), 0.0)
    refused = node.host.sent[-1].head
    assert isinstance(refused, Refused)
    assert (refused.request, refused.why) == (2, "moved")
    node.see(2, *HALVES)
    again = several(replace(pushed, request=3), *rows)
    node.node.handle(Source("w", 1), Message(again, None, values.view(np.uint8)), 0.0)
    assert node.host.sent[-1].head == Done(3)
    opened = several(replace(pull(4, 2, opened=1), stop=0), *rows)
    node.node.handle(Source("w", 1), Message(opened), 0.0)
    assert all((body[1] == 1).all() for body in node.host.sent[-1].bodies)
