"""A coordinator within another program: `from xain_coordinator import Coordinator`."""

import gc
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from support.trainee import Trainee
from support.waiting import beside, wait_until
from xain_coordinator import Coordinator
from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.core.vocabulary.values import Phase
from xain_foundation.exit_statuses import EXIT_FAILED, EXIT_OK, CommandFailed
from xain_foundation.settings.settings import ConfigError
from xain_participant import Agent

PATIENCE_S = 240.0  # for what takes seconds, on a machine that has other things to do


def settings(folder: Path, **rounds: Any) -> dict[str, Any]:
    return {
        "server": {"port": 0, "heartbeat_time_s": 1.0},
        "storage": {"path": folder / "weights"},
        "journal.path": folder / "journal.sqlite",
        "metrics": {"kind": "none"},
        "rounds": {"rounds": 2, "initial_weights": "average", "min_participants": 1, **rounds},
    }


def test_session_is_held_and_found_again(tmp_path):
    """Nothing of the process is changed, and the journal is free after stop()."""
    before = [sys.getswitchinterval(), gc.get_freeze_count(), signal.getsignal(signal.SIGTERM)]
    with Coordinator(settings(tmp_path)) as coordinator:
        assert coordinator.address == f"127.0.0.1:{coordinator.port}"
        with pytest.raises(TimeoutError):
            coordinator.wait(timeout_s=0.0)
        assert Agent(Trainee("north", 10), coordinator.address, "north").run() == EXIT_OK
        session = coordinator.wait(PATIENCE_S)
        assert (session.phase, session.cause) == (Phase.FINISHED, "completed")
        assert coordinator.session.session_id == session.session_id
        assert coordinator.history.rounds[-1].round == 1
    assert coordinator.stop() == EXIT_OK
    after = [sys.getswitchinterval(), gc.get_freeze_count(), signal.getsignal(signal.SIGTERM)]
    assert after == before
    again = Coordinator(settings(tmp_path)).start()
    assert again.session.session_id == session.session_id
    again.stop()
    with pytest.raises(RuntimeError, match="started before"):
        again.start()


def test_wait_ends_with_the_coordinator(tmp_path):
    coordinator = Coordinator(settings(tmp_path)).start()
    stopping = threading.Timer(0.1, coordinator.stop)
    stopping.start()
    with pytest.raises(Unavailable):
        coordinator.wait(PATIENCE_S)
    stopping.join()
    with pytest.raises(Unavailable):
        coordinator.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"rounds": {"rounds": -1}}, r"^rounds\.rounds is -1"),
        ({"round": {"rounds": 1}}, "^unknown key round"),
        ({"rounds.round": 1}, r"^unknown key rounds\.round; did you mean rounds\.rounds"),
    ],
)
def test_wrong_settings_are_named(wrong, why):
    with pytest.raises(ConfigError, match=why):
        Coordinator(wrong)


def test_start_raises_what_keeps_it_from_starting(tmp_path):
    with Coordinator(settings(tmp_path / "one")) as first:
        taken = settings(tmp_path / "two") | {"server": {"port": first.port}}
        with pytest.raises(CommandFailed):
            Coordinator(taken).start()


def test_stop_before_run_is_not_lost(tmp_path):
    coordinator = Coordinator(settings(tmp_path))
    assert coordinator.stop() == EXIT_OK
    statuses = []
    with beside(lambda: statuses.append(coordinator.run())):
        pass
    assert statuses == [EXIT_OK]
    stopped = Coordinator(settings(tmp_path))
    stopped.stop()
    with pytest.raises(Unavailable, match="has stopped"):
        stopped.start()


def test_stop_waits_for_the_end_of_run(tmp_path):
    """The journal is free then."""
    coordinator = Coordinator(settings(tmp_path))
    with beside(coordinator.run):
        assert coordinator._is_up.wait(PATIENCE_S)
        with pytest.raises(RuntimeError, match="started before"):
            coordinator.run()
        assert coordinator.stop() == EXIT_OK
        with Coordinator(settings(tmp_path)) as again:
            assert again.session.session_id == coordinator.session.session_id


def test_error_of_the_coordinator_is_its_exit_status(tmp_path, monkeypatch):
    def fails(**_: Any) -> int:
        raise RecursionError("too deep")

    coordinator = Coordinator(settings(tmp_path))
    monkeypatch.setattr(coordinator, "_serve_sessions", fails)
    with pytest.raises(RecursionError):
        coordinator.start()
    assert coordinator.stop() == EXIT_FAILED


def test_run_serves_until_a_signal_comes(tmp_path):
    code = f"""
from xain_coordinator import Coordinator
coordinator = Coordinator({{
    "server": {{"port": 0, "port_file": r"{tmp_path / "port"}"}},
    "storage.path": r"{tmp_path / "weights"}",
    "journal.path": r"{tmp_path / "journal.sqlite"}",
    "metrics.kind": "none",
}})
print("status", coordinator.run())
"""
    ran = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    wait_until((tmp_path / "port").exists)
    ran.send_signal(signal.SIGTERM)
    output, _ = ran.communicate(timeout=PATIENCE_S)
    assert output == "status 0\n"  # a library prints nothing
