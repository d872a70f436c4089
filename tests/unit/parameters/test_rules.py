import re
import sys
from pathlib import Path

import numpy as np
import pytest

from support.parameter_state import Oracle, keys_of, push, range_view, send, table
from xain_parameters.errors import Invalid
from xain_parameters.replica import Replica
from xain_parameters.specs import Plugin
from xain_parameters.tables import rules
from xain_parameters.tables.initialisers import Uniform
from xain_parameters.tables.rules import FTRL, SGD, Adagrad, Adam, Add, Assign, Momentum

EACH = [
    Add(),
    Assign(),
    SGD(0.1),
    Momentum(0.1, 0.5),
    Adagrad(0.3),
    Adam(0.01),
    FTRL(0.2, beta=0.5, l1=0.3, l2=0.1),
]


@pytest.mark.parametrize("rule", EACH, ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("bound", "dim"), [(50, 1), (50, 5), (None, 1), (None, 5)])
def test_rule_equals_its_slow_version(rule, dtype, bound, dim):
    """Bit for bit, but for Adam, whose slow version has other bias corrections in the last bits."""
    spec = table(1, bound=bound, dim=dim, dtype=dtype, update=rule, init=Uniform(1.0))
    replica = Replica(range_view(1), [spec], generation=1)
    oracle = Oracle([spec])
    rng = np.random.default_rng(0)
    for part in range(30):
        keys = keys_of(np.sort(rng.choice(50, rng.integers(1, 20), replace=False)))
        values = rng.standard_normal((len(keys), dim)).astype(dtype)
        oracle.apply(*send(replica, "w", push(spec, part=part), keys, values))
    oracle.assert_equals(replica)


def test_ftrl_makes_weights_of_rare_features_exactly_zero():
    fields = {name: np.zeros((2, 1), np.float32) for name in ("values", "z", "n")}
    for _ in range(5):
        FTRL(0.1, l1=1.0).update(fields, np.array([[0.1], [1.0]], np.float32))
    assert fields["values"][0] == 0
    assert fields["values"][1] < 0


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999])
def test_bias_correction_is_that_of_the_paper_for_any_number_of_steps(beta):
    steps = np.array([1, 2, 3, 50, 1000, 100_000, 2**32 - 1], np.uint32)
    expected = [1 - beta ** int(t) for t in steps]
    np.testing.assert_allclose(rules._correction(steps, beta), expected, rtol=1e-9)


@pytest.mark.parametrize("rule", EACH, ids=lambda rule: rule.name)
def test_a_rule_is_declared_by_name_and_options(rule):
    assert rules.made(Plugin.of(rule)) == rule


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (Plugin("nesterov"), "no update rule 'nesterov'; there are adagrad, adam"),
        (Plugin("sgd", {"rate": 1.0}), "update rule sgd: .*rate"),
        (Plugin("sgd", {"learning_rate": -1.0}), "sgd: learning_rate must be positive: -1"),
        (Plugin("adam", {"beta1": 1.0}), "adam: beta1 must be from 0 to below 1"),
        (Plugin("adam", {"beta2": 0.9999999}), "adam: beta 0.9999999 is above"),
        (Plugin("ftrl", {"l1": float("nan")}), "ftrl: l1 must not be negative"),
    ],
)
def test_wrong_declaration_of_a_rule_is_invalid(declared, said):
    with pytest.raises(Invalid, match=said):
        rules.made(declared)


@pytest.mark.parametrize("given", ["sgd", SGD, 0.5])
def test_other_objects_than_rules_are_refused_where_a_table_is_declared(given):
    with pytest.raises(Invalid, match=r"is no update rule or initialiser: .*SGD\(0.5\)"):
        Plugin.of(given)


def test_installed_package_adds_a_rule_by_entry_point(tmp_path, monkeypatch):
    """The rule that the documentation shows."""
    text = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
    (example,) = re.findall(r"```python\n((?:(?!```).)*?class Signum.*?)```", text, re.S)
    (tmp_path / "acme_updates.py").write_text(example)
    folder = tmp_path / "acme_updates-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-updates\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        f"[{rules.GROUP}]\nsignum = acme_updates:Signum\nbroken = no_such_module:Rule\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rules._installed.cache_clear()
    try:
        spec = table(1, bound=4, is_dense=True, init=Uniform(1.0))
        spec = type(spec)(
            1, "t", 4, 1, True, "float32", Plugin("signum", {"learning_rate": 0.5}), spec.init
        )
        replica = Replica(range_view(1), [spec], generation=1)
        before = Uniform(1.0).rows(keys_of(range(4)), 1, np.dtype("float32"))
        send(replica, "w", push(spec, start=1, stop=3), None, np.array([[4], [-4]], np.float32))
        ((_, fields),) = replica.rows(1)
        np.testing.assert_allclose(fields["velocity"], [[0], [0.4], [-0.4], [0]], rtol=1e-6)
        assert (fields["values"] == before - np.array([[0], [0.5], [-0.5], [0]], np.float32)).all()
        with pytest.raises(Invalid, match="update rule broken: cannot be imported"):
            rules.made(Plugin("broken"))
    finally:
        rules._installed.cache_clear()
        sys.modules.pop("acme_updates", None)
