"""Plug-ins as they are installed: a distribution of its own, with an entry point, on the path. The
example of docs/aggregation.md is one of them."""

import asyncio
import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from support.aggregation import load, npy, put, work_on
from support.configured import config, error_of
from xain_coordinator.aggregation.aggregator import RuleFailed
from xain_coordinator.aggregation.engine import aggregate
from xain_coordinator.aggregation.rules import BUILT_IN, known_rules, make_rule
from xain_coordinator.aggregation.sources import UpdateChanged
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.extensions import plugins
from xain_coordinator.extensions.options import WrongOption, options_of
from xain_coordinator.extensions.plugins import AGGREGATORS, PluginFailed
from xain_coordinator.process import embedding, run
from xain_coordinator.stores.memory import MemoryStore
from xain_foundation.exit_statuses import EXIT_BAD_CONFIG, EXIT_FAILED, CannotStart

DOCS = Path(__file__).parents[3] / "docs" / "aggregation.md"


def example(language: str) -> str:
    """The one block of this language in the documentation's chapter on plug-ins."""
    chapter = DOCS.read_text(encoding="utf-8").partition("## A rule of your own")[2]
    (block,) = re.findall(rf"```{language}\n(.*?)```", chapter, re.DOTALL)
    return str(block)


Install = Callable[..., Path]


def install_example(install: Install) -> None:
    found = re.search(r"(\[project\.entry-points[^\n]*\n)(\w+) = \"(\w+):(\w+)\"", example("toml"))
    assert found[1].strip() == f'[project.entry-points."{AGGREGATORS}"]'
    install(example("python"), AGGREGATORS, found[2], found[4], found[3])


def test_the_example_of_the_documentation(install):
    """Installed, named in a configuration, with an option, and run by the engine over tiles."""
    install_example(install)
    assert "midrange" in known_rules()
    rules = config(aggregation__rule="midrange", aggregation__options__towards="0.25").rules()
    assert (rules.aggregation, rules.aggregation_options) == ("midrange", {"towards": 0.25})
    store = MemoryStore()
    chance = np.random.default_rng(2)
    vectors = [chance.normal(size=1000).astype(np.float32) for _ in range(4)]
    work = work_on(store, rules.aggregation, vectors, vectors[0], options=rules.aggregation_options)
    models = []
    for tile_bytes in (1000, 1 << 20):
        models.append(aggregate(store, work, tile_bytes=tile_bytes))
        rows = np.stack(vectors).astype(np.float64)
        expected = 0.75 * rows.min(axis=0) + 0.25 * rows.max(axis=0)
        np.testing.assert_allclose(load(store, models[-1].ref), expected, rtol=1e-6)
        store.delete("4/global")
    assert models[0] == models[1]


def test_unused_plug_ins_are_not_imported(install):
    """A plug-in that is broken breaks only its users, and is named then."""
    install("import nowhere_to_be_found\n", AGGREGATORS, "broken", module="acme_broken")
    make_rule("mean", {})
    assert "acme_broken" not in sys.modules
    with pytest.raises(
        PluginFailed, match=r"'broken' of acme-broken 1\.2 .*acme_broken:Rule.*nowhere_to_be_found"
    ):
        make_rule("broken", {})
    told = error_of(aggregation__rule="broken")
    assert told.startswith('aggregation.rule is "broken"; the plug-in')


def test_a_plug_in_replaces_nothing(install):
    """A name that is built in means what it means, or nothing."""
    install("class Mean: ...\n", AGGREGATORS, "mean", "Mean", "acme_mean")
    assert known_rules() == sorted(BUILT_IN)
    make_rule("sum", {})
    with pytest.raises(PluginFailed, match=r"'mean' is built in, .*acme-mean 1\.2"):
        make_rule("mean", {})


@pytest.mark.parametrize(("section", "group"), [("storage", "stores"), ("metrics", "metrics")])
def test_wrong_option_of_a_store_is_a_wrong_setting(install, section, group):
    """The coordinator names its key, and ends with the status of a wrong configuration."""
    source = "class Store:\n    def __init__(self, depth: int = 1) -> None: ...\n"
    folder = install(source, f"xain.{group}", "acme", "Store")
    chosen = {
        "server.port": 0,
        "journal.path": folder / "journal.sqlite",
        "storage.path": folder / "weights",
        "metrics.kind": "none",
        f"{section}.kind": "acme",
        f"{section}.options.width": 3,
    }
    coordinator = embedding.Coordinator(chosen)
    with pytest.raises(CannotStart, match=rf"^{section}\.options\.width: .*no such option"):
        coordinator.start()
    assert coordinator.stop() == EXIT_BAD_CONFIG


def test_two_plug_ins_of_one_name(install):
    """The name is ambiguous, and the error names both packages."""
    for name in ("acme_one", "acme_two"):
        install("class Rule: ...\n", AGGREGATORS, "clever", module=name)
    assert plugins.known(AGGREGATORS, ()) == ["clever"]
    with pytest.raises(PluginFailed, match=r"'clever' .*acme-.* and acme-.*; uninstall"):
        make_rule("clever", {})


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("class Rule: ...", "takes_stale, check, combine"),
        (
            "class Rule:\n takes_stale = False\n check = combine = survey = None",
            "needs_base, weigh",
        ),
    ],
)
def test_plug_in_that_is_no_rule(install, source, missing):
    """The error comes at the start, and not at the end of the first round."""
    install(source, AGGREGATORS, "other")
    with pytest.raises(PluginFailed, match=f"'other' is no rule: it has no {missing}"):
        make_rule("other", {})


def test_a_rule_that_makes_something_else(install):
    """The engine does not guess."""
    source = """
class Rule:
    takes_stale = False
    def check(self, num_updates): ...
    def combine(self, tile, weights): return tile.mean(axis=1)
"""
    install(source, AGGREGATORS, "odd")
    store = MemoryStore()
    vectors = [np.ones(5, np.float32)] * 3
    with pytest.raises(ValueError, match=r"'odd' .*float32 .*\(3,\) .*5 columns"):
        aggregate(store, work_on(store, "odd", vectors, vectors[0]))


def test_a_plug_in_that_is_gone_in_the_middle_of_a_session(install):
    """The plug-in can be installed again: no failure of the rule, which would end the session."""
    store = MemoryStore()
    work = work_on(store, "midrange", [np.ones(5, np.float32)] * 3, np.ones(5, np.float32))
    with pytest.raises(PluginFailed, match=r"'midrange', .*not installed"):
        aggregate(store, work)
    install_example(install)
    aggregate(store, work)
    with pytest.raises(PluginFailed, match=r"'midrange', .*option"):
        aggregate(store, replace(work, options={"far": 1}))


SURVEYOR = """
import numpy as np
class Rule:
    takes_stale = False
    needs_base = False
    def check(self, num_updates): ...
    def survey(self, differences): return np.zeros(1)
    def weigh(self, surveyed, num_samples): return np.ones(len(num_samples) + 1)
    def combine(self, tile, weights): return tile.mean(axis=0, dtype=np.float64)
"""


def test_a_rule_that_surveys_takes_no_stale_updates(install):
    """Their weights follow from their age, and the survey would be left out without a word."""
    install(SURVEYOR.replace("takes_stale = False", "takes_stale = True"), AGGREGATORS, "odd")
    with pytest.raises(PluginFailed, match=r"'odd' is no rule: .*survey and takes_stale"):
        make_rule("odd", {})


def test_a_weight_for_a_global_model_that_is_not_there(install):
    """A round that initialises has none, and the rule is named."""
    install(SURVEYOR, AGGREGATORS, "odd")
    store = MemoryStore()
    vectors = [np.ones(5, np.float32)] * 3
    aggregate(store, work_on(store, "odd", vectors, vectors[0]))
    store.delete("4/global")
    with pytest.raises(RuleFailed, match=r"'odd' .*weight of 1 in round 3"):
        aggregate(store, work_on(store, "odd", vectors, None))


@pytest.mark.parametrize(
    ("part", "body"),
    [
        ("check", "raise KeyError('k')"),
        ("survey", "raise KeyError('k')"),
        ("weigh", "raise KeyError('k')"),
        ("combine", "raise KeyError('k')"),
        ("survey", "return None"),
        ("weigh", "return None"),
        ("combine", "return None"),
    ],
)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_rule_that_raises(install, part, body, num_threads):
    """The error names the rule, and the session goes on once the plug-in has been put right."""
    install(re.sub(rf"(def {part}\(.*?\)): .*", rf"\1: {body}", SURVEYOR), AGGREGATORS, "odd")
    store = MemoryStore()
    vectors = [np.ones(30_000, np.float32)] * 3
    work = work_on(store, "odd", vectors, vectors[0])
    with pytest.raises(PluginFailed, match=f"'odd' fails in {part}.. in round 3: [A-Z][a-z]*Error"):
        aggregate(store, work, num_threads=num_threads)
    put(store, "3/p001", npy(np.zeros(30_000, np.float32)))
    if part != "check":  # nothing has been read yet
        with pytest.raises(UpdateChanged, match="3/p001"):
            aggregate(store, work)


@pytest.mark.parametrize(
    ("entry", "body", "told"),
    [
        ("", "...", "the plug-in 'odd' is no rule: it is not a class"),
        ("made", "...", "the plug-in 'odd' is no rule: it is not a class"),
        ("Rule", "def __init__(self, depth: 'Nowhere' = 0): ...", "NameError: name 'No"),
        ("Rule", "def __init__(self): {}['depth']", "made: KeyError: 'depth'"),
        (
            "Rule",
            "def check(self, num_updates): raise ValueError('needs five')",
            "its check() fails with num_updates = 1: ValueError: needs five",
        ),
    ],
)
def test_a_plug_in_that_cannot_be_used(install, entry, body, told):
    """The start fails with one line."""
    lines = SURVEYOR.replace("class Rule:\n", f"class Rule:\n    {body}\n")
    if "def check" in body:
        lines = lines.replace("    def check(self, num_updates): ...\n", "")
    made = "made = Rule()\n" if entry == "made" else ""
    install(lines + made, AGGREGATORS, "odd", entry)
    line = error_of(aggregation__rule="odd")
    assert line.startswith('aggregation.rule is "odd"; ')
    assert told in line
    assert "\n" not in line


PICKY = """
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
import numpy as np
class Side(Enum):
    LEAST = "least"
    MOST = "most"
@dataclass(frozen=True)
class Rule:
    takes_stale = False
    side: Side = Side.LEAST
    table: Path = Path("a")
    scale: float = 1.0
    def check(self, num_updates): ...
    def combine(self, tile, weights): return tile.mean(axis=0, dtype=np.float64)
"""


def test_options_that_a_journal_keeps_as_they_were_given(install):
    """Options that the rule converts on its side are kept in their given form."""
    install(PICKY, AGGREGATORS, "odd")
    given = {"aggregation__options__side": "most", "aggregation__options__table": "b"}
    found = config(aggregation__rule="odd", **given)
    options = found.rules().aggregation_options
    assert options == {"side": "most", "table": "b", "scale": 1.0}
    assert make_rule("odd", options) == found.aggregation.made_rule()


def test_options_that_no_journal_keeps():
    """Options of a type that the journal cannot hold are refused where they are given."""
    with pytest.raises(WrongOption, match="depth: it must be text"):
        options_of(object(), {"depth": [1]})


def open_session(config: CoordinatorConfig) -> None:
    async def start_and_stop() -> None:
        coordinator = SessionCoordinator(config)
        await coordinator.start()
        await coordinator.stop()

    asyncio.run(start_and_stop())


async def _status_of(config: CoordinatorConfig) -> object:
    """The exit status of a start that fails."""
    with contextlib.ExitStack() as at_end:
        start = partial(SessionCoordinator, config, resume=True)
        with pytest.raises(run.STARTING_ERRORS) as raised:
            await run.start_coordinator(config, start, asyncio.Event(), at_end)
        return run._status_after(raised.value)


def test_a_session_whose_plug_in_is_gone(install, tmp_path, monkeypatch):
    """The error comes when the coordinator starts, and not at the end of a round."""
    folder = install(PICKY, AGGREGATORS, "odd")
    overrides = {
        "server.port": 0,
        "journal.path": str(tmp_path / "journal.sqlite"),
        "storage.path": str(tmp_path / "weights"),
        "metrics.kind": "none",
    }
    odd = config(**overrides, aggregation__rule="odd")
    open_session(odd)
    open_session(odd)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(folder)])
    other = config(**overrides)
    with pytest.raises(PluginFailed, match=r"'odd', .*not installed"):
        SessionCoordinator(other, resume=True)
    assert asyncio.run(_status_of(other)) == EXIT_FAILED
