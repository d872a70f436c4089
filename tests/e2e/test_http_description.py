"""The HTTP face keeps to its OpenAPI description, whatever is sent to it."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.served import PATIENCE_S, Served

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

# Beside statuses that every description may have: 422 is the answer to a request that fits the
# description and not the model, such as one with unknown columns. Nobody is left for a fit: 503.
CONFIG = """
seed = 1

[generation]
max-examples = 2
deterministic = true

[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "503"]
positive_data_acceptance.expected-statuses = ["2xx", "404", "409", "422", "503"]
"""


def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """All operations but /v1/events, which has no end, of a coordinator with a fitted model."""
    with Served(tmp_path / "http") as served:
        served.start(
            **{
                "rounds.rounds": 1,
                "rounds.min_participants": 1,
                "http.participants_timeout_s": 0.05,
                "server.heartbeat_timeout_s": 0.2,
            }
        )
        served.join("north", serve=False)
        served.until(lambda: served.status()["connected"] == 1)
        assert served.fit(wait=True).status_code == 200
        config = tmp_path / "schemathesis.toml"
        config.write_text(CONFIG)
        run = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", f"--config-file={config}"),
                *("run", f"{served.client.base_url}/v1/openapi.json", "--exclude-path=/v1/events"),
            ],
            cwd=tmp_path,  # it keeps what it has found
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        assert run.returncode == 0, run.stdout[:9000] + run.stderr[-2000:]
        assert served.is_running("coordinator")
        assert "http_crashed" not in served.log()
