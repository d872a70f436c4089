"""Cost of a round beyond the training: 8 participant processes, a model of 10 float32.

    python benchmarks/round_overhead.py [--participants 8] [--rounds 300] [--peers]

The participants are real agents whose updates are there before they are asked. A round lasts from
its opening to the publication of its model, as the coordinator records it: every participant is
told (the news carries the work, the work the model) and hands in (the call carries the update,
which is synced to disk and journalled); then the updates are aggregated, stored and journalled.

Beside it, in the same run, the raw limit: as many processes making two calls a round, one for the
news and one for the update, on a bare grpc.aio server that answers with the bytes it got.

coordinator_user_ms, coordinator_system_ms: processor time of the coordinator for a round.
coordinator_loop_ms: what its main thread has of both, where the event loop runs.

With --peers also Flower and NVFLARE, installed into .bench-peers/ when they are not there.
Prints medians and their ratio; writes bench-results/round_overhead.json.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import flags
import grpc
import processes
import results

from xain_foundation.net.sockets import free_ports

SIZE = 10  # of the model, in float32
WARM_UP_ROUNDS = 5  # imports and caches settle
CALLS_PER_ROUND = 2  # the news of the round, and EndTrainingRound
RAW_ROUNDS = 1000  # enough for the clients' different beginnings not to matter
PEER_ROUNDS = 5
ECHO = "/bench.Echo/Echo"
PAYLOAD = b"x" * 168  # the size of the model's .npy file


def spawn(role: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--role", role, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def measure_rounds(participants: int, rounds: int) -> processes.Session:
    with results.scratch() as folder:
        return processes.session(folder, participants, SIZE, rounds + WARM_UP_ROUNDS)


def measure_raw(clients: int, rounds: int) -> float:
    """Seconds for one round's calls of all clients, at full speed."""
    port = free_ports(1)[0]
    server = spawn("echo-server", "--port", port)
    try:
        them = [spawn("echo-client", "--port", port, "--rounds", rounds) for _ in range(clients)]
        spans = [json.loads(one.communicate(timeout=300)[0]) for one in them]
        return (max(end for _, end in spans) - min(begin for begin, _ in spans)) / rounds
    finally:
        server.terminate()
        server.wait(30)


async def serve_echo(port: int) -> None:
    async def echo(request: bytes, context: object) -> bytes:
        return request

    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(
        "bench.Echo", {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    )
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def call_echo(port: int, rounds: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Callable[..., bytes] = channel.unary_unary(ECHO)
        call(PAYLOAD, wait_for_ready=True)
        begin = time.time()
        for _ in range(rounds * CALLS_PER_ROUND):
            call(PAYLOAD)
        print(json.dumps([begin, time.time()]))


def main() -> None:
    parser = flags.parser(__doc__, quick="few rounds, to see that it works")
    parser.add_argument("--participants", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=300, help="after the warm-up")
    parser.add_argument("--peers", action="store_true", help="also Flower and NVFLARE")
    parser.add_argument("--role", default="main", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    match given.role:
        case "echo-server":
            asyncio.run(serve_echo(given.port))
        case "echo-client":
            call_echo(given.port, given.rounds)
        case _:
            results.begin(quick=given.quick, any_load=given.any_load)
            if given.quick:
                given.participants, given.rounds = 2, 3
            raw_rounds = given.rounds if given.quick else RAW_ROUNDS
            report(given.participants, given.rounds, raw_rounds, with_peers=given.peers)


def report(participants: int, rounds: int, raw_rounds: int, *, with_peers: bool) -> None:
    raw = measure_raw(participants, raw_rounds)
    session = measure_rounds(participants, rounds)
    seconds = sorted(session.seconds[WARM_UP_ROUNDS:])
    spent = session.processor_time
    median = statistics.median(seconds)
    figures: dict[str, object] = {
        "participants": participants,
        "rounds": rounds,
        "round_ms_median": round(1000 * median, 2),
        "round_ms_min": round(1000 * seconds[0], 2),
        "round_ms_p90": round(1000 * seconds[int(0.9 * (len(seconds) - 1))], 2),
        "bare_grpc_ms": round(1000 * raw, 2),
        "ratio_to_bare_grpc": round(median / raw, 2),
        "coordinator_user_ms": spent and round(1000 * spent.user_s, 1),
        "coordinator_system_ms": spent and round(1000 * spent.system_s, 1),
        "coordinator_loop_ms": spent and round(1000 * spent.loop_s, 1),
    }
    if with_peers:
        import peers

        rows = peers.measure(participants=participants, size=SIZE, rounds=min(rounds, PEER_ROUNDS))
        figures["peers"] = peers.beside(rows, median)
    results.report("round_overhead", figures)


if __name__ == "__main__":
    main()
