"""The way past the coordinator: URLs of the store, on both sides.

The participant's side is the real one, but for its connections: those are steps on virtual time,
which may take long, break off, bring a byte that is not the right one, or lose the answer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from simulation.disk import StoreDisk, Trouble
from simulation.hub import Hub, Process
from simulation.network import Link, Network
from simulation.threads import current, sleep
from xain_coordinator.ports import KeyNotFound, StoreUnavailable
from xain_participant.wire import direct
from xain_participant.wire.direct import DirectTransfer
from xain_participant.wire.download import Damaged, Download

STORE = "http://store:9000/"
CHUNK_BYTES = 16
TIMEOUT_S = 30.0


class SimulatedAccess:
    """A DirectAccess to a StoreDisk, used by one process."""

    def __init__(self, process: Process, disk: StoreDisk, trouble: Trouble) -> None:
        self._process = process
        self._disk = disk
        self._trouble = trouble

    def download_url(self, key: str) -> str:
        return STORE + key

    def upload_url(self, key: str) -> str:
        return STORE + key

    def copy(self, source: str, target: str, size_bytes: int) -> int:
        self._process.touch()
        if self._trouble.store_down:
            raise StoreUnavailable(f"cannot copy {source}")
        data = self._disk.visible.get(source)
        if data is None:
            raise KeyNotFound(source)
        if len(data) != size_bytes:
            return len(data)
        self._disk.put(target, data)
        self._process.touch()
        return size_bytes


class SimulatedDirect(DirectTransfer):
    """The GETs and PUTs of one participant."""

    def __init__(
        self, network: Network, process: Process, link: Link, disk: StoreDisk, trouble: Trouble
    ) -> None:
        super().__init__(clock=lambda: network.hub.now * process.clock_rate)
        self._hub: Hub = network.hub
        self._network = network
        self._process = process
        self._link = link
        self._disk = disk
        self._trouble = trouble

    @contextmanager
    def _connected(self, target: Any) -> Iterator[Any]:
        if self.is_closed:
            raise direct._Failed("the client is closed")
        self._pass()
        yield None

    def _pass(self) -> None:
        """Something on its way. Raises _Failed."""
        self._process.touch()
        wait_s = self._network.latency_s() + max(0.0, self._link.held_until - self._hub.now)
        sleep(min(wait_s, TIMEOUT_S))  # simulated time on the way
        if wait_s > TIMEOUT_S:
            raise direct._Failed("timed out")
        if self._trouble.store_down or self._happens(self._network.noise.lost):
            raise direct._Failed("the connection is lost", is_broken=True)

    def _happens(self, probability: float) -> bool:
        return bool(probability) and self._hub.chance.random() < probability

    def _receive(self, connection: Any, target: Any, download: Download) -> None:
        data = self._disk.visible.get(target.path[1:])
        if data is None:
            raise direct._Failed("status 404")
        self._hub.note(self._link.name, f"GET {target.path} from {download.received}")
        while not download.is_whole:
            self._pass()
            chunk = bytearray(data[download.received : download.received + CHUNK_BYTES])
            if not chunk:
                raise direct._Failed("the connection was closed early", is_broken=True)
            if self._happens(self._network.noise.lost):
                chunk[-1] ^= 1
            try:
                download.add(chunk)
            except Damaged as damaged:
                raise direct._Failed(str(damaged)) from None

    def _send(self, connection: Any, put: Any, offset: int) -> str:
        data, key = b"".join(put.parts), put.target.path[1:]
        self._hub.note(self._link.name, f"PUT {key}")
        self._process.touch()

        def arrive() -> None:
            if not self._trouble.store_down:
                self._disk.put(key, data)

        # Whatever becomes of its sender meanwhile.
        self._hub.after(self._network.latency_s(), None, arrive)
        self._pass()
        put.on_sent(len(data))
        thread = current()
        deadline = thread.now() + TIMEOUT_S
        while self._disk.visible.get(key) != data:
            if thread.now() > deadline:
                raise direct._Failed("timed out")
            sleep(1.0)  # simulated time between two looks
        return ""
