"""Participants that train stages in processes of their own, as one process group."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from xain_participant.sdk.participant import Assignment, GroupBroken, ProcessGroup
from xain_participant.stages.stage_trainer import StageTrainer
from xain_workloads.errors import DataError, WorkloadError
from xain_workloads.nets.neural import NeuralWorkload
from xain_workloads.nets.pipeline import StageResult
from xain_workloads.tables.data import load

pytestmark = pytest.mark.frameworks

DATA = load("iris")
WORKLOAD = NeuralWorkload.from_options({"mode": "pipeline", "dtype": "float64"})
MODEL = WORKLOAD.initial_model([DATA.profile()])
MANY = 1_000_000  # epochs; nobody waits for their end


class Pair:
    """Two participants that train rounds together."""

    def __init__(self) -> None:
        self.trainers = [StageTrainer("127.0.0.1", timeout_s=60.0), StageTrainer(timeout_s=60.0)]
        self._pool = ThreadPoolExecutor(2)

    def begin(self, attempt: int, epochs: int) -> "list[Future[StageResult]]":
        address = self.trainers[0].address
        return [
            self._pool.submit(
                trainer.train,
                Assignment("s1", 0, process_group=ProcessGroup(attempt, rank, 2, address)),
                MODEL,
                DATA,
                epochs=epochs,
                epoch_base=0,
            )
            for rank, trainer in enumerate(self.trainers)
        ]

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.end()
        self._pool.shutdown()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = Pair()
    yield made
    made.close()


def test_ended_attempt_breaks_the_group_and_the_next_attempt_goes_on(pair):
    """Rank 0 listens at the same address in all attempts, also after its process was killed."""
    first = pair.begin(1, epochs=2)
    slices = [one.result(100) for one in first]
    federated = NeuralWorkload.from_options({"dtype": "float64"})
    alone = federated.train(MODEL, DATA, epochs=2, epoch_base=0, seed=0)
    together = np.concatenate([one.vector for one in slices])
    np.testing.assert_allclose(together, alone.vector, rtol=1e-9)
    assert tuple(spec for one in slices for spec in one.layout) == MODEL.layout
    for one, before in zip(pair.begin(2, epochs=2), slices, strict=True):
        np.testing.assert_array_equal(one.result(100).vector, before.vector)
    broken = pair.begin(3, epochs=MANY)
    for trainer in pair.trainers:
        trainer.end()
    for one in broken:
        assert isinstance(one.exception(100), GroupBroken)
    again = np.concatenate([one.result(100).vector for one in pair.begin(4, epochs=2)])
    np.testing.assert_array_equal(again, together)


def test_group_that_other_machines_reach_needs_consent():
    """Everything in it travels in the clear."""
    trainer = StageTrainer()
    group = ProcessGroup(1, 1, 2, "192.0.2.7:4000")
    with pytest.raises(WorkloadError, match="process_group_insecure = true") as refused:
        trainer.train(Assignment("s1", 0, process_group=group), MODEL, DATA, epochs=1, epoch_base=0)
    assert "192.0.2.7:4000" in str(refused.value)
    trainer.end(0, 2)
    willing = StageTrainer(insecure=True)
    willing.end(0, 2)
    with pytest.raises(GroupBroken, match="the attempt is over"):
        willing.train(Assignment("s1", 0, process_group=group), MODEL, DATA, epochs=1, epoch_base=0)


def test_waiting_for_a_member_that_does_not_come_has_a_time_limit(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    trainer = StageTrainer("127.0.0.1", timeout_s=0.5)
    over = Assignment("s1", 0, process_group=ProcessGroup(1, 0, 2, ""))
    trainer.end(0, 2)
    earlier = Assignment("s1", 0, process_group=ProcessGroup(1, 0, 2, trainer.address))
    for one in (over, earlier):
        with pytest.raises(GroupBroken, match="the attempt is over"):
            trainer.train(one, MODEL, DATA, epochs=1, epoch_base=0)
    for rank, why in ((0, "timeout"), (1, "does not listen")):
        alone = Assignment("s1", 0, process_group=ProcessGroup(2, rank, 2, trainer.address))
        with pytest.raises(GroupBroken, match=why):
            trainer.train(alone, MODEL, DATA, epochs=1, epoch_base=0)
    own = Assignment("s1", 0, process_group=ProcessGroup(2, 0, 1, trainer.address))
    with pytest.raises(DataError, match="there are no rows"):
        trainer.train(own, MODEL, DATA.subset([]), epochs=1, epoch_base=0)
    trainer.end()
