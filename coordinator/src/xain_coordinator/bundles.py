"""Small updates lie together in one object of the store, a bundle.

An object for each would cost a store a file to make, to sync and to remove, or a request; and a
thread for each would cost the event loop its time, because every system call of such a thread gives
up the interpreter and then waits for it again. So while one bundle is being written, the next one
gathers. The key of an update says where in its bundle it lies: there is no table to keep.
"""

import asyncio
import uuid
from dataclasses import dataclass
from itertools import islice, takewhile

from xain_coordinator.core.keys import bundle_key, bundled_key, object_of, piece_of, round_of
from xain_coordinator.ports import Reader, WeightsStore
from xain_coordinator.stores.closing import ClosedAtEnd
from xain_coordinator.threads import run_to_end, wait_to_end

BUNDLE_SIZE = 64  # updates; bounds what one failure hits
MAX_COUNTED = 1024  # bundles whose updates are counted


def open_weights(
    store: WeightsStore, key: str, start: int = 0, length: int | None = None
) -> Reader:
    """WeightsStore.open for weights that may be a piece of a bundle."""
    piece = piece_of(key)
    if piece is None:
        return store.open(key, start, length)
    return _PieceReader(store.open(piece.key, piece.start + start, length), piece.start, piece.size)


class _PieceReader(ClosedAtEnd):
    """`size` bytes of an object, from `start`; fewer if it ends before."""

    def __init__(self, whole: Reader, start: int, size: int) -> None:
        self._whole = whole
        self._start = start
        self.size = max(0, min(size, whole.size - start))

    def read(self, offset: int, length: int) -> bytes:
        if length < 0:
            raise ValueError(f"length {length} must not be negative")
        return self._whole.read(self._start + offset, min(length, self._num_from(offset)))

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return self._whole.read_into(self._start + offset, buffer[: self._num_from(offset)])

    def _num_from(self, offset: int) -> int:
        if offset < 0:
            raise ValueError(f"offset {offset} must not be negative")
        return max(0, self.size - offset)

    def close(self) -> None:
        self._whole.close()


@dataclass(frozen=True, slots=True)
class _Waiting:
    place: str
    data: bytes
    written: "asyncio.Future[str]"


class Bundles:
    """Writes to one store, from one event loop."""

    def __init__(self, store: WeightsStore) -> None:
        self._store = store
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None
        # How many updates of a bundle there may be a use for, the latest at the end. Of one that is
        # not counted any more the round's end is the end.
        self._num_used: dict[str, int] = {}

    async def put(self, place: str, data: bytes) -> str:
        """Write one update. Returns its key; it is durable then.

        A caller that is cancelled hears of it only when the writing has ended.
        Raises StoreUnavailable.
        """
        written: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(place, data, written))
        if self._task is None:
            self._task = asyncio.ensure_future(self._write())
        return await wait_to_end(written)

    def discard(self, key: str) -> str | None:
        """There is no use for an update any more: the object to be removed, if there is none for
        any other in it."""
        whole = object_of(key)
        if whole == key:
            return key
        num_used = self._num_used.pop(whole, 0)
        if num_used > 1:
            self._num_used[whole] = num_used - 1
        return whole if num_used == 1 else None

    async def _write(self) -> None:
        try:
            while self._waiting:
                await self._write_one(self._next())
        except asyncio.CancelledError:  # the event loop is being closed: nobody may hang
            for one in self._waiting:
                one.written.cancel()
            raise
        finally:
            self._task = None

    def _next(self) -> list[_Waiting]:
        """Of one round: they go together when it is over."""
        round_ = round_of(self._waiting[0].place)
        of_round = takewhile(lambda one: round_of(one.place) == round_, self._waiting)
        bundle = list(islice(of_round, BUNDLE_SIZE))
        self._waiting = self._waiting[len(bundle) :]
        return bundle

    async def _write_one(self, bundle: list[_Waiting]) -> None:
        attempt = uuid.uuid4().hex
        key = bundle_key(round_of(bundle[0].place), attempt)
        try:
            await run_to_end(self._store.put, {key: b"".join(one.data for one in bundle)})
        except asyncio.CancelledError:
            for one in bundle:
                one.written.cancel()
            raise
        except Exception as error:  # whatever it is, it is its callers' to hear
            for one in bundle:
                one.written.set_exception(error)
            return
        self._count(key, len(bundle))
        _tell(bundle, attempt)

    def _count(self, key: str, num_used: int) -> None:
        self._num_used[key] = num_used
        if len(self._num_used) > MAX_COUNTED:
            del self._num_used[next(iter(self._num_used))]


def _tell(bundle: list[_Waiting], attempt: str) -> None:
    """Each its key, in the order in which they lie in the bundle."""
    start = 0
    for one in bundle:
        one.written.set_result(bundled_key(one.place, attempt, start, len(one.data)))
        start += len(one.data)
