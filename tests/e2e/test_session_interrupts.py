"""Ctrl-C while the coordinator in a script's process calls code of the script."""

import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from support.process import PATIENCE_S
from support.ray_nodes import ENVIRONMENT
from xain_coordinator.journal.sqlite import SqliteJournal

NAMES = "the rule __main__.Slow or the controller __main__.First"


def started(folder: Path, *what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "support.slow_script", str(folder), *what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def interrupted(folder: Path, *what: str) -> subprocess.Popen[str]:
    """A script that was interrupted in its code, and has said what it waits for."""
    script = started(folder, *what)
    while not (folder / "called").exists():
        assert script.poll() is None, script.communicate()
        time.sleep(0.02)  # a poll, not a race: it ends when the file is there
    script.send_signal(signal.SIGINT)
    assert script.stderr is not None
    told = next(line for line in script.stderr if line.startswith("the coordinator stops when"))
    assert NAMES in told
    assert "Ctrl-C ends the script at once" in told
    return script


@pytest.mark.parametrize(
    "what", [("rule",), ("controller",), ("rule", "asyncio")], ids=lambda words: " ".join(words)
)
@pytest.mark.parametrize("is_hurried", [False, True])
def test_interrupted_script_waits_for_its_code_unless_interrupted_again(tmp_path, what, is_hurried):
    """Either way the next start goes on with the session."""
    script = interrupted(tmp_path, *what)
    if is_hurried:
        script.send_signal(signal.SIGINT)
    else:
        (tmp_path / "go").touch()
    _, errors = script.communicate(timeout=PATIENCE_S)
    assert script.returncode == (128 + signal.SIGINT if is_hurried else -signal.SIGINT)
    assert ("Traceback" not in errors) == is_hurried, errors
    (tmp_path / "go").touch()
    again = started(tmp_path, *what)
    output, errors = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, errors
    assert output == "[2.0, 2.0, 2.0]\n"
    with closing(SqliteJournal(tmp_path / "data" / "journal.sqlite")) as journal:
        assert len(journal.session_ids()) == 1
