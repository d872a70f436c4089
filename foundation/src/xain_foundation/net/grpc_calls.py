"""gRPC calls: how they are cancelled safely, and their failures in our words."""

import re
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


# How texts of gRPC's own library begin, of calls that no server has answered, and our words. No
# sentence of our servers begins like this.
_OF_THE_LIBRARY: Final = (
    (r"(CLIENT: |SERVER: )?(Sent|Received) message larger", "a message is larger than its limit"),
    (r"Deadline [Ee]x", "no answer came in time"),
    (r"Internal error from Core|Channel closed|Locally cancelled", "the call was ended here"),
    (
        r"([Ff]ailed to connect|connections to all backends|DNS resolution|hostname lookup)",
        "no connection can be made",
    ),
    (
        r"Socket closed|Connection (reset|closed|refused)|GOAWAY|Received RST_STREAM|RST_STREAM"
        r"|Stream removed|Broken pipe|(Endpoint|Transport|transport|recvmsg|sendmsg|keepalive)\b"
        r"|Cancelling all calls|Too many pings",
        "the connection broke off",
    ),
)


def details_of(error: Any) -> str:
    """The reason of a failed call: the server's sentence, or ours for what gRPC's library says
    where there was no answer.

    error: a grpc.RpcError that is a call, or one of grpc.aio.
    """
    details = error.details() or ""
    for pattern, words in _OF_THE_LIBRARY:
        if re.match(rf"(UNKNOWN|UNAVAILABLE|INTERNAL)?:?\s*({pattern})", details):
            return words
    return details or f"the call ended with {error.code().name}"
