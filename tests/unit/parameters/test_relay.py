"""Requests that the scheduler passes on, without a network."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from xain_parameters.errors import Unavailable
from xain_parameters.handlers import MAX_WAITING, Key, Reply
from xain_parameters.messages import MAX_TEXT_BYTES
from xain_parameters.scheduler.relay import (
    LOST,
    MAX_OPEN,
    MAX_OPEN_OF_SENDER,
    MAX_UNSENT_BYTES,
    Relay,
)
from xain_wire.parameters import scheduler_pb2 as pb


class Sent:
    """Requests that are sent through a relay, each by a task."""

    def __init__(self) -> None:
        self.relay = Relay(lambda: None)
        self.tasks: dict[Key, asyncio.Task[dict[str, Reply]]] = {}

    async def send(self, key: Key, *names: str, others: tuple[str, ...] = ()) -> None:
        """Returns when the request waits for its answers, or has ended."""
        replies = self.relay.send(key, pb.PassedRequest(number=key[2]), names, others)
        self.tasks[key] = asyncio.create_task(gathered(replies))
        await asyncio.sleep(0)  # the task runs until it waits


async def gathered(replies: AsyncIterator[tuple[str, Reply]]) -> dict[str, Reply]:
    return {name: reply async for name, reply in replies}


@pytest.fixture
def sent() -> Sent:
    return Sent()


async def test_replies_are_gathered_as_they_come(sent):
    w1, w2 = (sent.relay.receiver(name, 1, "ctr") for name in ("w1", "w2"))
    await sent.send(("w0", 1, 1), "w1", "w2", others=("scheduler",))
    for name in ("scheduler", "w2", "w1", "w9"):  # the last one was not asked
        sent.relay.answered(("w0", 1, 1), name, Reply(name))
    expected = {name: Reply(name) for name in ("scheduler", "w1", "w2")}
    assert await sent.tasks["w0", 1, 1] == expected
    assert not w1.pending
    assert not w2.pending


async def test_request_that_its_sender_gives_up_is_passed_on_no_more(sent):
    w1 = sent.relay.receiver("w1", 1, "ctr")
    await sent.send(("w0", 1, 1), "w1")
    assert [each.number for each in w1.unsent({})] == [1]
    sent.tasks["w0", 1, 1].cancel()
    await asyncio.gather(*sent.tasks.values(), return_exceptions=True)
    assert w1.unsent({}) == []
    sent.relay.answered(("w0", 1, 1), "w1", Reply("late"))


async def test_sender_that_asks_again_has_the_request_passed_on_again(sent):
    """The reply was lost with its connection: the worker, which does it once, tells it again."""
    w1 = sent.relay.receiver("w1", 1, "ctr")
    told = {}
    await sent.send(("w0", 1, 1), "w1")
    first = sent.tasks["w0", 1, 1]
    assert len(w1.unsent(told)) == 1
    assert w1.unsent(told) == []
    await sent.send(("w0", 1, 1), "w1")
    with pytest.raises(Unavailable):
        await first
    assert len(w1.unsent(told)) == 1
    sent.relay.answered(("w0", 1, 1), "w1", Reply("done"))
    assert await sent.tasks["w0", 1, 1] == {"w1": Reply("done")}
    assert w1.unsent(told) == []
    assert told == {}


async def test_worker_that_is_lost_or_started_again_answers_nothing_any_more(sent):
    for name in ("w1", "w2", "w3"):
        sent.relay.receiver(name, 1, "ctr")
    await sent.send(("w0", 1, 1), "w1", "w2", "w3", "w4")
    sent.relay.keep({"w1": 1, "w3": 1})
    sent.relay.receiver("w3", 2, "ctr")
    sent.relay.answered(("w0", 1, 1), "w1", Reply("here"))
    expected = {"w1": Reply("here"), **dict.fromkeys(("w2", "w3", "w4"), LOST)}
    assert await sent.tasks["w0", 1, 1] == expected
    assert sent.relay.workers("ctr") == ["w1", "w3"]
    assert sent.relay.workers("other") == []


async def test_requests_of_a_sender_and_of_all_are_bounded(sent):
    for number in range(MAX_OPEN_OF_SENDER):
        await sent.send(("w0", 1, number), others=("scheduler",))
    await sent.send(("w0", 1, 1000), others=("scheduler",))
    with pytest.raises(Unavailable, match="too many requests"):
        await sent.tasks.pop(("w0", 1, 1000))
    for number in range(MAX_OPEN - MAX_OPEN_OF_SENDER):
        await sent.send((f"v{number}", 1, 1), others=("scheduler",))
    await sent.send(("u", 1, 1), others=("scheduler",))
    with pytest.raises(Unavailable, match="too many requests"):
        await sent.tasks.pop(("u", 1, 1))
    for key in sent.tasks:
        sent.relay.answered(key, "scheduler", Reply("here"))
    for task in sent.tasks.values():
        assert await task == {"scheduler": Reply("here")}


async def test_requests_that_wait_for_a_worker_are_bounded(sent):
    w1 = sent.relay.receiver("w1", 1, "ctr")
    keys = [(f"v{number}", 1, 1) for number in range(MAX_WAITING)]
    for key in keys:
        await sent.send(key, "w1")
    await sent.send(("u", 1, 1), "w1")
    error = f"{MAX_WAITING} requests wait for it already"
    assert await sent.tasks["u", 1, 1] == {"w1": Reply(error=error)}
    assert list(w1.pending) == keys
    sent.relay.end()
    for key in keys:
        with pytest.raises(Unavailable):
            await sent.tasks[key]


async def test_replies_that_their_sender_does_not_take_are_bounded(sent):
    """Replies beyond the bound are told to it as errors, which are small."""
    body = MAX_TEXT_BYTES * "x"
    num_kept = MAX_UNSENT_BYTES // MAX_TEXT_BYTES
    names = tuple(f"w{number}" for number in range(num_kept + 10))
    for number in (1, 2):  # there is room again when they are taken
        key = ("w0", 1, number)
        await sent.send(key, others=names)
        for name in names:
            sent.relay.answered(key, name, Reply(body))
        replies = await sent.tasks[key]
        assert replies.keys() == set(names)
        refused = [reply for reply in replies.values() if not reply.body]
        assert len(refused) == 10
        assert refused[0].error == "the scheduler has no room for its answer"
