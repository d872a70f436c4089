"""Rules of a session by the keys of the configuration, as people write them."""

import json
from collections.abc import Mapping
from dataclasses import astuple, fields

from xain_coordinator.config.choices import REMEDY
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.vocabulary.values import Rules
from xain_coordinator.core.vocabulary.values import Schema as DataSchema
from xain_foundation.settings.schema import Schema

_OF_WORKLOAD = "workload.options.*"

# The key of the configuration for each field of Rules that is not "rounds.FIELD". "*" stands for
# the items of a table, which a field holds as a mapping, as a JSON object or as a schema of the
# data. None: the field follows from others, or its new value is taken at every start.
_KEYS: Mapping[str, str | None] = {
    "num_required": None,
    "plans_epochs": None,
    "stride": None,
    "evaluate_patience_rows": None,
    "controller_options": "rounds.controller_options.*",
    "pacing_options": "rounds.pacing_options.*",
    "tags": "rounds.tags.*",
    "max_lost_share": None,
    "max_share": None,
    "aggregation": "aggregation.rule",
    "aggregation_options": "aggregation.options.*",
    "optimizer": "aggregation.optimizer",
    "optimizer_options": "aggregation.optimizer_options.*",
    "workload": "workload.name",
    "workload_options": _OF_WORKLOAD,
    "preprocessing": "workload.preprocessing.*",
    "initial": "rounds.initial_weights",
    "evaluate_every": "evaluate.every",
    "evaluate_metric": "evaluate.metric",
    "evaluate_minimised": "evaluate.direction",
    "evaluate_patience": "evaluate.patience",
    "evaluate_min_delta": "evaluate.min_delta",
    "evaluate_data": "evaluate.data",
    "evaluate_deadline_s": "evaluate.deadline_s",
    "evaluate_min_rows": "evaluate.min_rows",
    "evaluate_threshold": "evaluate.threshold",
    "evaluate_local": "evaluate.local",
    "evaluate_importance": "evaluate.importance",
    "train_config": "train.*",
    "schema": "schema.*",
    "heartbeat_time_s": None,
    "study": "*",
    "step": None,
    "heartbeat_timeout_s": None,
}


def key_of(field: str) -> str | None:
    """The key of the configuration for a field of Rules; None if the field is not compared."""
    return _KEYS.get(field, f"rounds.{field}")


def as_configured(rules: Rules, name: str) -> dict[str, object]:
    """The values of a field of a session's rules by their dotted keys, as the configuration has
    them; empty if no key gives the field."""
    key, value = key_of(name), getattr(rules, name)
    if key is None:
        return {}
    if name in _counted_otherwise(rules):
        return {key: None}
    if not key.endswith("*"):
        if name == "initial" and value == "empty":
            value = "average"
        elif name == "evaluate_minimised":
            value = "min" if value else "max"
        return {key: value}
    if isinstance(value, str):
        value = json.loads(value or "{}")
    elif isinstance(value, DataSchema):
        table = dict(zip(value.__slots__, astuple(value), strict=True))
        del table["columns"]
        table |= {f"columns.{column.name}": column.type for column in value.columns}
        value = table | {f"units.{c.name}": c.unit for c in value.columns if c.unit}
    return {
        f"{'workload.' if key == _OF_WORKLOAD and item in REMEDY else key[:-1]}{item}": of_item
        for item, of_item in value.items()
    }


def _counted_otherwise(rules: Rules) -> set[str]:
    """Fields of the length of a training that are not set, but follow from the others."""
    if not rules.passes:
        return {"passes"}
    follow = {"rounds"}
    follow |= {"epochs"} if rules.plans_epochs else set()
    return follow | ({"evaluate_patience"} if rules.evaluate_patience_rows else set())


def shown(schema: Schema, key: str, values: Mapping[str, object]) -> str:
    """A key's value as text; "(not set)" without one, and masked if it is secret."""
    value = values.get(key)
    if value is None:
        return "(not set)"
    if isinstance(value, list | tuple | dict):
        value = json.dumps(value)
    return schema.shown(tuple(key.split(".")), value)


def settings_of(rules: Rules) -> dict[str, str]:
    """The settings of a session that are not the defaults, as text by their dotted keys."""
    schema, default = Schema(CoordinatorConfig), CoordinatorConfig().rules()
    found: dict[str, str] = {}
    for field in fields(Rules):
        own, usual = (as_configured(of, field.name) for of in (rules, default))
        for key in own:
            if own[key] is not None and own[key] != usual.get(key):
                found[key] = shown(schema, key, own)
    return found
