"""Inspection tells of many participants page by page, each of which a client with gRPC's usual
4 MiB takes."""

import asyncio
from typing import Any

import pytest

from support.wire import Code, Member, assert_refused
from xain_coordinator.core.vocabulary.commands import Rendezvous
from xain_coordinator.core.vocabulary.values import DataProfile
from xain_foundation.settings.tags import MAX_KEY_BYTES, MAX_TAGS, MAX_VALUE_BYTES
from xain_wire.fl import inspection_pb2 as inspection


async def page(member: Member, size: int = 0, token: str = "") -> Any:
    return await member.inspection.ListParticipants(
        inspection.ListParticipantsRequest(page_size=size, page_token=token)
    )


async def names(member: Member, size: int) -> list[list[str]]:
    pages, token = [], ""
    while not pages or token:
        answer = await page(member, size, token)
        token = answer.next_page_token
        pages.append([one.participant_id for one in answer.participants])
    return pages


@pytest.fixture
async def asker(start: Any, join: Any) -> Member:
    """A member of a coordinator that admits all participants that the test submits."""
    coordinator = await start(rounds={"min_participants": 3000, "tags": {"site": ["north"]}})
    member = join(coordinator, "operator")
    member.driver = coordinator.driver
    return member


async def test_pages_are_in_the_order_of_the_names(asker):
    for name in ("c", "a", "e", "d", "b"):
        await asker.driver.submit(Rendezvous(name, None))
    assert await names(asker, 2) == [["a", "b"], ["c", "d"], ["e"]]
    assert await names(asker, 5) == [["a", "b", "c", "d", "e"]]
    assert await names(asker, 0) == [["a", "b", "c", "d", "e"]]


async def test_no_participants_are_one_empty_page(asker):
    assert await names(asker, 0) == [[]]


async def test_participant_that_joins_between_two_pages_moves_no_other(asker):
    for name in ("b", "d", "f", "h"):
        await asker.driver.submit(Rendezvous(name, None))
    first = await page(asker, 2)
    for name in ("a", "e"):
        await asker.driver.submit(Rendezvous(name, None))
    second = await page(asker, 10, first.next_page_token)
    assert [one.participant_id for one in second.participants] == ["e", "f", "h"]


async def test_every_page_fits_a_message(asker):
    """However many tags and classes they have."""
    tags = {f"{'k' * (MAX_KEY_BYTES - 2)}{i:02}": "v" * MAX_VALUE_BYTES for i in range(MAX_TAGS)}
    profile = DataProfile(7, 4, tuple(f"{'c' * 250}{i}" for i in range(1000)))
    together = [Rendezvous(f"site-{i:03}", profile if i < 10 else None, tags) for i in range(700)]
    await asyncio.gather(*(asker.driver.submit(one) for one in together))
    pages = await names(asker, 0)
    assert len(pages) > 2
    assert [name for one in pages for name in one] == [f"site-{i:03}" for i in range(700)]


@pytest.mark.parametrize(("size", "token"), [(-1, ""), (0, "x"), (0, "@@@@"), (0, "_w==")])
async def test_invalid_page_tokens_are_refused(asker, size, token):
    await assert_refused(page(asker, size, token), Code.INVALID_ARGUMENT, "", "page_")
