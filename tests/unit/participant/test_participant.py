"""Values that a user's class may return, and their conversion."""

from typing import Any

import numpy as np
import pytest

from xain_participant.sdk.participant import (
    Participant,
    call_init_weights,
    call_train_round,
    take_metrics,
)
from xain_wire.limits import MAX_POINTS

GLOBAL = np.zeros(3, dtype=np.float32)


class Returns(Participant):
    """A participant without super().__init__(), as users forget it."""

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def init_weights(self) -> Any:
        return self.result

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        self.received = (weights, epochs, epoch_base)
        return self.result


def trained(result: Any) -> tuple[Any, int]:
    return call_train_round(Returns(result), GLOBAL, 2, 6)


def test_an_update_takes_the_global_models_dtype():
    """The coordinator refuses other dtypes, and most numerics in Python end in float64."""
    weights, num_samples = trained((np.array([1.0, 2.0, 3.0]), 5))
    assert weights.dtype == np.float32
    assert weights.tolist() == [1, 2, 3]
    assert num_samples == 5


def test_train_round_gets_the_assignment():
    participant = Returns((GLOBAL, 1))
    call_train_round(participant, GLOBAL, 2, 6)
    assert participant.received[0] is GLOBAL
    assert participant.received[1:] == (2, 6)


@pytest.mark.parametrize("num_samples", [7, np.int64(7), np.uint8(7), np.array(7)])
def test_numpy_integers_count_as_sample_numbers(num_samples):
    """XAIN refused np.int64, which is what most sums and lengths in numpy are."""
    count = trained((GLOBAL, num_samples))[1]
    assert count == 7
    assert type(count) is int


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        *[
            ((GLOBAL, number), TypeError, "number of samples as an integer, not")
            for number in (True, np.True_, 7.0, np.float32(7), "7", None)
        ],
        *[((GLOBAL, n), ValueError, f"returned {n} samples") for n in (-1, 2**31)],
        *[(one, TypeError, "must return a pair") for one in (GLOBAL, None, (GLOBAL,), [GLOBAL, 1])],
    ],
)
def test_result_is_a_pair_whose_sample_number_has_a_type_and_a_range(result, error, message):
    with pytest.raises(error, match=message):
        trained(result)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], "numpy array, not list"),
        (None, "numpy array, not NoneType"),
        (np.float32(1), "numpy array, not float32"),
        (np.zeros((2, 2)), r"flat vector, not of shape \(2, 2\)"),
        (np.array(1.0), r"flat vector, not of shape \(\)"),
        (np.array(["a"]), "real numbers, not <U1"),
        (np.array([object()]), "real numbers, not object"),
        (np.array([True]), "real numbers, not bool"),
        (np.array([1j]), "real numbers, not complex128"),
    ],
)
def test_weights_must_be_a_flat_numeric_array(weights, message):
    with pytest.raises(TypeError, match=message):
        trained((weights, 1))
    with pytest.raises(TypeError, match=message):
        call_init_weights(Returns(weights), np.dtype(np.float64))


def test_overflow_of_the_dtype_is_left_to_the_coordinator():
    """One place decides that an update is not finite, and names the element."""
    assert np.isinf(trained((np.array([1e300, 0, 0]), 1))[0][0])


def test_strided_weights_are_laid_out_flat():
    weights, _ = trained((np.arange(6, dtype=np.float32)[::2], 1))
    assert weights.flags.c_contiguous
    assert weights.tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("given", "kept"), [(np.float32, np.float32), (np.float16, np.float16), (np.int64, np.float64)]
)
def test_the_first_weights_choose_the_dtype_unless_they_are_no_floats(given, kept):
    weights, layout = call_init_weights(Returns(np.ones(2, given)), np.dtype(np.float64))
    assert weights.dtype == kept
    assert layout == ()


def test_metrics_need_no_init():
    """XAIN's participants broke when a subclass forgot super().__init__()."""
    participant = Returns()
    participant.update_metrics(loss=0.5)
    participant.update_metrics(loss=0.25, accuracy=1)
    first, second = take_metrics(participant)
    assert first.values == {"loss": 0.5}
    assert second.values == {"loss": 0.25, "accuracy": 1.0}
    assert 0 < first.time_ns <= second.time_ns
    assert take_metrics(participant) == []


def test_wrong_metrics_are_refused_where_they_are_given():
    """None of the call's values is kept."""
    participant = Returns()
    with pytest.raises(TypeError, match="'b'"):
        participant.update_metrics(a=1.0, b="high")
    assert take_metrics(participant) == []


def test_the_newest_metrics_are_kept():
    participant = Returns()
    for step in range(MAX_POINTS + 1):
        participant.update_metrics(step=step)
    points = take_metrics(participant)
    assert len(points) == MAX_POINTS
    assert points[-1].values == {"step": MAX_POINTS}
