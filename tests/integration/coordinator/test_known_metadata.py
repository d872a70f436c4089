"""Metadata of a model travel to a participant once, and not with the work of every round."""

from asyncio import to_thread
from collections.abc import Mapping

import numpy as np

from xain_participant import Agent, Participant
from xain_wire.fl import coordinator_pb2 as pb
from xain_workloads.tables.schema import Column
from xain_workloads.tables.table import Table

NUM_COLUMNS = 300
SGD = {"workload": {"name": "sgd"}, "rounds": {"rounds": 3}}


def wide_table() -> Table:
    columns = tuple(Column(f"column {i}") for i in range(NUM_COLUMNS))
    values = {c.name: np.arange(20.0) * i for i, c in enumerate(columns)}
    return Table(columns, values, np.array(["no", "yes"] * 10))


def profile() -> pb.DataProfile:
    known = wide_table().profile()
    return pb.DataProfile(
        num_samples=known.num_samples,
        num_features=known.num_features,
        classes=known.classes,
        columns=[pb.Column(name=c.name, type=c.type) for c in known.columns],
        statistics=known.statistics,
    )


async def test_assignment_leaves_out_metadata_that_the_participant_has(start, join):
    coordinator = await start(**SGD)
    a = join(coordinator, "a")
    await a.rendezvous(profile())
    await a.until(pb.ROUND, 0)

    async def ask(known: bytes) -> pb.StartTrainingRoundResponse:
        request = pb.StartTrainingRoundRequest(known_metadata=known)
        return await a.stub.StartTrainingRound(request, metadata=a.metadata)

    whole = await a.start()
    assert len(whole.metadata["preprocessing"]) > 20_000
    assert len(whole.metadata_digest) == 16
    short = await ask(whole.metadata_digest)
    assert short.metadata_digest == whole.metadata_digest
    assert whole.ByteSize() - short.ByteSize() > 20_000
    assert not short.metadata
    for known in (b"", b"another digest !"):
        assert await ask(known) == whole
    short.metadata.update(whole.metadata)
    assert short == whole


async def test_watch_sends_metadata_once_to_participants_that_keep_them(start, join):
    """An earlier version of the participant takes them with each work."""
    coordinator = await start(**SGD)
    a = join(coordinator, "a")
    await a.rendezvous(profile())
    requests = {True: pb.WatchRequest(keeps_metadata=True), False: pb.WatchRequest()}
    streams = {keeps: a.stub.Watch(one, metadata=a.metadata) for keeps, one in requests.items()}
    await a.until(pb.ROUND, 0)
    for number in range(3):
        for keeps, stream in streams.items():
            while True:
                message = await stream.read()
                if message.round == number and message.HasField("work"):
                    break
            assert message.work.metadata_digest
            assert bool(message.work.metadata) == (number == 0 or not keeps)
        vector = np.zeros(coordinator.driver.session.model.shape, np.float32)
        await a.hand_in(vector, 1, number)


async def test_agent_trains_each_round_with_the_metadata(start):
    class Noting(Participant):
        def __init__(self) -> None:
            self.seen: list[Mapping[str, str]] = []

        def on_model(self, layout, metadata) -> None:
            self.seen.append(metadata)

        def profile(self):
            return wide_table().profile()

        def init_weights(self):
            raise AssertionError("the coordinator makes the initial weights")

        def train_round(self, weights, epochs, epoch_base):
            return weights, 1

    coordinator = await start(**SGD)
    participant = Noting()
    assert await to_thread(Agent(participant, f"127.0.0.1:{coordinator.port}", "a").run) == 0
    first, *others = participant.seen
    assert "preprocessing" in first
    assert others == [first] * 2
