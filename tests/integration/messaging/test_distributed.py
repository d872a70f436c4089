"""Classes that messages drive."""

import copy
from dataclasses import dataclass, field
from functools import partial

import pytest

from support.messaging import until
from support.waiting import beside
from xain_foundation.conditional_events import EventTableFull
from xain_messaging.distributed import dist
from xain_messaging.format.messages import Message
from xain_messaging.proxy import Proxy


@dataclass
class Sums:
    """The messages of each call of the handler."""

    name: str = "sums"
    seen: list[list[int]] = field(default_factory=list)

    def total(self) -> int:
        return sum(sum(bodies) for bodies in self.seen)


def note(local: Sums, proxy: Proxy, messages: list[Message]) -> None:
    local.seen.append([message.body for message in messages])
    for message in messages:
        proxy.reply(message, "noted", len(local.seen))


def nothing(local: Sums, proxy: Proxy, messages: list[Message]) -> None:
    pass


def test_handlers_get_the_messages_that_satisfy_their_event(group):
    """A handler gets the object, the proxy and the messages, which it can answer; the wrapped
    object has the attributes of its class; a stop event ends it."""
    server = group("server", name="server")
    workers = [group("worker", {"server": 1}) for _ in range(2)]
    until(lambda: len(server.peers.get("worker", [])) == 2, "the workers")
    make = dist(server, {"worker:update:3": note}, stop_event="worker:stop:1")(Sums)
    assert make.__name__ == "Sums"
    sums = make(name="mine")
    assert (sums.name, sums.proxy, sums.local_instance.seen) == ("mine", server, [])

    def has_come(number: int) -> bool:
        sums.launch(timeout_s=0.05)
        return 3 * len(sums.seen) + sums._table._views[0].num_held == number

    for i in range(7):
        workers[i % 2].isend(Message("update", workers[i % 2].name, "server", i))
        until(partial(has_come, i + 1), "the update")
        assert len(sums.seen) == (i + 1) // 3
    assert [sorted(bodies) for bodies in sums.seen] == [[0, 1, 2], [3, 4, 5]]
    assert sums.total() == 15
    answers = [worker.receive_once() for worker in workers for _ in range(3)]
    assert sorted(message.body for message in answers if message) == [1, 1, 1, 2, 2, 2]
    workers[0].isend(Message("stop", workers[0].name, "server"))
    sums.launch()
    with pytest.raises(AttributeError, match="nothing_like_it"):
        sums.nothing_like_it()


def test_percentages_follow_the_peers(group):
    """A percentage is of the peers when a message comes, and when a peer goes: the held messages
    may then be enough without a new one."""
    server = group("server", name="server")
    workers = [group("worker", {"server": 1}, name=f"worker-{i}") for i in range(4)]
    until(lambda: len(server.peers.get("worker", [])) == 4, "the workers")
    sums = dist(server, {"worker:update:100%": note})(Sums)()
    for i, worker in enumerate(workers[:3]):
        worker.isend(Message("update", worker.name, "server", i))
    with beside(sums.launch):
        until(lambda: sums._table._views[0].num_held == 3, "the table to hold three")
        assert sums.seen == []
        workers[3].close()
        until(lambda: bool(sums.seen), "the handler to be called")
        assert [sorted(bodies) for bodies in sums.seen] == [[0, 1, 2]]
        sums.stop()


def test_peer_that_goes_while_a_handler_works_counts_no_more(group):
    """The same holds for a handler whose event had fired before launch()."""
    server = group("server", name="server")
    workers = [group("worker", {"server": 1}, name=f"worker-{i}") for i in range(3)]
    until(lambda: len(server.peers.get("worker", [])) == 3, "the workers")

    def fail(local: Sums, proxy: Proxy, messages: list[Message]) -> None:
        raise ArithmeticError

    def lose_one(local: Sums, proxy: Proxy, messages: list[Message]) -> None:
        workers[2].close()
        until(lambda: len(server.peers["worker"]) == 2, "it to be gone")

    handlers = {
        "worker:update:100%": note,
        "worker-0:start:1": fail,
        ("worker-0:start:1", "AND"): lose_one,
    }
    sums = dist(server, handlers)(Sums)()
    for worker in workers[:2]:
        worker.isend(Message("update", worker.name, "server", 1))

    def both_are_held() -> bool:
        sums.launch(timeout_s=0.05)
        return sums._table._views[0].num_held == 2

    until(both_are_held, "the updates")
    assert sums.seen == []
    workers[0].isend(Message("start", "worker-0", "server"))
    with pytest.raises(ArithmeticError):
        sums.launch()
    sums.launch(timeout_s=0.2)
    assert sums.seen == [[1, 1]]


def test_error_of_a_handler_ends_launch(group):
    """launch() may be called again; the messages that the handler had are taken."""
    server, worker = group("server", name="server"), group("worker", {"server": 1})
    until(lambda: "worker" in server.peers, "the worker")

    def fail(local: Sums, proxy: Proxy, messages: list[Message]) -> None:
        raise ArithmeticError(messages[0].body)

    sums = dist(server, {"worker:bad:1": fail, ("*:good:1", "AND"): note})(Sums)()
    worker.isend(Message("bad", worker.name, "server", 13))
    worker.isend(Message("good", worker.name, "server", 14))
    with pytest.raises(ArithmeticError, match="13"):
        sums.launch()

    def is_noted() -> bool:
        sums.launch(timeout_s=0.05)
        return bool(sums.seen)

    until(is_noted, "the other message")
    assert sums.seen == [[14]]


def test_attributes_are_those_of_the_object(group):
    """Attributes can be read and set, also in a copy, which has the same object."""
    sums = dist(group("server"), {"worker:update:1": note})(Sums)()
    sums.name = "mine"
    sums.unit = "kg"
    assert (sums.local_instance.name, vars(sums.local_instance)["unit"]) == ("mine", "kg")
    other = copy.copy(sums)
    assert other.local_instance is sums.local_instance
    assert other.name == "mine"


def test_wrong_expressions_and_full_tables_are_told(group):
    """The error comes at the first object, and when an event holds too much."""
    server, worker = group("server", name="server"), group("worker", {"server": 1})
    until(lambda: "worker" in server.peers, "the worker")
    with pytest.raises(ValueError, match="worker:update:x"):
        dist(server, {"worker:update:x": nothing})(Sums)()
    sums = dist(server, {("worker:a:2", "worker:b:1", "AND"): nothing}, max_held=2)(Sums)()
    for i in range(3):
        worker.isend(Message("a", worker.name, "server", i))
    with pytest.raises(EventTableFull):
        sums.launch()
