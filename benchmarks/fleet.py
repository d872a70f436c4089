"""Thousands of participants on one coordinator process: 100, 500 and 2,000, a model of 10 float32.

    python benchmarks/fleet.py [--participants 100 500 2000] [--rounds 3] [--skip-aggregation]

For each number a coordinator and two processes of participants (fleet_agents.py): all start at
once and join; they train, and only their heartbeats go on, for a heartbeat interval; the
coordinator is killed with SIGKILL and started again; then come the rounds. At last the greatest
number heartbeats while four more hand in models of 250 MB, so that a gigabyte is aggregated.

Beside it, in the same run, a bare grpc.aio server (fleet_bare.py), which answers the same
participants with bytes made beforehand and does nothing else. Everything shares the machine's
cores, the participants too. Prints medians and ratios; writes bench-results/fleet.json.

join_s: from the start of the participants to the last that is told of round 0.
told_s: from the opening of a round to the last that has its work. round_s: to its new model.
heartbeat_cpu_ms: of the coordinator's processor time, a heartbeat's share when nothing else is on.
memory_kb: what each participant adds to the coordinator's memory.
back_s: from the start of the new process to the last of all streams that stands again.
rejoined: rendezvous after the restart; there should be none. slow: heartbeats then that took so
long that an agent would have asked again over a second connection.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import results
from numpy.typing import NDArray
from processes import free_port

from xain_messaging.process.logs import configure
from xain_participant import Participant
from xain_participant.agent import run
from xain_participant.connection import SILENCE_S

AGENTS = Path(__file__).with_name("fleet_agents.py")
BARE = Path(__file__).with_name("fleet_bare.py")
NUM_PROCESSES = 2  # of participants
INTERVAL_S = 10.0  # between two heartbeats
PATIENCE_S = 180.0  # for what takes seconds; a benchmark that hangs must end
POLL_S = 0.1
SPARE_FILES = 200
HEAVY = 4  # participants with large models
HEAVY_SIZE = 62_500_000  # float32: 250 MB each, a gigabyte together
HEAVY_ROUNDS = 3  # the first initialises
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Figures = dict[str, Any]


class Server:
    """A process with a port, whose log goes to a file."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = command
        self._log = log
        self.start()

    def start(self) -> None:
        """Returns when it serves."""
        before = len(self.events("serving"))
        self.started_at = time.monotonic()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stderr=log, stdin=subprocess.PIPE)
        try:
            wait(lambda: len(self.events("serving")) > before, "the server to serve", self)
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

    def __init__(self, port: int, number: int) -> None:
        self.number = number
        bounds = [number * i // NUM_PROCESSES for i in range(NUM_PROCESSES + 1)]
        self.started_at = time.monotonic()
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(AGENTS), f"127.0.0.1:{port}", str(first), str(end - first)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first, end in pairwise(bounds)
        ]

    def ask(self, command: str) -> Figures:
        """All of theirs together."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": command}) + "\n")
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
            "heartbeats": [beat for answer in answers for beat in answer["heartbeats"]],
        }

    def all_told(self, round_: int, server: Server) -> float:
        """When the last one was."""
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


class Heavy(Participant):
    """Training that takes no time, of a model that takes some."""

    def init_weights(self) -> NDArray[np.float32]:
        return np.random.default_rng(os.getpid()).random(HEAVY_SIZE, np.float32)

    def train_round(
        self, weights: NDArray[np.float32], epochs: int, epoch_base: int
    ) -> tuple[NDArray[np.float32], int]:
        weights += np.float32(os.getpid() % 7)
        return weights, 10


def wait(is_so: Callable[[], bool], what: str, server: Server) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not is_so():
        if server.process.poll() is not None:
            raise SystemExit(f"the server has ended with status {server.process.returncode}")
        if time.monotonic() > give_up_at:
            raise SystemExit(f"waited {PATIENCE_S:g} s for {what}")
        time.sleep(POLL_S)


@contextmanager
def coordinator(folder: Path, settings: dict[str, object]) -> Iterator[tuple[Server, int]]:
    port = free_port()
    flags = [f"--set={key}={value}" for key, value in settings.items()]
    server = Server(
        [
            *(sys.executable, "-m", "xain_coordinator", f"--data-dir={folder / 'data'}"),
            *(f"--port={port}", "--set=logging.console=false", *flags),
        ],
        folder / "log",
    )
    try:
        yield server, port
    finally:
        server.kill()


def p99_ms(heartbeats: Sequence[Sequence[float]]) -> float | None:
    seconds = sorted(answered_s for _, answered_s in heartbeats)
    return round(1000 * seconds[int(0.99 * (len(seconds) - 1))], 1) if seconds else None


def idle(crowd: Crowd, server: Server) -> Figures:
    """Nothing but heartbeats."""
    crowd.ask("forget")
    cpu_s = server.cpu_s
    time.sleep(1.5 * INTERVAL_S)
    beats = crowd.ask("heartbeats")["heartbeats"]
    spent_s = server.cpu_s - cpu_s
    return {
        "heartbeat_cpu_ms": round(1000 * spent_s / len(beats), 2),
        "heartbeat_p99_ms": p99_ms(beats),
    }


def measure(number: int, rounds: int) -> Figures:
    """One coordinator and so many participants."""
    settings: dict[str, object] = {"rounds.rounds": rounds + 1, "rounds.min_participants": number}
    with results.scratch() as folder, coordinator(folder, settings) as (server, port):
        memory_kb = server.memory_kb
        crowd = Crowd(port, number)
        try:
            crowd.ask("wait")
            joined_at = crowd.all_told(0, server)
            figures: Figures = {
                "participants": number,
                "join_s": round(joined_at - crowd.started_at, 2),
                "memory_kb": round((server.memory_kb - memory_kb) / number, 1),
                **idle(crowd, server),
                **restart(crowd, server),
            }
            crowd.ask("train")
            wait(lambda: bool(server.events("session_finished")), "the rounds", server)
            # The first initialises, and the restart fell into it.
            opened = {event["round"]: event["at"] for event in server.events("round_opened")}
            published = {event["round"]: event["at"] for event in server.events("model_published")}
            told = crowd.ask("look")["told"]
            numbers = range(1, rounds + 1)
            told_s = [told[round_][1] - opened[round_] for round_ in numbers]
            round_s = [published[round_] - opened[round_] for round_ in numbers]
            figures["told_s"] = round(statistics.median(told_s), 3)
            figures["round_s"] = round(statistics.median(round_s), 3)
            return figures
        finally:
            crowd.end()


def restart(crowd: Crowd, server: Server) -> Figures:
    """kill -9 with everybody connected."""
    crowd.ask("forget")
    server.kill()
    server.start()
    wait(lambda: is_back(crowd.ask("look"), crowd.number), "all to come back", server)
    seen = crowd.ask("heartbeats")
    return {
        "back_s": round(seen["watching_since"] - server.started_at, 2),
        "rejoined": seen["rendezvous"],
        "slow": sum(answered_s > SILENCE_S for _, answered_s in seen["heartbeats"]),
    }


def is_back(seen: Figures, number: int) -> bool:
    return bool(seen["lost"] >= number and seen["watching"] == number)


def measure_bare(number: int) -> Figures:
    """The same participants on a server that does nothing."""
    with results.scratch() as folder:
        port = free_port()
        server = Server([sys.executable, str(BARE), str(port)], folder / "log")
        try:
            memory_kb = server.memory_kb
            crowd = Crowd(port, number)
            try:
                wait(lambda: crowd.ask("look")["watching"] == number, "all to connect", server)
                used_kb = server.memory_kb - memory_kb
                figures = idle(crowd, server)
                began = time.monotonic()
                assert server.process.stdin is not None
                server.process.stdin.write(b"tell\n")
                server.process.stdin.flush()
                told_at = crowd.all_told(1, server)
                return {
                    "bare_memory_kb": round(used_kb / number, 1),
                    "bare_told_s": round(told_at - began, 3),
                    **{f"bare_{name}": value for name, value in figures.items()},
                }
            finally:
                crowd.end()
        finally:
            server.kill()


def measure_aggregation(number: int) -> Figures:
    """Heartbeats while a gigabyte is aggregated. Those who train are the first by name, so that
    the others are connected, and nothing else."""
    settings = {
        "rounds.rounds": HEAVY_ROUNDS,
        "rounds.min_participants": HEAVY,
        "rounds.fraction_participants": f"{(HEAVY - 0.5) / (number + HEAVY):.9f}",
        "rounds.start_participants": number + HEAVY,
        "rounds.max_participants": number + HEAVY,
        "rounds.controller": "ordered",
    }
    with results.scratch() as folder, coordinator(folder, settings) as (server, port):
        crowd = Crowd(port, number)
        command = [sys.executable, __file__, "--heavy", str(port)]
        heavy: list[subprocess.Popen[bytes]] = []
        try:
            wait(lambda: crowd.ask("look")["watching"] == number, "all to connect", server)
            crowd.ask("forget")
            heavy = [subprocess.Popen([*command, f"a-{i}"]) for i in range(HEAVY)]
            wait(lambda: bool(server.events("session_finished")), "the rounds", server)
            beats = crowd.ask("heartbeats")["heartbeats"]
            handed_in = server.events("update_accepted")
            spans = [
                (max(e["at"] for e in handed_in if e["round"] == made["round"]), made["at"])
                for made in server.events("model_published")
            ]
            during = [
                (sent_at, answered_s)
                for sent_at, answered_s in beats
                if any(begin <= sent_at + answered_s and sent_at <= end for begin, end in spans)
            ]
            return {
                "participants": number,
                "aggregation_s": round(statistics.median(end - begin for begin, end in spans), 2),
                "heartbeats_during": len(during),
                "p99_ms_during_aggregation": p99_ms(during),
                "p99_ms_with_transfers": p99_ms(beats),
            }
        finally:
            for process in heavy:
                process.kill()
                process.wait(30)
            crowd.end()


def ratios(row: Figures) -> Figures:
    """To the bare server."""
    names = ("told_s", "heartbeat_cpu_ms", "memory_kb")
    return {f"{name}_ratio": round(row[name] / row[f"bare_{name}"], 2) for name in names}


def raise_file_limit(most: int) -> None:
    """The coordinator has a file descriptor for each participant; every process inherits the
    limit from here."""
    needed = most + SPARE_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(
            f"{most} participants need {needed} file descriptors, and this user may have {hard}: "
            "raise the limit (ulimit -Hn), or ask for fewer with --participants"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--participants", type=int, nargs="+", default=[100, 500, 2000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-aggregation", action="store_true")
    parser.add_argument("--heavy", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.heavy:
        port, name = arguments.heavy
        configure("warning", console=False, third_party=False)
        sys.exit(run(Heavy(), f"127.0.0.1:{port}", name))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    numbers = arguments.participants
    raise_file_limit(max(numbers) + HEAVY)
    fleets = []
    for number in numbers:
        row = {**measure(number, arguments.rounds), **measure_bare(number)}
        fleets.append({**row, **ratios(row)})
        print(json.dumps(fleets[-1]), file=sys.stderr)
    figures: Figures = {"rounds": arguments.rounds, "fleets": fleets}
    if not arguments.skip_aggregation:
        figures["aggregation"] = [measure_aggregation(max(numbers))]
    results.report("fleet", figures)


if __name__ == "__main__":
    main()
