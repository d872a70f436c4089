"""Large pieces of work on the event loop, one at a time and with room in between.

A chunk of weights that comes or goes keeps the loop for milliseconds. gRPC takes up one call of a
method at a time, and needs several turns of the loop for it: with a chunk or two in every turn a
fleet's heartbeats would queue up for seconds, although no turn is long. So chunks of all transfers
go through here in single file, and between two of them the loop turns some times without any: in
proportion to the chunk, so that small ones do not wait for each other longer than they take. An
empty turn costs a hundredth of what a whole chunk does.

A sign of life that has come is often the first of several, so the next chunk waits until the loop
has turned as often as after a whole chunk: on a busy machine it is the transfers that take longer.
They go on all the same: a whole chunk after MAX_TURNS at the latest, and a smaller one, in
proportion, after fewer. So as many bytes pass in about the same time, whatever their chunks are.

Only weights that pass the gRPC port need the queue: see benchmarks/fleet.py --through-grpc. While
four participants handed in 50 MB each, on two busy cores, the 99th percentile of 500 heartbeats a
second was 113 and 215 ms with the queue, and 338 and 267 ms without it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from xain_coordinator.stores.reading import CHUNK_BYTES

# After CHUNK_BYTES. gRPC needs about six to take up a call.
TURNS_BETWEEN = 12

# Before CHUNK_BYTES, however many calls come: those of some twenty.
MAX_TURNS = 10 * TURNS_BETWEEN

# Given about how many bytes are to come or go; returns when their turn has come.
Turn = Callable[[int], Awaitable[None]]


class Turns:
    """Used from one event loop."""

    def __init__(self, between: int = TURNS_BETWEEN, most: int = MAX_TURNS) -> None:
        self._between = between
        self._most = most
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()  # each with its bytes
        self._is_turning = False
        self._left = 0  # turns until the next one may pass
        self._num_turned = 0  # since the last one has
        self._least = 0  # of those, for the sake of the last one

    async def next(self, num_bytes: int) -> None:
        """Wait for the turn of a chunk of so many bytes. They pass in the order of coming."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, num_bytes))
        if not self._is_turning:
            self._is_turning = True
            self._turn()
        await turn

    def make_way(self) -> None:
        """Something has come that chunks are not to hold up, and perhaps not alone."""
        self._left = max(self._left, self._between)

    def _turn(self) -> None:
        if self._left and self._num_turned < max(self._least, self._most_before_next()):
            self._left -= 1
            self._num_turned += 1
        else:
            self._let_pass()
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)

    def _most_before_next(self) -> int:
        if not self._waiting:
            return self._most
        _, num_bytes = self._waiting[0]
        return max(1, self._most * num_bytes // CHUNK_BYTES)

    def _let_pass(self) -> None:
        self._num_turned = 0
        while self._waiting:
            turn, num_bytes = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                self._left = self._least = max(1, self._between * num_bytes // CHUNK_BYTES)
                turn.set_result(None)
                return
        self._left = self._least = 0
        self._is_turning = False
