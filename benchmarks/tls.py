"""Cost of certificates: the same work with TLS and without, in turns.

    python benchmarks/tls.py [--repeats 5] [--participants 2000]

Each figure is measured on an open coordinator and on a closed one, one after the other, again and
again; what counts is the ratio of the medians. All programs share two cores: on a machine with more
they are kept to two.

a call: a heartbeat after another one, by one participant.
a round of 8 x 10 floats: as in round_overhead.py.
participants joined: from the start of a fleet to the last that is told of round 0, as in fleet.py.
a round of 4 x 100 MB: as in large_model.py, and the processor time of its coordinator, all work in
it, for each GB that went down or came up.
moving alone: the coordinator's processor time a GB while one participant brings down the model and
uploads updates that are in no aggregation, as often. They are checked, and written to the disk.

Prints a table; writes bench-results/tls.json.
"""

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import flags
import fleet
import numpy as np
import processes
import results

from xain_foundation.security.tls import Certificates
from xain_participant.wire.client import CoordinatorClient
from xain_participant.wire.direct import DirectTransfer
from xain_wire.fl import coordinator_pb2 as pb

WAYS = (False, True)  # open and closed
CORES = 2
WARM_UP_CALLS = 200
CALLS = 1000  # in a turn
SMALL, SMALL_PARTICIPANTS, SMALL_ROUNDS = 10, 8, 100
LARGE, LARGE_PARTICIPANTS, LARGE_ROUNDS = 25_000_000, 4, 4
WARM_UP_ROUNDS = 5
# The first round brings the first weights, and the second is the first with a download.
LARGE_WARM_UP_ROUNDS = 2
MOVES = 10  # of the large model in each direction, in a turn


def row(
    what: str, unit: str, plain: Sequence[float], tls: Sequence[float], most: str
) -> dict[str, Any]:
    """A line of the table. most: the bound that is kept to."""
    medians = [statistics.median(each) for each in (plain, tls)]
    return {
        "figure": f"{what} ({unit})",
        "plain": float(f"{medians[0]:.3g}"),
        "tls": float(f"{medians[1]:.3g}"),
        "ratio": round(medians[1] / medians[0], 2),
        "at_most": most,
    }


def calls(repeats: int, number: int) -> dict[str, Any]:
    """Both coordinators are there at the same time, so that both meet the machine alike."""
    found: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        clients = []
        for is_closed in WAYS:
            folder = stack.enter_context(results.scratch())
            coordinator = processes.CoordinatorProcess(folder, {}, is_closed=is_closed)
            stack.callback(coordinator.stop)
            coordinator.start()
            certificates = coordinator.certificates("p0")
            tls = None if certificates is None else Certificates(certificates)
            client = stack.enter_context(CoordinatorClient(coordinator.target, "p0", tls=tls))
            client.rendezvous()
            clients.append(client)
            heartbeats(client, WARM_UP_CALLS)
        for _ in range(repeats):
            for client, seconds in zip(clients, found, strict=True):
                seconds += heartbeats(client, number)
    return row("a call", "us", *([1e6 * s for s in each] for each in found), "1.3 times")


def heartbeats(client: CoordinatorClient, number: int) -> list[float]:
    """Seconds of each call."""
    seconds = []
    for _ in range(number):
        begin = time.perf_counter()
        client.heartbeat(pb.READY, -1)
        seconds.append(time.perf_counter() - begin)
    return seconds


def small_rounds(repeats: int, rounds: int) -> dict[str, Any]:
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for is_closed in WAYS:
            with results.scratch() as folder:
                session = processes.session(
                    folder, SMALL_PARTICIPANTS, SMALL, rounds + WARM_UP_ROUNDS, is_closed=is_closed
                )
            found[is_closed].extend(1000 * s for s in session.seconds[WARM_UP_ROUNDS:])
    what = f"a round of {SMALL_PARTICIPANTS} x {SMALL} floats"
    return row(what, "ms", *found, "1.3 times")


def joins(repeats: int, participants: int, scale: fleet.Scale) -> dict[str, Any]:
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for is_closed in WAYS:
            joined = fleet.measure_join(participants, scale, is_closed=is_closed)
            found[is_closed].append(joined["join_s"])
    return row(f"{participants} participants joined", "s", *found, "2 times")


def large_rounds(repeats: int, size: int, rounds: int) -> list[dict[str, Any]]:
    seconds: tuple[list[float], list[float]] = ([], [])
    spent_s: tuple[list[float], list[float]] = ([], [])
    count = rounds + LARGE_WARM_UP_ROUNDS
    model_gb = 4 * size / 1e9
    # The first round has no model to bring down.
    moved_gb = LARGE_PARTICIPANTS * model_gb * (2 * count - 1)
    for _ in range(repeats):
        for is_closed in WAYS:
            with results.scratch() as folder:
                session = processes.session(
                    folder, LARGE_PARTICIPANTS, size, count, is_closed=is_closed
                )
            seconds[is_closed].extend(session.seconds[LARGE_WARM_UP_ROUNDS:])
            spent = session.processor_time
            assert spent is not None, "processor time is told by Linux alone"
            spent_s[is_closed].append((spent.user_s + spent.system_s) * count / moved_gb)
    what = f"a round of {LARGE_PARTICIPANTS} x {1000 * model_gb:g} MB"
    return [
        row(what, "s", *seconds, "3.5 times"),
        row("coordinator's processor time a GB", "s", *spent_s, "1 s"),
    ]


def moves(repeats: int, size: int, number: int) -> dict[str, Any]:
    spent_s: tuple[list[float], list[float]] = ([], [])
    update = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    rules = {"rounds.rounds": 2, "rounds.initial_weights": "average"}
    for _ in range(repeats):
        for is_closed in WAYS:
            with results.scratch() as folder, ExitStack() as stack:
                coordinator = processes.CoordinatorProcess(folder, rules, is_closed=is_closed)
                stack.callback(coordinator.stop)
                coordinator.start()
                certificates = coordinator.certificates("p0")
                tls = None if certificates is None else Certificates(certificates)
                direct = DirectTransfer(certificates=tls)
                stack.callback(direct.close)
                client = CoordinatorClient(coordinator.target, "p0", direct=direct, tls=tls)
                stack.enter_context(client)
                client.rendezvous()
                work = started(client, 0)
                ref = client.put_weights(0, update, work.upload)
                client.end_round(client.end_request(0, ref, 1, ""))
                work = started(client, 1)
                before = coordinator.processor_time
                for i in range(number):
                    update[i % size] += 1  # an update that is there is not sent again
                    client.get_weights(work.model)
                    client.put_weights(1, update, work.upload)
                    work = client.start_round()
                after = coordinator.processor_time
                assert before is not None, "processor time is told by Linux alone"
                assert after is not None
                spent = after.since(before, number)
                moved_gb = 2 * update.nbytes / 1e9
                spent_s[is_closed].append((spent.user_s + spent.system_s) / moved_gb)
    return row("the same of moving alone", "s", *spent_s, "1 s")


def started(client: CoordinatorClient, round_: int) -> pb.StartTrainingRoundResponse:
    """The work of a round, once it is open."""

    def is_open() -> bool:
        told = client.heartbeat(pb.READY, round_ - 1)
        return (told.state, told.round) == (pb.ROUND, round_)

    processes.wait_until(is_open, f"round {round_}")
    return client.start_round()


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each figure")
    parser.add_argument("--participants", type=int, default=2000, help="that join")
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    scale, number, rounds = fleet.Scale(), CALLS, SMALL_ROUNDS
    size, large, moved = LARGE, LARGE_ROUNDS, MOVES
    if given.quick:
        given.repeats, given.participants, scale = 1, 4, fleet.QUICK
        number, rounds, size, large, moved = 20, 3, 50_000, 1, 1
    fleet.raise_file_limit(given.participants)
    table = [
        calls(given.repeats, number),
        small_rounds(given.repeats, rounds),
        joins(given.repeats, given.participants, scale),
        *large_rounds(given.repeats, size, large),
        moves(given.repeats, size, moved),
    ]
    results.report("tls", {"repeats": given.repeats, "cores_used": CORES, "figures": table})


if __name__ == "__main__":
    main()
