"""A channel of gRPC whose certificates follow their files: the next call after a change has a new
connection, and calls that are under way keep theirs."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from xain_foundation.net.channels import open_channel
from xain_foundation.security.identity import node_host

if TYPE_CHECKING:
    import grpc

    from xain_foundation.security.tls import Certificates

S = TypeVar("S")


@dataclass(slots=True, eq=False)
class _Open(Generic[S]):
    """version: of the certificates. num_calls: under way on the channel."""

    channel: "grpc.Channel"
    stub: S
    version: int
    num_calls: int = 0


class CurrentChannel(Generic[S]):
    """A stub of a service, for any number of threads, from the first call to close().

    address: see open_channel. tls: None: all goes in the clear. make: makes the stub.
    opens: called as open_channel(), for each new connection.
    node: the node that has to answer, if its certificate is of a coordinator's authority; "" for a
        coordinator. Other certificates have to be for the host in the address.
    """

    def __init__(
        self,
        address: str,
        options: Iterable[tuple[str, Any]],
        tls: "Certificates | None",
        make: "Callable[[grpc.Channel], S]",
        opens: "Callable[..., grpc.Channel]" = open_channel,
        node: str = "",
    ) -> None:
        self._address = address
        self._options = tuple(options)
        self._tls = tls
        self._make = make
        self._opens = opens
        self._node = node
        self._lock = threading.Lock()
        self._is_closed = False
        self._now = self._open(0 if tls is None else tls.version)
        self._former: set[_Open[S]] = set()  # with calls under way

    @property
    def is_encrypted(self) -> bool:
        return self._tls is not None

    def _open(self, version: int) -> _Open[S]:
        """Open a channel with the present certificates, and make its stub."""
        tls, options = self._tls, self._options
        credentials = None if tls is None else tls.of_channel()
        if tls is not None and self._node and tls.are_of_coordinator:
            options += (("grpc.ssl_target_name_override", node_host(self._node)),)
        channel = self._opens(self._address, options, credentials)
        return _Open(channel, self._make(channel), version)

    def stub(self) -> AbstractContextManager[S]:
        """Lend the stub for one call, within a block. After close() calls raise ValueError."""
        # Without certificates the channel stays: nothing is counted, which takes 7 us a call.
        return nullcontext(self._now.stub) if self._tls is None else self._counted()

    @contextmanager
    def _counted(self) -> Iterator[S]:
        """Lend the stub of the present channel, and close a former one when its last call ends. A
        channel becomes a former one when the certificates have changed."""
        version = 0 if self._tls is None else self._tls.look()
        with self._lock:
            former = None
            if version != self._now.version and not self._is_closed:
                former, self._now = self._now, self._open(version)
                if former.num_calls:
                    self._former.add(former)
                    former = None
            used = self._now
            used.num_calls += 1
        if former is not None:
            former.channel.close()
        try:
            yield used.stub
        finally:
            with self._lock:
                used.num_calls -= 1
                is_over = not used.num_calls and used in self._former
                if is_over:
                    self._former.discard(used)
            if is_over:
                used.channel.close()

    def close(self) -> None:
        """Close all channels, which ends their calls. May be called again."""
        with self._lock:
            self._is_closed = True
            channels = [self._now.channel, *(each.channel for each in self._former)]
        for channel in channels:
            channel.close()
