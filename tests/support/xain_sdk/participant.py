"""A participant of XAIN 0.6.0, as its users write them. Runs in the SDK's environment.

    python participant.py CONFIG.toml HURRY NUM_SAMPLES STEP FIRST_WEIGHT...

The SDK's waits are divided by HURRY: with 1 they are its own. The participant starts with the first
weights, and each of its rounds adds STEP to the global model's. What the SDK asks of it is told on
standard output, one JSON object a line.
"""

import json
import sys
from typing import Any

import numpy as np
from xain_sdk import participant_state_machine as sdk
from xain_sdk.config import Config
from xain_sdk.participant import Participant


def tell(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class Adding(Participant):
    """num_samples: n_k, by which its updates are weighted."""

    def __init__(self, num_samples: int, step: float, first: list[float]) -> None:
        super().__init__()
        self._num_samples = num_samples
        self._step = step
        self._first = first
        tell(id=self.dummy_id)

    def init_weights(self) -> Any:
        tell(call="init_weights")
        return np.array(self._first, np.float32)

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> tuple[Any, int]:
        tell(call="train_round", epochs=epochs, epoch_base=epoch_base, weights=weights.tolist())
        for epoch in range(epochs):
            self.update_metrics(epoch, epoch_base, step=self._step)
        return weights + np.float32(self._step), self._num_samples


if __name__ == "__main__":
    config, hurry, num_samples, step, *first = sys.argv[1:]
    sdk.HEARTBEAT_TIME /= int(hurry)
    sdk.RETRY_TIMEOUT /= int(hurry)
    sdk.start_participant(
        Adding(int(num_samples), float(step), [float(weight) for weight in first]),
        Config.load(config),
    )
