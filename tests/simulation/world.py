"""One run from beginning to end."""

import gc
import logging
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import partial
from random import Random
from typing import Any, Self
from unittest import mock

from simulation.coordinator import CoordinatorMachine
from simulation.fleet import ParticipantMachine
from simulation.hub import Hub, Trace, Violation
from simulation.network import Link, Network, Noise
from simulation.oracle import TILE_ELEMENTS
from simulation.scenario import EVERYBODY, Fault, Kind, Scenario, from_seed
from simulation.script import ScriptMachine
from support.logs import given_to

# Of weights that do not travel inside calls.
CHUNK_BYTES = 64
MESSAGE_BYTES = 16
RESUMED_AT_BYTES = 16  # behind the header: where a part can be gone on with


@dataclass(frozen=True, slots=True)
class Outcome:
    """digest: of all that has happened."""

    digest: str
    num_steps: int
    took_s: float
    cause: str


class Failed(AssertionError):
    """Something happened that must never happen. Its text has all it takes to see it again.

    lines: of the trace, the last ones.
    """

    def __init__(self, scenario: Scenario, what: str, trace: Trace) -> None:
        self.scenario = scenario
        self.what = what
        self.lines = tuple(trace.latest)
        text = "\n".join(self.lines)
        again = f"make simulate SEED={scenario.seed}"
        if scenario != from_seed(scenario.seed):
            again = "simulate(scenario, show=print), where that is the scenario above"
        super().__init__(
            f"{what}\n\n{scenario}\n\nthe last of {trace.num_lines} lines:\n{text}\n\n"
            f"again, with all of them: {again}"
        )


def simulate(scenario: Scenario, show: Callable[[str], None] | None = None) -> Outcome:
    """Run a scenario to its end. show: for each line of what happens.

    Raises Failed.
    """
    trace = Trace(show)
    with _unraisable() as found:
        outcome = _run(scenario, trace)
        # What still lies about ends here, where it can be told whose it was.
        gc.collect()
    if found:
        raise Failed(scenario, found[0], trace)
    return outcome


def _run(scenario: Scenario, trace: Trace) -> Outcome:
    world = _World(scenario, trace)
    with _surroundings(world, scenario):
        try:
            world.run()
        except Exception as error:  # whatever the code under test does
            what = str(error) if isinstance(error, Violation) else repr(error)
            raise Failed(scenario, what, trace) from error
        finally:
            world.bury()
    session = world.coordinator.oracle.session
    cause = session.cause if session is not None else ""
    return Outcome(trace.digest, world.hub.num_steps, world.hub.now, cause)


class _World:
    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        self.scenario = scenario
        self.hub = Hub(Random(scenario.seed), trace)
        noise = scenario.noise
        self._noise = Noise(noise.lost, noise.duplicated, noise.slow, noise.slow_s)
        self.network = Network(self.hub, self._noise, scenario.heartbeat_timeout_s)
        self.coordinator = CoordinatorMachine(self.hub, scenario, self.network)
        self.oracle = self.coordinator.oracle
        self.network.heard = self.oracle.heard
        self.hub.after_step = self.coordinator.check
        self.participants = [
            ParticipantMachine(
                self.hub,
                scenario,
                self.network,
                self.coordinator.store,
                self.coordinator.trouble,
                self.oracle,
                index,
            )
            for index in range(scenario.num_participants)
        ]
        self.script = ScriptMachine(self.hub, scenario, self.network, self.oracle)
        self._faults = {
            Kind.KILL_COORDINATOR: self._kill_coordinator,
            Kind.KILL_COORDINATOR_IN_IO: self._kill_coordinator_in_io,
            Kind.CUT_POWER: self._cut_power,
            Kind.LOSE_HOST: self._lose_host,
            Kind.OVERTAKE: self._overtake,
            Kind.STOP_COORDINATOR: self._stop_coordinator,
            Kind.JOURNAL_FAILS: self._journal_fails,
            Kind.SLOW_DISK: self._slow_disk,
            Kind.STORE_DOWN: self._store_down,
            Kind.KILL_PARTICIPANT: self._kill_participant,
            Kind.STOP_PARTICIPANT: self._stop_participant,
            Kind.CUT_POWER_OF_PARTICIPANT: self._cut_power_of_participant,
            Kind.FREEZE_PARTICIPANT: self._freeze_participant,
            Kind.PARTITION: self._partition,
            Kind.HALF_OPEN: self._half_open,
            Kind.BREAK: self._break,
            Kind.WALL_CLOCK: self._wall_clock,
            Kind.KILL_SCRIPT: self._kill_script,
        }

    def run(self) -> None:
        hub, scenario = self.hub, self.scenario
        self.coordinator.boot()
        for participant in self.participants:
            hub.after(hub.chance.random() * 2.0, None, participant.boot)
        if scenario.scripted:
            hub.after(hub.chance.random() * 2.0, None, self.script.boot)
        for fault in scenario.faults:
            hub.at(fault.at, None, partial(self._befall, fault))
        for who, at in scenario.gone:
            hub.at(at, None, partial(self._leave, who))
        hub.at(scenario.quiet_at, None, self._quieten)
        until = scenario.quiet_at + scenario.bound_s
        is_over = hub.run(self._is_over, until)
        if not is_over:
            waiting = [p.name for p in (*self.participants, self.script) if not p.is_done]
            hub.note("oracle", f"still there: {', '.join(waiting)}")
            hub.fail(f"there is no end {scenario.bound_s} s after the last fault")
        self.oracle.ended()
        hub.check()

    def _is_over(self) -> bool:
        machines = (*self.participants, self.script)
        return self.oracle.is_finished and all(one.is_done for one in machines)

    def bury(self) -> None:
        """End what still runs."""
        hub = self.hub
        hub.after_step = lambda process: None
        self.coordinator.bury()
        for machine in (*self.participants, self.script):
            if machine.process is not None:
                machine.process.kill()
        hub.bury()

    def logged(self, level: str, entry: Mapping[str, Any]) -> None:
        """Note a log line of the code under test. An error is a defect of ours, unless the scenario
        has brought it about."""
        process = self.hub.running
        if process is None or not process.is_alive:
            return
        fields = " ".join(f"{key}={value}" for key, value in entry.items() if key != "event")
        self.hub.note(process.name, f"{level}: {entry['event']} {fields}")
        # How a participant exits, fleet.py looks at.
        if level in ("error", "critical") and not process.excuse and entry["event"] != "exiting":
            self.hub.fail(f"{process.name} logs an error: {dict(entry)}")

    # --- faults ---

    def _befall(self, fault: Fault) -> None:
        self.hub.note("fault", f"{fault.kind} {fault.seconds:.3f} s {fault.count} {fault.who}")
        self._faults[fault.kind](fault)

    def _kill_coordinator(self, fault: Fault) -> None:
        self.coordinator.kill(fault.count, down_s=fault.seconds)

    def _kill_coordinator_in_io(self, fault: Fault) -> None:
        self.coordinator.kill_in_io(fault.count, down_s=fault.seconds)

    def _cut_power(self, fault: Fault) -> None:
        self.coordinator.cut_power(down_s=fault.seconds)

    def _lose_host(self, fault: Fault) -> None:
        self.coordinator.kill(down_s=fault.seconds, host=True)

    def _overtake(self, fault: Fault) -> None:
        self.coordinator.copy(paused_s=fault.seconds)

    def _stop_coordinator(self, fault: Fault) -> None:
        self.coordinator.stop(down_s=fault.seconds)

    def _journal_fails(self, fault: Fault) -> None:
        self.coordinator.trouble.journal_fails = True
        self.hub.after(fault.seconds, None, self._journal_works)

    def _journal_works(self) -> None:
        self.coordinator.trouble.journal_fails = False

    def _slow_disk(self, fault: Fault) -> None:
        self.coordinator.trouble.slow_s = min(fault.seconds, 5.0)
        self.hub.after(fault.seconds, None, self._fast_disk)

    def _fast_disk(self) -> None:
        self.coordinator.trouble.slow_s = 0.0

    def _store_down(self, fault: Fault) -> None:
        self.coordinator.trouble.store_down = True
        self.hub.after(fault.seconds, None, self._store_up)

    def _store_up(self) -> None:
        self.coordinator.trouble.store_down = False

    def _kill_participant(self, fault: Fault) -> None:
        for participant in self._whom(fault):
            participant.kill(fault.count, down_s=fault.seconds, host=fault.count % 3 == 0)

    def _stop_participant(self, fault: Fault) -> None:
        for participant in self._whom(fault):
            participant.stop(down_s=fault.seconds)

    def _cut_power_of_participant(self, fault: Fault) -> None:
        for participant in self._whom(fault):
            participant.cut_power(down_s=fault.seconds)

    def _freeze_participant(self, fault: Fault) -> None:
        for participant in self._whom(fault):
            participant.freeze(fault.seconds)

    def _partition(self, fault: Fault) -> None:
        for link in self._links(fault):
            link.held_until = max(link.held_until, self.hub.now + fault.seconds)

    def _half_open(self, fault: Fault) -> None:
        for link in self._links(fault):
            for channel in list(link.channels):
                if channel.connection is not None:
                    channel.connection.silence(acknowledged=fault.count % 2 == 1)

    def _break(self, fault: Fault) -> None:
        for link in self._links(fault):
            for channel in list(link.channels):
                if channel.connection is not None:
                    channel.connection.break_for_client()

    def _wall_clock(self, fault: Fault) -> None:
        self.coordinator.wall_offset_s += (fault.count - 20) * fault.seconds * 1000.0

    def _kill_script(self, fault: Fault) -> None:
        self.script.kill(fault.count, down_s=fault.seconds)

    def _leave(self, who: int) -> None:
        self.participants[who].kill(down_s=None, host=True)

    def _quieten(self) -> None:
        self.hub.note("fault", "no more of them")
        self._noise.lost = self._noise.duplicated = self._noise.slow = 0.0
        self.coordinator.spare()
        self.script.spare()

    def _whom(self, fault: Fault) -> list[ParticipantMachine]:
        return self.participants if fault.who == EVERYBODY else [self.participants[fault.who]]

    def _links(self, fault: Fault) -> list[Link]:
        of_script = [self.script.link] if fault.who == EVERYBODY else []
        return [participant.link for participant in self._whom(fault)] + of_script


class _Dates(datetime):
    """Dates in notes for operators."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls(2026, 1, 1, tzinfo=tz)


@contextmanager
def _unraisable() -> Iterator[list[str]]:
    """Unhandled exceptions, such as of coroutines that are thrown away."""
    found: list[str] = []
    before = sys.unraisablehook

    def take(unraisable: "sys.UnraisableHookArgs") -> None:
        # Words: a kept object would stay alive.
        about = f"{unraisable.err_msg or 'Exception ignored in'}: {unraisable.object!r}"
        found.append(f"{unraisable.exc_value!r} could not be raised. {about}")

    sys.unraisablehook = take
    # Nothing that was there before is looked through: it would take longer than the run.
    gc.freeze()
    try:
        yield found
    finally:
        gc.unfreeze()
        sys.unraisablehook = before


@contextmanager
def _surroundings(world: _World, scenario: Scenario) -> Iterator[None]:
    """Replace what the code under test finds outside of its ports: chance, sizes, the log."""
    chance = Random(f"ids {scenario.seed}")

    def new_id() -> uuid.UUID:
        return uuid.UUID(int=chance.getrandbits(128), version=4)

    replaced: dict[str, Any] = {
        "uuid.uuid4": new_id,
        "time.time_ns": lambda: int((1.7e9 + world.hub.now) * 1e9),
        "os.getpid": lambda: 1,
        "socket.gethostname": lambda: "simulated",
        "xain_participant.wire.direct.proxy_for": lambda host, port: None,
        "xain_participant.wire.client.CoordinatorClient.why_away": lambda client: "",
        "xain_coordinator.upkeep.fence.datetime": _Dates,
    }
    if not scenario.is_inline:
        replaced |= {
            "xain_wire.np.DeltaCodec.tile_elements": TILE_ELEMENTS,
            "xain_participant.wire.client.CoordinatorClient.max_inline_bytes": 0,
            "xain_participant.stages.parts.PartSize.first_bytes": 4 * MESSAGE_BYTES,
            "xain_participant.stages.parts.PartSize.least_bytes": MESSAGE_BYTES,
            "xain_participant.stages.parts.PartSize.most_message_bytes": MESSAGE_BYTES,
            "xain_coordinator.server.weights.downloads.Downloads.max_inline_bytes": 0,
            "xain_coordinator.server.weights.downloads.Downloads.message_bytes": MESSAGE_BYTES,
            "xain_coordinator.server.weights.downloads.Downloads.block_bytes": 2 * CHUNK_BYTES,
            "xain_coordinator.updates.bodies.StallTimer.least_bytes": MESSAGE_BYTES,
            "xain_coordinator.updates.measured_upload.MeasuredUpload.chunk_bytes": RESUMED_AT_BYTES,
        }
    collects = gc.isenabled()
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        # When it would run depends on what has been before, and so would the end of a coroutine.
        gc.disable()
        if collects:
            stack.callback(gc.enable)
        # An error is a violation, unless the scenario has made it.
        stack.enter_context(given_to(world.logged, logging.INFO))
        yield
