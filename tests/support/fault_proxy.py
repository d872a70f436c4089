"""A network that misbehaves as it is told, between participants and a coordinator.

    with FaultProxy(coordinator_port) as proxy:
        agent = Agent(participant, f"127.0.0.1:{proxy.port}", "a")
        ...
        proxy.blackhole(new=False)   # half-open: what is connected goes silent, whoever connects
        ...                          # anew is served
        proxy.heal()                 # everything flows again, what was held back first

`port` stays the same; `upstream` may be set to another port at any time, for connections to come.
A fault lasts until heal(), and several may be there together. Faults of the moment are cut() and
cut_one(). storm(seed) draws one after another until calm().

It runs in a thread of its own, so tests with and without an event loop can use it, from any thread.
A call returns when what it says is so.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Self

from xain_foundation.net.sockets import free_ports

PIECE_BYTES = 64 << 10
MAX_LATE_S = 0.5  # that a slow line catches up
MAX_FAULTS = 100  # of a storm: two minutes at most by default
PATIENCE_S = 60.0  # for what takes milliseconds, on a machine that has other things to do

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing drops what is unsent, and tells by RST


class FaultProxy:
    """upstream: the port on this machine that connections are passed on to; one without a listener
    resets them.

    num_accepted: connections so far, among them those that found no listener upstream.
    num_bytes_up, num_bytes_down: passed on to the upstream, and from it, so far.
    told: what storm() has done, in order.
    """

    def __init__(self, upstream: int = 0) -> None:
        self.upstream = upstream
        # Not any free port: one that outgoing connections take could be gone after refuse().
        self.port: int = free_ports(1)[0]
        self.num_accepted = 0
        self.num_bytes_up = self.num_bytes_down = 0
        self.told: list[str] = []
        self._connections: set[_Connection] = set()
        self._listening: socket.socket | None = None
        self._storm: asyncio.Task[None] | None = None
        self._delay_s = 0.0
        self._bytes_per_s: float | None = None
        self._new_silent = False
        self._healed = asyncio.Event()  # replaced by each heal()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy")
        self._thread.start()
        try:
            self._do(self._listen())
        except BaseException:  # no thread outlives a test that cannot begin
            self._end_loop()
            raise

    @property
    def num_open(self) -> int:
        """Connections that there are now, silent ones too."""
        return len(self._connections)

    def cut(self, *, reset: bool = True) -> None:
        """End all connections, by RST, or by FIN as if both sides had hung up."""
        self._do(self._cut(list(self._connections), reset=reset))

    def cut_one(self, chance: Random) -> None:
        """End one of them, by RST, if there is one."""
        self._do(self._cut_one(chance))

    def refuse(self) -> None:
        """Refuse new connections, as if no process listened here. Open ones stay."""
        self._do(self._refuse())

    def delay(self, seconds: float) -> None:
        """Every piece, of at most PIECE_BYTES, comes this much later."""
        self._do(self._set(delay_s=seconds))

    def throttle(self, bytes_per_s: float) -> None:
        """Each connection is this slow, in each direction."""
        self._do(self._set(bytes_per_s=bytes_per_s))

    def blackhole(self, *, new: bool = True) -> None:
        """Let nothing through open connections, not even an end. new: the same for new connections;
        if not, they are served."""
        self._do(self._blackhole(new=new))

    def heal(self) -> None:
        """No faults any more. Nothing was lost on connections that are still there."""
        self._do(self._heal())

    def storm(self, seed: int, *, fault_s: float = 0.6, pause_s: float = 0.6) -> None:
        """Faults drawn from the seed, one after another, until calm(), and MAX_FAULTS at most: on a
        machine that is so slow that no exchange ends between two faults, the storm ends.

        fault_s, pause_s: how long each, and the time between two, lasts at most.
        """
        self._do(self._begin_storm(Random(seed), fault_s, pause_s))

    def calm(self) -> None:
        """The storm is over, and all is healed. Harmless when there is none."""
        self._do(self._end_storm())

    def close(self) -> None:
        self._do(self._close())
        self._end_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in the thread ---

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(PATIENCE_S)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def _listen(self) -> None:
        if self._listening is None:
            self._listening = socket.create_server(("127.0.0.1", self.port), backlog=256)
            self._listening.setblocking(False)
            # Not sock_accept(): cancelled at the wrong moment, it loses what it has accepted.
            self._loop.add_reader(self._listening, self._accept, self._listening)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client has gone again
        client.setblocking(False)
        self.num_accepted += 1
        connection = _Connection(self, client, silent=self._new_silent)
        self._connections.add(connection)
        connection.task = self._loop.create_task(connection.run())
        connection.task.add_done_callback(lambda _, ended=connection: self._forget(ended))

    def _forget(self, connection: "_Connection") -> None:
        self._connections.discard(connection)
        connection.client.close()  # of one that was cut before it began

    async def _refuse(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            self._loop.remove_reader(listening)
            listening.close()

    async def _cut(self, connections: "list[_Connection]", *, reset: bool) -> None:
        for connection in connections:
            connection.resets = reset
            assert connection.task is not None
            await _cancelled(connection.task)

    async def _cut_one(self, chance: Random) -> None:
        # In the order of their age, so that the choice depends on the seed alone.
        connections = sorted(self._connections, key=lambda connection: connection.number)
        if connections:
            await self._cut([chance.choice(connections)], reset=True)

    async def _set(self, *, delay_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        self._delay_s = delay_s or self._delay_s
        self._bytes_per_s = bytes_per_s or self._bytes_per_s

    async def _blackhole(self, *, new: bool) -> None:
        self._new_silent = new
        for connection in self._connections:
            connection.silent = True

    async def _heal(self) -> None:
        self._delay_s = 0.0
        self._bytes_per_s = None
        self._new_silent = False
        for connection in self._connections:
            connection.silent = False
        self._healed.set()
        self._healed = asyncio.Event()
        await self._listen()

    async def _begin_storm(self, chance: Random, fault_s: float, pause_s: float) -> None:
        await self._end_storm()
        self._storm = self._loop.create_task(self._blow(chance, fault_s, pause_s))

    async def _blow(self, chance: Random, fault_s: float, pause_s: float) -> None:
        faults: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "cut": lambda: self._cut(list(self._connections), reset=True),
            "hang up": lambda: self._cut(list(self._connections), reset=False),
            "cut one": lambda: self._cut_one(chance),
            "refuse": self._refuse,
            "delay": lambda: self._set(delay_s=chance.uniform(0.01, 0.2)),
            "throttle": lambda: self._set(bytes_per_s=chance.uniform(20_000, 2_000_000)),
            "half-open": lambda: self._blackhole(new=False),
            "blackhole": lambda: self._blackhole(new=True),
        }
        for _ in range(MAX_FAULTS):
            await asyncio.sleep(chance.uniform(0.0, pause_s))  # the pause is the weather
            name = chance.choice(list(faults))
            self.told.append(name)
            await faults[name]()
            await asyncio.sleep(chance.uniform(0.0, fault_s))  # and so is the fault
            await self._heal()

    async def _end_storm(self) -> None:
        storm, self._storm = self._storm, None
        if storm is not None:
            await _cancelled(storm)
        await self._heal()

    async def _close(self) -> None:
        if self._storm is not None:
            await _cancelled(self._storm)
        await self._refuse()
        await self._cut(list(self._connections), reset=True)

    # --- for connections ---

    async def until_healed(self) -> None:
        await self._healed.wait()

    async def delayed(self) -> None:
        await self._pause(self._delay_s)

    async def throttled(self, data: bytes, due: float) -> tuple[bytes, float]:
        """The first part of the data, when it has had the time that it takes now, and when that
        was due. due: when the part before it was."""
        if self._bytes_per_s is None:
            return data, due
        # Little at a time, so that a slow line is a steady one. On a busy machine pauses are longer
        # than they should be: the next ones are shorter, or the line would be slower than told.
        part = data[: max(1, int(self._bytes_per_s / 20))]
        due = max(due, self._loop.time() - MAX_LATE_S) + len(part) / self._bytes_per_s
        await self._pause(max(0.0, due - self._loop.time()))
        return part, due

    async def _pause(self, seconds: float) -> None:
        """Pause, at most until all is healed."""
        if seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._healed.wait()


class _Connection:
    """silent: nothing comes through. resets: how it ends when it is cut."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, *, silent: bool) -> None:
        self.number = proxy.num_accepted
        self.silent = silent
        self.resets = True
        self.task: asyncio.Task[None] | None = None
        self._proxy = proxy
        self.client = client

    async def run(self) -> None:
        server = socket.socket()
        with self.client, server:
            for end in (self.client, server):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                await self._while_silent()
                loop = asyncio.get_running_loop()
                await loop.sock_connect(server, ("127.0.0.1", self._proxy.upstream))
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pump(self.client, server))
                    both.create_task(self._pump(server, self.client))
            except* OSError:  # one side is gone, and the other is to hear of it
                self._reset(server)
            except* asyncio.CancelledError:
                if self.resets:
                    self._reset(server)

    def _reset(self, server: socket.socket) -> None:
        for end in (self.client, server):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    async def _pump(self, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            data = await loop.sock_recv(source, PIECE_BYTES)
            await self._proxy.delayed()
            await self._while_silent()
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            while data:
                part, due = await self._proxy.throttled(data, due)
                await self._while_silent()
                # Before: whoever has received all of them finds all of them counted.
                if source is self.client:
                    self._proxy.num_bytes_up += len(part)
                else:
                    self._proxy.num_bytes_down += len(part)
                await loop.sock_sendall(target, part)
                data = data[len(part) :]

    async def _while_silent(self) -> None:
        while self.silent:
            await self._proxy.until_healed()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()  # if it ended by an error of its own, that is told here
