from pathlib import Path

import pytest

from support.examples import keys_in, keys_of
from xain_foundation.settings.settings import ConfigError, load
from xain_participant.config import ENV_PREFIX, ParticipantConfig
from xain_workloads.tables.partition import Partition

CONFIGS = Path(__file__).parents[3] / "configs"


def error_of(**overrides: object) -> str:
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    with pytest.raises(ConfigError) as caught:
        load(ParticipantConfig, overrides=given)
    return str(caught.value).removeprefix("command line: ")


def test_environment(monkeypatch):
    """One file for a fleet; name and part come from the environment."""
    monkeypatch.setenv("XAIN_PARTICIPANT_PARTICIPANT__ID", "007")
    monkeypatch.setenv("XAIN_PARTICIPANT_PARTITION__INDEX", "3")
    file = CONFIGS / "participant-digits-partition.toml"
    config = load(ParticipantConfig, file, ENV_PREFIX)
    assert config.participant.id == "007"
    assert config.partition.partition() == Partition("dirichlet", 4, 3, 0.5, 0)


def test_ipv6():
    """An address in brackets and one without lead to the same channel."""
    for host in ("::1", "[::1]"):
        config = load(ParticipantConfig, overrides={"coordinator.host": host})
        assert config.coordinator.address == "[::1]:50051"


def test_wrong_settings():
    """One line that names the key."""
    assert error_of(partition__index=1).startswith("partition.index is 1")
    assert error_of(partition__num_parts=2).startswith("partition.num_parts is 2")
    assert error_of(partition__alpha=0).startswith("partition.alpha is 0")
    assert error_of(data__task="clustering").startswith('data.task is "clustering"')
    assert error_of(data__test_fraction=1).startswith("data.test_fraction is 1")
    assert error_of(data__scale="nan").startswith("data.scale is nan")
    assert error_of(data__scale=0).startswith("data.scale is 0")
    assert error_of(coordinator__port=0).startswith("coordinator.port is 0; it must be a whole")
    assert error_of(storage__bucket="b").startswith("storage.bucket is gone: weights travel")


@pytest.mark.parametrize("source", ["iris", "part.npz", "part.libsvm"])
def test_a_target_where_no_column_has_a_name_is_a_wrong_setting(source):
    told = error_of(data__source=source, data__target="label")
    assert told.startswith(
        'data.target is "label"; only files that end in one of: .csv, .tsv, .parquet'
    )


def test_diabetes_has_no_classes():
    told = 'data.task: it must be "regression": the target of diabetes is a measurement'
    assert error_of(data__source="diabetes") == told
    overrides = {"data.source": "diabetes", "data.task": "regression"}
    assert load(ParticipantConfig, overrides=overrides).data.task == "regression"


def test_files_of_all_kinds_are_sources():
    for name in ("a.csv", "a.PARQUET", "a.npz", "a.libsvm", "iris"):
        assert load(ParticipantConfig, overrides={"data.source": name}).data.source == name


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("participant-*.toml")), ids=lambda f: f.stem)
def test_examples_load(file):
    assert load(ParticipantConfig, file).data.source


def test_every_key_occurs_in_an_example():
    """The examples are the reference; a new key is explained there or nowhere."""
    assert keys_of(ParticipantConfig) <= keys_in(CONFIGS.glob("participant-*.toml"))


def test_no_file_in_configs_is_of_another_kind():
    """A file that no test loads would rot."""
    for file in CONFIGS.iterdir():
        assert file.name.startswith(("coordinator-", "parameter-server-", "participant-")), file
