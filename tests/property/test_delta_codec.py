"""Encoded updates stay within the bounds that docs/transfer.md states, for any model and update."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from xain_wire.np import DeltaCodec, can_encode

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
# float32's own rounding of the difference, the product and the sum.
ROUNDING = 2.0**-22


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """An update and its model, near each other or not."""
    size = draw(st.integers(1, 40))
    model = draw(arrays(np.float32, size, elements=FLOATS))
    update = draw(arrays(np.float32, size, elements=FLOATS))
    if draw(st.booleans()):
        with np.errstate(over="ignore"):
            update = model + update * np.float32(10.0 ** draw(st.integers(-30, 0)))
    return update, model


@given(pair=pairs())
def test_decoded_values_are_near_the_encoded_ones(pair):
    update, model = pair
    codec = DeltaCodec()
    try:
        encoded = bytes(codec.encode(update, model))
    except ValueError:
        with np.errstate(over="ignore"):
            assert np.abs(update - model).max() > 2.0**100
        return
    assert len(encoded) == codec.encoded_bytes(len(update))
    decoded = codec.decode(encoded, model).astype(np.float64)
    # In double precision, which holds differences of float32 nearly exactly.
    w, m = update.astype(np.float64), model.astype(np.float64)
    delta = np.abs(w - m)
    bound = np.maximum(delta / 2048, delta.max() / 2**24)
    bound = bound * (1 + 2**-20) + ROUNDING * np.maximum(np.abs(w), np.abs(m)) + 2.0**-119
    assert (np.abs(decoded - w) <= bound).all()


def test_an_update_that_changes_nothing_is_the_model():
    model = np.linspace(-3, 5, 1000, dtype=np.float32)
    codec = DeltaCodec()
    decoded = codec.decode(bytes(codec.encode(model, model)), model)
    assert decoded.tobytes() == model.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_infinite_values_cannot_be_encoded(bad):
    """An update with an infinite value travels as it is: the refusal can name the position."""
    model = np.zeros(10, dtype=np.float32)
    update = model.copy()
    update[7] = bad
    with pytest.raises(ValueError, match="largest difference"):
        DeltaCodec().encode(update, model)


def test_bytes_that_no_encoder_writes_are_refused():
    codec = DeltaCodec()
    model = np.zeros(10, dtype=np.float32)
    encoded = bytearray(codec.encode(model + 1, model))
    for wrong in (b"", bytes(encoded[:-1]), bytes(encoded) + b"\0"):
        with pytest.raises(ValueError, match="bytes for a tile"):
            codec.decode(wrong, model)
    for scale in (np.nan, np.inf, -1.0):
        encoded[:4] = np.float32(scale).tobytes()
        with pytest.raises(ValueError, match="scale"):
            codec.decode(bytes(encoded), model)


def test_only_vectors_of_float32_that_fit_their_model_are_encoded():
    single = np.zeros(4, dtype="<f4")
    assert can_encode(single, single)
    assert not can_encode(single, np.zeros(5, dtype="<f4"))
    for dtype in ("<f8", "<f2", ">f4"):
        other = np.zeros(4, dtype=dtype)
        assert not can_encode(other, other)
        assert not can_encode(single, other)
