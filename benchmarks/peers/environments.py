"""Environments of their own for peers, and their processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from processes import peak_memory_mb

CACHE = Path(".bench-peers")
INSTALL_S = 900.0
POLL_S = 0.2


class PeerFailed(Exception):
    """A peer could not be installed, or did not run. First line: the reason; the rest: its log."""


@dataclass(frozen=True, slots=True)
class Found:
    """seconds: of each round, the warm-up among them. server_peak_mb: VmHWM of the largest of the
    server's processes, in 10^6 bytes."""

    seconds: Sequence[float]
    server_peak_mb: float | None


def environment(package: str, version: str) -> Path:
    """The folder of its programs. Installs it once. Raises PeerFailed."""
    folder = (CACHE / f"{package}-{version}").absolute()
    programs = folder / ("Scripts" if sys.platform == "win32" else "bin")
    ready = folder / ".ready"
    if ready.exists():
        return programs
    print(f"installing {package} {version} into {folder} (once) ...", file=sys.stderr, flush=True)
    python = str(programs / "python")
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [python, "-m", "pip", "install", "--quiet", f"{package}=={version}"],
    ):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
        except subprocess.CalledProcessError as error:
            raise PeerFailed(f"it cannot be installed\n{error.stderr}") from None
        except subprocess.TimeoutExpired:
            raise PeerFailed(f"it was not installed within {INSTALL_S:.0f} s") from None
    ready.touch()
    return programs


def prepare(folder: Path, names: Sequence[str], size: int) -> None:
    """model.npy, of zeros, and an update for each name, as NAME.npy: (size,) float32."""
    np.save(folder / "model.npy", np.zeros(size, np.float32))
    for i, name in enumerate(names):
        chance = np.random.default_rng(i)
        np.save(folder / f"{name}.npy", chance.standard_normal(size, dtype=np.float32))


class Tree:
    """A process and all that it starts, which is looked at while it runs.

    server: what the command lines of the server's processes have in them.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, server: str) -> None:
        self.process = process
        self.log = log
        self._server = server.encode()
        self._peaks: dict[int, float] = {}
        self._seen: dict[int, str] = {}  # processes, and when each was started

    def look(self) -> None:
        """Read the processes of the server and their memory. Does nothing without /proc."""
        parents, begun = {}, {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it may end while it is looked at
                fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
                parents[int(stat.parent.name)] = int(fields[1])
                begun[int(stat.parent.name)] = fields[19]
        # With those that were seen before: a process whose parent has ended has another parent.
        ours = {self.process.pid, *(pid for pid, at in self._seen.items() if begun.get(pid) == at)}
        while found := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= found
        self._seen = {pid: begun[pid] for pid in ours if pid in begun}
        for pid in self._seen:
            with suppress(OSError):
                if self._server in Path(f"/proc/{pid}/cmdline").read_bytes():
                    peak = peak_memory_mb(pid)
                    self._peaks[pid] = max(peak or 0.0, self._peaks.get(pid, 0.0))

    @property
    def peak_mb(self) -> float | None:
        """Peak memory of the largest process of the server."""
        return max(self._peaks.values(), default=None)

    def end(self) -> None:
        """Nothing of it is left. First it may end by itself."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.look()
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        for pid in self._seen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def tail(self) -> str:
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-30:])


@contextmanager
def tree(
    command: Sequence[object],
    log: Path,
    environ: Mapping[str, str] | None = None,
    *,
    server: str = "",
) -> Iterator[Tree]:
    """Start it, in a session of its own; at the end nothing of it is left."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
        )
    one = Tree(process, log, server)
    try:
        yield one
    finally:
        one.end()


def wait(main: Tree, others: Sequence[Tree], limit_s: float) -> None:
    """Wait until the main process has ended well. Raises PeerFailed."""
    deadline = time.monotonic() + limit_s
    while main.process.poll() is None:
        for one in (main, *others):
            one.look()
        for one in others:
            if one.process.poll() is not None:
                raise PeerFailed(f"{one.log.stem} has ended early\n{one.tail()}")
        if time.monotonic() > deadline:
            raise PeerFailed(f"it was not ready within {limit_s:.0f} s\n{main.tail()}")
        time.sleep(POLL_S)  # a poll, and how often memory is looked at
    if main.process.returncode != 0:
        status = main.process.returncode
        raise PeerFailed(f"{main.log.stem} has ended with status {status}\n{main.tail()}")


def intervals(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]
