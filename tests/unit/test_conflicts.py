"""Conflicts between the settings of each program are told all at once."""

import re
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xain_coordinator.cli.launch.sparse import SparseConfig
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_foundation.settings.fields import Section
from xain_foundation.settings.schema import Schema, dotted
from xain_foundation.settings.settings import ConfigError, load
from xain_parameters.config import SchedulerConfig, ServerConfig
from xain_participant.config import ParticipantConfig

PROGRAMS = (CoordinatorConfig, ParticipantConfig, SchedulerConfig, ServerConfig, SparseConfig)

# Settings. Behind a line stand the keys of the conflicts that the line makes.
UNREAD = """
[evaluate]
direction = "max"  # evaluate.direction
every = 0
target = "y"  # evaluate.target
scale = 2.0  # evaluate.scale
[parameters]
port = 0
host = "::"  # parameters.advertised
[rounds]
rounds = 2
epochs = 2147483647  # rounds.epochs
min_participants = 3
max_participants = 2  # rounds.max_participants
start_participants = 2  # rounds.start_participants
expected_participants = ["a", "a"]  # rounds.expected_participants
controller = "best"  # rounds.controller
tags = {"a:b" = "x", "c:d" = "x"}  # rounds.tags."a:b" rounds.tags."c:d"
staleness = 2  # rounds.staleness
buffer_size = 2  # rounds.buffer_size
over_selection = 0.5  # rounds.over_selection
pacing_options = {a = 1}  # rounds.pacing_options
start = "request"  # rounds.start
quorum = "participant:model:1"  # rounds.quorum
[schema]
units = {x = "kg", y = "kg"}  # schema.units.x schema.units.y
columns = {age = "number"}
target = "age"  # schema.target
classes = ["a"]  # schema.classes
[workload]
options = {a = 1}  # workload.options
[aggregation]
rule = "best"  # aggregation.rule
optimizer_options = {a = 1}  # aggregation.optimizer_options
[storage]
endpoint = "http://h"  # storage.endpoint
region = "r"  # storage.region
format = "xain-pickle"  # storage.format
[metrics]
url = "http://h"  # metrics.url
token = "t"
token_file = "t"  # metrics.token_file
[logging]
status_file = "a"
latency_file = "a"  # logging.latency_file
[train]
lr = inf  # train.lr
epochs = 3  # train.epochs
[launch]
names = ["a", "a"]  # launch.names
workers = 3  # launch.workers
ports = [1, 1]  # launch.ports
cpu_shares = 1  # launch.cpu_shares
"""
INCOMPLETE = """
[evaluate]
metric = "elegance"  # evaluate.direction
data = "rows.doc"  # evaluate.data
min_delta = 0.5  # evaluate.min_delta
[rounds]
consistency = "ssp"  # rounds.staleness
over_selection = 0.5  # rounds.over_selection
quorum = "participant:update:1"  # rounds.quorum
[workload]
name = "best"  # workload.name
[aggregation]
rule = "sum"
options = {a = 1}  # aggregation.options.a
optimizer = "best"  # aggregation.optimizer
[storage]
kind = "s3"  # storage.bucket
access_key_id = "a"  # storage.secret_access_key
[metrics]
kind = "influxdb"  # metrics.url metrics.org metrics.bucket
"""
BETWEEN_SECTIONS = """
[rounds]
epochs = 2  # rounds.epochs
min_participants = 3
initial_weights = "first"  # rounds.initial_weights
[evaluate]
metric = "accuracy"  # evaluate.metric
data = "iris"  # evaluate.data
[workload]
name = "bagging"
preprocessing = {scaling = "site"}  # workload.preprocessing.scaling
[aggregation]
rule = "ensemble"
[model]
personal = ["head.*"]  # model.personal
[server]
max_update_norm = 1.0  # server.max_update_norm
[schema]
task = "regression"  # schema.task
[http]
port = 0  # http.port
[storage]
kind = "s3"
bucket = "b"
format = "xain-pickle"  # storage.format
"""
STAGES = """
[rounds]
epochs = 0  # rounds.epochs
min_participants = 3  # rounds.min_participants
initial_weights = "average"  # rounds.initial_weights
quorum = "participant:update:1"  # rounds.quorum
[aggregation]
rule = "assemble"
options = {stages = 2}
"""
PARTICIPANT = """
[participant]
tags = {"a:b" = "x", "c:d" = "x"}  # participant.tags."a:b" participant.tags."c:d"
[data]
source = "diabetes"
target = "y"  # data.target
classes = ["a", "b"]  # data.task
[partition]
index = 9  # partition.index
num_parts = 3  # partition.num_parts
"""
LAUNCH = """
[scheduler]
checkpoint_interval = 1  # scheduler.checkpoint_interval
[launch]
workers = 3  # launch.workers
names = ["a", "b"]
ports = [1]  # launch.ports
"""
SCHEDULER = "[scheduler]\ncheckpoint_interval = 1  # scheduler.checkpoint_interval"


def told(model: type[Section], file: Path, **mistakes: object) -> list[str]:
    """Lines about the settings in a file, without their sources."""
    with pytest.raises(ConfigError) as caught:
        load(model, file, overrides=mistakes)
    return [line.partition(": ")[2] for line in str(caught.value).splitlines()]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        pytest.param(CoordinatorConfig, UNREAD, id="unread"),
        pytest.param(CoordinatorConfig, INCOMPLETE, id="incomplete"),
        pytest.param(CoordinatorConfig, BETWEEN_SECTIONS, id="between sections"),
        pytest.param(CoordinatorConfig, STAGES, id="stages"),
        pytest.param(ParticipantConfig, PARTICIPANT, id="participant"),
        pytest.param(SparseConfig, LAUNCH, id="launch"),
        pytest.param(SchedulerConfig, SCHEDULER, id="scheduler"),
    ],
)
def test_all_conflicts_are_told_at_once(model, text, tmp_path):
    """Conflicts within a section and between sections are told, and the same ones beside a wrong
    value, an unknown section, and unknown keys in several sections."""
    file = tmp_path / "settings.toml"
    file.write_text(text)
    expected = [key for line in text.splitlines() for key in line.partition("# ")[2].split()]
    conflicts = told(model, file)
    assert sorted(re.split(" is |: ", line)[0] for line in conflicts) == sorted(expected)
    unlike = "z" * 20  # no key, and not a misspelt one
    unknown = [unlike, *(f"{dotted(section)}.{unlike}" for section in Schema(model).sections[:6])]
    mistakes = told(model, file, **{"logging.console": "maybe", **dict.fromkeys(unknown, 1)})
    assert mistakes[-len(conflicts) :] == conflicts
    assert len(mistakes) == len(conflicts) + len(unknown) + 1


def leaves(text: str) -> list[tuple[str, object]]:
    """The keys of a file and their values."""
    return [
        (f"{section}.{key}", value)
        for section, table in tomllib.loads(text).items()
        for key, value in table.items()
    ]


LEAVES = [leaf for text in (UNREAD, INCOMPLETE, BETWEEN_SECTIONS, STAGES) for leaf in leaves(text)]
TYPED = [key for key, _ in LEAVES if not key.startswith("train.")]


@given(
    chosen=st.lists(st.sampled_from(LEAVES), min_size=1, max_size=12),
    wrong=st.lists(st.sampled_from(TYPED), max_size=2),
)
def test_checks_read_nothing_of_what_is_wrong(chosen, wrong):
    """Any of the settings together, some of them with a value of no key's type, are taken, or
    refused with no conflict of a key whose value is wrong."""
    nothing = date(1979, 5, 27)
    try:
        load(CoordinatorConfig, overrides={**dict(chosen), **dict.fromkeys(wrong, nothing)})
    except ConfigError as error:
        told = str(error).splitlines()
        for key in set(wrong):
            assert len([line for line in told if line.startswith(f"command line: {key} is ")]) == 1
    else:
        assert not wrong


def sections(model: type[Section]) -> Iterator[type[Section]]:
    yield model
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from sections(field.annotation)


@pytest.mark.parametrize("model", PROGRAMS)
def test_conflicts_are_found_by_checks_alone(model):
    """A validator of pydantic that raises would hide all checks of its section."""
    for section in sections(model):
        validators = section.__pydantic_decorators__.model_validators.items()
        after = [name for name, each in validators if each.info.mode == "after"]
        assert after == ["_has_no_conflict"]
