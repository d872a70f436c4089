"""Each rule against a slow, obvious version in exact fractions; and which ones a configuration may
name."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from oracle.staleness import shares
from support.configured import error_of
from xain_coordinator.aggregation.aggregator import RuleFailed
from xain_coordinator.aggregation.rules import RULES
from xain_coordinator.aggregation.staleness import mixing_weights
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_foundation.settings.settings import ConfigError, load

Array = NDArray[Any]
DTYPES = ("float16", "float32", "float64")


@st.composite
def rounds(draw: st.DrawFn, min_rows: int = 1) -> tuple[Array, Array]:
    """A tile (k, t) and the sample counts (k,)."""
    k, t = draw(st.integers(min_rows, 6)), draw(st.integers(1, 5))
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


def shares_of(rule: str, num_samples: Array) -> list[Fraction]:
    """The weight of each update: of a weighted average n_k / Σ n_k, alike without any samples."""
    counts, k = [int(n) for n in num_samples], len(num_samples)
    if rule == "weighted_average" and any(counts):
        return [Fraction(n, sum(counts)) for n in counts]
    return [Fraction(1) if rule == "sum" else Fraction(1, k)] * k


@pytest.mark.parametrize("rule", ["weighted_average", "mean", "sum"])
@settings(deadline=None)
@given(round_=rounds())
def test_rule_gives_the_sum_of_its_weights(rule, round_):
    tile, num_samples = round_
    expected = slow_sum(tile, shares_of(rule, num_samples))
    assert_close(RULES[rule]().combine(tile, num_samples), expected, tile)


@settings(deadline=None)
@given(rounds())
def test_identity(round_):
    """The update itself, to the bit."""
    tile, num_samples = round_
    combined = RULES["identity"]().combine(tile[:1], num_samples[:1])
    np.testing.assert_array_equal(combined.astype(np.float32), tile[0])


def test_float64_inside():
    """The sum is limited by neither the range nor the precision of the averaged values."""
    half = np.full((4, 1), 60000, np.float16)  # their sum is no float16 any more
    one = np.ones(4, np.int64)
    assert RULES["mean"]().combine(half, one).tolist() == [60000.0]
    # In float32 each of the ones would vanish beside 2^24.
    single = np.array([[2.0**24], *[[1.0]] * 7], np.float32)
    assert RULES["sum"]().combine(single, np.ones(8, np.int64)).tolist() == [2.0**24 + 7]


def test_sample_counts_that_add_up_to_more_than_an_int64():
    """Nothing wraps around into a negative weight."""
    tile = np.array([[1.0], [3.0]], np.float32)
    counts = np.full(2, 2**63 - 1, np.int64)
    assert RULES["weighted_average"]().combine(tile, counts).tolist() == [2.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mean", "weighted_average"])
@settings(deadline=None)
@given(num_samples=st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_an_average_of_the_largest_is_the_largest(name, dtype, num_samples):
    """Rounding on the way does not lead out of the dtype: an average lies between its values."""
    largest = np.finfo(dtype).max
    tile = np.full((len(num_samples), 2), largest, dtype)
    tile[:, 1] *= -1
    combined = RULES[name]().combine(tile, np.array(num_samples, np.int64))
    assert (np.abs(combined) <= largest).all()
    np.testing.assert_allclose(combined / float(largest), [1.0, -1.0], rtol=1e-14)


def test_identity_takes_one_update():
    rule = RULES["identity"]()
    rule.check(1)
    with pytest.raises(RuleFailed, match="'identity' takes exactly one update, not 2"):
        rule.check(2)


# --- stale updates --------------------------------------------------------------------------------


@settings(deadline=None)
@given(rounds(), st.data())
def test_updates_are_mixed_with_the_base(round_, data):
    """Shares of the samples of all sites; what no update weighs is the base's, the last row."""
    tile, num_samples = round_
    k, t = tile.shape
    base = data.draw(arrays(np.float32, (1, t), elements=st.floats(-1e6, 1e6, width=32)))
    staleness = data.draw(st.lists(st.integers(0, 50), min_size=k, max_size=k))
    total = data.draw(st.integers(1, 10**6))
    rows = np.concatenate([tile, base])
    weights = mixing_weights(num_samples, staleness, total)
    combined = RULES["weighted_average"]().combine(rows, weights)
    of_updates, rest = shares([int(n) for n in num_samples], staleness, total)
    assert_close(combined, slow_sum(rows, [*of_updates, rest]), rows)


def test_updates_of_all_sites_leave_nothing_to_the_base():
    """The base has weight 0 exactly, also where counts add up to more than an int64."""
    counts = np.array([3, 2**63 - 1, 2**63 - 1])
    total = sum(map(int, counts))
    assert mixing_weights(counts, [0, 0, 0], total)[-1] == 0.0


def test_which_rules_take_stale_updates():
    assert [name for name, rule in RULES.items() if rule.takes_stale] == ["weighted_average"]


# --- which rule a configuration may name ----------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"rule": "krum", "options.num_byzantine": "-1"}, "aggregation.options.num_byzantine is"),
        ({"rule": "krum", "options.num_byzantine": "one"}, "aggregation.options.num_byzantine is"),
        ({"rule": "krum", "options.f": "1"}, "aggregation.options.f is 1; rule 'krum' has no such"),
        ({"options.trim": "1"}, "aggregation.options.trim is 1; rule 'weighted_average' has no"),
        ({"optimizer": "adam"}, 'aggregation.optimizer is "adam"; it must be one of: fedadagrad, '),
        (
            {"optimizer": "fedadam", "optimizer_options.beta1": "1"},
            "aggregation.optimizer_options.beta1 is 1; it must be less than 1",
        ),
        ({"optimizer_options.beta1": "0.5"}, "aggregation.optimizer_options: without"),
    ],
)
def test_wrong_options_are_named(overrides, told):
    assert error_of(**{f"aggregation.{key}": value for key, value in overrides.items()}).startswith(
        told
    )


def test_options_of_a_file_keep_their_types(tmp_path):
    """A session is opened with all options, with their defaults."""
    file = tmp_path / "coordinator.toml"
    file.write_text(
        '[aggregation]\nrule = "norm_clipping"\noptions = { threshold = 2 }\n'
        'optimizer = "fedadam"\n[aggregation.optimizer_options]\nlearning_rate = 0.5\n'
    )
    rules = load(CoordinatorConfig, file).rules()
    assert rules.aggregation_options == {"threshold": 2.0}
    assert rules.optimizer == "fedadam"
    assert rules.optimizer_options == {
        "learning_rate": 0.5,
        "beta1": 0.9,
        "tau": 1e-3,
        "beta2": 0.99,
    }
    file.write_text('[aggregation]\nrule = "krum"\noptions = { num_byzantine = true }\n')
    with pytest.raises(ConfigError, match=r"num_byzantine is true; .*integer"):
        load(CoordinatorConfig, file)


@pytest.mark.parametrize(
    ("rule", "rounds_settings", "told"),
    [
        ("krum", {"min_participants": 4}, "a round may have 4"),
        (
            "trimmed_mean",
            {"min_participants": 2},
            "a round may have 2 updates with these [rounds], and rule 'trimmed_mean' with trim = 1 "
            "needs more than 2 updates, not 2",
        ),
        ("identity", {"min_participants": 2}, "a round may have 2 updates"),
        ("identity", {"max_participants": 3}, "a round may have 3 updates"),
        (
            "identity",
            {"min_participants": 1, "fraction_participants": "1/2", "max_participants": 3},
            "a round may have 2 updates",
        ),
        (
            "identity",
            {"fraction_participants": "1/2", "max_participants": 2, "controller": "all"},
            "a round may have 2 updates",
        ),
        # A thousand may come, which no file says.
        ("identity", {}, "not 1000; rounds.max_participants bounds them"),
    ],
)
def test_a_rule_that_cannot_work_is_a_wrong_setting(rule, rounds_settings, told):
    """The mistake is found at the start, and not at the end of the first round. A round that closes
    at its deadline may have no more updates than min_participants."""
    settings = {f"rounds__{key}": value for key, value in rounds_settings.items()}
    message = error_of(aggregation__rule=rule, **settings)
    assert f'aggregation.rule is "{rule}"' in message
    assert told in message
