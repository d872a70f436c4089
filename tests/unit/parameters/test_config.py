"""The settings of the scheduler and of a server, and their examples in configs/."""

from pathlib import Path

import pytest

from support.examples import keys_in, keys_of
from xain_foundation.settings.settings import ConfigError, load
from xain_parameters.config import SchedulerConfig, ServerConfig

CONFIGS = Path(__file__).parents[3] / "configs"
EXAMPLES = [
    pytest.param(SchedulerConfig, "parameter-server-scheduler.toml", id="scheduler"),
    pytest.param(ServerConfig, "parameter-server-serve.toml", id="server"),
]


@pytest.mark.parametrize(("model", "file"), EXAMPLES)
def test_examples_load_and_tell_every_key(model, file):
    load(model, CONFIGS / file)
    told = {key for key in keys_in([CONFIGS / file]) if "." in key}
    assert {key for key in told if not key.startswith("tls.roles.")} == keys_of(model)


def test_checkpoint_interval_without_a_folder_is_refused():
    with pytest.raises(ConfigError) as caught:
        load(SchedulerConfig, overrides={"scheduler.checkpoint_interval": 5})
    assert "scheduler.checkpoint_interval is 5" in str(caught.value)
    assert "scheduler.checkpoints must be given" in str(caught.value)
    load(
        SchedulerConfig,
        overrides={"scheduler.checkpoint_interval": 5, "scheduler.checkpoints": "cuts"},
    )


@pytest.mark.parametrize("lease_s", ["2", "inf", "nan"])
def test_worker_lease_below_the_lease_of_a_member_or_without_end_is_refused(lease_s):
    with pytest.raises(ConfigError, match=r"scheduler\.worker_lease_s is"):
        load(SchedulerConfig, overrides={"scheduler.worker_lease_s": lease_s})
    loaded = load(SchedulerConfig, overrides={"scheduler.worker_lease_s": "60"})
    assert loaded.scheduler.worker_lease_s == 60
