"""The files of a coordinator's certificates change again and again while it is called."""

import asyncio
import os
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from support.certificates import issued, write_folder
from support.process import PATIENCE_S, CoordinatorProcess
from support.wire import Member
from xain_foundation.net.sockets import free_ports
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import AUTHORITY, CERTIFICATE, KEY, Certificates
from xain_foundation.security.x509 import Authority
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2

SEED = int(os.environ.get("SEED") or 0)
NUM_CHANGES = 100
NUM_CALLS = 2  # of each kind, on new connections, between two changes
GOOD = ("same authority", "second authority")
BAD = ("junk", "part of a file", "another's key", "no file")

pytestmark = pytest.mark.timeout(900 + 60 * NUM_CHANGES)


class Files:
    """The files of the coordinator. Each change writes them one after the other, in any order, as
    `cp` does.

    shown: certificate in DER that belongs to the files that are right.
    """

    def __init__(self, folder: Path, authorities: list[Authority], chance: Random) -> None:
        self.folder = folder
        self.authorities = authorities
        self._chance = chance
        self.right: dict[str, bytes] = {}
        folder.mkdir()
        self.change("same authority")

    @property
    def shown(self) -> bytes:
        return ssl.PEM_cert_to_DER_cert(self.right[CERTIFICATE].decode())

    def change(self, kind: str) -> None:
        first, second = self.authorities
        if kind in GOOD:
            by = first if kind == "same authority" else second
            certificate, key = issued(by, Role.COORDINATOR, "coordinator")
            both = first.certificate + second.certificate
            self.right = {AUTHORITY: both, CERTIFICATE: certificate, KEY: key}
            self._write(self.right)
            return
        name = self._chance.choice(list(self.right))
        if kind == "junk":
            self._write({name: self._chance.randbytes(700)})
        elif kind == "part of a file":
            # Not a half: that of two authorities is one authority, a file that is right.
            self._write({name: self.right[name][: len(self.right[name]) // 3]})
        elif kind == "another's key":
            self._write({KEY: issued(first, Role.COORDINATOR, "coordinator")[1]})
        else:
            (self.folder / name).unlink(missing_ok=True)

    def _write(self, files: dict[str, bytes]) -> None:
        for name, content in self._chance.sample(sorted(files.items()), len(files)):
            (self.folder / name).write_bytes(content)


class Load:
    """Calls without end. No call may fail.

    done: number of calls and messages of each kind.
    """

    def __init__(self, members: list[Member], ports: list[int], holders: list[Certificates]):
        self.done: Counter[str] = Counter()
        self._members = members
        self._ports = ports
        self._holders = holders

    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        return [self._beats, self._news, self._connections, self._handshakes]

    async def _beats(self) -> None:
        """Calls on connections that stand since the start."""
        while True:
            for member in self._members:
                await member.heartbeat()
            self.done["heartbeats"] += 1

    async def _news(self) -> None:
        """Streams that are open since the start."""

        async def read(member: Member) -> None:
            async for _ in member.watch():
                self.done["news"] += 1
            raise AssertionError("a stream has ended")

        await asyncio.gather(*map(read, self._members))

    async def _connections(self) -> None:
        """Calls of gRPC, each on a connection of its own."""
        while True:
            for holder in self._holders:
                member = Member(self._ports[0], None, holder.of_channel())
                await member.inspection.GetStatus(inspection_pb2.GetStatusRequest())
                await member.close()
            self.done["connections"] += 1

    async def _handshakes(self) -> None:
        """Requests to the other ports, each on a connection of its own."""
        while True:
            for holder in self._holders:
                for port in self._ports[1:]:
                    assert await asyncio.to_thread(answered, port, holder)
            self.done["handshakes"] += 1


def connected(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    return context.wrap_socket(raw, server_hostname="127.0.0.1")


def shown(port: int, context: ssl.SSLContext) -> bytes:
    """The certificate that a port shows, in DER."""
    with connected(port, context) as sock:
        return sock.getpeercert(binary_form=True) or b""


def answered(port: int, holder: Certificates) -> bytes:
    """The beginning of the answer to a request."""
    with connected(port, holder.connects) as sock:
        sock.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
        return sock.recv(9)


async def test_certificates_change_while_the_coordinator_is_called(tmp_path, capsys):
    """No call fails, streams go on, and what is right is in use soon; what is not is named, and
    those before stay in use."""
    chance = Random(SEED)
    authorities = [
        Authority.create(f"{name}.example.org", time.time(), 86_400.0) for name in ("one", "two")
    ]
    files = Files(tmp_path / "tls", authorities, chance)
    holders, members = [], []
    for authority in authorities:
        name = authority.name.partition(".")[0]
        folder = write_folder(tmp_path / name, authority, Role.PARTICIPANT, name)
        (folder / AUTHORITY).write_bytes(files.right[AUTHORITY])
        holders.append(Certificates(folder))
    others = free_ports(2)
    settings = {
        "tls.folder": files.folder,
        "rounds.min_participants": 3,
        "server.heartbeat_timeout_s": 10 * PATIENCE_S,
        "server.weights_port": others[0],
        "http.port": others[1],
    }
    process = CoordinatorProcess(tmp_path / "data", settings)
    slowest_s = 0.0
    try:
        await process.start()
        members = [Member(process.port, None, holder.of_channel()) for holder in holders]
        for member in members:
            assert (await member.rendezvous()).reply == pb.ACCEPT
        load = Load(members, [process.port, *others], holders)

        async def until_called() -> None:
            before = load.done.copy()
            async with asyncio.timeout(PATIENCE_S):
                while any(  # noqa: ASYNC110  # nothing tells of it
                    load.done[kind] < before[kind] + NUM_CALLS
                    for kind in ("heartbeats", "connections", "handshakes")
                ):
                    await asyncio.sleep(0.01)  # a poll, not a race: it ends when they were made

        async def until_in_use() -> float:
            since = time.monotonic()
            asked = [
                (process.port, holders[0].connects_http2),
                *((port, holders[0].connects) for port in others),
            ]
            async with asyncio.timeout(PATIENCE_S):
                while any(  # noqa: ASYNC110  # nothing tells of it
                    [await asyncio.to_thread(shown, *one) != files.shown for one in asked]
                ):
                    await asyncio.sleep(0.05)  # a poll, not a race: it ends when it is in use
            return time.monotonic() - since

        async def change() -> None:
            nonlocal slowest_s
            for number in range(NUM_CHANGES):
                files.change(chance.choice((*GOOD, *BAD)))
                await until_called()
                if number % 5 == 4:
                    files.change(chance.choice(GOOD))
                    slowest_s = max(slowest_s, await until_in_use())
            files.change("junk")
            await process.until_logged("certificates_not_used")
            files.change("second authority")
            slowest_s = max(slowest_s, await until_in_use())

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one()) for one in load.tasks()]
            await change()
            for task in running:
                task.cancel()
        assert await process.stop() == 0
    finally:
        for member in members:
            await member.close()
        await process.end()
    with capsys.disabled():
        sys.stdout.write(
            f"\n{NUM_CHANGES} changes, {load.done.total()} calls; in use {slowest_s:.1f} s after "
            "the change at most\n"
        )
