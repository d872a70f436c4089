"""Properties of the gRPC driver alone."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import grpc
import pytest

from support.drivers import Lost, Receiving, closing_all, next_event, received
from support.messaging import PATIENCE_S, until
from xain_messaging.drivers.grpc_framing import to_chunks
from xain_messaging.drivers.grpc_streams import _USUAL, METHOD, STREAM, GrpcDriver
from xain_messaging.errors import MalformedMessage
from xain_messaging.format.codec import Frames
from xain_messaging.ports import ignore


def is_served(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(0.5)
        except grpc.FutureTimeoutError:
            return False
    return True


def stream_threads() -> int:
    return sum(thread.name == STREAM for thread in threading.enumerate())


def test_streams_that_come_before_serve_wait():
    """Their packets come when it is called."""
    there, here = GrpcDriver(), GrpcDriver()
    with closing_all(there, here):
        here.connect("there", there.address)
        here.send("there", [b"early"])
        until(lambda: len(there._streams) == 1, "the stream")
        assert received(Receiving(there)) == [b"early"]


@pytest.mark.parametrize("how", ["close", "cancel"])
@pytest.mark.parametrize("is_served", [False, True])
def test_streams_that_wait_end(*, is_served, how):
    """Streams wait for serve(), or for their peers and for memory. All their threads end when the
    driver closes, before gRPC would cancel the calls, and when the peers cancel them."""
    before = stream_threads()
    there = GrpcDriver()
    there.stop_grace_s = PATIENCE_S
    there._small.max_bytes = 1
    is_over = threading.Event()

    def chunks() -> Iterator[bytes]:
        yield next(to_chunks([bytes(3 << 20)]))
        is_over.wait(PATIENCE_S)

    if is_served:
        there.serve(ignore, lambda peer: None)
    with closing_all(there), grpc.insecure_channel(there.address) as channel:
        deliver = channel.stream_unary(METHOD)
        calls = [deliver.future(chunks()) for _ in range(3)]
        until(lambda: len(there._streams) == 3, "the streams")
        if is_served:
            until(lambda: there._small.coming_bytes > 0, "one of them")
        if how == "close":
            there.close(0.0)
            assert not there._streams
        else:
            for call in calls:
                call.cancel()
            until(lambda: not there._streams, "the threads to end")
        assert not there._small.coming_bytes
        is_over.set()
        for call in calls if how == "close" else ():
            assert call.exception(PATIENCE_S).code() in _USUAL
    until(lambda: stream_threads() <= before, "the threads to end")


def test_a_stream_beyond_the_bound_is_served_when_another_has_ended():
    """The driver refuses the stream of a second peer, which tries again."""

    class OneStream(GrpcDriver):
        max_streams = 1

    there, here, friend = (Receiving(make()) for make in (OneStream, GrpcDriver, GrpcDriver))
    with closing_all(there, here, friend):
        here.connect("there", there.address)
        here.send("there", [b"first"])
        assert received(there) == [b"first"]
        friend.connect("there", there.address)
        friend.send("there", [b"refused"])
        assert next_event(friend) == Lost("there")
        here.close(0.0)

        def is_served() -> bool:
            friend.send("there", [b"again"])
            friend.receive(0.1)  # a stream that was refused begins anew
            return there.receive(0.1) is not None

        until(is_served, "the second peer to be served")


def test_a_stream_for_which_the_system_has_no_thread_is_refused(monkeypatch):
    """One thread waits for the next stream. A stream after that is refused; the server and the
    other streams go on. The refused peer tries again, and is served when there are threads."""
    there, here, friend = (Receiving(GrpcDriver()) for _ in range(3))
    start, refused = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if thread.name == STREAM:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with closing_all(there, here, friend), grpc.insecure_channel(there.address) as channel:
        friend.connect("there", there.address)
        friend.send("there", [b"before"])
        assert received(there) == [b"before"]
        until(lambda: there._threads._num_waiting == 1, "a thread for the next stream")
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            deliver = channel.stream_unary(METHOD)
            deliver(to_chunks([b"last thread"]), timeout=PATIENCE_S)
            assert received(there) == [b"last thread"]
            with pytest.raises(grpc.RpcError) as caught:
                deliver(to_chunks([b"refused"]), timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            num_refused = len(refused)
            here.connect("there", there.address)
            here.send("there", [b"lost"])
            until(lambda: len(refused) > num_refused, "the second refusal")
        friend.send("there", [b"meanwhile"])
        assert received(there) == [b"meanwhile"]
        until(lambda: here.receive(0.1) is not None, "the loss to be told")
        here.send("there", [b"again"])
        assert received(there) == [b"again"]


def test_a_driver_may_be_closed_where_packets_are_handed_over():
    """The thread of the stream does not wait for itself, and the server ends."""
    there, here = GrpcDriver(), GrpcDriver()
    closed = threading.Event()

    def close(frames: Frames, sender: str | None = None) -> None:
        there.close(0.0)
        closed.set()

    with closing_all(here, there):
        there.serve(close, lambda peer: None)
        here.connect("there", there.address)
        here.send("there", [b"x"])
        assert closed.wait(PATIENCE_S)
        assert not is_served(there.address)


@pytest.mark.parametrize("error", [EOFError, MalformedMessage])
def test_error_where_packets_are_handed_over_is_not_the_peer_s(error):
    """A defect of ours ends the stream, and is neither its end nor a refusal of the peer."""
    there = GrpcDriver()

    def fail(frames: Frames, sender: str | None = None) -> None:
        raise error("a defect")

    with closing_all(there), grpc.insecure_channel(there.address) as channel:
        there.serve(fail, lambda peer: None)
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary(METHOD)(to_chunks([b"x"]), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.UNKNOWN
        assert not there.num_refused


PROGRAM = textwrap.dedent(
    """
    import threading
    from xain_messaging.drivers.grpc_streams import GrpcDriver

    here, there = GrpcDriver(), GrpcDriver()
    come = threading.Event()
    there.serve(lambda frames, sender: come.set(), lambda peer: None)
    here.connect("there", there.address)
    here.send("there", [b"x"])
    assert come.wait(30.0)
    """
)


def test_a_program_may_end_without_close():
    """Threads of streams do not keep it."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=PATIENCE_S)
