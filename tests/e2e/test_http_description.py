"""The HTTP face keeps to its OpenAPI description, whatever is sent to it."""

import subprocess
import sys

from support import http_hooks
from support.served import PATIENCE_S, Served

# All checks are on. Two of them know only what every API does: a description cannot tell that a fit
# is refused while another one goes on (409), that a round has no model (404), that rows do not fit
# the model (422), or that the participant has not joined the next session yet (503).
CONFIG = f"""
seed = 1
hooks = "{http_hooks.__file__}"

[generation]
max-examples = 3
deterministic = true
database = "none"

[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "503"]
positive_data_acceptance.expected-statuses = ["2xx", "404", "409", "422", "503"]
"""


def test_schemathesis_finds_nothing(tmp_path):
    """All operations but /v1/events, which has no end, while a participant fits what is requested.

    The participant stays: no request makes its work fail.
    """
    with Served(tmp_path / "http") as served:
        served.start(**{"rounds.rounds": 1, "rounds.min_participants": 1})
        served.join("north")
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
            timeout=4 * PATIENCE_S,
        )
        assert run.returncode == 0, run.stdout[:9000] + run.stderr[-2000:]
        assert served.is_running("coordinator")
        assert served.is_running("north")
        assert "http_crashed" not in served.log()
        fits = served.log("north").count('"event": "session_finished"')
        assert fits > 5, "fits that were requested go to their end"
