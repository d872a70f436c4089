"""The weights port over real sockets, against real coordinators."""

import asyncio
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.process import CoordinatorProcess
from support.transfers import DATA, LARGE, MIB, PATIENCE_S, VECTOR, join_round, with_model, written
from support.waiting import until
from support.wire import Member, digest, npy
from xain_coordinator.server.weights import weights_port as ports
from xain_coordinator.server.weights.capabilities import Capabilities, PortFile
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.net.sockets import free_ports
from xain_participant.wire.client import CoordinatorClient
from xain_participant.wire.direct import DirectTransfer, OfferFailed, with_host
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.weights_port import PATH

OTHER = VECTOR + 1
OTHER_DATA = npy(OTHER)


def request(
    method: str, url: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send one request and read the whole answer."""
    return exchange(url, head(method, url, len(body), **headers) + body)


def head(method: str, url: str, length: int = 0, **headers: str) -> bytes:
    parsed = urlsplit(url)
    lines = [f"{method} {parsed.path} HTTP/1.1", "Host: x", f"Content-Length: {length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def exchange(url: str, data: bytes) -> tuple[int, dict[str, str], bytes]:
    with connected(url) as sock:
        with suppress(BrokenPipeError, ConnectionResetError):  # an answer may come before the end
            sock.sendall(data)
        return answer(sock)


def connected(url: str) -> socket.socket:
    port = urlsplit(with_host(url, "127.0.0.1:1")).port
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    received = b""
    while data := sock.recv(1 << 20):
        received += data
    start, _, body = received.partition(b"\r\n\r\n")
    status, *lines = start.decode().split("\r\n")
    found = dict(line.lower().split(": ", 1) for line in lines)
    assert int(found["content-length"]) == len(body) or not body
    return int(status.split()[1]), found, body


def put(
    url: str, data: bytes, offset: int = 0, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    if offset:
        headers["Content_Range"] = f"bytes {offset}-{len(data) - 1}/{len(data)}"
    return request("PUT", url, data[offset:], Xain_Digest=digest(data).hex(), **headers)


def offset_of(url: str, data: bytes) -> int:
    status, headers, _ = request(
        "HEAD", url, Content_Range=f"bytes */{len(data)}", Xain_Digest=digest(data).hex()
    )
    assert status == 200
    return int(headers["xain-offset"])


def put_part(url: str, data: bytes, end: int) -> socket.socket:
    """An upload that has sent bytes up to `end` and goes on sending nothing."""
    sock = connected(url)
    sock.sendall(head("PUT", url, len(data), Xain_Digest=digest(data).hex()) + data[:end])
    return sock


async def stored(work: pb.StartTrainingRoundResponse, data: bytes) -> pb.WeightsRef:
    """The reference of an update after a PUT that was answered."""
    status, headers, body = await asyncio.to_thread(put, work.upload.url, data)
    assert (status, body) == (200, b"the update is stored\n")
    return pb.WeightsRef(key=headers["xain-key"], size_bytes=len(data), digest=digest(data))


async def test_model_is_served_whole_and_in_ranges(start, join):
    """GET answers like any HTTP server of files."""
    _, a = await with_model(start, join, VECTOR)
    url = (await a.start()).model.url
    assert url.startswith("http://:"), "the host is the one of the gRPC port"

    def get(said: str = "") -> tuple[int, dict[str, str], bytes]:
        return request("GET", url, **({"Range": said} if said else {}))

    assert (await asyncio.to_thread(get))[::2] == (200, DATA)
    status, headers, body = await asyncio.to_thread(get, "bytes=1000-1999")
    assert (status, body) == (206, DATA[1000:2000])
    assert headers["content-range"] == f"bytes 1000-1999/{len(DATA)}"
    assert (await asyncio.to_thread(get, "bytes=1000000-"))[2] == DATA[1000000:]
    assert (await asyncio.to_thread(get, "bytes=-7"))[2] == DATA[-7:]
    assert (await asyncio.to_thread(get, f"bytes={len(DATA)}-"))[0] == 416


async def test_repeated_put_of_same_update_is_answered_as_done(start, join):
    """A used URL with the same bytes changes nothing, before and after the update has counted."""
    _, a = await with_model(start, join, VECTOR)
    work = await a.start()
    ref = await stored(work, OTHER_DATA)
    assert await stored(work, OTHER_DATA) == ref
    sock = put_part(work.upload.url, OTHER_DATA, 0)
    with sock:  # not one byte of the body is needed
        assert (await asyncio.to_thread(answer, sock))[0] == 200
    await a.end(ref, round_=1)
    assert (await asyncio.to_thread(put, work.upload.url, OTHER_DATA))[0] in (200, 409)
    assert (await asyncio.to_thread(put, work.upload.url, DATA))[0] == 409, "another update"
    await a.until(pb.FINISHED, 1)
    assert await a.download("2/global") == OTHER_DATA
    assert (await asyncio.to_thread(put, work.upload.url, DATA))[0] == 409, "the round is over"


async def test_interrupted_put_goes_on_where_it_stopped(start, join, tmp_path):
    """HEAD says how much is there, and a PUT with a range brings the rest."""
    _, a = await with_model(start, join, VECTOR)
    url = (await a.start()).upload.url
    assert await asyncio.to_thread(offset_of, url, OTHER_DATA) == 0
    sock = await asyncio.to_thread(put_part, url, OTHER_DATA, 3 * MIB)
    await written(tmp_path, 3 * MIB)
    sock.close()
    assert await asyncio.to_thread(offset_of, url, OTHER_DATA) == 3 * MIB
    assert (await asyncio.to_thread(put, url, OTHER_DATA, 2 * MIB))[0] == 416
    status, headers, _ = await asyncio.to_thread(put, url, OTHER_DATA, 3 * MIB)
    assert status == 200
    ref = pb.WeightsRef(
        key=headers["xain-key"], size_bytes=len(OTHER_DATA), digest=digest(OTHER_DATA)
    )
    await a.end(ref, round_=1)
    await a.until(pb.FINISHED, 1)
    assert await a.download("2/global") == OTHER_DATA


async def test_put_goes_on_after_the_coordinator_was_killed(keep, tmp_path):
    """The restarted coordinator takes the same URL on the same port, finds what was written, and
    the update counts."""
    coordinator = keep(CoordinatorProcess(tmp_path, {"rounds.rounds": 2}))
    await coordinator.start()
    a = Member(coordinator.port, "a")
    await join_round(a)
    await a.hand_in(VECTOR)
    await a.until(pb.ROUND, 1)
    url = (await a.start()).upload.url
    with await asyncio.to_thread(put_part, url, OTHER_DATA, 3 * MIB):
        await written(tmp_path, 3 * MIB)
        await coordinator.kill()
    await coordinator.start()
    await a.rendezvous()
    offset = await asyncio.to_thread(offset_of, url, OTHER_DATA)
    assert 2 * MIB < offset <= 3 * MIB, "it goes on at a border of pieces"
    status, headers, _ = await asyncio.to_thread(put, url, OTHER_DATA, offset)
    assert status == 200
    key = headers["xain-key"]
    await coordinator.kill()  # what was answered is durable
    await coordinator.start()
    await a.rendezvous()
    ref = pb.WeightsRef(key=key, size_bytes=len(OTHER_DATA), digest=digest(OTHER_DATA))
    await a.end(ref, round_=1)
    await a.until(pb.FINISHED, 1)
    assert await a.download("2/global") == OTHER_DATA
    assert "/.weights/" not in coordinator.log()
    assert "Traceback" not in coordinator.log()


async def test_urls_that_do_not_fit_the_request_change_nothing(start, join, tmp_path):
    """A URL of another session, of another method, expired or changed, and paths that are none."""
    coordinator, a = await with_model(start, join, VECTOR)
    work = await a.start()
    session = coordinator.driver.session.session_id
    secret = PortFile.of(tmp_path / "weights" / session).secret
    base = work.upload.url.partition("/.weights/")[0]
    args = ("PUT", "a", 1, "1/a", len(OTHER_DATA))
    expired = Capabilities(secret, session, -1).path(*args)
    foreign = Capabilities(secret, "another", 60).path(*args)
    unregistered = Capabilities(secret, session, 60).path("PUT", "nobody", 1, "1/nobody", 1 << 30)
    earlier = Capabilities(secret, session, 60).path("PUT", "a", 0, "0/a", 1 << 30)
    cases = [
        ("PUT", base + expired, 403),
        ("PUT", base + foreign, 403),
        ("PUT", base + unregistered, 403),
        ("PUT", base + earlier, 409),
        ("PUT", work.model.url, 403),
        ("PUT", f"{work.upload.url}x", 403),
        ("PUT", f"{base}/elsewhere", 404),
        ("POST", work.upload.url, 405),
        ("GET", work.upload.url, 403),
        ("HEAD", work.model.url, 403),
    ]

    def statuses() -> list[int]:
        digests = {"Xain_Digest": digest(OTHER_DATA).hex()}
        return [request(method, url, OTHER_DATA, **digests)[0] for method, url, _ in cases]

    assert await asyncio.to_thread(statuses) == [status for *_, status in cases]
    assert await asyncio.to_thread(offset_of, work.upload.url, OTHER_DATA) == 0
    assert coordinator.driver.session.accepted("a", 1) is None


async def test_bodies_unlike_their_announcement_are_refused(start, join):
    """Too large, without a length, of another digest, or no array: with a status and one line."""
    _, a = await with_model(start, join, VECTOR)
    url = (await a.start()).upload.url
    name = digest(OTHER_DATA).hex()
    bad = b"x" * len(OTHER_DATA)
    large = OTHER_DATA + bytes(1 << 20)
    start_of = f"PUT {urlsplit(url).path} HTTP/1.1\r\nHost: x\r\n"

    def raw(more: str) -> int:
        return exchange(url, f"{start_of}{more}\r\n".encode())[0]

    def statuses() -> list[int]:
        return [
            put(url, large)[0],
            put(url, bad)[0],
            put(url, OTHER_DATA[:1000])[0],
            request("PUT", url, OTHER_DATA, Xain_Digest="0" * 32)[0],
            request("PUT", url, OTHER_DATA)[0],
            request("PUT", url, OTHER_DATA, Xain_Digest=name, Content_Range="bytes 1-2/3")[0],
            request("PUT", url, OTHER_DATA, Xain_Digest=name, Content_Range="bytes x")[0],
            raw(f"Xain-Digest: {name}\r\n"),
            raw(f"Xain-Digest: {name}\r\nTransfer-Encoding: chunked\r\n"),
            raw(f"X: {'x' * 40_000}\r\n"),
            request("HEAD", url, Xain_Digest=name)[0],
        ]

    assert await asyncio.to_thread(statuses) == [
        *(413, 400, 400, 400, 400, 400, 400),
        *(411, 411, 431, 400),
    ]
    await a.end(await stored(await a.start(), OTHER_DATA), round_=1)


async def test_expected_continue_is_said_before_the_body(start, join):
    """A sender that waits for it sends nothing that is not wanted."""
    _, a = await with_model(start, join, VECTOR)
    url = (await a.start()).upload.url
    name = digest(OTHER_DATA).hex()

    def exchange_in_steps() -> int:
        with connected(url) as sock:
            sock.sendall(head("PUT", url, len(OTHER_DATA), Xain_Digest=name, Expect="100-continue"))
            assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            sock.sendall(OTHER_DATA)
            return answer(sock)[0]

    assert await asyncio.to_thread(exchange_in_steps) == 200


async def test_slow_peers_hold_no_thread(start, join):
    """More slow readers and senders than threads keep no other waiting."""
    coordinator, a = await with_model(start, join, LARGE)
    coordinator._weights_port.max_per_participant = 100
    work = await a.start()
    large = npy(LARGE)

    def held() -> list[socket.socket]:
        slow = []
        for _ in range(3 * ports.WeightsPort.num_threads):
            sock = connected(work.model.url)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(head("GET", work.model.url))
            assert sock.recv(1)
            slow.append(sock)
        return slow

    slow = await asyncio.to_thread(held)
    slow.append(await asyncio.to_thread(put_part, work.upload.url, large, MIB))
    status, _, body = await asyncio.to_thread(request, "GET", work.model.url)
    assert (status, body) == (200, large)
    for sock in slow:
        sock.close()
    assert await asyncio.to_thread(offset_of, work.upload.url, large) == MIB


async def test_model_is_opened_while_senders_keep_all_threads_busy(start, join, monkeypatch):
    """A sender of a few bytes at a time never makes its thread wait for long."""
    monkeypatch.setattr(ports.WeightsPort, "num_threads", 1)
    coordinator, a = await with_model(start, join, VECTOR)
    coordinator._weights_port.stalled_s = 600.0
    work = await a.start()
    is_served = threading.Event()

    def dripping() -> None:
        with put_part(work.upload.url, OTHER_DATA, 0) as sock:
            for at in range(0, len(OTHER_DATA), 100):
                sock.sendall(OTHER_DATA[at : at + 100])
                if is_served.wait(0.004):
                    return

    sender = asyncio.ensure_future(asyncio.to_thread(dripping))
    await until(lambda: coordinator._weights_port._num_moving)
    status, _, body = await asyncio.to_thread(request, "GET", work.model.url)
    assert not sender.done(), "the model came after the upload"
    is_served.set()
    assert (status, body) == (200, DATA)
    await sender


async def test_stalled_transfer_ends(start, join):
    """An upload of which nothing comes is answered with 408 and can go on; a head is, too."""
    coordinator, a = await with_model(start, join, VECTOR)
    coordinator._weights_port.head_s = coordinator._weights_port.stalled_s = 0.2
    url = (await a.start()).upload.url

    def statuses() -> list[int]:
        with put_part(url, OTHER_DATA, 2 * MIB) as sock:
            found = [answer(sock)[0]]
        with connected(url) as sock:
            sock.sendall(b"PUT /")
            return [*found, answer(sock)[0]]

    assert await asyncio.to_thread(statuses) == [408, 408]
    assert await asyncio.to_thread(offset_of, url, OTHER_DATA) == 2 * MIB


async def test_sender_of_single_bytes_ends(start, join):
    """Bytes that come one by one do not make a transfer last, and hold no thread for ever."""
    coordinator, a = await with_model(start, join, VECTOR)
    coordinator._weights_port.stalled_s = 0.3
    url = (await a.start()).upload.url

    def dripping() -> int:
        with put_part(url, OTHER_DATA, MIB) as sock:
            at = MIB
            while not select.select([sock], [], [], 0.01)[0]:
                sock.sendall(OTHER_DATA[at : at + 1])
                at += 1
            return answer(sock)[0]

    assert await asyncio.wait_for(asyncio.to_thread(dripping), PATIENCE_S) == 408
    assert await asyncio.to_thread(offset_of, url, OTHER_DATA) >= MIB


async def test_idle_connections_give_way_to_new_ones(start, join):
    """Unregistered clients cannot fill the port: neither with connections that send no head, nor
    with refused requests whose answer they do not read to its end."""
    coordinator, a = await with_model(start, join, VECTOR)
    port = coordinator._weights_port
    port.max_connections, port.linger_s = 8, 1e6
    work = await a.start()
    refused = head("GET", f"{work.model.url}x")

    def through() -> int:
        idle = [connected(work.model.url) for _ in range(20)]
        for sock in idle[::2]:
            with suppress(OSError):
                sock.sendall(refused)
                sock.recv(1)
        try:
            return request("GET", work.model.url)[0]
        finally:
            for sock in idle:
                sock.close()

    assert await asyncio.to_thread(through) == 200


async def test_burst_of_connections_stays_within_the_limit(start, join, monkeypatch):
    """A connection that gives way is closed before the next one is accepted."""
    coordinator, a = await with_model(start, join, VECTOR)
    url = (await a.start()).model.url
    port = coordinator._weights_port
    port.max_connections = 4
    gate, most = threading.Event(), []
    serve = ports.WeightsPort._connection

    async def counted(self: Any, sock: socket.socket) -> None:
        most.append(len(self._connections))
        await serve(self, sock)

    async def hold() -> None:
        gate.wait()  # all connections are there when the port goes on

    monkeypatch.setattr(ports.WeightsPort, "_connection", counted)
    held = port.run(hold())
    with ThreadPoolExecutor(1) as thread:
        socks = await asyncio.get_running_loop().run_in_executor(
            thread, lambda: [connected(url) for _ in range(20)]
        )
    gate.set()
    await asyncio.wrap_future(held)
    assert (await asyncio.to_thread(request, "GET", url))[0] == 200
    for sock in socks:
        sock.close()
    assert max(most) == 4


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 1",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=["nothing", "a part of a line", "no key"],
)
async def test_answer_that_is_not_the_port_s_fails_an_offer(said):
    """An answer of another server is no proof that the update is stored, and nothing hangs."""
    transfer = DirectTransfer(continue_timeout_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as server, closing(transfer) as direct:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(said)
                with suppress(ConnectionResetError):
                    while sock.recv(1 << 20):
                        pass

        serving = asyncio.ensure_future(asyncio.to_thread(serve))
        url = f"http://127.0.0.1:{server.getsockname()[1]}{PATH}x"
        putting = asyncio.to_thread(
            direct.put, url, [memoryview(OTHER_DATA)], digest=digest(OTHER_DATA)
        )
        with pytest.raises(OfferFailed):
            await asyncio.wait_for(putting, PATIENCE_S)
        await serving


async def test_coordinator_starts_without_a_port_that_was_not_asked_for(start, join, monkeypatch):
    def refuse(*_: object) -> socket.socket:
        raise CommandFailed("cannot listen")

    monkeypatch.setattr(ports, "_listen", refuse)
    _, a = await with_model(start, join, VECTOR)
    work = await a.start()
    assert not work.model.url
    assert not work.upload.url


@pytest.mark.parametrize("fault", ["full", "closed"])
async def test_participant_falls_back_to_grpc_at_once(start, join, fault):
    """A port that is full or cannot be reached costs a participant no round."""
    settings = {}
    if fault == "closed":
        settings["server"] = {"weights_address": f"127.0.0.1:{free_ports(1)[0]}"}
    coordinator, _ = await with_model(partial(start, **settings), join, VECTOR)
    if fault == "full":
        coordinator._weights_port.max_connections = 0
    failed = []

    def take_part() -> pb.WeightsRef:
        with CoordinatorClient(
            f"127.0.0.1:{coordinator.port}",
            "a",
            direct=DirectTransfer(),
            on_offer_failed=lambda one: failed.append(one.method),
        ) as client:
            client.rendezvous()
            work = client.start_round()
            assert npy(client.get_weights(work.model)) == DATA
            ref = client.put_weights(1, OTHER, work.upload)
            client.end_round(client.end_request(1, ref, 1, "[]"))
            return ref

    await asyncio.to_thread(take_part)
    assert failed == ["GET", "PUT"]


async def test_malformed_requests_crash_and_leak_nothing(start, join):
    """10,000 of them, on several connections at a time: each gets an answer or an end, none a 500,
    and afterwards the process has as many descriptors as before."""
    _, a = await with_model(start, join, VECTOR)
    work = await a.start()
    chance = Random(19)
    whole = head("PUT", work.upload.url, 100, Xain_Digest="0" * 32, Content_Range="bytes 0-99/100")
    seeds = [whole + bytes(100), head("GET", work.model.url, Range="bytes=0-9"), b"\x16\x03\x01"]

    def crooked() -> bytes:
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(4):
                case 0:
                    data[at : at + 1] = bytes([chance.randrange(256)])
                case 1:
                    del data[at : at + chance.randrange(20)]
                case 2:
                    data[at:at] = chance.randbytes(chance.randrange(30))
                case _:
                    data[at:at] = chance.choice([b"\r\n", b"\0", b"\r\n\r\n", b"%00", b"99999999"])
        return bytes(data)

    def send(data: bytes) -> bytes:
        with connected(work.model.url) as sock, suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            return sock.recv(100)
        return b""

    def send_all(num: int) -> set[bytes]:
        with ThreadPoolExecutor(8) as pool:
            return {answer[9:12] for answer in pool.map(send, [crooked() for _ in range(num)])}

    await asyncio.to_thread(send_all, 200)
    before = num_open()
    statuses = await asyncio.to_thread(send_all, 10_000)
    refusals = (400, 403, 404, 405, 408, 409, 411, 413, 416, 431, 501, 503)
    assert statuses <= {b"", *(b"%d" % number for number in (200, 206, *refusals))}
    # One file more may be that of an upload that broke off, which is kept.
    await until(lambda: num_open() <= before + 1)
    moving = [one for one in threading.enumerate() if one.name.startswith("weights_")]
    assert len(moving) <= ports.WeightsPort.num_threads
    assert (await asyncio.to_thread(request, "GET", work.model.url))[0] == 200


def num_open() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))
