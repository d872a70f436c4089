"""Parameter averaging with @dist: a server averages when 60 % of the workers have sent theirs.

    python messaging/examples/parameter_averaging.py [--workers 5] [--rounds 10] [--driver grpc]

Each worker has data of its own, and fits a line to it by gradient descent, starting from what the
server last answered. The conditional event "worker:update:60%" calls the server's handler with the
updates of that many workers; those who are later are averaged in the next turn. The percentage is
of the workers who are there at the time.
"""

import argparse
import multiprocessing as mp

import numpy as np
from numpy.typing import NDArray

from xain_foundation.logs.logs import configure
from xain_messaging import (
    MembershipServer,
    Message,
    Proxy,
    SessionMessage,
    dist,
)

GROUP = "averaging"
TRUE_LINE = np.array([2.0, -1.0])  # slope, intercept
STEP = 0.1
PATIENCE_S = 60.0  # for what takes a second


class Average:
    """Average of the weights that the workers have found. num_averaged: how often it was made."""

    def __init__(self) -> None:
        self.weights = np.zeros(2)
        self.num_averaged = 0

    def take(self, updates: list[NDArray[np.float64]]) -> None:
        self.weights = np.mean(updates, axis=0)
        self.num_averaged += 1


def average(local: Average, proxy: Proxy, messages: list[Message]) -> None:
    """The handler: one average of all that have come, and an answer to each."""
    local.take([message.body for message in messages])
    for message in messages:
        proxy.reply(message, "weights", local.weights)


def work(discovery: str, driver: str, seed: int, rounds: int) -> None:
    """A worker: its own points, and some steps in each round."""
    configure("warning", console=True, third_party=False)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=100)
    y = TRUE_LINE[0] * x + TRUE_LINE[1] + rng.normal(scale=0.1, size=100)
    weights = np.zeros(2)
    with Proxy(
        GROUP, "worker", {"server": 1}, name=f"worker-{seed}", discovery=discovery, driver=driver
    ) as proxy:
        server = proxy.peers["server"][0]
        for _ in range(rounds):
            for _ in range(5):
                error = weights[0] * x + weights[1] - y
                weights = weights - STEP * np.array([(error * x).mean(), error.mean()])
            update = SessionMessage("update", proxy.name, server, weights)
            (reply,) = proxy.send(update).complete()
            weights = reply.body


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--driver", choices=["grpc", "zmq"], default="grpc")
    arguments = parser.parse_args()
    configure("warning", console=True, third_party=False)
    with MembershipServer() as membership:
        processes = [
            mp.get_context("spawn").Process(
                target=work,
                args=(membership.target, arguments.driver, seed, arguments.rounds),
                daemon=True,
            )
            for seed in range(arguments.workers)
        ]
        for process in processes:
            process.start()
        with Proxy(
            GROUP,
            "server",
            {"worker": arguments.workers},
            discovery=membership.target,
            driver=arguments.driver,
        ) as proxy:

            @dist(proxy, {"worker:update:60%": average})
            class Server(Average):
                pass

            server = Server()
            # Everybody leaves after the last round; those who wait alone then are 60 % of all.
            while proxy.peers.get("worker"):
                server.launch(timeout_s=0.2)
            print(f"averages made: {server.num_averaged}")
            print(
                f"slope {server.weights[0]:.3f}, intercept {server.weights[1]:.3f}; in truth 2, -1"
            )
        for process in processes:
            process.join(PATIENCE_S)


if __name__ == "__main__":
    main()
