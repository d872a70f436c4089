"""The sections [study] and [search]: sessions one after the other, with one table at the end."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import exp, log
from random import Random
from typing import Annotated, Any, Literal

from pydantic import Field

from xain_coordinator.core.view.study import Kind, Plan
from xain_coordinator.core.vocabulary.values import Rules, Step
from xain_foundation.settings.fields import Allowed, Check, Conflicts, Section, WrongSetting
from xain_wire.limits import MAX_INT32
from xain_workloads.tables.division import MAX_FOLDS

MAX_OPTIONS = 1000
_SECTIONS = ("workload", "aggregation", "rounds", "train")
# Settings that a session of a study gets from the study.
_NOT_SEARCHED = ("workload.name", "rounds.rounds", "rounds.passes", "rounds.start")
_RANGE = {"from", "to", "scale"}
_DEFAULT_FOLDS = 5

SearchList = Annotated[
    list[dict[str, Any]],
    Allowed('a list of tables such as { "workload.options.alpha" = 0.001 }'),
]


class StudySettings(Section):
    """[study]"""

    folds: int | None = Field(default=None, ge=2, le=MAX_FOLDS)
    leave_out: Literal["", "site"] = ""
    cross: bool = False
    model: str = ""
    rows: Literal["held_out", "all"] = "held_out"
    seed: int = Field(default=0, ge=0, le=MAX_INT32)
    final: bool = False

    @property
    def kind(self) -> Kind | None:
        """The kind of the study; None without one."""
        if self.model:
            return "model"
        if self.cross:
            return "cross"
        if self.leave_out:
            return "leave_out"
        return None if self.folds is None else "folds"

    @Check
    def _is_one(self) -> Conflicts:
        """Check that one kind of study is set, with no settings of another kind."""
        if self.leave_out:
            for name in self.changed("folds", "cross", "model", "final", "seed"):
                more = ": the first training is that of all sites" if name == "final" else ""
                yield WrongSetting(name, f"leave it out with study.leave_out{more}")
        if self.model:
            for name in self.changed("folds", "cross", "final", "seed"):
                yield WrongSetting(name, "leave it out: with study.model nothing is trained")
        elif self.rows != "held_out":
            yield WrongSetting("rows", "nothing would read it without study.model")
        if self.kind is None:
            for name in self.changed("final", "seed"):
                yield WrongSetting(name, "nothing would read it without study.folds or study.cross")


def _can_be_searched(key: str) -> bool:
    """Whether a dotted key is one that a search may vary."""
    section, dot, _ = key.partition(".")
    return section in _SECTIONS and bool(dot) and key not in _NOT_SEARCHED


class SearchSettings(Section):
    """[search]"""

    options: dict[str, Any] = Field(default_factory=dict)
    list: SearchList = Field(default_factory=list)
    draw: int | None = Field(default=None, ge=2, le=MAX_OPTIONS)
    seed: int = Field(default=0, ge=0, le=MAX_INT32)
    first: int | None = Field(default=None, ge=1, le=MAX_INT32)
    final: bool = False

    @property
    def is_on(self) -> bool:
        """Whether options are searched."""
        return bool(self.options or self.list)

    @Check
    def _has_options(self) -> Conflicts:
        """Check that the options make up a search: either lists and ranges of sensible size, or a
        list of options."""
        if not self.is_on:
            for name in self.changed("draw", "seed", "first", "final"):
                yield WrongSetting(name, "nothing would read it without search.options")
            return
        if self.options and self.list:
            yield WrongSetting("list", "leave it out, or search.options")
        if self.draw is None and self.seed:
            yield WrongSetting("seed", "nothing would read it without search.draw")
        if self.list and self.draw is not None:
            yield WrongSetting("draw", "nothing is drawn from search.list")
        if not self.options or self.list:
            return
        size = 1
        if not all(_can_be_searched(key) for key, _ in _flat(self.options)):
            return  # told below
        for key, values in _flat(self.options):
            if isinstance(values, Mapping):
                if self.draw is None:
                    yield WrongSetting("options", f"{key} is a range, which needs search.draw = N")
                if (why := _why_no_range(values)) is not None:
                    yield WrongSetting("options", f"the range of {key} {why}")
            elif not isinstance(values, Sequence) or isinstance(values, str) or not values:
                yield WrongSetting(
                    "options",
                    f"{key} must be a list of values, or a range such as {{ from = 0.001, to = 1, "
                    'scale = "log" }',
                )
            else:
                size *= len(values)
        if self.draw is None and not 2 <= size <= MAX_OPTIONS:
            yield WrongSetting(
                "options", f"there are {size} options; it must be 2 to {MAX_OPTIONS}"
            )

    @Check
    def _can_be_searched(self) -> Conflicts:
        """Check that a search varies only keys that may be varied."""
        keys = [key for key, _ in _flat(self.options)]
        keys += [key for one in self.list for key, _ in _flat(one)]
        for key in dict.fromkeys(keys):
            if not _can_be_searched(key):
                yield WrongSetting(
                    "options",
                    f"{key} cannot be searched; settings of {', '.join(_SECTIONS)} can, without "
                    f"{', '.join(_NOT_SEARCHED)}",
                )
        if self.list and len(self.list) < 2:
            yield WrongSetting("list", "it has one option; give two or more")

    def found(self) -> tuple[dict[str, str], ...]:
        """The options, each with its settings as JSON by dotted key; none without a search."""
        if not self.is_on:
            return ()
        given = sorted(
            _flat(self.options), key=lambda one: one[0]
        )  # whatever their order in the file
        if self.list:
            found = [dict(sorted(_flat(one), key=lambda item: item[0])) for one in self.list]
        elif self.draw is None:
            every = product(*(values for _, values in given))
            keys = [key for key, _ in given]
            found = [dict(zip(keys, one, strict=True)) for one in every]
        else:
            chance = Random(self.seed)
            found = [{key: _drawn(chance, of) for key, of in given} for _ in range(self.draw)]
        return tuple({key: json.dumps(value) for key, value in one.items()} for one in found)


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Items of a table by dotted key, of the tables in it too. A range is a value."""
    for key, value in table.items():
        if isinstance(value, Mapping) and not (value and _RANGE.issuperset(value)):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _why_no_range(given: Mapping[str, Any]) -> str | None:
    """Why a table is no range of numbers, as the end of a sentence; None if it is one."""
    low, high, scale = given.get("from"), given.get("to"), given.get("scale", "linear")
    if isinstance(low, bool) or isinstance(high, bool):
        return "must be of numbers"
    if not isinstance(low, int | float) or not isinstance(high, int | float) or low >= high:
        return "must have numbers `from` and `to`, the second one larger"
    if scale not in ("linear", "log"):
        return f'has the scale {scale!r}; it must be "linear" or "log"'
    if scale == "log" and low <= 0:
        return f'begins at {low}; with scale = "log" it must be above 0'
    return None


def _drawn(chance: Random, values: Any) -> Any:
    """A value drawn from a list, or from a range on its scale; whole where both ends are."""
    if not isinstance(values, Mapping):
        return values[chance.randrange(len(values))]
    low, high = values["from"], values["to"]
    is_whole = isinstance(low, int) and isinstance(high, int)
    if values.get("scale") != "log":
        return chance.randint(low, high) if is_whole else chance.uniform(low, high)
    value = exp(chance.uniform(log(low), log(high)))
    return min(max(round(value), low), high) if is_whole else value


def as_text(study: StudySettings, search: SearchSettings, whole: int) -> str:
    """The settings of a study as a JSON object by dotted key; "" without one. whole: rounds, or
    passes, of a whole training."""
    if search.is_on:
        given = search.model_dump(exclude_defaults=True)
        rungs = (len(search.found()) - 1).bit_length()
        given["first"] = search.first or max(1, whole >> rungs)
        found = {f"search.{key}": value for key, value in given.items()}
    elif study.kind is not None:
        given = study.model_dump(exclude_defaults=True)
        found = {f"study.{key}": value for key, value in given.items()}
    else:
        return ""
    return json.dumps(found, sort_keys=True)


def plan_of(text: str) -> Plan:
    """The plan of a study that as_text() has written."""
    given: dict[str, dict[str, Any]] = {"study": {}, "search": {}}
    for key, value in json.loads(text).items():
        section, _, name = key.partition(".")
        given[section][name] = value
    if given["search"]:
        search = SearchSettings.model_validate(given["search"])
        return Plan("search", final=search.final, options=search.found(), budget=search.first or 1)
    study = StudySettings.model_validate(given["study"])
    assert study.kind is not None, f"{text} is no study"
    return Plan(
        study.kind,
        folds=study.folds or _DEFAULT_FOLDS,
        seed=study.seed,
        final=study.final,
        source=study.model,
        all_rows=study.rows == "all",
    )


def rules_of(step: Step, rules: Rules) -> Rules:
    """The rules of a session of a study.

    step: its part in the study; it may measure only, have a smaller budget, or name its sites.
        rules: of the session without the study, with the step's options.
    """
    rules = replace(rules, step=step, evaluate_local=False)  # see study.cross
    if step.position != (0, 0):  # one of several folds, sites or options
        rules = replace(rules, evaluate_importance=False)
    if step.task == "measure":
        rules = replace(
            rules,
            rounds=0,
            passes=0,
            evaluate_every=1,
            evaluate_patience=0,
            evaluate_data=False,
        )
    elif step.budget:
        budget = min(step.budget, rules.rounds)  # passes where these are counted
        rules = replace(rules, rounds=budget, passes=budget if rules.passes else 0)
    if (n := len(step.sites)) > 0:
        rules = replace(
            rules,
            min_participants=min(rules.min_participants, n),
            num_required=min(rules.num_required, n),
            buffer_size=min(rules.buffer_size, n),
            start_participants=n,
            max_participants=max(rules.max_participants, n),
        )
    return rules
