"""The programs of the parameter server, as processes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = [
    sys.executable,
    "-c",
    "import sys; from xain_parameters.cli import main; sys.exit(main())",
]
LONG_S = 30.0


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, timeout=LONG_S, check=False
    )


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_scheduler_tells_its_status_and_stops_cleanly(tmp_path: Path, stop: signal.Signals) -> None:
    command = [*PROGRAM, "scheduler", "--listen", "127.0.0.1:0", "--data", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        target = process.stderr.readline().split()[-1]
        status = run("status", "--scheduler", target)
        assert (status.returncode, status.stderr) == (0, "")
        assert status.stdout.startswith("parameters: 0 servers, 0 ranges, 0 tables, 0 workers;")
        second = run("scheduler", "--listen", "127.0.0.1:0", "--data", str(tmp_path))
        assert second.returncode == 1
        assert "another scheduler has" in second.stderr
        refused = run("checkpoint", "--scheduler", target)
        assert refused.returncode == 1
        assert "without --checkpoints" in refused.stderr
        process.send_signal(stop)
        assert process.wait(LONG_S) == 0


def test_server_joins_and_leaves_with_sigterm(tmp_path: Path) -> None:
    first = [*PROGRAM, "scheduler", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "a")]
    with subprocess.Popen(first, stderr=subprocess.PIPE, text=True) as scheduler:
        assert scheduler.stderr is not None
        target = scheduler.stderr.readline().split()[-1]
        second = [*PROGRAM, "serve", "--scheduler", target, "--name", "s1", "--data", str(tmp_path)]
        with subprocess.Popen(second, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            assert "s1 serving on 127.0.0.1:" in server.stderr.readline()
            assert "server s1 at 127.0.0.1:" in run("status", "--scheduler", target).stdout
            server.send_signal(signal.SIGTERM)
            assert server.wait(LONG_S) == 0
        assert "server s1" not in run("status", "--scheduler", target).stdout
        scheduler.send_signal(signal.SIGTERM)
        assert scheduler.wait(LONG_S) == 0


def test_wrong_settings_are_refused_in_one_line(tmp_path: Path) -> None:
    for arguments, text in (
        (["--replicas", "many"], "scheduler.replicas is"),
        (["--listen", "nowhere:x"], "is no address"),
        (["--checkpoint-interval", "5"], "scheduler.checkpoints is not"),
    ):
        refused = run("scheduler", "--data", str(tmp_path), *arguments)
        assert refused.returncode == 2
        assert text in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_status_of_nobody_is_one_line() -> None:
    asked = run("status", "--scheduler", "127.0.0.1:1", "--timeout", "0.5")
    assert asked.returncode == 1
    assert asked.stderr.startswith("xain-parameter-server: the scheduler at 127.0.0.1:1 does not")
