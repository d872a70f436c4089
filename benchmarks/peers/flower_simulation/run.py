"""Federated averaging in Flower's simulation, whose ClientApps are run by actors of Ray.

    run.py TIMES PARTICIPANTS SIZE ROUNDS ACTORS

Every participant adds 1 to a model of SIZE float32. TIMES: a file, which gets a line with the time
when each round begins, and one when the last has ended.
"""

import os
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    weights = message.content["arrays"]["weights"].numpy() + np.float32(1)
    arrays = ArrayRecord({"weights": Array(weights)})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 10})})
    return Message(content=content, reply_to=message)


class Timed(FedAvg):
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        note()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        failed = [reply.error for reply in replies if reply.has_error()]
        assert not failed, failed
        assert len(replies) == participants, len(replies)
        return super().aggregate_train(server_round, replies)


def note() -> None:
    with times.open("a", encoding="utf-8") as file:
        file.write(f"{time.time()}\n")


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = Timed(
        fraction_evaluate=0.0,
        min_train_nodes=participants,
        min_available_nodes=participants,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"weights": Array(np.zeros(size, np.float32))}),
        num_rounds=rounds,
        timeout=600,
    )
    note()
    # Averaged in float32 there.
    np.testing.assert_allclose(result.arrays["weights"].numpy(), rounds, rtol=1e-3)


if __name__ == "__main__":
    times = Path(sys.argv[1])
    participants, size, rounds, actors = map(int, sys.argv[2:])
    try:
        run_simulation(
            server,
            client,
            num_supernodes=participants,
            backend_config={
                "init_args": {"address": "local", "num_cpus": actors},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
    except BaseException:  # whatever it is: the process could not end by itself
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the thread of the server waits for clients that never come
