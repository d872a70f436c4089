"""Places for chunks of weights in memory: so many for all transfers of a kind, however many there
are.

A transfer takes a place before a chunk is in memory and gives it back when the chunk is gone from
there. Those who wait are served in the order in which they came, for LONGEST_WAIT_S at most. While
a chunk is on the line, its place may be held up by a line that is slow, or dead. So a chunk that
takes longer than SLOW_S moves to one of the places for slow lines, and the next ones of its
transfer begin there, until the line is faster again. If none of those is free, the transfer ends,
to go on with small messages, of SMALL_BYTES at most, as our participants and our downloads do. They
take no place, so any number of slow lines can go on at the same time. A line on which LEAST_BYTES
take longer than STALLED_S ends, too, so there is an end to every wait, in however small pieces the
bytes come.

So a slow line holds up a fast one for SLOW_S at most, once: when it comes with a large message.
Behind so many of them that come at the same time, a fast one waits for their number, divided by
that of places, times SLOW_S. Those that begin with small messages hold up nobody.

What counts is the time on the line. That for which a chunk waits for us does not, nor does that for
which our own event loop was busy when it was to look.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from xain_coordinator.admission import CHUNK_BYTES
from xain_coordinator.core.errors import LineSlow, Unavailable

SLOW_S = 0.1  # for CHUNK_BYTES
SMALL_BYTES = 64 << 10  # the same as in xain_participant.message_sizes
# The slowest line: 2 KB a second, or a message, however large, in this time. Participants give up a
# chunk after 20 s; this is for those that are gone, or do not mean well.
LEAST_BYTES = 64 << 10
STALLED_S = 30.0
# Our event loop is busy if it looks so much later than it was to. It must turn once more then
# before it can know what has come meanwhile.
LATE_S = 0.01
# For a place. Those before have theirs for SLOW_S on the line at most, and as long as the disk
# takes: so many that it is longer than this had better come later.
LONGEST_WAIT_S = 60.0


class Room:
    """A first-in, first-out semaphore that says whether tasks wait for it."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def is_wanted(self) -> bool:
        """Somebody waits."""
        return bool(self._waiting)

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
    """num: for lines that are not slow. num_slow: for those that are. Used from one event loop."""

    def __init__(self, num: int, num_slow: int) -> None:
        self.fast = Room(num)
        self.slow = Room(num_slow)
        self.gathered_bytes = 0  # in batches of small messages, which have no place


class Place:
    """For one chunk."""

    def __init__(self, room: Room) -> None:
        self._room: Room | None = room

    def is_in(self, room: Room) -> bool:
        return self._room is room

    def move(self, room: Room) -> bool:
        """Whether it is there now; if not, that is because no place is free."""
        if self._room is not None and self._room is not room:
            if not room.try_enter():
                return False
            self._room.leave()
            self._room = room
        return True

    def give_back(self) -> None:
        """Harmless when repeated."""
        room, self._room = self._room, None
        if room is not None:
            room.leave()


class Line:
    """What one transfer's chunks come or go through, one after the other.

    go_on: how a transfer that was ended can go on, for whoever hears of it.
    is_slow: the last CHUNK_BYTES took longer than SLOW_S. At the beginning, what it is taken for.
    is_known: its speed has been seen.
    """

    def __init__(self, places: Places, go_on: str, *, is_slow: bool = False) -> None:
        self.is_slow = is_slow
        self.is_known = False
        self._go_on = go_on
        self._places = places
        self._loop = asyncio.get_running_loop()
        # Of the chunk that is passing.
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = 0.0
        self._began_at = 0.0
        self._late_s = 0.0  # for which we were late since, which is no fault of the line
        self._why_ended = ""
        # Of those before: since it was last seen how fast it is, and since the last LEAST_BYTES.
        self._seconds, self._num_bytes = 0.0, 0
        self._waited_s, self._waited_bytes = 0.0, 0

    @property
    def waited_s(self) -> float:
        """Seconds for which the present chunk has been passing; 0 without one."""
        return 0.0 if self._task is None else self._loop.time() - self._began_at

    def end(self, why: str) -> None:
        """End the transfer, whose chunk is passing."""
        self._end(why)

    async def take(self) -> Place:
        """Wait for a place. Raises Unavailable when that takes too long, LineSlow if it is one of
        those for slow lines."""
        room = self._places.slow if self.is_slow else self._places.fast
        try:
            async with asyncio.timeout(LONGEST_WAIT_S):
                await room.enter()
        except TimeoutError:
            refusal = LineSlow if self.is_slow else Unavailable
            raise refusal(
                f"no place in memory was free for {LONGEST_WAIT_S:g} s; {self._go_on}"
            ) from None
        return Place(room)

    @contextmanager
    def passing(self, place: Place | None) -> Iterator[None]:
        """While a chunk comes or goes, which the current task waits for.

        place: its own; None: it is so small that it has none. Raises LineSlow when the transfer
        must end.
        """
        task = asyncio.current_task()
        assert task is not None
        self._task, self._why_ended = task, ""
        self._began_at, self._late_s = self._loop.time(), 0.0
        self._look_later(place)
        try:
            yield
        except asyncio.CancelledError:
            # By us, unless it was somebody else as well.
            if not self._why_ended or task.uncancel():
                raise
            raise LineSlow(f"{self._why_ended}; {self._go_on}") from None
        finally:
            passed_s = self._now() - self._began_at
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._task = None
            self._seconds += max(0.0, passed_s - self._late_s)
            self._waited_s += passed_s
            self._judge()

    def count(self, num_bytes: int) -> None:
        """So many are through, of the chunk that is passing."""
        self._num_bytes += num_bytes
        self._waited_bytes += num_bytes

    def _judge(self) -> None:
        if self._num_bytes >= CHUNK_BYTES:
            self.is_slow = self._seconds > SLOW_S * self._num_bytes / CHUNK_BYTES
            self.is_known = True
            self._seconds, self._num_bytes = 0.0, 0
        elif self._seconds > SLOW_S:
            self.is_slow = self.is_known = True
        if self._waited_bytes >= LEAST_BYTES:
            self._waited_s, self._waited_bytes = 0.0, 0

    @property
    def _slow_at(self) -> float:
        return self._began_at + SLOW_S - self._seconds + self._late_s

    @property
    def _stalled_at(self) -> float:
        return self._began_at + STALLED_S - self._waited_s

    def _now(self) -> float:
        """Notes whether we are late."""
        now = self._loop.time()
        if self._timer is not None and now - self._look_at > LATE_S:
            self._late_s += now - self._look_at + LATE_S
            self._look_at = now
        return now

    def _look_later(self, place: Place | None) -> None:
        """When there is something to see."""
        self._look_at = self._stalled_at
        if place is None:
            pass  # however slow the line is, it holds up nobody
        elif not self.is_slow:
            self._look_at = min(self._look_at, self._slow_at)
        elif not place.is_in(self._places.slow):
            self._look_at = self._began_at
        self._timer = self._loop.call_at(self._look_at, self._look, place)

    def _look(self, place: Place | None) -> None:
        now = self._now()
        self._timer = None
        if now >= self._slow_at:
            self.is_slow = self.is_known = True
        if self.is_slow and place is not None and not place.move(self._places.slow):
            self._end("the line is slow, as many others are at the moment")
        elif now >= self._stalled_at:
            self._end(f"less than {LEAST_BYTES} bytes have come through in {STALLED_S:g} s")
        else:
            self._look_later(place)

    def _end(self, why: str) -> None:
        assert self._task is not None
        if not self._why_ended:  # else it has been cancelled already
            self._why_ended = why
            self._task.cancel()
