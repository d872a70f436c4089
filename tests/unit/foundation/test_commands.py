"""What the command lines of coordinator and participant share."""

import pytest

from xain_coordinator.config.coordinator import ServerSettings
from xain_foundation.commands import DEFAULT_PORT, split_host_port
from xain_participant.config import CoordinatorSettings


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("fleet:1", "fleet", "1"),
        ("fleet", "fleet", None),
        ("[::1]:1", "[::1]", "1"),
        ("[::1]", "[::1]", None),
        ("::1", "::1", None),
        ("fleet:", "fleet", ""),
    ],
)
def test_split_host_port(address: str, host: str, port: str | None) -> None:
    assert split_host_port(address) == (host, port)


def test_default_port_is_the_same_on_both_sides() -> None:
    assert DEFAULT_PORT == ServerSettings().port == CoordinatorSettings().port
