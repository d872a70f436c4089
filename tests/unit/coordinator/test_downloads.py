"""Reads and memory of downloads, all of which end with them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.core.vocabulary.values import GlobalModel, WeightsRef
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.server.weights.downloads import Downloads
from xain_coordinator.stores.files import FileStore

BLOCK_BYTES, MESSAGE_BYTES = Downloads.block_bytes, Downloads.message_bytes
KEY = "1/global"
DATA = bytes(range(256)) * (12 * BLOCK_BYTES // 256)


class Store(FileStore):
    """Counts the bytes that are read. is_away: it fails."""

    num_bytes = 0
    is_away = False

    def open(self, key: str, start: int = 0, length: int | None = None) -> Any:
        if self.is_away:
            raise StoreUnavailable("the disk is away")
        self.num_bytes += length or 0
        return super().open(key, start, length)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    store.put({KEY: DATA})
    return store


@pytest.fixture
def sender(store: Store) -> Downloads:
    """Downloads of a model of 12 blocks."""
    model = GlobalModel(1, WeightsRef(KEY, len(DATA), ""), "float32", (len(DATA) // 4,))
    driver = SimpleNamespace(history=SimpleNamespace(models={KEY: model}))
    return Downloads(cast(Driver, driver), store)


@pytest.mark.parametrize("offset", [0, 1, MESSAGE_BYTES - 1, BLOCK_BYTES + 5, len(DATA) - 1])
async def test_model_is_sent_from_any_offset_in_small_messages(sender, offset):
    received = bytearray()

    async def write(_, data):
        assert len(data) <= MESSAGE_BYTES
        received.extend(data)

    await sender.send(KEY, offset, write)
    assert received == DATA[offset:]


async def test_receiver_that_takes_nothing_is_ended(sender):
    sender.stalled_s = 0.01

    async def dead(_, data):
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        with pytest.raises(Unavailable, match="next offset"):
            await sender.send(KEY, 0, dead)


async def test_bytes_of_models_in_memory_are_bounded(sender):
    """However many downloads there are, each at another offset."""
    assert sender.max_blocks * BLOCK_BYTES == 16 << 20
    sender.max_blocks = 3

    async def write(_, data):
        await asyncio.sleep(0)  # one iteration of the event loop
        assert len(sender._blocks) <= 3

    await asyncio.gather(*(sender.send(KEY, n * BLOCK_BYTES, write) for n in range(12)))
