"""Federated averaging, with a note of when each round begins and when the last one has ended."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Timed(FedAvg):
    def __init__(self, times: Path, participants: int) -> None:
        super().__init__(
            fraction_evaluate=0.0,
            min_train_nodes=participants,
            min_available_nodes=participants,
        )
        self._times = times

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.note()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        failed = [reply.error for reply in replies if reply.has_error()]
        assert not failed, failed
        return super().aggregate_train(server_round, replies)

    def note(self) -> None:
        with self._times.open("a", encoding="utf-8") as file:
            file.write(f"{time.time()}\n")


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    # Until all are there, a round would not begin; nor is their coming part of one.
    while len(list(grid.get_node_ids())) < int(settings["participants"]):
        time.sleep(0.1)  # a poll: it ends when they are there
    strategy = Timed(Path(str(settings["times"])), int(settings["participants"]))
    weights = np.load(Path(str(settings["model"])))
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"weights": Array(weights)}),
        num_rounds=int(settings["rounds"]),
        timeout=600,
    )
    strategy.note()
