"""Bytes of request bodies that an HTTP face holds."""

import asyncio
import json

import pytest
from pydantic import ValidationError

from xain_coordinator.http_face import bodies
from xain_coordinator.http_face.admission import HELD, Bodies, Message
from xain_coordinator.http_face.errors import HttpError

MAX = 1000


class Body:
    """A body that comes as a test says, and its request."""

    def __init__(self, held: Bodies) -> None:
        self._coming: asyncio.Queue[Message] = asyncio.Queue()
        self._is_answered = asyncio.Event()
        self._held = held
        self.has_slot = asyncio.Event()
        self.request = asyncio.create_task(self._take())

    async def _take(self) -> None:
        async with self._held.held(self._coming.get, MAX):
            self.has_slot.set()
            await self._is_answered.wait()

    async def comes(self, size: int, *, is_whole: bool = False) -> None:
        message = {"type": "http.request", "body": bytes(size), "more_body": not is_whole}
        self._coming.put_nowait(message)
        await settled()

    async def answered(self) -> None:
        self._is_answered.set()
        await self.request

    async def disconnects(self) -> None:
        self._coming.put_nowait({"type": "http.disconnect"})
        await settled()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)  # each lets all tasks take a step


async def refused(body: Body) -> str:
    with pytest.raises(HttpError) as caught:
        await body.request
    return caught.value.code


async def test_body_that_has_been_arriving_longest_makes_room():
    """Bodies of which a part has come are never more than the bound together, and a whole one has
    room."""
    held = Bodies(MAX)
    begun = [Body(held) for _ in range(2 * HELD)]
    for body in begun:
        await body.comes(MAX - 1)
        assert held.num_bytes <= HELD * MAX
    assert [body.request.done() for body in begun] == [True] * HELD + [False] * HELD
    assert await refused(begun[0]) == "TOO_BUSY"
    honest = Body(held)
    await honest.comes(MAX, is_whole=True)
    assert honest.has_slot.is_set()
    await honest.answered()
    for body in begun[HELD + 1 :]:
        await body.disconnects()
        with pytest.raises(asyncio.IncompleteReadError):
            await body.request
    assert held.num_bytes == 0


async def test_whole_bodies_wait_for_a_slot_and_none_ends_for_another():
    held = Bodies(MAX)
    whole = [Body(held) for _ in range(HELD + 1)]
    for body in whole:
        await body.comes(MAX, is_whole=True)
    assert [body.has_slot.is_set() for body in whole] == [True] + [False] * HELD
    assert await refused(whole[-1]) == "TOO_BUSY"
    for body in whole[:HELD]:
        assert held.num_bytes <= HELD * MAX
        await asyncio.wait_for(body.has_slot.wait(), 10)
        await body.answered()
    assert held.num_bytes == 0


async def test_small_bodies_are_answered_beside_each_other():
    held = Bodies(MAX)
    small = [Body(held) for _ in range(10)]
    for body in small:
        await body.comes(MAX // 10, is_whole=True)
    assert all(body.has_slot.is_set() for body in small)
    for body in small:
        await body.answered()


@pytest.mark.parametrize("model", [bodies.PredictRequest, bodies.ChimeraPredictRequest])
def test_cells_that_are_wrong_are_not_all_listed(model):
    """A list of mistakes would take a thousand times their bytes."""
    columns, rows = list(model.model_fields)[:2]
    wrong = {columns: [1] * 1000, rows: [[float("inf")] * 1000] * 100}
    with pytest.raises(ValidationError) as caught:
        model.model_validate(json.loads(json.dumps(wrong)))
    assert caught.value.error_count() < 20
