"""Pacing rules of other distributions, by their entry points; their options."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.core.bench import Bench

from support.configured import config
from support.pages import executed
from xain_coordinator.assembly.changed_rules import differences
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.rules.pacing import noted_every_s
from xain_coordinator.core.view.view import waiting_for
from xain_coordinator.core.vocabulary.values import Phase, Rules
from xain_coordinator.extensions.plugins import PACINGS, PluginFailed
from xain_coordinator.extensions.strategies import known_pacings, make_pacing, strategy_of_session
from xain_foundation.settings.settings import ConfigError

Install = Callable[..., Path]
EXAMPLE = executed("extending.md")
NO_TIME = "return None  # time"
TWO = {"rounds__start_participants": 2, "rounds__max_participants": 2}
THREE = {"rounds__start_participants": 3, "rounds__max_participants": 3}


def rules_of(install: Install, source: str, samples: int | None = None, **given: Any) -> Rules:
    """Rules of a session with the pacing rule of this source. samples: its option."""
    install(source, PACINGS, "enough_samples", "EnoughSamples")
    if samples is not None:
        given["rounds__pacing_options"] = {"samples": samples}
    return config(rounds__pacing="enough_samples", **given).rules()


def with_method(name: str, answer: str) -> str:
    """The rule of the documentation, with one more method."""
    return f"{EXAMPLE}\n    def {name}(self):\n        return {answer}\n"


def session_of(
    rules: Rules, *names: str, all_of_them: bool = False, initial: str = "workload"
) -> Bench:
    """A session with these rules, which these participants have joined. all_of_them: the least
    number is not 1."""
    changes: dict[str, Any] = {} if all_of_them else {"fraction_participants": 1, "num_required": 1}
    bench = Bench(replace(rules, initial=initial, **changes))
    bench.strategy = strategy_of_session(rules)
    bench.join(*names)
    return bench


def test_the_example_of_the_documentation_closes_a_round(install):
    rules = rules_of(install, EXAMPLE, 60, **THREE, rounds__controller="ordered")
    assert {"after_first", "enough_samples"} <= set(known_pacings())
    assert rules.pacing_options == {"samples": 60}
    bench = session_of(rules, "a", "b", "c")
    bench.end("a", num_samples=30)
    assert bench.phase is Phase.COLLECTING
    assert waiting_for(bench.session, strategy=bench.strategy) == "30 of 60 samples are in."
    bench.end("b", num_samples=30)
    assert bench.session.round == 1


def test_closing_time_that_has_passed_closes_a_round_at_once(install):
    closes_at = "return round_.opened_at + 30 if len(round_.updates) > 1 else None  # time"
    rules = rules_of(install, EXAMPLE.replace(NO_TIME, closes_at), **THREE)
    bench = session_of(rules, "a", "b", "c")
    bench.end("a")
    bench.pass_time(31)
    assert bench.session.round == 0
    bench.end("b")
    assert bench.session.round == 1


def test_rule_is_not_asked_for_a_time_once_nothing_is_outstanding(install):
    asks = "return max(round_.outstanding) and None  # time"
    bench = session_of(rules_of(install, EXAMPLE.replace(NO_TIME, asks), 9, **TWO), "a", "b")
    bench.end("a")
    bench.end("b")
    assert bench.session.round == 1


def test_a_rule_that_fails_names_itself(install):
    source = EXAMPLE.replace(NO_TIME, "raise ZeroDivisionError  # time")
    bench = session_of(rules_of(install, source, **TWO), "a", "b", all_of_them=True)
    with pytest.raises(PluginFailed, match="'enough_samples' has failed in round 0: ZeroDiv"):
        bench.end("a")


def test_late_participants_go_on_under_a_rule_that_takes_stale_updates(install):
    """The rule's answer is in the journal, which folds without the code of the rule."""
    rules = rules_of(install, with_method("max_staleness", "1"), 10, **TWO, rounds__rounds=4)
    assert rules.staleness == 1
    bench = session_of(rules, "a", "b", all_of_them=True)
    bench.end("a", num_samples=10)
    bench.restart()
    assert {name: bench.session.trained_by(name) for name in "ab"} == {"a": 1, "b": 0}
    bench.end("b", round_=0, num_samples=10)
    assert bench.aggregates[-1].staleness == (1,)
    assert bench.points[-1].fields["max_staleness"] == 1
    bench.end("b", num_samples=10)
    assert bench.session.trained_by("a") == 3, "its update of round 1 would be too stale"


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        *[("max_staleness", answer) for answer in ("1.5", "'2'", "-1", "2**31", "1 // 0")],
        *[("shortest_wait_s", answer) for answer in ("0.0", "'2'", "1 // 0")],
        ("closes_initial_round", "1 // 0"),
    ],
)
def test_answer_that_cannot_be_used_is_refused(install, method, answer):
    """A session is not opened with a rule that would end the coordinator later."""
    with pytest.raises(ConfigError, match=r"rounds.pacing.*'enough_samples' .*(answers|failed)"):
        rules_of(install, with_method(method, answer))


@pytest.mark.parametrize(
    ("source", "every_s"),
    [
        (with_method("shortest_wait_s", "200.0"), 20.0),
        (with_method("shortest_wait_s", "None"), 60.0),
        (EXAMPLE, 3.0),
    ],
    ids=["200 s", "no wait", "untold"],
)
def test_rule_tells_how_often_session_time_is_recorded(install, source, every_s):
    rules = rules_of(install, source)
    assert noted_every_s(rules, strategy_of_session(rules).pacing) == every_s


def test_rule_may_close_the_round_of_the_initial_weights(install):
    source = with_method("closes_initial_round", "True")
    rules = rules_of(install, source, 10, **TWO, rounds__initial_weights="average")
    bench = session_of(rules, "a", "b", all_of_them=True, initial="empty")
    assert bench.session.is_untrained
    bench.end("a", num_samples=10)
    assert bench.session.round == 1


def test_start_with_another_rule_names_the_rule_alone(install):
    """The limit of staleness follows from the rule, and is no setting to put right."""
    session = Session("s1", rules_of(install, with_method("max_staleness", "2")))
    expected = ['rounds.pacing = "enough_samples" (configured: "")']
    assert list(differences(session, config())) == expected


def test_rule_that_cannot_describe_itself_stops_neither_status_nor_check_config(install):
    """The text says which rule has failed, and why."""
    source = EXAMPLE
    for method in ("describe(self)", "awaited(self, round_: Round)"):
        head = f"def {method} -> str:\n"
        assert head in source
        source = source.replace(head, f"{head}        raise ZeroDivisionError('no')\n")
    bench = session_of(rules_of(install, source, **TWO), "a", "b")
    failed = "the pacing rule 'enough_samples' has failed"
    assert f"{failed}: ZeroDivisionError: no" in bench.strategy.pacing.describe()
    said = waiting_for(bench.session, strategy=bench.strategy)
    assert f"{failed} in round 0: ZeroDivisionError: no" in said


def test_a_rule_that_is_not_installed_is_told_at_the_start():
    rules = replace(config().rules(), pacing="fortune")
    with pytest.raises(PluginFailed, match=r"pacing rule is 'fortune'.* not installed"):
        strategy_of_session(rules)


@pytest.mark.parametrize(
    ("source", "why"), [("X = 7", "not a class"), ("class X: pass", "no is_complete")]
)
def test_a_class_without_the_methods_is_refused(install, source, why):
    install(source, PACINGS, "x", "X")
    with pytest.raises(PluginFailed, match=f"'x' is no pacing rule: it .*{why}"):
        make_pacing("x", {})


AFTER_FIRST = {"rounds__pacing": "after_first"}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rounds__pacing": "fortune"}, "rounds.pacing.*must be one of: after_first"),
        ({**AFTER_FIRST, "rounds__pacing_options": {"seconds": -1}}, "must be greater than 0"),
        ({**AFTER_FIRST, "rounds__pacing_options": {"minutes": 1}}, "has no such option"),
        ({"rounds__pacing_options": {"seconds": 1.0}}, "nothing would read it"),
        ({**AFTER_FIRST, "rounds__quorum": "participant:update:1"}, "leave this out"),
        ({**AFTER_FIRST, "rounds__consistency": "asp"}, "leave this out"),
    ],
)
def test_settings_that_contradict_the_rule_are_refused(given, why):
    with pytest.raises(ConfigError, match=why):
        config(**given)


def test_rule_that_takes_stale_updates_needs_an_aggregation_rule_that_does(install):
    with pytest.raises(ConfigError, match=r'rounds.pacing = "enough_samples" mixes updates'):
        rules_of(install, with_method("max_staleness", "None"), aggregation__rule="sum")
