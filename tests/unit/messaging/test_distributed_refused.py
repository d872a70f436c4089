"""Messages that a full table of events has refused."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from support.messaging import PATIENCE_S, until
from xain_foundation.conditional_events import EventTableFull
from xain_membership.in_process import InProcessDiscovery
from xain_messaging.distributed import dist
from xain_messaging.drivers.in_process import InProcessDriver, Switchboard
from xain_messaging.format.messages import Message
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
    """The messages of its handler."""

    def __init__(self) -> None:
        self.bodies: list[list[int]] = []


def note(local: Seen, proxy: Proxy, messages: list[Message]) -> None:
    local.bodies.append([message.body for message in messages])


def send(sender: Proxy, tag: str, *bodies: int) -> None:
    for body in bodies:
        sender.isend(Message(tag, sender.name, "server", body), timeout_s=PATIENCE_S)


def test_a_message_that_finds_no_room_comes_with_the_error(join):
    """An event that is full still takes what lets it fire, when launch() is called again."""
    server, worker = join("server", "server"), join("worker", "w")
    seen = dist(server, {("w:a:4", "w:z:1", "AND"): note}, max_held=4)(Seen)()
    send(worker, "a", 0, 1, 2, 3, 4)
    with pytest.raises(EventTableFull) as caught:
        seen.launch(PATIENCE_S)
    assert isinstance(caught.value.refused, Message)
    assert caught.value.refused.body == 4
    send(worker, "z", 5)

    def has_fired():
        seen.launch(0.01)
        return bool(seen.bodies)

    until(has_fired, "the event to fire")
    assert seen.bodies == [[0, 1, 2, 3, 5]]
