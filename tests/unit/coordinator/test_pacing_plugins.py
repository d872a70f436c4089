"""Pacing rules of other distributions, by their entry points; their options."""

import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.core.bench import Bench

from xain_coordinator.assembly.changed_rules import differences
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.rules.pacing import noted_every_s
from xain_coordinator.core.rules.selection import ControllerFailed
from xain_coordinator.core.view.view import waiting_for
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.extensions.plugins import PluginFailed
from xain_coordinator.extensions.strategies import known_pacings, make_pacing, strategy_of_session
from xain_foundation.settings.settings import ConfigError, load

DOCS = Path(__file__).parents[3] / "docs" / "extending.md"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with one module and one pacing rule, as pip lays it out."""

    def lay_out(source: str, name: str = "enough_samples", value: str = "EnoughSamples") -> None:
        module = f"acme_{uuid.uuid4().hex}"
        info = tmp_path / module / f"{module}-1.2.dist-info"
        info.mkdir(parents=True)
        (tmp_path / module / f"{module}.py").write_text(source, encoding="utf-8")
        metadata = f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.2\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        points = f"[xain.pacings]\n{name} = {module}:{value}\n"
        (info / "entry_points.txt").write_text(points, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path / module))

    return lay_out


def config(**rounds: object) -> CoordinatorConfig:
    return load(CoordinatorConfig, overrides={f"rounds.{k}": v for k, v in rounds.items()})


def example() -> str:
    """The pacing rule in the documentation."""
    text = DOCS.read_text(encoding="utf-8")
    found = re.search(r"<!-- executed by a test -->\n```python\n(.*?)```", text, re.S)
    assert found is not None
    return found[1]


def with_method(name: str, answer: str) -> str:
    """The rule of the documentation, with one more method."""
    return f"{example()}\n    def {name}(self):\n        return {answer}\n"


def test_the_example_of_the_documentation_closes_a_round(install: Install) -> None:
    install(example())
    assert {"after_first", "enough_samples"} <= set(known_pacings())
    rules = config(
        pacing="enough_samples",
        pacing_options={"samples": 60},
        min_participants=1,
        start_participants=3,
        max_participants=3,
        controller="ordered",
    ).rules()
    assert rules.pacing_options == {"samples": 60}
    bench = Bench(replace(rules, initial="workload", fraction_participants=1, num_required=1))
    bench.strategy = strategy_of_session(rules)
    bench.join("a", "b", "c")
    bench.end("a", num_samples=30)
    assert bench.phase is Phase.COLLECTING
    assert waiting_for(bench.session, strategy=bench.strategy) == "30 of 60 samples are in."
    bench.end("b", num_samples=30)
    assert bench.session.round == 1


def test_closing_time_that_has_passed_closes_a_round_at_once(install: Install) -> None:
    closes_at = "return round_.opened_at + 30 if len(round_.updates) > 1 else None  # time"
    install(example().replace("return None  # time", closes_at))
    rules = config(pacing="enough_samples", start_participants=3, max_participants=3).rules()
    bench = Bench(replace(rules, initial="workload", fraction_participants=1, num_required=1))
    bench.strategy = strategy_of_session(rules)
    bench.join("a", "b", "c")
    bench.end("a")
    bench.pass_time(31)
    assert bench.session.round == 0
    bench.end("b")
    assert bench.session.round == 1


def test_rule_is_not_asked_for_a_time_once_nothing_is_outstanding(install: Install) -> None:
    asks = "return max(round_.outstanding) and None  # time"
    source = example().replace("return None  # time", asks)
    install(source)
    rules = config(
        pacing="enough_samples",
        pacing_options={"samples": 9},
        start_participants=2,
        max_participants=2,
    ).rules()
    bench = Bench(replace(rules, initial="workload", fraction_participants=1, num_required=1))
    bench.strategy = strategy_of_session(rules)
    bench.join("a", "b")
    bench.end("a")
    bench.end("b")
    assert bench.session.round == 1


def test_a_rule_that_fails_names_itself(install: Install) -> None:
    source = example().replace("return None  # time", "raise ZeroDivisionError  # time")
    install(source)
    rules = config(pacing="enough_samples", start_participants=2, max_participants=2).rules()
    bench = Bench(replace(rules, initial="workload"))
    bench.strategy = strategy_of_session(rules)
    bench.join("a", "b")
    with pytest.raises(ControllerFailed, match="'enough_samples' has failed in round 0: ZeroDiv"):
        bench.end("a")


def test_late_participants_go_on_under_a_rule_that_takes_stale_updates(install: Install) -> None:
    """The rule's answer is in the journal, which folds without the code of the rule."""
    install(with_method("max_staleness", "1"))
    rules = config(
        pacing="enough_samples",
        pacing_options={"samples": 10},
        rounds=4,
        start_participants=2,
        max_participants=2,
    ).rules()
    assert rules.staleness == 1
    bench = Bench(replace(rules, initial="workload"))
    bench.strategy = strategy_of_session(rules)
    bench.join("a", "b")
    bench.end("a", num_samples=10)
    bench.restart()
    assert {name: bench.session.trained_by(name) for name in "ab"} == {"a": 1, "b": 0}
    bench.end("b", round_=0, num_samples=10)
    assert bench.aggregates[-1].staleness == (1,)
    assert bench.points[-1].fields["max_staleness"] == 1
    bench.end("b", num_samples=10)
    assert bench.session.trained_by("a") == 3, "its update of round 1 would be too stale"


def test_rule_that_takes_stale_updates_needs_an_aggregation_rule_that_does(
    install: Install,
) -> None:
    install(with_method("max_staleness", "None"))
    with pytest.raises(ConfigError, match=r'rounds.pacing = "enough_samples" mixes updates'):
        load(
            CoordinatorConfig,
            overrides={"rounds.pacing": "enough_samples", "aggregation.rule": "sum"},
        )


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        *[("max_staleness", answer) for answer in ("1.5", "'2'", "-1", "2**31", "1 // 0")],
        *[("shortest_wait_s", answer) for answer in ("0.0", "'2'", "1 // 0")],
        ("closes_initial_round", "1 // 0"),
    ],
)
def test_answer_that_cannot_be_used_is_refused(install: Install, method: str, answer: str) -> None:
    """A session is not opened with a rule that would end the coordinator later."""
    install(with_method(method, answer))
    with pytest.raises(ConfigError, match=r"rounds.pacing.*'enough_samples' .*(answers|failed)"):
        config(pacing="enough_samples")


@pytest.mark.parametrize(("answer", "every_s"), [("200.0", 20.0), ("None", 60.0)])
def test_rule_tells_how_often_session_time_is_recorded(
    install: Install, answer: str, every_s: float
) -> None:
    install(with_method("shortest_wait_s", answer))
    rules = config(pacing="enough_samples").rules()
    assert noted_every_s(rules, strategy_of_session(rules).pacing) == every_s


def test_rule_that_tells_no_shortest_wait_may_be_off_by_three_seconds(install: Install) -> None:
    install(example())
    rules = config(pacing="enough_samples").rules()
    assert noted_every_s(rules, strategy_of_session(rules).pacing) == 3.0


def test_rule_may_close_the_round_of_the_initial_weights(install: Install) -> None:
    install(with_method("closes_initial_round", "True"))
    rules = config(
        pacing="enough_samples",
        pacing_options={"samples": 10},
        initial_weights="average",
        start_participants=2,
        max_participants=2,
    ).rules()
    bench = Bench(rules)
    bench.strategy = strategy_of_session(rules)
    bench.join("a", "b")
    assert bench.session.is_untrained
    bench.end("a", num_samples=10)
    assert bench.session.round == 1


def test_start_with_another_rule_names_the_rule_alone(install: Install) -> None:
    """The limit of staleness follows from the rule, and is no setting to put right."""
    install(with_method("max_staleness", "2"))
    session = Session("s1", config(pacing="enough_samples").rules())
    expected = ['rounds.pacing = "enough_samples" (configured: "")']
    assert list(differences(session, config())) == expected


def test_rule_that_cannot_describe_itself_stops_neither_status_nor_check_config(
    install: Install,
) -> None:
    """The text says which rule has failed, and why."""
    source = example()
    for method in ("describe(self)", "awaited(self, round_: Round)"):
        head = f"def {method} -> str:\n"
        assert head in source
        source = source.replace(head, f"{head}        raise ZeroDivisionError('no')\n")
    install(source)
    rules = config(pacing="enough_samples", start_participants=2, max_participants=2).rules()
    bench = Bench(replace(rules, initial="workload", fraction_participants=1, num_required=1))
    bench.strategy = strategy_of_session(rules)
    bench.join("a", "b")
    failed = "the pacing rule 'enough_samples' has failed"
    assert f"{failed}: ZeroDivisionError: no" in bench.strategy.pacing.describe()
    said = waiting_for(bench.session, strategy=bench.strategy)
    assert f"{failed} in round 0: ZeroDivisionError: no" in said


def test_a_rule_that_is_not_installed_is_told_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"rounds.pacing.*must be one of: after_first"):
        config(pacing="fortune")
    rules = replace(config().rules(), pacing="fortune")
    with pytest.raises(ControllerFailed, match=r"pacing rule is 'fortune'.* not installed"):
        strategy_of_session(rules)


@pytest.mark.parametrize(
    ("source", "why"), [("X = 7", "not a class"), ("class X: pass", "no is_complete")]
)
def test_a_class_without_the_methods_is_refused(install: Install, source: str, why: str) -> None:
    install(source, "x", "X")
    with pytest.raises(PluginFailed, match=f"'x' is no pacing rule: it .*{why}"):
        make_pacing("x", {})


@pytest.mark.parametrize(
    ("rounds", "why"),
    [
        ({"pacing": "after_first", "pacing_options": {"seconds": -1}}, "must be greater than 0"),
        ({"pacing": "after_first", "pacing_options": {"minutes": 1}}, "has no such option"),
        ({"pacing_options": {"seconds": 1.0}}, "nothing would read it"),
        ({"pacing": "after_first", "quorum": "participant:update:1"}, "leave this out"),
        ({"pacing": "after_first", "consistency": "asp"}, "leave this out"),
    ],
)
def test_settings_that_contradict_the_rule_are_refused(rounds: dict, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config(**rounds)
