"""Large pieces of work on the event loop, one at a time and with room in between.

A chunk of weights that comes or goes keeps the loop for milliseconds. gRPC takes up one call of a
method at a time, and needs several turns of the loop for it: with a chunk or two in every turn a
fleet's heartbeats would queue up for seconds, although no turn is long. So chunks of all transfers
go through here in single file, and between two of them the loop turns some times without any. An
empty turn costs a hundredth of what a chunk does.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

# gRPC needs about six to take up a call.
TURNS_BETWEEN = 12

Turn = Callable[[], Awaitable[None]]  # returns when it has come


class Turns:
    """Used from one event loop."""

    def __init__(self, between: int = TURNS_BETWEEN) -> None:
        self._between = between
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    async def next(self) -> None:
        """Wait until it is this caller's turn, in the order in which they came."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if not self._is_turning:
            self._is_turning = True
            self._let_pass(0)
        await turn

    def _let_pass(self, left: int) -> None:
        if left:
            asyncio.get_running_loop().call_soon(self._let_pass, left - 1)
            return
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._let_pass, self._between)
                return
        self._is_turning = False
