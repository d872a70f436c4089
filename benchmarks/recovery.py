"""Cost of the coordinator's death: kill -9 in a round of 8 participants, which are uploading.

    python benchmarks/recovery.py [--participants 8] [--size 5000000] [--kills 5]

The coordinator is killed when half of a round's bytes have come up, and started again at once on
the same data and port. Measured from the start of the new process: the seconds until it serves,
and until the model of the round is published. Every other round is left in peace.

The bytes that were sent twice are those that went through a proxy between the participants and the
coordinator, less those of the same session without a kill; weights travel by gRPC for that. The
participants are real agents whose updates are there before they are asked.

How long it takes to read a long journal is measured by restart.py. Prints medians; writes
bench-results/recovery.json.
"""

import statistics
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import flags
import grpc
import processes
import results
from counting_proxy import CountingProxy

WARM_UP_ROUNDS = 2
POLL_S = 0.002  # while they upload: a whole round takes only some hundredths of a second


@dataclass(slots=True)
class Found:
    """serving_s, round_ends_s: of each kill. round_s: of each round that was left in peace.
    bytes_up, bytes_down: of the whole session."""

    serving_s: list[float] = field(default_factory=list)
    round_ends_s: list[float] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0


def session(participants: int, size: int, rounds: int, kills: int) -> Found:
    """Run so many rounds after the warm-up, and kill the coordinator in every other one."""
    found = Found()
    with ExitStack() as stack:
        folder = stack.enter_context(results.scratch())
        rules = {
            "rounds.rounds": WARM_UP_ROUNDS + rounds,
            "rounds.initial_weights": "average",
            "rounds.min_participants": participants,
            "server.weights_port": "off",  # all bytes pass the proxy
        }
        coordinator = processes.CoordinatorProcess(folder, rules)
        stack.callback(coordinator.stop)
        coordinator.start()
        proxy = stack.enter_context(CountingProxy(coordinator.port))
        target = f"127.0.0.1:{proxy.port}"
        them = stack.enter_context(processes.agents(target, participants, size))
        them.go()
        for kill in range(kills):
            number = WARM_UP_ROUNDS + 2 * kill + 1
            wait_for_round(coordinator, number)
            wait_for_bytes(proxy, participants * 4 * size / 2)
            coordinator.kill()
            begin = time.perf_counter()
            found.serving_s.append(coordinator.start())
            wait_for_round(coordinator, number + 1)
            found.round_ends_s.append(time.perf_counter() - begin)
            them.check()
        them.finish()
        seconds = [round_.seconds for round_ in coordinator.rounds()]
        found.round_s = seconds[WARM_UP_ROUNDS :: 2 if kills else 1]
        found.bytes_up, found.bytes_down = proxy.num_bytes_up, proxy.num_bytes_down
    return found


def wait_for_round(coordinator: processes.CoordinatorProcess, number: int) -> None:
    """Wait until a round is open, and so the one before it published."""

    def is_open() -> bool:
        with suppress(grpc.RpcError):  # while it is away
            return len(coordinator.rounds()) > number
        return False

    processes.wait_until(is_open, f"round {number}")


def wait_for_bytes(proxy: CountingProxy, num_bytes: float) -> None:
    """Wait until so many more bytes have come up."""
    wanted = proxy.num_bytes_up + num_bytes
    deadline = time.monotonic() + processes.PATIENCE_S
    while proxy.num_bytes_up < wanted:
        if time.monotonic() > deadline:
            raise SystemExit("the participants do not send")
        time.sleep(POLL_S)  # a poll: it ends when they are there


def measure(participants: int, size: int, kills: int) -> dict[str, object]:
    # One more, so that the session is not over while the last one is looked for.
    rounds = 2 * kills + 1
    usual = session(participants, size, rounds, 0)
    killed = session(participants, size, rounds, kills)
    twice_up = max(0, killed.bytes_up - usual.bytes_up) / kills
    twice_down = max(0, killed.bytes_down - usual.bytes_down) / kills
    return {
        "participants": participants,
        "update_mb": processes.mb(4 * size),
        "kills": kills,
        "serving_s_median": statistics.median(killed.serving_s),
        "serving_s_max": max(killed.serving_s),
        "round_ends_s_median": statistics.median(killed.round_ends_s),
        "round_ends_s_max": max(killed.round_ends_s),
        "undisturbed_round_s_median": statistics.median(usual.round_s),
        "round_mb_up": processes.mb(participants * 4 * size),
        "sent_twice_mb_up": processes.mb(twice_up),
        "sent_twice_mb_down": processes.mb(twice_down),
        "sent_twice_share": twice_up / (participants * 4 * size),
    }


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument("--participants", type=int, default=8)
    parser.add_argument("--size", type=int, default=5_000_000, help="of the model, in float32")
    parser.add_argument("--kills", type=int, default=5)
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    if given.quick:
        given.participants, given.size, given.kills = 2, 500_000, 1
    results.report("recovery", measure(given.participants, given.size, given.kills))


if __name__ == "__main__":
    main()
