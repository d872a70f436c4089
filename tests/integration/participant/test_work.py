"""One round's work against a scripted coordinator, and what it keeps for it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from integration.participant.scripted import PATIENCE_S, Ledger, ScriptedCoordinator
from xain_participant import Participant
from xain_participant.client import CoordinatorClient
from xain_participant.events import Trained
from xain_participant.values import Call
from xain_participant.work import Work
from xain_proto.fl import coordinator_pb2 as pb


class InPlace(Participant):
    """Changes what it is given. addresses: where that was."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def init_weights(self) -> Any:
        raise AssertionError("there is a model")

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        self.addresses.append(weights.ctypes.data)
        weights += 1
        return weights, 1


@pytest.mark.parametrize(
    ("dtype", "encoding", "is_kept"),
    [
        (np.float32, pb.INT8, True),
        (np.float32, pb.PLAIN, False),
        (np.float64, pb.INT8, False),
        (np.float16, pb.FLOAT16, False),
    ],
)
def test_the_model_is_kept_only_for_an_encoding(
    serve: Callable[..., ScriptedCoordinator],
    dtype: Any,
    encoding: "pb.Encoding.ValueType",
    is_kept: bool,
) -> None:
    """One that there is for its dtype. The copy would be a model's worth of memory."""
    model = (np.arange(100_000) % 1000).astype(dtype)
    server = serve(Ledger(model=model, members={"a"}))
    with CoordinatorClient(server.target, "a", call_timeout_s=PATIENCE_S) as client:
        work = Work(InPlace(), client, "a")
        assignment = client.start_round()
        assignment.encoding = encoding
        work.assign(assignment)
        assert isinstance(work.do(Call.TRAIN, 0), Trained)
        base = work._base
        assert (base is not None) == is_kept
        assert base is None or np.array_equal(base, model), "not what training has made of it"


def test_a_round_uses_the_memory_of_the_one_before(
    serve: Callable[..., ScriptedCoordinator],
) -> None:
    """When its result is handed in and dropped."""
    server = serve(Ledger(model=np.zeros(1_000_000, np.float32), rounds=4, members={"a"}))
    participant, others = InPlace(), list[Any]()
    with CoordinatorClient(server.target, "a", call_timeout_s=PATIENCE_S) as client:
        work = Work(participant, client, "a")
        for round_ in range(3):
            work.do(Call.BEGIN_ROUND, round_)
            work.do(Call.TRAIN, round_)
            assert work.result is not None
            work.drop()
            others.append(np.empty(4_000_128, np.uint8))  # what is free has other uses
            server.change(round=round_ + 1)
    assert len(set(participant.addresses)) == 1
