"""What a round costs beyond the training: 8 participant processes, a model of 10 float32.

    python benchmarks/round_overhead.py [--participants 8] [--rounds 30]

The participants are real agents whose training is a single addition. A round lasts from its opening
to the publication of its model, as the coordinator records it: every participant is told (the news
carries the work, the work the model) and hands in (the call carries the update, which is synced to
disk and journalled); then the updates are aggregated, stored and journalled.

Beside it, in the same run, the raw limit: as many processes making two calls a round, one for the
news and one for the update, on a bare grpc.aio server that answers with the bytes it got. Prints
medians and their ratio; writes bench-results/round_overhead.json.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import grpc
import numpy as np
import results
from numpy.typing import NDArray

from xain_messaging.process.logs import configure
from xain_participant import Participant
from xain_participant.agent import run
from xain_proto.fl import inspection_pb2 as inspection
from xain_proto.fl import inspection_pb2_grpc

WARM_UP_ROUNDS = 5  # imports and caches settle
CALLS_PER_ROUND = 2  # the news of the round, and EndTrainingRound
RAW_ROUNDS = 1000  # enough for the clients' different beginnings not to matter
ECHO = "/bench.Echo/Echo"
PAYLOAD = b"x" * 168  # the size of the model's .npy file


class Adder(Participant):
    """Training that takes no time."""

    def init_weights(self) -> NDArray[np.float32]:
        return np.zeros(10, np.float32)

    def train_round(
        self, weights: NDArray[np.float32], epochs: int, epoch_base: int
    ) -> tuple[NDArray[np.float32], int]:
        return weights + np.float32(1), 10


def spawn(role: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--role", role, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def measure_rounds(participants: int, rounds: int) -> list[float]:
    """Seconds of each round after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "rounds.rounds": rounds + WARM_UP_ROUNDS,
            "rounds.min_participants": participants,
            "logging.level": "warning",
            "logging.console": "false",
        }
        port = free_port()
        command = [sys.executable, "-m", "xain_coordinator", f"--data-dir={folder}"]
        flags = [f"--port={port}", *(f"--set={k}={v}" for k, v in settings.items())]
        coordinator = subprocess.Popen([*command, *flags])
        agents = [spawn("agent", "--port", port, "--name", f"p{i}") for i in range(participants)]
        try:
            for agent in agents:
                if agent.wait(300) != 0:
                    raise SystemExit(f"a participant ended with status {agent.returncode}")
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = inspection_pb2_grpc.InspectionStub(channel)
                listed = stub.ListRounds(inspection.ListRoundsRequest(limit=10_000)).rounds
            return [round_.seconds for round_ in listed][WARM_UP_ROUNDS:]
        finally:
            for process in (*agents, coordinator):
                process.terminate()
                process.wait(30)


def measure_raw(clients: int) -> float:
    """Seconds for one round's calls of all clients, at full speed."""
    port = free_port()
    server = spawn("echo-server", "--port", port)
    try:
        processes = [
            spawn("echo-client", "--port", port, "--rounds", RAW_ROUNDS) for _ in range(clients)
        ]
        spans = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
        return (max(end for _, end in spans) - min(begin for begin, _ in spans)) / RAW_ROUNDS
    finally:
        server.terminate()
        server.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--participants", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--role", default="main", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    match arguments.role:
        case "agent":
            configure("warning", console=False, third_party=False)
            sys.exit(run(Adder(), f"127.0.0.1:{arguments.port}", arguments.name))
        case "echo-server":
            asyncio.run(serve_echo(arguments.port))
        case "echo-client":
            call_echo(arguments.port, arguments.rounds)
        case _:
            report(arguments.participants, arguments.rounds)


def report(participants: int, rounds: int) -> None:
    raw = measure_raw(participants)
    seconds = sorted(measure_rounds(participants, rounds))
    median = statistics.median(seconds)
    results.report(
        "round_overhead",
        {
            "participants": participants,
            "rounds": rounds,
            "round_ms_median": round(1000 * median, 2),
            "round_ms_min": round(1000 * seconds[0], 2),
            "round_ms_p90": round(1000 * seconds[int(0.9 * (len(seconds) - 1))], 2),
            "bare_grpc_ms": round(1000 * raw, 2),
            "ratio_to_bare_grpc": round(median / raw, 2),
            "grpcio": grpc.__version__,
        },
    )


if __name__ == "__main__":
    main()
