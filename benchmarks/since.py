"""Cost of what came since a revision: the same work by its tree and by this one, in turns.

    python benchmarks/since.py REVISION [--repeats 5] [--only a-call,a-small-round,...]

REVISION is checked out into a folder of its own, and its programs and its `benchmarks/` run from
there, by the Python and the packages of this environment. The order of the two changes from turn to
turn. What counts is the ratio of the medians. All programs share two cores.

a call: a heartbeat after another one, and the coordinator's processor time for it.
a small round: 8 participants, 10 float32, and the coordinator's processor time.
a large round: 4 participants, 25 million float32, and the coordinator's processor time.
joins: from the start of 2,000 participants to the last that is told of round 0.
starts: processor time of `import xain`; time until a coordinator serves, and its processor time;
    processor time of a participant that joins and trains two rounds.
demo: processor time of `xain-coordinator demo`, all its programs together.
trips: a message of 1 kB to a proxy in another process and its answer, over ZeroMQ and over gRPC,
    and the processor time of both processes for it; and the same bytes by pyzmq's REQ and REP.
tables: pushes and pulls of one worker with one parameter server, one after the other: of 1,000 keys
    of one float, the same each time or others for each pull, whose keys the push after it has too;
    of 100,000 keys of one and of 16 floats; and of dense arrays of 4 KiB and of 4 MiB.

Prints a table; writes bench-results/since.json.
"""

import itertools
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

# Modules of the tree that is measured: PYTHONPATH leads to it, and -P leaves this folder out.
import flags
import fleet
import messaging
import numpy as np
import processes
import results
from parameter_group import connected, group_of

from xain_messaging import Proxy, SessionMessage
from xain_wire.fl import coordinator_pb2 as pb

try:
    from xain_participant.wire.client import CoordinatorClient
except ImportError:  # in revisions whose folders were laid out otherwise
    from xain_participant.client import CoordinatorClient

HERE = Path(__file__).resolve().parent.parent
CORES = 2
QUICK = "--quick"
WARM_UP_CALLS, CALLS = 500, 4000
SMALL_WARM_UP, SMALL_ROUNDS = 5, 150
# The first round brings the first weights, and the second is the first with a download.
LARGE_WARM_UP, LARGE_ROUNDS, LARGE = 2, 6, 25_000_000
JOINS = 2000
WARM_UP_TRIPS, TRIPS = 500, 3000
KB = bytes(1000)
TABLE_ROWS, FEW_KEYS, MANY_KEYS = 400_000, 1000, 100_000
KEY_LISTS = 50  # more than are remembered
WARM_UP_FEW, FEW_REQUESTS = 200, 2000  # pushes and pulls of few keys
WARM_UP_MANY, MANY_REQUESTS = 10, 60
Figures = dict[str, float]


def a_call() -> Figures:
    warm_up, calls = (10, 50) if QUICK in sys.argv else (WARM_UP_CALLS, CALLS)
    with results.scratch() as folder, ExitStack() as stack:
        coordinator = processes.CoordinatorProcess(folder, {})
        stack.callback(coordinator.stop)
        coordinator.start()
        client = stack.enter_context(CoordinatorClient(f"127.0.0.1:{coordinator.port}", "p0"))
        client.rendezvous()
        seconds = []
        before = None
        for i in range(warm_up + calls):
            if i == warm_up:
                before = coordinator.processor_time
            begin = time.perf_counter()
            client.heartbeat(pb.READY, -1)
            seconds.append(time.perf_counter() - begin)
        spent_s = _spent_s(before, coordinator.processor_time, calls)
        median_s = statistics.median(seconds[warm_up:])
    return {"a call (us)": 1e6 * median_s, "a call, its processor time (us)": 1e6 * spent_s}


def _spent_s(
    before: processes.ProcessorTime | None, after: processes.ProcessorTime | None, number: int
) -> float:
    assert before is not None, "processor time is told by Linux alone"
    assert after is not None
    spent = after.since(before, number)
    return spent.user_s + spent.system_s


def _rounds(
    what: str, unit: str, of_s: float, participants: int, size: int, rounds: int
) -> Figures:
    warm_up = SMALL_WARM_UP if size == 10 else LARGE_WARM_UP
    with results.scratch() as folder:
        session = processes.session(folder, participants, size, warm_up + rounds)
    spent = session.processor_time
    assert spent is not None, "processor time is told by Linux alone"
    return {
        f"{what} ({unit})": of_s * statistics.median(session.seconds[warm_up:]),
        f"{what}, its processor time ({unit})": of_s * (spent.user_s + spent.system_s),
    }


def a_small_round() -> Figures:
    return _rounds("a round of 8 x 10 floats", "ms", 1000, 8, 10, SMALL_ROUNDS)


def a_large_round() -> Figures:
    return _rounds("a round of 4 x 100 MB", "s", 1, 4, LARGE, LARGE_ROUNDS)


def joins() -> Figures:
    settings: dict[str, object] = {
        "rounds.initial_weights": "average",
        "rounds.min_participants": JOINS,
        "server.heartbeat_time_s": 10.0,
    }
    fleet.raise_file_limit(JOINS)
    with results.scratch() as folder, fleet.coordinator(folder, settings) as (server, port):
        cpu_s = server.cpu_s
        crowd = fleet.Crowd(port, JOINS)
        try:
            join_s = crowd.all_told(0, server) - crowd.started_at
            spent_s = server.cpu_s - cpu_s
        finally:
            crowd.end()
    what = f"{JOINS} participants joined"
    return {f"{what} (s)": join_s, f"{what}, the processor time (s)": spent_s}


def starts() -> Figures:
    imported_s = _children_s([sys.executable, "-c", "import xain"])
    rules = {"rounds.rounds": 2, "rounds.min_participants": 1, "rounds.initial_weights": "average"}
    with results.scratch() as folder, ExitStack() as stack:
        coordinator = processes.CoordinatorProcess(folder, rules)
        stack.callback(coordinator.stop)
        served_s = coordinator.start()
        spent = coordinator.processor_time
        assert spent is not None, "processor time is told by Linux alone"
        target = f"127.0.0.1:{coordinator.port}"
        trained_s = _children_s([sys.executable, str(processes.AGENT), target, "p", "10"])
    return {
        "import xain, processor time (s)": imported_s,
        "a coordinator serves (s)": served_s,
        "a coordinator serves, its processor time (s)": spent.user_s + spent.system_s,
        "a participant and two rounds, its processor time (s)": trained_s,
    }


def demo() -> Figures:
    spent_s = _children_s([sys.executable, "-m", "xain_coordinator", "demo"])
    return {"xain-coordinator demo, processor time (s)": spent_s}


def trips() -> Figures:
    found: Figures = {}
    for name in ("zmq", "grpc", "pyzmq"):
        here, there = multiprocessing.Pipe()
        other = multiprocessing.get_context("spawn").Process(
            target=_answer, args=(name, there), daemon=True
        )
        other.start()
        try:
            ask = _asker(name, here)
            for _ in range(WARM_UP_TRIPS):
                ask()
            assert other.pid is not None
            cpu_s, begin = messaging.cpu_s(other.pid), time.perf_counter()
            for _ in range(TRIPS):
                ask()
            trip_s = (time.perf_counter() - begin) / TRIPS
            spent_s = (messaging.cpu_s(other.pid) - cpu_s) / TRIPS
        finally:
            other.kill()
            other.join()
        what = f"a trip of 1 kB over {name}"
        found |= {f"{what} (us)": 1e6 * trip_s, f"{what}, its processor time (us)": 1e6 * spent_s}
    return found


def tables() -> Figures:
    is_quick = QUICK in sys.argv
    rows = 2000 if is_quick else TABLE_ROWS
    few = (5, 20) if is_quick else (WARM_UP_FEW, FEW_REQUESTS)
    many = (1, 3) if is_quick else (WARM_UP_MANY, MANY_REQUESTS)
    # An odd factor is a bijection of 64-bit numbers: no key is near another one.
    keys = np.sort(np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    chance = np.random.default_rng(8)
    found: Figures = {}
    with group_of(1) as group, connected(group) as server:
        for what, num_lists, num_keys, dim, numbers in (
            ("1,000 keys", 1, FEW_KEYS, 1, few),
            ("1,000 other keys", KEY_LISTS, FEW_KEYS, 1, few),
            ("100,000 keys", 5, MANY_KEYS, 1, many),
            ("100,000 keys of 16", 5, MANY_KEYS, 16, many),
        ):
            size = min(num_keys, rows // 2)
            lists = [np.sort(chance.choice(keys, size, replace=False)) for _ in range(num_lists)]
            pushed = np.ones((size, dim), np.float32)
            table = server.table(what, dim)
            table.push(keys, np.ones((rows, dim), np.float32))
            requests = itertools.cycle(
                (partial(table.pull, each), partial(table.push, each, pushed)) for each in lists
            )
            found |= _requests_us(what, requests, *numbers)
        for what, size, numbers in (("4 KiB", 1 << 10, few), ("4 MiB", 1 << 20, many)):
            array, pushed = server.dense(what, (size,)), np.ones(size, np.float32)
            pull = partial(array.pull, out=np.empty(size, np.float32))
            requests = itertools.repeat((pull, partial(array.push, pushed)))
            found |= _requests_us(f"a dense {what}", requests, *numbers)
    return found


def _requests_us(
    what: str,
    requests: Iterator[tuple[Callable[[], object], Callable[[], object]]],
    warm_up: int,
    number: int,
) -> Figures:
    """Medians of pulls and pushes in turns."""
    pulls, pushes = [], []
    for pull, push in itertools.islice(requests, warm_up + number):
        begin = time.perf_counter()
        pull()
        middle = time.perf_counter()
        push()
        pushes.append(time.perf_counter() - middle)
        pulls.append(middle - begin)
    return {
        f"a pull of {what} (us)": 1e6 * statistics.median(pulls[warm_up:]),
        f"a push of {what} (us)": 1e6 * statistics.median(pushes[warm_up:]),
    }


def _proxy(driver: str, pipe: Connection, *, is_first: bool) -> Proxy:
    name = "first" if is_first else "second"
    pair = messaging.Pair(pipe, is_first=is_first)
    return Proxy("trips", "peer", name=name, discovery=pair, driver=driver)


def _answer(name: str, pipe: Connection) -> None:
    """Loop of the other process."""
    if name == "pyzmq":
        raw = messaging.ZmqRequests(pipe, is_first=True)
        while True:
            raw.receive()
            raw.send(KB)
    proxy = _proxy(name, pipe, is_first=True)
    for message in proxy.receive():
        proxy.reply(message)


def _asker(name: str, pipe: Connection) -> Callable[[], None]:
    """Return a function that makes one trip."""
    if name == "pyzmq":
        raw = messaging.ZmqRequests(pipe, is_first=False)

        def exchange() -> None:
            raw.send(KB)
            raw.receive()

        return exchange
    proxy = _proxy(name, pipe, is_first=False)

    def ask() -> None:
        proxy.send(SessionMessage("x", proxy.name, "first", KB)).complete()

    return ask


def _children_s(command: list[str]) -> float:
    """Processor time of a command and of all that it has waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, input="go\n", text=True, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


WORK: dict[str, Callable[[], Figures]] = {
    "a-call": a_call,
    "a-small-round": a_small_round,
    "a-large-round": a_large_round,
    "joins": joins,
    "starts": starts,
    "demo": demo,
    "trips": trips,
    "tables": tables,
}


def measured(tree: Path, what: str, *flags_of: str) -> Figures:
    """Figures of one piece of work, by a process that has only the modules of this tree."""
    path = os.pathsep.join(map(str, (*sorted(tree.glob("*/src")), tree / "benchmarks")))
    # With compiled modules, as they are started: else a start would be measured by its lines.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    made = subprocess.run(
        [sys.executable, "-P", __file__, "--inside", what, *flags_of],
        env={**kept, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: Figures = json.loads(made.stdout.splitlines()[-1])
    return figures


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        print(json.dumps(WORK[sys.argv[2]]()))
        return
    parser = flags.parser(__doc__)
    parser.add_argument("revision", help="any name of git for it")
    parser.add_argument("--repeats", type=int, default=5, help="of each piece of work")
    parser.add_argument("--only", default=",".join(WORK), help=f"of {', '.join(WORK)}")
    given = parser.parse_args()
    only = given.only.split(",")
    if not set(only) <= set(WORK):
        parser.error(f"--only has pieces of: {', '.join(WORK)}")
    results.begin(quick=given.quick, any_load=given.any_load)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    repeats = 1 if given.quick else given.repeats
    found: defaultdict[str, dict[bool, list[float]]] = defaultdict(lambda: {True: [], False: []})
    with results.scratch() as folder:
        before = folder / "before"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run(
            [*git, "add", "--quiet", "--detach", str(before), given.revision], check=True
        )
        try:
            for number, what in itertools.product(range(repeats), only):
                for is_before in (number % 2 == 0, number % 2 == 1):
                    tree = before if is_before else HERE
                    made = measured(tree, what, *([QUICK] if given.quick else []))
                    print(
                        f"{number}: {what} {'before' if is_before else 'now'}: {made}",
                        file=sys.stderr,
                    )
                    for name, figure in made.items():
                        found[name][is_before].append(figure)
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    table = [
        {
            "figure": name,
            "before": float(f"{statistics.median(by[True]):.3g}"),
            "now": float(f"{statistics.median(by[False]):.3g}"),
            "ratio": round(statistics.median(by[False]) / statistics.median(by[True]), 3),
        }
        for name, by in found.items()
    ]
    results.report("since", {"since": given.revision, "repeats": repeats, "figures": table})


if __name__ == "__main__":
    main()
