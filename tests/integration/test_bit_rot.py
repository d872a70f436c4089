"""One bit of what is stored changes: it is found, and there is a way out."""

import io
import threading
from asyncio import to_thread
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from support.wire import Member, digest, npy
from xain_participant import Agent, Participant, StateDirectory
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl.inspection_pb2 import ListRoundsRequest

LARGE = 50_000  # float32: more than what travels inside a call


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x04
    path.write_bytes(content)


def stored(folder: Path, pattern: str) -> Path:
    """The only file of the weights store whose name fits."""
    (path,) = (p for p in (folder / "weights").rglob(pattern) if p.is_file())
    return path


class Constant(Participant):
    """Trains to a vector of its own, once it may."""

    def __init__(self, value: float, size: int, may_train: threading.Event | None = None) -> None:
        self.vector = np.full(size, value, np.float32)
        self.may_train = may_train
        self.num_trained = 0

    def init_weights(self) -> np.ndarray:
        return self._train()

    def train_round(self, weights: np.ndarray, epochs: int, epoch_base: int) -> tuple:
        return self._train(), 1

    def _train(self) -> np.ndarray:
        if self.may_train is not None:
            assert self.may_train.wait(20.0)
        self.num_trained += 1
        return self.vector


async def hand_in(member: Member, vector: np.ndarray) -> None:
    """For round 0, as participants do: a small update inside the call, a large one before it."""
    data = npy(vector)
    if len(data) > 1000:
        await member.hand_in(vector)
        return
    key = f"0/{member.participant_id}"
    await member.end(pb.WeightsRef(key=key, size_bytes=len(data), digest=digest(data), data=data))


@pytest.mark.parametrize("size", [3, LARGE], ids=["in a bundle", "by itself"])
async def test_damaged_update_is_asked_for_again(start, join, tmp_path, size):
    """Its sender hears of it, and the model is that of the undisturbed run. The reason stands in
    the log and in the record of the round."""
    coordinator = await start(rounds={"rounds": 2, "min_participants": 2})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    for member in (a, b):
        await member.rendezvous()
    await a.until(pb.ROUND, 0)
    await hand_in(a, np.full(size, 1.0, np.float32))
    flip(stored(tmp_path, "*0/bundle*" if size == 3 else "*0/a*"))
    news = aiter(a.watch())
    assert (await anext(news)).update_accepted
    with capture_logs() as logs:
        await hand_in(b, np.full(size, 3.0, np.float32))
        told = await anext(news)
    assert (told.state, told.round, told.update_damaged) == (pb.ROUND, 0, True)
    assert (await a.heartbeat()).update_damaged
    (warning,) = (line for line in logs if line["event"] == "update_damaged")
    assert (warning["log_level"], warning["participant"]) == ("warning", "a")
    assert "has the digest" in warning["reason"]
    await hand_in(a, np.full(size, 1.0, np.float32))
    await a.until(pb.ROUND, 1)
    model = np.load(io.BytesIO(await a.download("1/global")))
    assert (model == 2.0).all()
    rounds = await a.inspection.ListRounds(ListRoundsRequest())
    assert dict(rounds.rounds[0].damaged_updates) == {"a": warning["reason"]}
    assert set(rounds.rounds[0].contributors) == {"a", "b"}


@pytest.mark.parametrize("has_state", [True, False])
async def test_participant_brings_a_damaged_update_again(start, tmp_path, has_state):
    """From its state directory if it has one; otherwise it trains the round once more."""
    coordinator = await start(rounds={"rounds": 1, "min_participants": 2})
    may_train = threading.Event()
    a, b = Constant(1.0, LARGE), Constant(3.0, LARGE, may_train)
    target = f"127.0.0.1:{coordinator.port}"
    handed_in = threading.Event()

    def observe(progress) -> None:
        if progress.what == "handed_in":
            handed_in.set()

    state = StateDirectory(tmp_path / "state", "a") if has_state else None
    agents = [Agent(a, target, "a", state=state, observer=observe), Agent(b, target, "b")]
    threads = [threading.Thread(target=agent.run) for agent in agents]
    for thread in threads:
        thread.start()
    try:
        assert await to_thread(handed_in.wait, 20.0)
        flip(stored(tmp_path, "*0/a*"))
        may_train.set()
        for thread in threads:
            await to_thread(thread.join, 20.0)
    finally:
        may_train.set()
        for agent in agents:
            agent.stop()
        if state is not None:
            state.close()
    assert coordinator.driver.session.cause == "completed"
    assert (a.num_trained, b.num_trained) == (1 if has_state else 2, 1)
    model = np.load(stored(tmp_path, "*1/global*"))
    assert (model == 2.0).all()
