"""Failures of real gRPC calls, told in our words."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import pytest

from xain_foundation.net.channels import open_channel
from xain_foundation.net.grpc_calls import details_of
from xain_foundation.net.sockets import free_ports

SENTENCE = "update_bytes 5: too large, the limit is 3; Socket closed is no word of ours"


class Server:
    """One method: it refuses "refuse" with SENTENCE and holds all else until the end."""

    def __init__(self) -> None:
        self.begun, self._over = threading.Event(), threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.unary_unary_rpc_method_handler(self._answer)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("a.A", {"Do": handler}),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._over.set()
        self._server.stop(0).wait()

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.begun.set()
        if request == b"refuse":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, SENTENCE)
        self._over.wait()
        return b""


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as server:
        yield server


def failure_of(call: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    return details_of(caught.value)


def test_sentence_of_a_server_is_told_as_it_is(server):
    with open_channel(server.address) as channel:
        assert failure_of(channel.unary_unary("/a.A/Do").future(b"refuse")) == SENTENCE


def test_words_of_the_library_are_not_told(server):
    """A time-out, a call that was cancelled, a message over the limit, and an absent server."""
    with open_channel(server.address, [("grpc.max_send_message_length", 10)]) as channel:
        do = channel.unary_unary("/a.A/Do")
        assert failure_of(do.future(b"", timeout=0.05)) == "no answer came in time"
        assert failure_of(do.future(b"x" * 11)) == "a message is larger than its limit"
        held = do.future(b"")
        assert server.begun.wait(60)
        held.cancel()
        assert details_of(held) == "the call was ended here"
    with open_channel(f"127.0.0.1:{free_ports(1)[0]}") as channel:
        call = channel.unary_unary("/a.A/Do").future(b"")
        assert failure_of(call) == "no connection can be made"


@pytest.mark.parametrize(
    "details",
    [
        "Socket closed",
        "Connection reset by peer",
        "recvmsg:Connection reset by peer",
        "GOAWAY received",
    ],
)
def test_broken_connection_has_one_sentence(details):
    """Which of its texts gRPC gives for a server that has died is a matter of chance."""

    class Failed:
        def details(self) -> str:
            return details

    assert details_of(Failed()) == "the connection broke off"
