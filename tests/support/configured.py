"""Configurations of a coordinator from keywords: rounds__epochs=3 for rounds.epochs."""

import pytest

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_foundation.settings.settings import ConfigError, load


def config(**overrides: object) -> CoordinatorConfig:
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return load(CoordinatorConfig, overrides=given)


def error_of(**overrides: object) -> str:
    """The lines that a wrong configuration is refused with."""
    with pytest.raises(ConfigError) as caught:
        config(**overrides)
    return str(caught.value).removeprefix("command line: ")
