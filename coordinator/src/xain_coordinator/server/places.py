"""Places for chunks of weights in memory: so many for all transfers of a kind, however many there
are.

A transfer takes a place before a chunk is in memory and gives it back when the chunk is gone from
there. Those who wait are served in the order in which they came. While a chunk is on the line, its
place may be held up by a line that is slow, or dead. So a chunk that takes longer than SLOW_S moves
to one of the places for slow lines, and the next ones of its transfer begin there, until the line
is faster again. A chunk that does not come through within STALLED_S ends its transfer. So slow
lines wait for each other and never hold up a fast one, and there is an end to every wait.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from xain_coordinator.admission import CHUNK_BYTES

NUM_SLOW_PLACES = 64
SLOW_S = 0.5  # for CHUNK_BYTES
# Participants give up a chunk after 20 s. This is for those that are gone, or do not mean well.
STALLED_S = 30.0


class _Room:
    """A semaphore that can also be asked."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        if self.try_enter():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(turn)
            else:
                self.leave()  # its turn had come
            raise

    def try_enter(self) -> bool:
        """Nobody is overtaken: while somebody waits, no place is free."""
        if not self._num_free:
            return False
        self._num_free -= 1
        return True

    def leave(self) -> None:
        for turn in self._waiting:
            if not turn.done():
                self._waiting.remove(turn)
                turn.set_result(None)
                return
        self._num_free += 1


class Places:
    """num: for lines that are not slow. Used from one event loop."""

    def __init__(self, num: int, num_slow: int = NUM_SLOW_PLACES) -> None:
        self.fast = _Room(num)
        self.slow = _Room(num_slow)


class Place:
    """For one chunk."""

    def __init__(self, room: _Room) -> None:
        self._room: _Room | None = room

    @property
    def is_taken(self) -> bool:
        return self._room is not None

    def move(self, room: _Room) -> None:
        """If there is a place."""
        if self._room is not None and self._room is not room and room.try_enter():
            self._room.leave()
            self._room = room

    def give_back(self) -> None:
        """Harmless when repeated."""
        room, self._room = self._room, None
        if room is not None:
            room.leave()


class Line:
    """What one transfer's chunks come or go through, one after the other.

    is_slow: the last CHUNK_BYTES took longer than SLOW_S.
    on_stalled: called once, when a chunk does not come through.
    """

    def __init__(self, places: Places, on_stalled: Callable[[], object]) -> None:
        self.is_slow = False
        self._places = places
        self._on_stalled = on_stalled
        self._loop = asyncio.get_running_loop()
        self._began_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._seconds = 0.0  # of so many bytes
        self._num_bytes = 0

    async def take(self) -> Place:
        """Wait for a place."""
        room = self._places.slow if self.is_slow else self._places.fast
        await room.enter()
        return Place(room)

    def begin(self, place: Place | None) -> None:
        """A chunk begins to go through. place: its own; None: it is too small to need one."""
        self._began_at = self._loop.time()
        self._timer = self._loop.call_later(SLOW_S, self._look, place)

    def end(self, num_bytes: int) -> None:
        """It is through. num_bytes: what it had."""
        self.drop()
        self._seconds += self._loop.time() - self._began_at
        self._num_bytes += num_bytes
        if self._num_bytes >= CHUNK_BYTES:
            self.is_slow = self._seconds > SLOW_S * self._num_bytes / CHUNK_BYTES
            self._seconds, self._num_bytes = 0.0, 0

    def drop(self) -> None:
        """Nothing is going through any more. Harmless when repeated."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, place: Place | None) -> None:
        self.is_slow = True
        if place is not None:
            place.move(self._places.slow)
        if self._loop.time() - self._began_at < STALLED_S:
            self._timer = self._loop.call_later(SLOW_S, self._look, place)
        else:
            self._timer = None
            self._on_stalled()
