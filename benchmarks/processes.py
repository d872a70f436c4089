"""The processes of a benchmark: a coordinator, agents in processes of their own, their memory."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import results

from xain_foundation.net.sockets import free_ports
from xain_wire.fl import inspection_pb2 as inspection
from xain_wire.fl import inspection_pb2_grpc

if TYPE_CHECKING:
    from certificates import Issuer

PATIENCE_S = 300.0  # for what takes seconds; a benchmark that hangs must end
SESSION_LIMIT_S = 1800.0  # for what takes minutes
POLL_S = 0.01
AGENT = Path(__file__).with_name("agent.py")
MAPPED_AGENT = Path(__file__).with_name("mapped_agent.py")


def peak_memory_mb(pid: int | None = None, *, field: str = "VmHWM") -> float | None:
    """VmHWM, the most that a process had in memory so far, in 10^6 bytes; by default of this one.

    field: VmRSS for what it has now.
    None where the system does not tell, and for a process that is gone.
    """
    with suppress(OSError):
        for line in Path(f"/proc/{pid or 'self'}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024 / 1e6
    return None


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Processor time of a process. loop_s: user and system time of the thread of the event loop."""

    user_s: float
    system_s: float
    loop_s: float

    def since(self, before: "ProcessorTime", rounds: int) -> "ProcessorTime":
        """Mean processor time of a round since `before`."""
        return ProcessorTime(
            (self.user_s - before.user_s) / rounds,
            (self.system_s - before.system_s) / rounds,
            (self.loop_s - before.loop_s) / rounds,
        )


def processor_time(pid: int) -> ProcessorTime | None:
    """Processor time so far. None where the system does not tell, and for an ended process."""
    with suppress(OSError):
        user_s, system_s = _ticks_s(Path(f"/proc/{pid}/stat"))
        return ProcessorTime(user_s, system_s, sum(_ticks_s(Path(f"/proc/{pid}/task/{pid}/stat"))))
    return None


def _ticks_s(stat: Path) -> tuple[float, float]:
    fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks_per_s, int(fields[12]) / ticks_per_s


def _closed(folder: Path) -> "Issuer":
    """Take nobody without a certificate into this folder's session; returns who signs them."""
    # Here: the agents import this module, and what they measure needs no cryptography.
    from certificates import Issuer, close_coordinator

    close_coordinator(folder)
    return Issuer(folder)


class CoordinatorProcess:
    """A coordinator in a folder, which may be killed and started again on the same port.

    settings: by dotted key. is_closed: nobody comes in without a certificate.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, object], *, is_closed: bool = False
    ) -> None:
        self.port = free_ports(1)[0]
        self._folder = folder
        self._issuer = _closed(folder) if is_closed else None
        flags = [f"--set={key}={value}" for key, value in settings.items()]
        self._command = [
            *(sys.executable, "-m", "xain_coordinator", f"--data-dir={folder}"),
            *(f"--port={self.port}", "--set=logging.console=false", *flags),
        ]
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> float:
        """Wait until it serves; returns how long that took."""
        begin = time.perf_counter()
        with results.uninterrupted():
            self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        lines = self._process.stderr
        assert lines is not None
        for line in lines:
            if json.loads(line)["event"] == "coordinator_serving":
                taken = time.perf_counter() - begin
                # Its log has to be read, or it would wait.
                self._reader = threading.Thread(target=_show_problems, args=(lines,), daemon=True)
                self._reader.start()
                return taken
        raise SystemExit(f"the coordinator ended with status {self._process.wait()}")

    def certificates(self, name: str) -> Path | None:
        """A folder with a new certificate of a participant; None for an open coordinator."""
        return None if self._issuer is None else self._issuer.folder(name)

    @property
    def peak_memory_mb(self) -> float | None:
        assert self._process is not None
        return peak_memory_mb(self._process.pid)

    @property
    def memory_mb(self) -> float | None:
        assert self._process is not None
        return peak_memory_mb(self._process.pid, field="VmRSS")

    @property
    def processor_time(self) -> ProcessorTime | None:
        assert self._process is not None
        return processor_time(self._process.pid)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._reader is not None:
            self._reader.join(30)

    def rounds(self) -> list[inspection.RoundStatus]:
        """All rounds, oldest first."""
        # The socket is a link where its path would be too long.
        door = (self._folder / "journal.sock").resolve()
        with grpc.insecure_channel(f"unix:{door}") as channel:
            stub = inspection_pb2_grpc.InspectionStub(channel)
            request = inspection.ListRoundsRequest(limit=1000)
            answer = stub.ListRounds(request, timeout=30, wait_for_ready=True)
            assert answer.total_size == len(answer.rounds), "more rounds than one answer has"
            return list(answer.rounds)


def _show_problems(lines: Iterator[str]) -> None:
    for line in lines:
        if '"level": "info"' in line:
            continue  # several a round, and there is no processor to spare for parsing them
        with suppress(ValueError):  # whatever is no JSON is of the interpreter
            if json.loads(line).get("level") not in ("error", "critical"):
                continue
        print(f"coordinator: {line}", end="", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of an agent. prepared_mb: peak before it joined, with all that training holds."""

    prepared_mb: float | None
    peak_mb: float | None


class Agents:
    """Agents that are prepared and wait for go()."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def start(
        self,
        target: str,
        name: str,
        given: object,
        script: Path = AGENT,
        tls: Path | None = None,
    ) -> None:
        """Start one more process. given, tls: the third and fourth argument of the script."""
        command = [sys.executable, str(script), target, name, str(given)]
        if tls is not None:
            command.append(str(tls))
        pipe = subprocess.PIPE
        with results.uninterrupted():
            self._processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))

    def go(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit(f"a participant ended with status {process.wait()}")
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def check(self) -> None:
        """Raises SystemExit if one has failed."""
        for process in self._processes:
            if process.poll():
                raise SystemExit(f"a participant ended with status {process.returncode}")

    def finish(self) -> list[Memory]:
        """Wait until the session is over."""
        found = []
        deadline = time.monotonic() + SESSION_LIMIT_S
        for process in self._processes:
            out, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            self.check()
            found.append(Memory(**json.loads(out)))
        return found

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@contextmanager
def agents(
    target: str,
    num_participants: int,
    given: object,
    script: Path = AGENT,
    certificates: Callable[[str], Path | None] = lambda name: None,
) -> Iterator[Agents]:
    """Agents that are all ended with the block. given: the script's third argument. certificates:
    gives each its own."""
    them = Agents()
    try:
        for i in range(num_participants):
            name = f"p{i}"
            them.start(target, name, given, script, certificates(name))
        yield them
    finally:
        them.end()


@dataclass(frozen=True, slots=True)
class Session:
    """Time and memory of a session.

    seconds: duration of each round, as the coordinator records it.
    processor_time: of the coordinator, by round.
    """

    seconds: Sequence[float]
    coordinator_mb: float | None
    participants: Sequence[Memory]
    processor_time: ProcessorTime | None


def session(
    folder: Path,
    num_participants: int,
    size: int,
    rounds: int,
    settings: Mapping[str, object] | None = None,
    *,
    update: Path | None = None,
    is_closed: bool = False,
) -> Session:
    """Run one to its end. size: of the model, in float32. update: file of the update that each
    participant maps into memory; None: each makes its own. is_closed: see CoordinatorProcess."""
    rules: dict[str, object] = {
        "rounds.rounds": rounds,
        "rounds.initial_weights": "average",
        "rounds.min_participants": num_participants,
        "logging.level": "info",
        **(settings or {}),
    }
    coordinator = CoordinatorProcess(folder, rules, is_closed=is_closed)
    with ExitStack() as stack:
        stack.callback(coordinator.stop)
        coordinator.start()
        given, script = (size, AGENT) if update is None else (update, MAPPED_AGENT)
        them = stack.enter_context(
            agents(coordinator.target, num_participants, given, script, coordinator.certificates)
        )
        before = coordinator.processor_time
        them.go()
        memory = them.finish()
        # Making the initial model, if only one participant does that, is a round by itself.
        seconds = [round_.seconds for round_ in coordinator.rounds()][-rounds:]
        assert len(seconds) == rounds
        after = coordinator.processor_time
        spent = after.since(before, rounds) if after is not None and before is not None else None
        return Session(seconds, coordinator.peak_memory_mb, memory, spent)


def wait_until(found: Callable[[], object], what: str) -> None:
    """Poll for it. Raises SystemExit if it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    while not found():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not happen within {PATIENCE_S:.0f} s")
        time.sleep(POLL_S)  # a poll: it ends when it is found


def mb(num_bytes: float) -> float:
    return num_bytes / 1e6


def shm_folder() -> Path | None:
    """A folder in memory, where fsync costs nothing; None if this system has none."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None
