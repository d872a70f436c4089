"""A participant of a benchmark whose update is a file that is mapped into memory.

    python benchmarks/mapped_agent.py TARGET NAME FILE

It takes part in each round as an agent does, except that it keeps nothing of the model: the bytes
are received, their digest is checked, and they are overwritten. So many of them fit on one machine,
however large the model is. FILE holds float32 and nothing else.

Prints a line when it is ready, and waits for one on standard input; prints the peak of its memory
when the session is over.
"""

import json
import sys
from pathlib import Path

import numpy as np
from agent import NUM_SAMPLES
from processes import peak_memory_mb

from xain_participant.wire.client import CoordinatorClient
from xain_participant.wire.direct import CHUNK_BYTES, DirectTransfer, with_host
from xain_participant.wire.download import Download
from xain_wire.fl import coordinator_pb2 as pb


class Discarded(Download):
    """A download that keeps its latest piece only."""

    def __init__(self, ref: pb.WeightsRef) -> None:
        super().__init__(pb.WeightsRef(size_bytes=CHUNK_BYTES))  # the piece
        self._piece = self._target
        self.ref, self.size_bytes = ref, ref.size_bytes

    def room(self, most: int) -> memoryview:
        return self._piece[: min(most, self.size_bytes - self.received)]

    def take(self, num_bytes: int) -> None:
        self._digest.update(self._piece[:num_bytes])
        self.received += num_bytes


def take_part(client: CoordinatorClient, direct: DirectTransfer, target: str, file: Path) -> None:
    """Hand in the file in every round, until the session is over."""
    update = np.memmap(file, np.float32, "r")
    watch = iter(client.watch())
    news = next(watch)
    while news.state != pb.FINISHED:
        answer = None
        if news.HasField("work"):
            work = news.work
            is_trained = work.task == pb.TRAIN
            if is_trained:
                assert direct.fetch(with_host(work.model.url, target), Discarded(work.model))
            ref = client.put_weights(work.round, update, work.upload)
            answer = client.end_round(
                client.end_request(work.round, ref, NUM_SAMPLES if is_trained else 0, "")
            )
        news = answer or next(watch)


def main() -> int:
    target, name, file = sys.argv[1:]
    print("ready", flush=True)
    if not sys.stdin.readline():
        return 0  # the benchmark has ended
    prepared_mb = peak_memory_mb()
    direct = DirectTransfer()
    with CoordinatorClient(target, name, direct=direct) as client:
        client.rendezvous()
        take_part(client, direct, target, Path(file))
    print(json.dumps({"prepared_mb": prepared_mb, "peak_mb": peak_memory_mb()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
