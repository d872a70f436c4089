"""The machine that coordinators run on, one process after the other, as assembly/ makes them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulation.direct import SimulatedAccess
from simulation.disk import JournalDisk, SimulatedJournal, SimulatedStore, StoreDisk, Trouble
from simulation.hub import Hub, Killed, Process
from simulation.loop import VirtualLoop
from simulation.network import Network
from simulation.oracle import Oracle, initial_model, layout_of
from simulation.scenario import Scenario
from simulation.server import Server
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.vocabulary.values import DataProfile, Point
from xain_coordinator.driver.driver import Driver
from xain_coordinator.driver.effects import StoreWorker
from xain_coordinator.ports import Clock, StoreUnavailable
from xain_coordinator.server.calls.admission_control import AdmissionControl
from xain_coordinator.server.calls.control_service import ControlService
from xain_coordinator.server.calls.coordinator_service import CoordinatorService
from xain_coordinator.server.calls.interceptor import RefusalInterceptor
from xain_coordinator.server.guard import Guard
from xain_coordinator.server.predictions import RemotePredictor
from xain_coordinator.server.weights.downloads import Downloads
from xain_coordinator.stores.journalled import JournalledStore
from xain_coordinator.telemetry.null import NullMetricsStore
from xain_coordinator.telemetry.points import parse_points
from xain_coordinator.updates.inbox import Inbox
from xain_coordinator.updates.slots import Slots
from xain_coordinator.updates.uploads import Uploads
from xain_coordinator.upkeep.fence import Fence, FencedStore
from xain_coordinator.upkeep.model_copies import ModelCopies
from xain_coordinator.upkeep.retention import Retention
from xain_foundation.threads import run_to_end
from xain_wire.fl.access_pb2_grpc import add_ControlServicer_to_server
from xain_wire.fl.coordinator_pb2 import Encoding
from xain_wire.fl.coordinator_pb2_grpc import add_CoordinatorServicer_to_server
from xain_workloads.model import Model

DRAIN_S = 2.0
MAX_UPDATE_BYTES = 1 << 20
# How soon a coordinator notices that it has been overtaken, on the slowest disk.
NOTICES_S = 60.0


@dataclass(slots=True)
class _Incarnation:
    """A coordinator's process.

    driver, server: once it has them. checked: the session that was looked at last.
    """

    process: Process
    loop: VirtualLoop
    journal: JournalDisk
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    driver: Driver | None = None
    server: Server | None = None
    checked: Session | None = None


class CoordinatorMachine:
    """Keeps a coordinator running: whenever its process has ended, there is another one after a
    while.

    Its journal and its store outlive all of them.
    """

    def __init__(self, hub: Hub, scenario: Scenario, network: Network) -> None:
        self.trouble = Trouble()
        self.wall_offset_s = 0.0
        self.store = StoreDisk()
        self.oracle = Oracle(hub, scenario, self.store)
        self.store.shown = self.oracle.shown
        self._journal = JournalDisk(self.oracle.committed)
        self.oracle.journalled = lambda key: self._journal.file.read_object(key)
        self._hub = hub
        self._scenario = scenario
        self._rules = scenario.rules()
        self._network = network
        self._current: _Incarnation | None = None
        self._overtaken: list[_Incarnation] = []
        self._num_started = 0
        self._restart_s = 1.0
        self._host_down = False

    def boot(self) -> None:
        """Start a process, if none runs."""
        if self._current is not None:
            return
        self._num_started += 1
        process = Process(f"coord{self._num_started}", self._scenario.clock_rate(-1))
        loop = VirtualLoop(self._hub, process, self._work_s)
        current = self._current = _Incarnation(process, loop, self._journal)
        process.on_kill = lambda: self._gone(current, "is dead")
        self._hub.note(process.name, "starts")
        loop.create_task(self._main(current))

    def _work_s(self) -> float:
        chance = self._hub.chance
        delay_s = 0.0002 + 0.003 * chance.random()
        if chance.random() < 0.02:
            delay_s += 0.2 * chance.random()
        return delay_s + self.trouble.slow_s * chance.random()

    def check(self, process: Process | None) -> None:
        """Check the state after a step of this process."""
        current = self._current
        if current is None or current.process is not process or current.driver is None:
            return
        session = current.driver.session
        if session is not current.checked:
            current.checked = session
            self.oracle.lives(session)

    # --- what ends it ---

    def kill(self, steps: int = 0, *, down_s: float, host: bool = False) -> None:
        """Kill the process after so many steps. host: the whole machine, so no peer is told."""
        if self._current is not None:
            self._host_down = host
            self._restart_s = down_s
            if steps:
                self._current.process.steps_left = steps
            else:
                self._current.process.kill()

    def kill_in_io(self, count: int, *, down_s: float) -> None:
        """Kill the process when it touches its disk or its store for the count-th time from now."""
        if self._current is not None:
            self._restart_s = down_s
            self._current.process.io_left = count

    def cut_power(self, *, down_s: float) -> None:
        self.kill(down_s=down_s, host=True)
        self.store.cut_power(self._hub)

    def stop(self, *, down_s: float) -> None:
        """SIGTERM."""
        if self._current is not None:
            self._restart_s = down_s
            self._current.stop.set()

    def copy(self, *, paused_s: float) -> None:
        """Freeze the machine and start another one on a copy of its disk, as of a virtual machine
        that was declared dead. Later the first goes on, too, cut off from participants."""
        current = self._current
        if current is None or current.server is None:
            return
        self._network.cut_off(current.server)
        current.process.is_paused = True
        current.process.excuse = "it was overtaken"
        self._overtaken.append(current)
        self._journal = current.journal.copy(self.oracle.committed)
        current.journal.committed = lambda records: None
        self._current = None
        self.boot()
        self._hub.after(paused_s, None, lambda: self._go_on(current, paused_s))

    def _go_on(self, overtaken: _Incarnation, paused_s: float) -> None:
        if self._current is None or self._current.server is None:
            # Only one that was overtaken: one that goes on before that is the owner still.
            self._hub.after(paused_s + 1.0, None, lambda: self._go_on(overtaken, paused_s))
            return
        self._hub.note(overtaken.process.name, "goes on, overtaken")
        self._hub.go_on(overtaken.process)
        self._hub.after(NOTICES_S, overtaken.process, lambda: self._must_be_gone(overtaken))

    def _must_be_gone(self, overtaken: _Incarnation) -> None:
        if not self.trouble.store_down and not self.trouble.slow_s:
            self.oracle.fail(f"{overtaken.process.name} was overtaken, and goes on")

    def spare(self) -> None:
        """Cancel the planned kill."""
        if self._current is not None:
            self._current.process.steps_left = self._current.process.io_left = None

    def bury(self) -> None:
        for incarnation in (*self._overtaken, self._current):
            if incarnation is not None:
                incarnation.process.kill()

    def _gone(self, incarnation: _Incarnation, how: str) -> None:
        self._hub.note(incarnation.process.name, how)
        incarnation.process.is_alive = False
        # Not now: it may be running.
        self._hub.bury_after_step(incarnation.loop.bury)
        if incarnation is not self._current:
            self._overtaken.remove(incarnation)
            return
        self._current = None
        if incarnation.server is not None:
            self._network.hang_up(incarnation.server, host_down=self._host_down)
        self._host_down = False
        self._hub.after(self._restart_s, None, self.boot)

    # --- its life ---

    async def _main(self, current: _Incarnation) -> None:
        process = current.process
        try:
            how = await self._run(current)
        except Killed:
            return
        except Exception as error:  # whatever the code under test does
            if not process.is_alive:
                return
            # A store that is away at the start is a reason to end, and to start again later.
            if not process.excuse and not isinstance(error, StoreUnavailable):
                self._hub.fail(f"{process.name} ends with {error!r}")
            how = repr(error)
        self._gone(current, f"exits: {how}")

    async def _run(self, current: _Incarnation) -> str:
        hub, process, loop = self._hub, current.process, current.loop
        journal = SimulatedJournal(hub, process, current.journal, self.trouble)
        bare = SimulatedStore(
            hub, process, self.store, self.trouble, keeps_parts=self._scenario.keeps_parts
        )
        access = None
        if self._scenario.is_direct:
            access = SimulatedAccess(process, self.store, self.trouble)
        metrics = NullMetricsStore()

        def open_driver() -> tuple[Driver, float]:
            driver = Driver.open(journal, self._clock, self._rules, lambda: "session")
            driver.snapshot_records = driver.max_unsaved_records = self._scenario.snapshot_records
            return driver, driver.clock.now()

        driver, began_at = await asyncio.to_thread(open_driver)
        current.driver = driver
        self.oracle.restored(driver.session, began_at)
        fence = Fence(bare, journal, driver.session.session_id, "the simulated store")
        whole = FencedStore(bare, fence.check)
        store = JournalledStore(whole, journal, is_new=driver.is_new)
        workload = _Workload(self._scenario)
        worker = StoreWorker(driver, store, metrics, workload, require_owner=fence.check)
        admission = AdmissionControl(lambda name: name in driver.session.members)
        interceptor = RefusalInterceptor(Counter(), admission)
        server = Server(self._network, process, loop, interceptor)
        server.answered = lambda participant_id, method, at: self.oracle.answered(
            participant_id, method, driver.clock.now() - (hub.now - at) * process.clock_rate
        )
        slots = Slots(driver, store, MAX_UPDATE_BYTES)
        encoding = Encoding.Value(self._scenario.encoding.upper())
        add_CoordinatorServicer_to_server(
            CoordinatorService(
                driver,
                Inbox(slots, access),
                Uploads(slots, encoding),
                Downloads(driver, store, access),
                _points_of(driver),
                Counter(),
                RemotePredictor(driver, store, timeout_s=1.0, max_retries=0),
            ),
            server,
        )
        add_ControlServicer_to_server(
            ControlService(Guard(), driver, lambda: "", _no_copies), server
        )
        await run_to_end(fence.take_over)
        watches = [asyncio.create_task(fence.watch(driver))]
        driver.start(worker)
        copies = ModelCopies(store)
        watches.append(asyncio.create_task(copies.watch(driver)))
        retention = Retention(store, self._scenario.keep_updates, self._scenario.keep_models)
        watches.append(asyncio.create_task(retention.watch(driver)))
        current.server = server
        server.start()
        hub.note(process.name, "serves")
        waits = [
            asyncio.ensure_future(current.stop.wait()),
            asyncio.ensure_future(driver.failed.wait()),
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        hub.note(process.name, "stops")
        failure = driver.failure
        if failure is not None and not process.excuse:
            hub.fail(f"{process.name} has failed: {failure!r}")
        retention.stop()
        driver.end_watches()
        await server.stop(DRAIN_S)
        await slots.close()
        await worker.close()
        await driver.end()
        if driver.failure is None:
            await copies.copy_now(driver)
        await driver.close()
        for watch in watches:
            watch.cancel()
        await asyncio.wait(watches)
        return "stopped" if failure is None else f"failed: {failure!r}"

    def _clock(self, start: float) -> Clock:
        rate = self._scenario.clock_rate(-1)
        return _SessionClock(self._hub, start, rate, lambda: self.wall_offset_s)


def _no_copies() -> AbstractAsyncContextManager[Path]:
    raise AssertionError("nobody asks for a copy of the journal")


def _points_of(driver: Driver) -> Callable[[str, int, str], tuple[Point, ...]]:
    return lambda participant, round_, text: parse_points(text, driver.clock.wall_ns())[0]


class _SessionClock:
    """The clock of clock.py on virtual time, with a wall clock that jumps."""

    def __init__(
        self, hub: Hub, start: float, rate: float, wall_offset_s: Callable[[], float]
    ) -> None:
        self._hub = hub
        self._rate = rate
        self._offset = start - hub.now * rate
        self._wall_offset_s = wall_offset_s

    def now(self) -> float:
        return self._hub.now * self._rate + self._offset

    def wall_ns(self) -> int:
        return int((1.7e9 + self._hub.now + self._wall_offset_s()) * 1e9)


class _Workload:
    """Makes the initial model, and nothing else."""

    name = "simulated"
    trains, options = True, None  # as of a workload that has neither

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def initial_model(self, profiles: Sequence[DataProfile], metadata: object = None) -> Model:
        return Model(initial_model(self._scenario), layout_of(self._scenario))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a coordinator does not ask for {name}")
