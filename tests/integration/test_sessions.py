"""Whole sessions over a real channel."""

import asyncio
import io
import os
import re
import threading

import numpy as np
from rich.console import Console

from support.wire import Code, assert_refused, digest, inside, npy
from xain_coordinator.cli.report.page import page
from xain_coordinator.cli.status import frame
from xain_coordinator.core.view.records import RoundRecord
from xain_coordinator.core.vocabulary.commands import Rendezvous
from xain_coordinator.core.vocabulary.values import DataProfile, GlobalModel, WeightsRef
from xain_coordinator.export.trained import ask as ask_trained
from xain_coordinator.inspection.client import fetch
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_workloads.model import TensorSpec


def array(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data), allow_pickle=False)


async def test_small_weights_travel_inside_their_reference(in_round):
    """Down with the assignment, up with the hand-in, and from there into the journal."""
    coordinator, a, b = await in_round("a", "b", rounds={"rounds": 2})
    ref = inside([1.0, 2.0])
    await a.end(ref)
    await a.end(ref)  # again: the first answer again
    accepted = coordinator.driver.session.open_round.updates["a"].weights.ref.key
    assert re.fullmatch(r"0/a\.[0-9a-f]{32}/journal", accepted)
    with coordinator.store.open(accepted) as reader:
        assert reader.read(0, reader.size) == ref.data
    await b.hand_in([3.0, 4.0])
    await a.until(pb.ROUND, 1)
    model = (await a.start()).model
    assert model.data == await a.download("1/global")
    assert array(model.data).tolist() == [2.0, 3.0]


async def test_a_watch_brings_the_work_with_the_news(start, join):
    """A selected participant gets its assignment with the news of the round; one that has handed
    in, or is not selected, gets none."""
    coordinator = await start(
        rounds={"min_participants": 2, "max_participants": 3, "controller": "ordered"}
    )
    a, b, c = (join(coordinator, name) for name in "abc")
    await a.rendezvous()
    call = a.watch()
    assert not (await call.read()).HasField("work")
    await b.rendezvous()
    seen = await call.read()
    assert (seen.state, seen.round) == (pb.ROUND, 0)
    work = await a.start()
    for one in (seen.work, work):
        one.upload.ClearField("url")  # it names the second in which it was made
    assert seen.work == work
    call.cancel()
    await c.rendezvous()
    assert not (await c.watch().read()).HasField("work")
    await a.hand_in([1.0])
    again = await a.watch().read()
    assert again.update_accepted
    assert not again.HasField("work")


async def test_watch_sends_no_message_only_because_an_update_was_accepted(start, join):
    """The answer to EndTrainingRound tells the sender. A stream that begins later tells it in its
    first message."""
    coordinator = await start(rounds={"rounds": 2, "min_participants": 2, "max_participants": 3})
    a, b, c = (join(coordinator, name) for name in "abc")
    await a.rendezvous()
    await b.rendezvous()
    await a.until(pb.ROUND, 0)
    await c.rendezvous()
    call = a.watch()
    first = await call.read()
    assert (first.state, first.round, first.update_accepted) == (pb.ROUND, 0, False)
    await a.hand_in([1.0])
    await c.heartbeat(pb.FINISHED)  # c leaves, and all streams look what has changed for them
    later = a.watch()
    assert (await later.read()).update_accepted
    later.cancel()
    await b.hand_in([3.0])
    following = await call.read()
    assert (following.state, following.round, following.update_accepted) == (pb.ROUND, 1, False)
    call.cancel()


async def test_an_accepted_update_is_never_overwritten(in_round):
    """An upload begun before the acceptance and ended after it leaves the accepted one alone."""
    _, a, b = await in_round("a", "b", rounds={"rounds": 1})
    other = npy([100.0])
    header = pb.PutWeightsRequest.Header(round=0, size_bytes=len(other), digest=digest(other))
    late = a.stub.PutWeights(metadata=a.metadata)
    await late.write(pb.PutWeightsRequest(header=header, data=other[:50]))
    await a.end(inside([1.0]))
    await late.write(pb.PutWeightsRequest(data=other[50:]))
    await late.done_writing()
    await assert_refused(late, Code.ALREADY_EXISTS)
    await b.hand_in([3.0])
    await a.until(pb.FINISHED, 0)
    assert (await a.model(1)).tolist() == [2.0]


async def test_a_call_that_was_given_up_does_not_write_later(in_round, monkeypatch):
    """The client goes while its bytes are being synced: no other update is handled until they are,
    so that the update that is accepted next is the one that is aggregated."""
    _, a = await in_round("a", rounds={"rounds": 1})
    reached, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(fd: int) -> None:
        reached.set()
        assert go_on.wait(30)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    given_up = asyncio.ensure_future(a.upload([100.0]))
    await asyncio.to_thread(reached.wait, 30)
    given_up.cancel()
    await asyncio.wait([given_up])
    monkeypatch.undo()
    second = asyncio.ensure_future(a.hand_in([1.0]))
    done, _ = await asyncio.wait([second], timeout=0.2)
    assert not done, "the second update overtook the first, whose bytes are still on their way"
    go_on.set()
    await second
    await a.until(pb.FINISHED, 0)
    assert (await a.model(1)).tolist() == [1.0]


async def test_a_new_upload_ends_the_one_before(in_round):
    """A participant has one upload at a time, however many it begins."""
    coordinator, a = await in_round("a", rounds={"rounds": 1})
    header = pb.PutWeightsRequest.Header(round=0, size_bytes=4 << 20, digest=b"?" * 16)
    stalled = a.stub.PutWeights(metadata=a.metadata)
    await stalled.write(pb.PutWeightsRequest(header=header, data=npy([1.0])))
    uploads = coordinator._server.uploads
    while not uploads.num_uploads:  # the calls of one channel may overtake each other
        await a.heartbeat()
    ref = await a.upload([1.0])
    await assert_refused(stalled, Code.UNAVAILABLE)
    await a.end(ref)
    await a.until(pb.FINISHED, 0)
    assert uploads.num_uploads == 0


async def test_inspection_answers_an_operator(start, join):
    """Status, participants, rounds and models of a session in its second round."""
    coordinator = await start(rounds={"rounds": 2, "min_participants": 2})
    a, b = join(coordinator, "a"), join(coordinator, "b")
    status = await a.status()
    assert status.waiting_for == "2 more participants: 0 of 2 connected."
    await a.rendezvous(pb.DataProfile(num_samples=7, num_features=4))
    await b.rendezvous()
    await a.until(pb.ROUND, 0)
    await a.hand_in([1.0], num_samples=7)
    await b.hand_in([1.0], num_samples=5)
    await a.until(pb.ROUND, 1)
    await b.hand_in([1.0], num_samples=5, round_=1)
    await a.heartbeat(pb.TRAINING, 1)

    status = await a.status()
    assert (status.state, status.phase, status.round) == (pb.ROUND, "collecting", 1)
    assert (status.num_connected, status.num_selected, status.num_updates) == (2, 2, 1)
    assert status.waiting_for == "1 of 2 updates: a."
    listed = await a.inspection.ListParticipants(inspection.ListParticipantsRequest())
    people = {p.participant_id: p for p in listed.participants}
    assert people["a"].profile.num_samples == 7
    assert people["a"].reported_state == pb.TRAINING
    assert (people["a"].update_accepted, people["b"].update_accepted) == (False, True)
    assert (people["a"].rounds_contributed, people["b"].rounds_contributed) == (0, 1)
    lease_s = coordinator.driver.session.rules.lease_s
    assert all(0 < p.lease_seconds <= lease_s for p in people.values())
    rounds = (await a.inspection.ListRounds(inspection.ListRoundsRequest())).rounds
    assert [(r.round, r.phase, r.num_samples) for r in rounds] == [
        (0, "published", 12),
        (1, "collecting", 5),
    ]
    assert list(rounds[0].contributors) == ["a", "b"]
    models = (await a.inspection.ListModels(inspection.ListModelsRequest(limit=1))).models
    assert [(m.round, m.ref.key, m.dtype, list(m.shape)) for m in models] == [
        (1, "1/global", "float64", [1])
    ]


async def test_the_lists_of_an_inspection_are_bounded(start, join):
    """2,000 participants and any limit give answers that a client with gRPC's usual 4 MiB takes;
    where names are left out, their number is told."""
    coordinator = await start(rounds={"min_participants": 2001})  # so none is opened
    history = coordinator.driver.history
    everybody = tuple(f"{'x' * 120}{i:04}" for i in range(2000))
    layout = tuple(TensorSpec(f"{'layer' * 20}.{i}", (10, 10), "float32") for i in range(100))
    for number in range(1500):
        names = everybody if number % 2 else everybody[:100]
        history.rounds.append(RoundRecord(number, names, 0.0, names, 7, 1.0))
        ref = WeightsRef(f"{number}/global", 128, "0" * 32)
        history.models[ref.key] = GlobalModel(number, ref, "float32", (10_000,), layout)
    a = join(coordinator, "a")
    for name in everybody:
        await coordinator.driver.submit(Rendezvous(name, DataProfile(7, 4, ("yes", "no"))))

    listed = await a.inspection.ListParticipants(inspection.ListParticipantsRequest())
    assert len(listed.participants) == 1000
    for limit, expected in ((-1, 100), (0, 100), (3, 3), (2**31 - 1, 1000)):
        rounds = (await a.inspection.ListRounds(inspection.ListRoundsRequest(limit=limit))).rounds
        assert [r.round for r in rounds] == list(range(1500 - expected, 1500))
        models = (await a.inspection.ListModels(inspection.ListModelsRequest(limit=limit))).models
        assert [m.round for m in models] == list(range(1500 - len(models), 1500))
        assert 0 < len(models) <= expected
    large, small = rounds[-1], rounds[-2]
    assert (large.num_selected, large.num_contributors, len(large.selected)) == (2000, 2000, 0)
    assert (small.num_selected, small.num_contributors) == (100, 100)
    assert tuple(small.selected) == tuple(small.contributors) == everybody[:100]


def key_of_model(address, which):
    with ask_trained(address) as trained:
        return trained.choose(which).model.ref.key


async def test_pages_have_every_round_and_every_model(start, join):
    """A client reads a session of 2,500 rounds from the first one on, in answers that a client with
    gRPC's usual 4 MiB takes, and finds each model; what shows the latest only says how many there
    are."""
    coordinator = await start(rounds={"min_participants": 2})  # so none is opened
    history, num_rounds = coordinator.driver.history, 2500
    names = tuple(f"{'x' * 120}{i:04}" for i in range(50))
    layout = tuple(TensorSpec(f"{'layer' * 20}.{i}", (10, 10), "float32") for i in range(50))
    for number in range(num_rounds):
        history.rounds.append(RoundRecord(number, names, 0.0, names, 7, 1.0))
        ref = WeightsRef(f"{number}/global", 128, "0" * 32)
        history.models[ref.key] = GlobalModel(number, ref, "float32", (5_000,), layout)
    a = join(coordinator, "a")
    address = f"127.0.0.1:{coordinator.port}"

    for ask, kind in (
        (a.inspection.ListRounds, inspection.ListRoundsRequest),
        (a.inspection.ListModels, inspection.ListModelsRequest),
    ):
        for wrong in ({"page_size": -1}, {"page_size": 9, "page_token": "x"}):
            await assert_refused(ask(kind(**wrong)), Code.INVALID_ARGUMENT)
        latest = await ask(kind(limit=3))
        assert (latest.total_size, latest.next_page_token) == (num_rounds, "")
        short = await ask(kind(page_size=7))
        assert [one.round for one in getattr(short, latest.DESCRIPTOR.fields[0].name)] == [
            *range(7)
        ]

    snapshot = await asyncio.to_thread(fetch, address, everything=True)
    assert [one.round for one in snapshot.rounds.rounds] == list(range(num_rounds))
    assert all(tuple(one.selected) == names for one in snapshot.rounds.rounds)
    assert [one.round for one in snapshot.models.models] == list(range(num_rounds))
    assert "<th>2499</th>" in page(snapshot)
    assert "the latest 60 of 2,500 rounds" in page(snapshot)
    assert await asyncio.to_thread(key_of_model, address, "12") == "12/global"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(frame(await asyncio.to_thread(fetch, address)))
    assert "and 2,492 earlier rounds; see the report, or status --json" in console.export_text()
