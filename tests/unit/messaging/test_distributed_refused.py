"""Messages that a full table of events has refused, and when they are tried again."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from support.messaging import PATIENCE_S, until
from xain_messaging.conditional_events import EventTableFull
from xain_messaging.discovery.in_process import InProcessDiscovery
from xain_messaging.distributed import Distributed, dist
from xain_messaging.drivers.in_process import InProcessDriver, Switchboard
from xain_messaging.messages import Message
from xain_messaging.proxy import Proxy

Join = Callable[[str, str], Proxy]


@pytest.fixture
def join() -> Iterator[Join]:
    """A peer of this role and name, in a group of this process."""
    discovery, switchboard = InProcessDiscovery(), Switchboard()
    with ExitStack() as stack:

        def join(role: str, name: str) -> Proxy:
            driver = InProcessDriver(switchboard)
            proxy = Proxy("g", role, name=name, discovery=discovery, driver=driver)
            return stack.enter_context(proxy)

        yield join


class Seen:
    """What its handler got."""

    def __init__(self) -> None:
        self.bodies: list[list[int]] = []


def note(local: Seen, proxy: Proxy, messages: list[Message]) -> None:
    local.bodies.append([message.body for message in messages])


def send(sender: Proxy, tag: str, *bodies: int) -> None:
    for body in bodies:
        sender.isend(Message(tag, sender.name, "server", body), timeout_s=PATIENCE_S)


def takes(seen: Distributed[Seen], num_refused: int, num_called: int) -> None:
    """Until so many are refused, and the handler has been called so often."""

    def has_taken() -> bool:
        with suppress(EventTableFull):
            seen.launch(0.01)
        return len(seen._refused) >= num_refused and len(seen.bodies) >= num_called

    until(has_taken, "what was sent")


def test_one_for_which_there_is_room_does_not_wait_for_one_of_another_kind(join: Join) -> None:
    """An event that is full still takes what lets it fire."""
    server, worker = join("server", "server"), join("worker", "w")
    event = (("w:a:1", "w:b:1", "AND"), ("w:p:1", "w:z:1", "AND"), "OR")
    seen = dist(server, {event: note}, max_held=4)(Seen)()
    send(worker, "p", 0, 1, 2, 3)
    send(worker, "a", 4, 5)
    send(worker, "b", 6)
    takes(seen, num_refused=3, num_called=0)
    send(worker, "z", 7)
    takes(seen, num_refused=0, num_called=2)
    assert seen.bodies == [[0, 7], [4, 6]]
    assert len(seen._refused) == 0


def test_an_interrupted_launch_keeps_what_was_refused(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When there is room for it, until it has that."""
    server, worker = join("server", "server"), join("worker", "w")
    seen = dist(server, {"w:x:2": note})(Seen)()
    seen._refused.append(Message("x", "w", "server", 2))
    push = seen._table.push

    def interrupt(message: Message) -> object:
        monkeypatch.setattr(seen._table, "push", push)  # once
        raise KeyboardInterrupt

    monkeypatch.setattr(seen._table, "push", interrupt)
    with pytest.raises(KeyboardInterrupt):
        seen.launch(0.0)
    send(worker, "x", 3)
    takes(seen, num_refused=0, num_called=1)
    assert seen.bodies == [[2, 3]]


def test_there_may_be_room_when_somebody_has_gone(join: Join) -> None:
    """Also when nothing fires for that by itself, and between two launches."""
    server, workers = join("server", "server"), [join("worker", f"w{i}") for i in range(4)]
    seen = dist(server, {"worker:x:100%": note}, max_held=2)(Seen)()
    send(workers[0], "x", *range(6))
    takes(seen, num_refused=2, num_called=0)
    workers[3].close()
    until(lambda: len(server.peers["worker"]) == 3, "one to have gone")
    takes(seen, num_refused=0, num_called=2)
    assert seen.bodies == [[0, 1, 2], [3, 4, 5]]


def test_what_a_message_counts_in_follows_the_peers(join: Join) -> None:
    """One whose sender has gone is of no role any more: it waits for room no longer, nor behind one
    that does."""
    server, workers = join("server", "server"), [join("worker", f"w{i}") for i in range(2)]
    handlers = {("worker:x:1", "worker:never:1", "AND"): note}
    seen = dist(server, handlers, max_held=3)(Seen)()
    send(workers[0], "x", 0, 1, 2)
    takes(seen, num_refused=0, num_called=0)
    send(workers[0], "x", 3)
    takes(seen, num_refused=1, num_called=0)
    send(workers[1], "x", 4)
    takes(seen, num_refused=2, num_called=0)
    workers[1].close()
    until(lambda: len(server.peers["worker"]) == 1, "one to have gone")
    seen.launch(0.01)
    assert [message.body for message in seen._refused] == [3]
