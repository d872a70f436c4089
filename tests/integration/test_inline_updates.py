"""Updates that come inside the call that names them."""

import asyncio
import threading

import grpc
import pytest

from support.wire import Code, assert_refused, inside
from xain_coordinator.core.vocabulary.keys import is_journalled
from xain_coordinator.journal.sqlite import SqliteJournal

PATIENCE_S = 60.0


def stored(coordinator) -> list[str]:
    """Keys of updates of round 0."""
    return [key for key in coordinator.store.keys("0/") if key != "0/global"]


async def test_update_that_is_given_up_is_there_when_it_comes_again(in_round, monkeypatch):
    """However often: it is written once, to the journal, together with its event."""
    coordinator, a, b = await in_round("a", "b")
    begun, go, commit = threading.Event(), threading.Event(), SqliteJournal._commit

    def wait(journal, written):
        begun.set()
        assert go.wait(PATIENCE_S)
        commit(journal, written)

    monkeypatch.setattr(SqliteJournal, "_commit", wait)
    ref = inside([1.0, 2.0])
    given_up = asyncio.ensure_future(a.end(ref))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    again = asyncio.ensure_future(a.end(ref))
    go.set()
    await again
    await b.end(inside([3.0, 4.0]))
    keys = stored(coordinator)
    assert sorted(key.partition(".")[0] for key in keys) == ["0/a", "0/b"]
    assert all(is_journalled(key) for key in keys)


async def test_refused_update_leaves_nothing_for_a_call_without_bytes(in_round):
    """The bytes of a small update are only in its call, so a later call must bring them again."""
    coordinator, a = await in_round("a")
    ref = inside([1.0, 2.0])
    await assert_refused(a.end(ref, -1), Code.INVALID_ARGUMENT)
    ref.ClearField("data")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await a.end(ref)
    assert refused.value.details().startswith("there is no such upload")
    assert stored(coordinator) == []
