"""What the SDK prints in a process that has configured no logs."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable

from integration.participant.scripted import ScriptedCoordinator

PROGRAM = textwrap.dedent(
    """
    import sys, numpy as np
    from xain_participant import Participant, run

    class Still(Participant):
        def init_weights(self):
            return np.zeros(4)

        def train_round(self, weights, epochs, epoch_base):
            return weights, 1

    status = run(Still(), sys.argv[1], "ward-7")
    print("done")
    sys.exit(status)
    """
)


def test_standard_output_is_the_callers(serve: Callable[..., ScriptedCoordinator]) -> None:
    """Logs go to standard error, and an ordinary run has no warnings and no errors in them."""
    command = [sys.executable, "-c", PROGRAM, serve().target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout == "done\n"
    entries = [json.loads(line) for line in done.stderr.splitlines()]
    assert {entry["level"] for entry in entries} == {"info"}
    assert entries[-1]["event"] == "exiting"
    assert "connection_lost" not in {entry["event"] for entry in entries}
