"""A participant of a benchmark: a real agent whose training takes no time.

    python benchmarks/agent.py TARGET NAME SIZE [CERTIFICATES]

Prints a line when its update is there, and waits for one on standard input; prints the peak of its
memory when the session is over.
"""

import json
import sys

import numpy as np
from numpy.typing import NDArray
from processes import peak_memory_mb

from xain_foundation.logs.logs import configure
from xain_foundation.security.tls import Certificates
from xain_participant import Participant
from xain_participant.agent.agent import run

NUM_SAMPLES = 10


class Prepared(Participant):
    """A participant whose update is made before the first round: random, and different by name and
    round, so that all of its bytes are sent each time."""

    def __init__(self, name: str, size: int) -> None:
        chance = np.random.default_rng(list(name.encode()))
        self._update = chance.standard_normal(size, dtype=np.float32)

    def init_weights(self) -> NDArray[np.float32]:
        return self._update

    def train_round(
        self, weights: NDArray[np.float32], epochs: int, epoch_base: int
    ) -> tuple[NDArray[np.float32], int]:
        self._update[epoch_base % len(self._update)] += 1
        return self._update, NUM_SAMPLES


def main() -> int:
    target, name, size, *tls = sys.argv[1:]
    configure("error", console=False, third_party=False)
    participant = Prepared(name, int(size))
    certificates = Certificates(tls[0]) if tls else None
    prepared_mb = peak_memory_mb()
    print("ready", flush=True)
    if not sys.stdin.readline():
        return 0  # the benchmark has ended
    code = run(participant, target, name, tls=certificates)
    print(json.dumps({"prepared_mb": prepared_mb, "peak_mb": peak_memory_mb()}), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
