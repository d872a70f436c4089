"""A server's script that is killed between any two lines, again and again: the same rounds, each
configured and evaluated once, and the same models, bit for bit.

    make session-kills KILLS=200
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from support.process import PATIENCE_S
from support.ray_nodes import ENVIRONMENT
from support.session_script import ROUNDS
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_foundation.net.sockets import free_ports

KILLS = int(os.environ.get("KILLS") or 3)
SEED = int(os.environ.get("SEED") or 0)
KILLS_A_SESSION = 3
TESTS = Path(__file__).parents[1]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900 + 60 * KILLS)]


class Script:
    """The script of session_script.py.

    sites: as it is told them: "server" for real ones, "local", or the address of a Ray cluster.
    """

    first_round = 0  # that the script configures

    def __init__(self, sites: str, port: int) -> None:
        self._sites = sites
        self._port = port

    def run(self, folder: Path, at: int = 0) -> dict[str, Any] | None:
        """Run it; returns its result, or None if it was killed at that line."""
        done = subprocess.run(
            command(self._sites, folder, self._port, at),
            cwd=TESTS,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env=ENVIRONMENT,
        )
        if done.returncode == -signal.SIGKILL:
            return None
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))

    @contextmanager
    def served(self, folder: Path) -> Iterator[None]:
        """The time of a session, whose coordinator runs in the script."""
        yield


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "support.session_script", *map(str, arguments)]


@contextmanager
def sites(port: int) -> Iterator[None]:
    with subprocess.Popen(command("sites", port), cwd=TESTS, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def decisions(folder: Path) -> list[tuple[str, int]]:
    """Rounds that were configured and models that were evaluated, as often as the journal has
    them."""
    with closing(SqliteJournal(folder / "journal.sqlite")) as journal:
        (session_id,) = journal.session_ids()
        records = journal.records_of(session_id)
        assert records is not None
        found = []
        for record in records:
            if isinstance(record.event, e.RoundConfigured):
                found.append(("configured", record.event.round))
            elif isinstance(record.event, e.ScriptEvaluated):
                found.append(("evaluated", record.event.round))
        return found


def killed_and_started_again(script: Script, folder: Path, kills: int) -> None:
    """Kill the script so often, in one session after the other, each of which ends as one that was
    not disturbed."""
    chance, num_kills, number = Random(SEED), 0, 0
    with script.served(folder / "undisturbed"):
        undisturbed = script.run(folder / "undisturbed")
    assert undisturbed is not None
    num_lines = undisturbed.pop("lines")
    while num_kills < kills:
        number += 1
        data = folder / f"session{number}"
        ended = None
        with script.served(data):
            for _ in range(KILLS_A_SESSION):
                ended = script.run(data, chance.randrange(1, num_lines))
                if ended is not None:
                    break
                num_kills += 1
            ended = ended or script.run(data)
        assert ended is not None
        ended.pop("lines")
        assert ended == undisturbed
        assert Counter(decisions(data)) == Counter(
            [("configured", script.first_round + one) for one in range(ROUNDS)]
            + [("evaluated", script.first_round + one + 1) for one in range(ROUNDS)]
        )


def test_script_that_is_killed_at_any_line_goes_on_in_the_same_round(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with sites(port):
        killed_and_started_again(Script("server", port), tmp_path, KILLS)
