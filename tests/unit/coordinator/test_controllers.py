"""Controllers of other distributions, by their entry points; their options."""

import pytest

from support.configured import config
from support.pages import executed
from xain_coordinator.core.rules.selection import Candidate, Weighted, select
from xain_coordinator.extensions.options import WrongOption
from xain_coordinator.extensions.plugins import CONTROLLERS, PluginFailed
from xain_coordinator.extensions.strategies import (
    known_controllers,
    make_controller,
    strategy_of_session,
)
from xain_foundation.settings.settings import ConfigError


def test_the_example_of_the_documentation_selects(install):
    """Installed beside the coordinator it is chosen by its name, and does what is said of it."""
    install(executed("controllers.md"), CONTROLLERS, "one_of_each", "OneOfEach")
    assert "one_of_each" in known_controllers()
    rules = config(
        rounds__controller="one_of_each", rounds__controller_options={"tag": "site"}
    ).rules()
    assert (rules.controller, rules.controller_options) == ("one_of_each", {"tag": "site"})
    controller = strategy_of_session(rules).controller
    candidates = [Candidate(f"n{i}", tags={"site": "north"}) for i in range(8)]
    candidates += [Candidate("s", tags={"site": "south"}), Candidate("nowhere")]
    for round_ in range(20):
        chosen = select(controller, candidates, 4, seed=1, round_=round_, draw=0)
        assert {"s", "nowhere"} < set(chosen)
        assert len(chosen) == 4
    assert select(controller, candidates, 4, seed=1, round_=3, draw=0) == select(
        controller, candidates[::-1], 4, seed=1, round_=3, draw=0
    )


@pytest.mark.parametrize(
    ("source", "why"), [("X = 7", "not a class"), ("class X: pass", "no select")]
)
def test_invalid_controller_is_told_at_the_start(install, source, why):
    install(source, CONTROLLERS, "x", "X")
    with pytest.raises(PluginFailed, match=f"'x' is no controller: it .*{why}"):
        make_controller("x", {})


def test_options_are_checked_at_the_start():
    """Unknown ones, wrong types, wrong values; each names itself."""
    assert make_controller("weighted", {"default_samples": 9}) == Weighted(9)
    with pytest.raises(WrongOption, match="seed: controller 'random' has no such option"):
        make_controller("random", {"seed": 3})
    for value, why in (("many", "valid integer"), (-1, "must not be negative"), (1.5, "integer")):
        with pytest.raises(ConfigError, match=f"rounds.controller_options.*{why}"):
            config(
                rounds__controller="weighted", rounds__controller_options={"default_samples": value}
            )


def test_a_session_keeps_the_defaults_that_it_was_opened_with():
    """A later version may have others."""
    assert config(rounds__controller="weighted").rules().controller_options == {
        "default_samples": 1
    }
    assert config().rules().controller_options == {}
