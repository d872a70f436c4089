import hashlib
import statistics

import numpy as np
import pytest

from xain_parameters.errors import Invalid
from xain_parameters.specs import Plugin
from xain_parameters.tables import initialisers
from xain_parameters.tables.initialisers import Constant, Normal, Uniform, Zeros

F32, F64 = np.dtype("float32"), np.dtype("float64")
MANY = np.arange(20_000, dtype=np.uint64)


def test_first_values_have_the_same_bits_on_every_machine():
    """A checkpoint of one machine is continued on another: these digests may never change."""

    def digest(initialiser, dtype):
        rows = initialiser.rows(MANY, 3, dtype)
        return hashlib.sha256(rows.astype(dtype.newbyteorder("<")).tobytes()).hexdigest()[:16]

    assert digest(Uniform(0.5, seed=1), F32) == "3f3942c9cd3b3afd"
    assert digest(Uniform(0.5, seed=1), F64) == "f5a7b35c27913cf9"
    assert digest(Normal(0.5, seed=1), F32) == "38d3b1c6305b389d"
    assert digest(Normal(0.5, seed=1), F64) == "60ea2c0a17d41fb9"


def test_normal_values_are_distributed_normally():
    """At no point does the share of values below differ from that of the distribution by more than
    chance explains (Kolmogorov and Smirnov: 1.63 / sqrt(n) once in a hundred)."""
    values = np.sort(Normal(1.0, seed=5).rows(MANY, 2, F64), axis=None)
    expected = np.array([statistics.NormalDist().cdf(value) for value in values])
    below = np.arange(1, len(values) + 1) / len(values)
    assert abs(below - expected).max() < 1.63 / np.sqrt(len(values))


def test_an_initialiser_is_declared_by_name_and_options():
    for initialiser in (Zeros(), Constant(2.5), Uniform(1.0, seed=2), Normal(1.0)):
        assert initialisers.made(Plugin.of(initialiser)) == initialiser


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (Plugin("ones"), "no initialiser 'ones'; there are constant, normal, uniform, zeros"),
        (Plugin("uniform"), "initialiser uniform: .*scale"),
        (Plugin("uniform", {"scale": -1.0}), "uniform: scale must not be negative"),
        (Plugin("normal", {"scale": 1.0, "seed": -1}), "normal: seed must be a number from 0"),
        (Plugin("constant", {"value": float("inf")}), "constant: the value must be finite"),
    ],
)
def test_wrong_declaration_of_an_initialiser_is_invalid(declared, said):
    with pytest.raises(Invalid, match=said):
        initialisers.made(declared)
