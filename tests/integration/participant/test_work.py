"""One round's work against a scripted coordinator, and what it keeps for it."""

from typing import Any

import numpy as np
import pytest

from integration.participant.scripted import PATIENCE_S, Ledger
from xain_participant import Participant
from xain_participant.agent.work import Work
from xain_participant.sdk.encoded import Encoded
from xain_participant.sdk.events import Trained
from xain_participant.sdk.values import Call
from xain_participant.wire.client import CoordinatorClient
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.limits import MAX_INLINE_BYTES
from xain_wire.np import DeltaCodec


class Noise(Participant):
    """Adds noise. nan_at: the element that becomes NaN. copied: a copy of the trained vector."""

    def __init__(self, nan_at: int | None = None) -> None:
        self._nan_at = nan_at
        self.trained: Any = None
        self.copied: Any = None

    def init_weights(self) -> Any:
        raise AssertionError("there is a model")

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        weights += np.random.default_rng(2).standard_normal(len(weights)).astype(weights.dtype)
        if self._nan_at is not None:
            weights[self._nan_at] = np.nan
        self.trained, self.copied = weights, weights.copy()
        return weights, 1


def decoded(encoded: Encoded, model: Any) -> Any:
    codec, tiles, at = DeltaCodec(), [], 0
    for first in range(0, len(model), DeltaCodec.tile_elements):
        base = model[first : first + DeltaCodec.tile_elements]
        end = at + codec.encoded_bytes(len(base))
        tiles.append(codec.decode(encoded.tiles[at:end].tobytes(), base).copy())
        at = end
    assert at == len(encoded.tiles)
    return np.concatenate(tiles)


@pytest.mark.parametrize(
    ("size", "dtype", "encoding", "is_encoded"),
    [
        (100_000, np.float32, pb.FLOAT16, True),
        (100_000, np.float32, pb.PLAIN, False),
        (100_000, np.float64, pb.FLOAT16, False),
        (100_000, np.float16, pb.FLOAT16, False),
        (MAX_INLINE_BYTES // 4, np.float32, pb.FLOAT16, False),
        (MAX_INLINE_BYTES // 4 + 1, np.float32, pb.FLOAT16, True),
    ],
)
def test_result_equals_its_decoded_form(serve, size, dtype, encoding, is_encoded):
    """The result's vector is what the coordinator decodes. An update that has no encoding, or goes
    inside its call, stays as training has made it. What training holds is not changed."""
    model = np.random.default_rng(1).standard_normal(size).astype(dtype)
    server = serve(Ledger(model=model, members={"a"}))
    participant = Noise()
    with CoordinatorClient(server.target, "a", call_timeout_s=PATIENCE_S) as client:
        work = Work(participant, client, "a")
        assignment = client.start_round()
        assignment.encoding = encoding
        work.assign(assignment)
        assert isinstance(work.do(Call.TRAIN, 0), Trained)
        result = work.result
        assert np.array_equal(participant.trained, participant.copied)
        if not is_encoded:
            assert result.encoded is None
            assert np.array_equal(result.vector, participant.trained)
            return
        assert result.encoded is not None
        assert not np.array_equal(result.vector, participant.trained)
        assert np.array_equal(result.vector, decoded(result.encoded, model))


def test_an_update_that_cannot_be_encoded_stays_as_it_is(serve):
    """A difference that is not finite shows only in the middle of encoding."""
    model = np.zeros(200_000, np.float32)
    server = serve(Ledger(model=model, members={"a"}))
    participant = Noise(nan_at=150_000)
    with CoordinatorClient(server.target, "a", call_timeout_s=PATIENCE_S) as client:
        work = Work(participant, client, "a")
        assignment = client.start_round()
        assignment.encoding = pb.FLOAT16
        work.assign(assignment)
        assert isinstance(work.do(Call.TRAIN, 0), Trained)
    assert work.result.encoded is None
    assert np.array_equal(work.result.vector, participant.trained, equal_nan=True)
