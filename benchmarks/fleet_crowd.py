"""A server process whose log is read, and the processes of a fleet of light participants."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

AGENTS = Path(__file__).with_name("fleet_agents.py")
NUM_PROCESSES = 2  # of participants; one for a few
PATIENCE_S = 180.0  # for what takes seconds; a benchmark that hangs must end
POLL_S = 0.1
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Figures = dict[str, Any]
Heartbeats = Sequence[Sequence[float]]  # when sent, seconds until answered


class Server:
    """A process with a port, whose log goes to a file."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = command
        self._log = log
        self.start()

    def start(self) -> None:
        """Returns when it serves."""
        before = len(self.events("coordinator_serving"))
        self.started_at = time.monotonic()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stderr=log, stdin=subprocess.PIPE)
        try:
            wait(
                lambda: len(self.events("coordinator_serving")) > before,
                "the server to serve",
                self,
            )
        except BaseException:  # whatever it is, an interrupt too: no process stays behind
            self.kill()
            raise

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of its log, each with its time on CLOCK_MONOTONIC."""
        if not self._log.exists():
            return []
        offset_s = time.time() - time.monotonic()
        found = []
        for line in self._log.read_text(encoding="utf-8").splitlines():
            if f'"{name}"' in line:
                event = json.loads(line)
                written = datetime.fromisoformat(event["timestamp"])
                found.append({**event, "at": written.timestamp() - offset_s})
        return found

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    @property
    def memory_kb(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


class Crowd:
    """Processes of light participants."""

    def __init__(self, port: int, number: int, certificates: Path | None = None) -> None:
        """certificates: of each, in a folder by its name."""
        self.number = number
        tls = [] if certificates is None else [str(certificates)]
        num_processes = NUM_PROCESSES if number > 10 else 1
        bounds = [number * i // num_processes for i in range(num_processes + 1)]
        self.started_at = time.monotonic()
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(AGENTS),
                    f"127.0.0.1:{port}",
                    str(first),
                    str(end - first),
                    *tls,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first, end in pairwise(bounds)
        ]

    def train(self, until: int) -> None:
        """Let training end at once up to this round; in later rounds it goes on."""
        self.ask("train", until=until)

    def ask(self, command: str, **more: int) -> Figures:
        """Send a command to all processes, and add up their answers."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": command, **more}) + "\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        told: dict[int, tuple[int, float]] = {}
        for answer in answers:
            for round_, (number, _, last) in answer["told"].items():
                before = told.get(int(round_), (0, 0.0))
                told[int(round_)] = (before[0] + number, max(before[1], last))
        added = {
            name: sum(answer[name] for answer in answers)
            for name in ("watching", "rendezvous", "lost", "refused")
        }
        return {
            **added,
            "told": told,
            "watching_since": max(answer["watching_since"] for answer in answers),
            "unanswered_since": min(answer["unanswered_since"] for answer in answers),
            "heartbeats": [beat for answer in answers for beat in answer["heartbeats"]],
        }

    def heartbeats(self, server: Server) -> Heartbeats:
        """All heartbeats sent until now, once each is answered or given up."""
        until = time.monotonic()
        wait(lambda: self.ask("look")["unanswered_since"] > until, "the answers", server)
        return [beat for beat in self.ask("heartbeats")["heartbeats"] if beat[0] <= until]

    def all_told(self, round_: int, server: Server) -> float:
        """Time at which the last participant was told."""
        wait(
            lambda: self.ask("look")["told"].get(round_, (0, 0))[0] >= self.number,
            f"all to be told of round {round_}",
            server,
        )
        told: tuple[int, float] = self.ask("look")["told"][round_]
        return told[1]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(30)


def wait(is_so: Callable[[], bool], what: str, server: Server) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not is_so():
        if server.process.poll() is not None:
            raise SystemExit(f"the server has ended with status {server.process.returncode}")
        if time.monotonic() > give_up_at:
            raise SystemExit(f"waited {PATIENCE_S:g} s for {what}")
        time.sleep(POLL_S)  # a poll: it ends when it is so
