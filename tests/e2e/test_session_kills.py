"""A server's script that is killed between any two lines, again and again: the same rounds, each
configured and evaluated once, and the same models, bit for bit.

    make session-kills KILLS=200
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from support.process import PATIENCE_S
from support.ray_nodes import ENVIRONMENT, Node
from support.session_script import ROUNDS, SITES
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_foundation.net.sockets import free_ports

KILLS = int(os.environ.get("KILLS") or 3)
KILLS_ON_RAY = int(os.environ.get("KILLS_ON_RAY") or 1)
SEED = int(os.environ.get("SEED") or 0)
KILLS_A_SESSION = 3
TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(900 + 60 * KILLS)


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


class ConnectedScript(Script):
    """The same script with a coordinator in a process of its own, which outlives it."""

    first_round = 1  # before it the sites make the model

    def __init__(self, port: int) -> None:
        super().__init__("connect", port)

    @contextmanager
    def served(self, folder: Path) -> Iterator[None]:
        flags = [f"--set={key}={value}" for key, value in COORDINATOR.items()]
        program = [sys.executable, "-m", "xain_coordinator", f"--data-dir={folder}"]
        folder.mkdir()
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen([*program, f"--port={self._port}", *flags], stderr=log) as process,
        ):
            try:
                while not (folder / "journal.sock").exists():
                    assert process.poll() is None, (folder / "log").read_text()
                    time.sleep(0.02)  # a poll, not a race: it ends when the file is there
                yield
            finally:
                process.kill()


COORDINATOR = {
    "rounds.scripted": "true",
    "rounds.rounds": ROUNDS,
    "rounds.min_participants": len(SITES),
    "aggregation.rule": "median",
    "evaluate.metric": "r2",
}


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


def test_script_that_is_killed_at_any_line_goes_on_in_the_same_round(tmp_path):
    (port,) = free_ports(1)
    with sites(port):
        killed_and_started_again(Script("server", port), tmp_path, KILLS)


def test_script_of_a_coordinator_elsewhere_goes_on_likewise(tmp_path):
    (port,) = free_ports(1)
    with sites(port):
        killed_and_started_again(ConnectedScript(port), tmp_path, KILLS)


def test_script_that_simulates_its_sites_goes_on_likewise(tmp_path):
    killed_and_started_again(Script("local", 0), tmp_path, KILLS)


def test_script_that_simulates_its_sites_on_ray_goes_on_likewise(tmp_path):
    node = Node(2, tmp_path)
    try:
        node.wait_until_up()
        killed_and_started_again(Script(node.address, 0), tmp_path, KILLS_ON_RAY)
    finally:
        node.kill()
