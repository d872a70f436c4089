"""Peak memory of a participant that sends and receives a large model."""

import asyncio
import sys
from pathlib import Path

import pytest

from support.commands import called
from support.process import PATIENCE_S, CoordinatorProcess, ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a peak is read from /proc")

MIB = 1 << 20
MODEL_MIB = 64
# What gRPC, the allocator and the interpreter may take beside models. A copy too many is 64 MiB.
SLACK_MIB = 48

TRAINEE = """
import sys
import numpy as np
from pathlib import Path
from xain_participant import Participant, run
from xain_participant.keep.state import StateDirectory

target, name, folder, size = sys.argv[1:]

def memory(what):
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(what)).split()[1]) // 1024

class Trainee(Participant):
    def init_weights(self):
        return np.ones(int(size), dtype=np.float32)

    def train_round(self, weights, epochs, epoch_base):
        # Training itself holds nothing but what it was given.
        for first in range(0, len(weights), 1 << 16):
            weights[first : first + (1 << 16)] *= 1.5
        return weights, 1

before = memory("VmRSS")
with StateDirectory(Path(folder), name) as state:
    run(Trainee(), target, state=state)
print(memory("VmHWM") - before)
"""


async def growth(folder: Path, encoding: str) -> int:
    """MiB by which a participant grew in three rounds."""
    # Heartbeats come during transfers, and not between two, as with large models.
    settings = {
        "rounds.rounds": 3,
        "server.update_encoding": encoding,
        "server.heartbeat_time_s": 0.4,
    }
    coordinator = CoordinatorProcess(folder, settings)
    await coordinator.start()
    target, size = f"127.0.0.1:{coordinator.port}", str(MODEL_MIB * MIB // 4)
    async with ended(coordinator), asyncio.timeout(PATIENCE_S):
        status, told, err = await called("-c", TRAINEE, target, "a", f"{folder}/a", size)
    assert status == 0, err
    return int(told)


@pytest.mark.parametrize("encoding", ["plain", "float16"])
async def test_a_participant_holds_two_models_and_an_encoding_at_most(tmp_path, encoding):
    """The model that it trains on. With an encoding also a copy of that model, which becomes the
    update, and the encoded update, half a model."""
    num_models = 1 if encoding == "plain" else 2.5
    grown = await growth(tmp_path, encoding)
    assert grown <= num_models * MODEL_MIB + SLACK_MIB
