"""Calls of gRPC that a program cancels, in such a way that it can end afterwards."""

import threading
from typing import Any, Final

END_S: Final = 5.0


class Cancellable:
    """A call whose cancel() returns when gRPC has handled the end of the call.

    gRPC handles what happens to a call in a daemon thread, under a lock of the call. The
    interpreter ends that thread wherever it is, and deletes the call later, which takes the same
    lock: a program that ends at the wrong moment would wait for the lock forever.

    call: of grpc, not of grpc.aio.
    """

    def __init__(self, call: Any) -> None:
        self.call = call
        self._has_ended = threading.Event()
        call.add_done_callback(lambda _: self._has_ended.set())

    def cancel(self) -> None:
        """End the call; nothing happens if it has ended. Not for a callback of the call."""
        self.call.cancel()
        self._has_ended.wait(END_S)
