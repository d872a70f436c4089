"""Compare the rules that a session was opened with to those of the configuration, key by key.

A session keeps its rules to its end. A start with other settings would not do what they say, so it
is refused unless the operator says which of the two counts.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, fields

from xain_coordinator.config import CoordinatorConfig
from xain_coordinator.core.session import Session
from xain_coordinator.core.values import Phase, Rules
from xain_coordinator.core.values import Schema as DataSchema
from xain_coordinator.warm_start import is_source
from xain_messaging.process.schema import Schema

# The key of the configuration for each field of Rules. "*" stands for the items of a table, which a
# field holds as a mapping, as a JSON object or as a schema of the data. None: the field follows
# from others, or its new value is taken at every start.
KEYS: Mapping[str, str | None] = {
    "rounds": "rounds.rounds",
    "epochs": "rounds.epochs",
    "min_participants": "rounds.min_participants",
    "fraction_participants": "rounds.fraction_participants",
    "num_required": None,
    "max_participants": "rounds.max_participants",
    "start_participants": "rounds.start_participants",
    "start_timeout_s": "rounds.start_timeout_s",
    "controller": "rounds.controller",
    "controller_options": "rounds.controller_options.*",
    "tags": "rounds.tags.*",
    "refused_limit": "rounds.refused_limit",
    "refused_rounds": "rounds.refused_rounds",
    "max_lost_share": None,
    "seed": "rounds.seed",
    "deadline_s": "rounds.deadline_s",
    "idle_timeout_s": "rounds.idle_timeout_s",
    "quorum": "rounds.quorum",
    "over_selection": "rounds.over_selection",
    "consistency": "rounds.consistency",
    "staleness": "rounds.staleness",
    "buffer_size": "rounds.buffer_size",
    "aggregation": "aggregation.rule",
    "aggregation_options": "aggregation.options.*",
    "optimizer": "aggregation.optimizer",
    "optimizer_options": "aggregation.optimizer_options.*",
    "workload": "workload.name",
    "workload_options": "workload.options.*",
    "preprocessing": "workload.preprocessing.*",
    "initial": "rounds.initial_weights",
    "evaluate_every": "evaluate.every",
    "evaluate_metric": "evaluate.metric",
    "evaluate_minimised": "evaluate.direction",
    "evaluate_patience": "evaluate.patience",
    "evaluate_min_delta": "evaluate.min_delta",
    "evaluate_data": "evaluate.data",
    "evaluate_deadline_s": "evaluate.deadline_s",
    "train_config": "train.*",
    "schema": "schema.*",
    "heartbeat_time_s": None,
    "heartbeat_timeout_s": None,
}

# Tables whose items mean nothing beside another value of the first field.
_OPTIONS_OF = {
    "controller_options": "controller",
    "aggregation_options": "aggregation",
    "optimizer_options": "optimizer",
    "workload_options": "workload",
    "preprocessing": "workload",
}

_WORKLOAD = {"workload", "workload_options", "preprocessing"}

# Fields whose values follow from these where the configuration does not set them.
_DERIVED = ("max_participants", "start_participants", "buffer_size")
_DERIVED_FROM = ("min_participants", "fraction_participants")


class OtherRules(Exception):
    """A start whose settings are not those that the session was opened with."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key of the configuration. kept: its value in the session. configured: the one that was
    asked for. Both as in TOML."""

    key: str
    kept: str
    configured: str

    def __str__(self) -> str:
        return f"{self.key} = {self.kept} (configured: {self.configured})"


def differences(session: Session, config: CoordinatorConfig) -> tuple[Difference, ...]:
    """The keys that matter and have other values than the session, in the order of KEYS."""
    return tuple(_differences(session, config))


def _differences(session: Session, config: CoordinatorConfig) -> Iterator[Difference]:
    schema, asked = Schema(CoordinatorConfig), config.rules()
    changed = {
        field.name
        for field in fields(Rules)
        if getattr(session.rules, field.name) != getattr(asked, field.name)
    }
    if session.lineage is not None or "workload" in changed:
        changed.discard("initial")  # nothing reads it, or it follows from the workload
    is_earlier = not session.rules.preprocessing  # the workload was not written down then
    if is_earlier:
        changed -= _WORKLOAD if "initial" not in changed else _WORKLOAD - {"workload"}
    if is_earlier and asked.initial == "first" and config.rounds.initial_weights is None:
        changed.discard("initial")  # an earlier version had no choice
    if _is_extended_as_configured(session, asked.rounds):
        changed.discard("rounds")
    if changed.intersection(_DERIVED_FROM):
        changed -= {name for name in _DERIVED if getattr(config.rounds, name) is None}
    for name, key in KEYS.items():
        if name not in changed or key is None or _OPTIONS_OF.get(name) in changed:
            continue
        kept, wanted = _value(session.rules, name), _value(asked, name)
        if not key.endswith(".*"):
            pairs = [(key, kept, wanted)]
        else:
            mine, theirs = _table(kept), _table(wanted)
            pairs = [
                (f"{key[:-1]}{item}", mine.get(item), theirs.get(item))
                for item in sorted({*mine, *theirs})
            ]
        for one, before, now in pairs:
            # The task is the workload's, where the configuration does not say it.
            is_derived = one == "schema.task" and (is_earlier or changed.intersection(_WORKLOAD))
            if before != now and not is_derived:
                yield Difference(one, _shown(schema, one, before), _shown(schema, one, now))


def _is_extended_as_configured(session: Session, configured_rounds: int) -> bool:
    """Whether the configuration has the number of rounds from before an extension, or the new
    total: `extend` changes the session and leaves the configuration to its owner."""
    lineage = session.lineage
    if lineage is None or not lineage.configured_rounds:
        return False
    total = lineage.num_rounds + session.rules.rounds
    return configured_rounds in (lineage.configured_rounds, total)


# Values as the configuration has them, where a field has others.
_AS_CONFIGURED: Mapping[tuple[str, object], object] = {
    ("initial", "empty"): "average",
    ("evaluate_minimised", True): "min",
    ("evaluate_minimised", False): "max",
}


def _value(rules: Rules, name: str) -> object:
    value = getattr(rules, name)
    is_plain = isinstance(value, str | int | float)
    return _AS_CONFIGURED.get((name, value), value) if is_plain else value


def _table(value: object) -> Mapping[str, object]:
    if isinstance(value, str):
        return dict(json.loads(value)) if value else {}
    if isinstance(value, DataSchema):
        table = dict(zip(value.__slots__, astuple(value), strict=True))
        table.pop("columns")
        table |= {f"columns.{column.name}": column.type for column in value.columns}
        return table | {f"units.{c.name}": c.unit for c in value.columns if c.unit}
    assert isinstance(value, Mapping), "a field with items is a mapping or a JSON object"
    return value


def _shown(schema: Schema, key: str, value: object) -> str:
    if value is None:
        return "(not set)"
    if isinstance(value, list | tuple | dict):
        value = json.dumps(value)
    return schema.shown(tuple(key.split(".")), value)


def require_same_rules(session: Session, config: CoordinatorConfig, from_model: str = "") -> None:
    """Refuse to go on with a session under other settings than its own.

    from_model: the model that was asked for as the first one; "" if none was. Raises OtherRules.
    """
    different = differences(session, config)
    own = "" if session.lineage is None else session.lineage.source
    if from_model and not is_source(from_model, own):
        different += (Difference("--from-model", own or "(not set)", from_model),)
    if not different:
        return
    told = ", ".join(map(str, different))
    resume, more = "goes on with these", ""
    if session.phase is Phase.FINISHED:
        resume = "serves its result"
        more = "`xain-coordinator extend --rounds +N` trains it further, "
    raise OtherRules(
        f"the session {session.session_id} in {config.journal.path} "
        f"{'is finished and ' if more else ''}was opened with other settings than the configured "
        f"ones: {told}; --resume {resume}, {more}--new-session opens a session with the configured "
        "ones, another --data-dir leaves this one where it is"
    )
