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

from support.session_script import ROUNDS
from xain_coordinator.core import events as e
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_foundation.sockets import free_ports

KILLS = int(os.environ.get("KILLS") or 6)
SEED = int(os.environ.get("SEED") or 0)
KILLS_A_SESSION = 3
TESTS = Path(__file__).parents[1]
LONG_S = 300.0

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900 + 60 * KILLS)]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "support.session_script", *map(str, arguments)]


def served(folder: Path, port: int, at: int = 0) -> dict[str, Any] | None:
    """The result of the script, or None if it was killed at that line."""
    done = subprocess.run(
        command("server", folder, port, at),
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


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


def test_script_that_is_killed_at_any_line_goes_on_in_the_same_round(tmp_path: Path) -> None:
    chance, num_kills, number = Random(SEED), 0, 0
    (port,) = free_ports(1)
    with sites(port):
        undisturbed = served(tmp_path / "undisturbed", port)
        assert undisturbed is not None
        num_lines = undisturbed.pop("lines")
        while num_kills < KILLS:
            number += 1
            folder = tmp_path / f"session{number}"
            for _ in range(KILLS_A_SESSION):
                ended = served(folder, port, chance.randrange(1, num_lines))
                if ended is not None:
                    break
                num_kills += 1
            else:
                ended = served(folder, port)
            assert ended is not None
            ended.pop("lines")
            assert ended == undisturbed
            assert Counter(decisions(folder)) == Counter(
                [("configured", one) for one in range(ROUNDS)]
                + [("evaluated", one + 1) for one in range(ROUNDS)]
            )
