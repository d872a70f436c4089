"""Cancellation of gRPC calls that is safe shortly before a program ends."""

import threading
from typing import Any, Final

# Longest wait for gRPC's thread, which a machine with much to do may hold up.
END_S: Final = 5.0


class Cancellable:
    """A call whose cancel() returns when gRPC has handled the end of the call.

    gRPC handles what happens to a call in a daemon thread, under a lock of the call. The
    interpreter ends that thread wherever it is, and deletes the call later, which takes the same
    lock: a program that ends at the wrong moment would wait for the lock forever.

    call: a call of grpc whose events a thread of gRPC handles; not of grpc.aio, and not a stream of
        a channel with SingleThreadedUnaryStream.
    """

    def __init__(self, call: Any) -> None:
        self.call = call
        self._has_ended = threading.Event()
        call.add_done_callback(lambda _: self._has_ended.set())

    def cancel(self) -> None:
        """Cancel the call, and wait for END_S at most until gRPC's thread has handled its end. A
        callback of the call must not do this: the thread would wait for itself."""
        self.call.cancel()
        self._has_ended.wait(END_S)
