"""Each rule against a slow, obvious version in exact fractions; and which ones a configuration may
name."""

import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from xain_coordinator import cli
from xain_coordinator.aggregation.rules import RULES, RuleFailed
from xain_coordinator.aggregation.staleness import mixing_weights
from xain_coordinator.config import CoordinatorConfig
from xain_messaging.process.settings import ConfigError, load

Array = NDArray[Any]
DTYPES = ("float16", "float32", "float64")


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Array, Array]:
    """A tile (k, t) and the sample counts (k,)."""
    k, t = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    tile = draw(arrays(np.float32, (k, t), elements=st.floats(-1e6, 1e6, width=32)))
    counts = st.one_of(st.just(0), st.integers(0, 10), st.integers(0, 2**31 - 1))
    num_samples = draw(st.lists(counts, min_size=k, max_size=k))
    return tile, np.array(num_samples, np.int64)


def slow_sum(tile: Array, weights: list[Fraction]) -> list[float]:
    columns = ([Fraction(float(value)) for value in column] for column in tile.T)
    return [
        float(sum(w * value for w, value in zip(weights, column, strict=True)))
        for column in columns
    ]


def assert_close(combined: Array, expected: list[float], tile: Array) -> None:
    """Within the rounding of float64, which is far below that of float32."""
    assert combined.dtype == np.float64
    scale = np.abs(tile).astype(np.float64).sum()
    np.testing.assert_allclose(combined, expected, rtol=0, atol=1e-13 * scale)


@given(rounds())
def test_weighted_average(round_: tuple[Array, Array]) -> None:
    """Σ n_k w_k / Σ n_k; without any samples each update weighs the same."""
    tile, num_samples = round_
    counts = [int(n) for n in num_samples]
    if not any(counts):
        counts = [1] * len(counts)
    weights = [Fraction(n, sum(counts)) for n in counts]
    combined = RULES["weighted_average"]().combine(tile, num_samples)
    assert_close(combined, slow_sum(tile, weights), tile)


@given(rounds())
def test_mean(round_: tuple[Array, Array]) -> None:
    """Σ w_k / k, whatever the sample counts."""
    tile, num_samples = round_
    weights = [Fraction(1, len(tile))] * len(tile)
    assert_close(RULES["mean"]().combine(tile, num_samples), slow_sum(tile, weights), tile)


@given(rounds())
def test_sum(round_: tuple[Array, Array]) -> None:
    """Σ w_k."""
    tile, num_samples = round_
    expected = slow_sum(tile, [Fraction(1)] * len(tile))
    assert_close(RULES["sum"]().combine(tile, num_samples), expected, tile)


@given(rounds())
def test_identity(round_: tuple[Array, Array]) -> None:
    """The update itself, to the bit."""
    tile, num_samples = round_
    combined = RULES["identity"]().combine(tile[:1], num_samples[:1])
    np.testing.assert_array_equal(combined.astype(np.float32), tile[0])


@pytest.mark.parametrize("name", sorted(set(RULES) - {"identity"}))
@given(round_=rounds(), cut=st.integers(0, 5))
def test_a_rule_treats_each_column_by_itself(
    name: str, round_: tuple[Array, Array], cut: int
) -> None:
    """To the bit: the result must not depend on where tiles begin."""
    tile, num_samples = round_
    rule = RULES[name]()
    whole = rule.combine(tile, num_samples)
    parts = [rule.combine(part, num_samples) for part in (tile[:, :cut], tile[:, cut:])]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_all_zero_samples_weigh_the_same() -> None:
    """A round of initialisations has no samples at all, and is no division by zero."""
    tile = np.array([[1.0, 4.0], [3.0, 8.0]], np.float32)
    zeros = np.zeros(2, np.int64)
    assert RULES["weighted_average"]().combine(tile, zeros).tolist() == [2.0, 6.0]


def test_float64_inside() -> None:
    """Neither the range nor the precision of what is averaged limits the sum on the way."""
    half = np.full((4, 1), 60000, np.float16)  # their sum is no float16 any more
    one = np.ones(4, np.int64)
    assert RULES["mean"]().combine(half, one).tolist() == [60000.0]
    # In float32 each of the ones would vanish beside 2^24.
    single = np.array([[2.0**24], *[[1.0]] * 7], np.float32)
    assert RULES["sum"]().combine(single, np.ones(8, np.int64)).tolist() == [2.0**24 + 7]


def test_sample_counts_that_add_up_to_more_than_an_int64() -> None:
    """Nothing wraps around into a negative weight."""
    tile = np.array([[1.0], [3.0]], np.float32)
    counts = np.full(2, 2**63 - 1, np.int64)
    assert RULES["weighted_average"]().combine(tile, counts).tolist() == [2.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mean", "weighted_average"])
@given(num_samples=st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_an_average_of_the_largest_is_the_largest(
    name: str, dtype: str, num_samples: list[int]
) -> None:
    """Rounding on the way does not lead out of the dtype: an average lies between its values."""
    largest = np.finfo(dtype).max
    tile = np.full((len(num_samples), 2), largest, dtype)
    tile[:, 1] *= -1
    combined = RULES[name]().combine(tile, np.array(num_samples, np.int64))
    assert (np.abs(combined) <= largest).all()
    np.testing.assert_allclose(combined / float(largest), [1.0, -1.0], rtol=1e-14)


def test_identity_takes_one_update() -> None:
    """And says so by a RuleFailed of its own, not by any ValueError."""
    rule = RULES["identity"]()
    rule.check(1)
    with pytest.raises(RuleFailed, match="'identity' takes exactly one update, not 2"):
        rule.check(2)


# --- stale updates --------------------------------------------------------------------------------


@settings(deadline=None)
@given(rounds(), st.data())
def test_stale_updates_are_mixed_with_the_base(round_: tuple[Array, Array], data: Any) -> None:
    """Σ n_k s(τ_k) / N · w_k + (1 - Σ n_k s(τ_k) / N) · base, the base being the last row."""
    tile, num_samples = round_
    k, t = tile.shape
    base = data.draw(arrays(np.float32, (1, t), elements=st.floats(-1e6, 1e6, width=32)))
    staleness = data.draw(st.lists(st.integers(0, 50), min_size=k, max_size=k))
    rows = np.concatenate([tile, base])
    weights = mixing_weights(num_samples, staleness)
    combined = RULES["weighted_average"]().combine(rows, weights)
    counts = [int(n) for n in num_samples]
    if not any(counts):
        counts = [1] * k
    shares = [
        Fraction(n, sum(counts)) * Fraction((1 + tau) ** -0.5)
        for n, tau in zip(counts, staleness, strict=True)
    ]
    assert_close(combined, slow_sum(rows, [*shares, 1 - sum(shares)]), rows)


def test_what_a_stale_update_weighs() -> None:
    """1 / sqrt(1 + τ) of its samples; the base weighs what is missing."""
    weights = mixing_weights(np.array([10, 20, 40]), [0, 3, 15])
    assert weights.tolist() == [10.0, 10.0, 10.0, 40.0]


def test_equally_stale_updates_do_not_get_their_full_weight_back() -> None:
    """A buffer of them is as far from the global model as each of them is."""
    assert mixing_weights(np.array([5, 5]), [3, 3]).tolist() == [2.5, 2.5, 5.0]


def test_stale_updates_without_samples_weigh_the_same() -> None:
    """As fresh ones do."""
    assert mixing_weights(np.zeros(2, np.int64), [0, 3]).tolist() == [1.0, 0.5, 0.5]


def test_fresh_updates_leave_nothing_to_the_base() -> None:
    """Not even by rounding, and also where counts add up to more than an int64."""
    counts = np.array([3, 2**63 - 1, 2**63 - 1])
    assert mixing_weights(counts, [0, 0, 0]).tolist() == [*counts.astype(float), 0.0]


def test_which_rules_take_stale_updates() -> None:
    """Those that go by the weights they are given."""
    assert [name for name, rule in RULES.items() if rule.takes_stale] == ["weighted_average"]


# --- which rule a configuration may name ----------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds_settings", "num_updates"),
    [
        ({"min_participants": 2}, 2),
        ({"max_participants": 3}, 3),
        ({"min_participants": 1, "fraction_participants": "1/2", "max_participants": 3}, 2),
        ({"fraction_participants": "1/2", "max_participants": 2, "controller": "all"}, 2),
    ],
)
def test_a_rule_that_cannot_work_is_a_wrong_setting(
    rounds_settings: dict[str, object], num_updates: int
) -> None:
    """It would otherwise be found out at the end of the first round."""
    overrides = {f"rounds.{key}": value for key, value in rounds_settings.items()}
    with pytest.raises(ConfigError) as caught:
        load(CoordinatorConfig, overrides={**overrides, "aggregation.rule": "identity"})
    assert str(caught.value) == (
        'command line: aggregation.rule is "identity"; a round may have '
        f"{num_updates} updates with these [rounds], and rule 'identity' takes exactly one "
        f"update, not {num_updates}"
    )


def test_a_rule_that_can_work_is_taken() -> None:
    """One at a time, of however many."""
    overrides = {
        "aggregation.rule": "identity",
        "rounds.fraction_participants": "1/5",
        "rounds.max_participants": 5,
    }
    assert load(CoordinatorConfig, overrides=overrides).aggregation.rule == "identity"


def test_the_process_refuses_it_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As every other wrong setting."""
    flags = ["--set", "aggregation.rule=identity", "--min-participants", "2"]
    monkeypatch.setattr(sys, "argv", ["xain-coordinator", *flags])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "aggregation.rule" in capsys.readouterr().err
