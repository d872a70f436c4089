"""Uploads that are durable only when they are not wanted any more."""

import asyncio
import threading

import grpc
import pytest

from support.transfers import PATIENCE_S, VECTOR, put
from support.waiting import until
from support.wire import refused
from xain_coordinator.core.vocabulary.values import StoredWeights
from xain_coordinator.updates.measured_upload import MeasuredUpload
from xain_wire.fl import coordinator_pb2 as pb


def of_round_0(coordinator) -> set[str]:
    return set(coordinator.store.keys("0/")) - {"0/global"}


@pytest.mark.parametrize("num_rounds", [1, 2])
async def test_update_of_a_round_that_is_over_does_not_stay(
    in_round, tmp_path, monkeypatch, num_rounds
):
    """A disk may take seconds for it, and the round close without it, and the session end."""
    quorum = {"quorum": "participant:update:50%", "start_participants": 2, "max_participants": 2}
    coordinator, a, b = await in_round(
        "a",
        "b",
        rounds={"rounds": num_rounds, **quorum},
        storage={"path": str(tmp_path / "weights"), "keep_updates": 0},
    )
    complete = MeasuredUpload.complete
    is_begun, may_end = threading.Event(), threading.Event()
    completed = []

    def slow(self: MeasuredUpload) -> StoredWeights:
        if "/b." in self.key:
            is_begun.set()
            assert may_end.wait(PATIENCE_S)
        measured = complete(self)
        completed.append(measured.ref.key)
        return measured

    monkeypatch.setattr(MeasuredUpload, "complete", slow)
    sending = await put(b)
    assert await asyncio.to_thread(is_begun.wait, PATIENCE_S)
    await a.hand_in(VECTOR)
    await a.until(*((pb.FINISHED, 0) if num_rounds == 1 else (pb.ROUND, 1)))
    await until(lambda: not of_round_0(coordinator))
    may_end.set()
    code, why, _ = await refused(sending)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert why == ("ROUND_CLOSED" if num_rounds == 1 else "STALE_ROUND")
    assert len(completed) == 2
    await until(lambda: not of_round_0(coordinator))
