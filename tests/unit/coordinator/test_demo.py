"""The parts of the demo that need no training."""

import re
import signal

import pytest
from rich.console import Console
from typer.testing import CliRunner

from support.inspected import snapshot
from xain_coordinator.cli.demo import cli, view
from xain_coordinator.cli.demo.sites import DemoLaunch, Settings
from xain_coordinator.cli.launch import processes
from xain_coordinator.cli.launch.interrupts import Interrupts
from xain_coordinator.cli.launch.logs import LogView
from xain_coordinator.cli.launch.supervisor import Launcher
from xain_coordinator.inspection.client import Snapshot
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.wheels import pip_install
from xain_wire.fl import inspection_pb2 as inspection
from xain_wire.fl.coordinator_pb2 import Evaluation


def test_alpha_has_a_largest_value():
    """Beyond it there would be no split; the option says so before anything is started."""
    result = CliRunner().invoke(cli.app, ["--alpha", "1e9"])
    assert result.exit_code == 2
    assert "--alpha" in result.output


def test_log_of_a_coordinator_that_did_not_start_is_quoted(tmp_path):
    """The folder may be gone when the message is read."""
    backend = processes.ProcessBackend("127.0.0.1")
    launcher = Launcher(backend, LogView(["x"], colors=False, is_quiet=True), print)
    launch = DemoLaunch(Settings(2, -1, 0.5, 0), tmp_path, tmp_path / "a.html", Console(), launcher)
    try:
        with pytest.raises(CommandFailed, match=r"(?s)ended with status 2.*rounds\.rounds is -1"):
            launch.follow()
    finally:
        launch.stop()


def test_a_signal_waits_for_the_next_pause():
    """The first one decides about the exit status."""
    interrupts = Interrupts()
    with interrupts.installed():
        interrupts.pause(0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            interrupts.pause(0)
    assert interrupts.number == signal.SIGTERM


def test_without_the_participant_package_the_demo_names_it(monkeypatch):
    """A coordinator alone, as its container image has it, neither trains nor loads data."""
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    result = CliRunner().invoke(cli.app, [])
    assert result.exit_code == 1
    assert result.stderr.endswith(f": {pip_install('xain-participant', 'tables')}\n")


@pytest.mark.parametrize(
    ("federated", "centralised", "difference"),
    [(0.9557, 0.9583, "-0.2"), (0.95649, 0.9574, "-0.1"), (0.9, 0.9, "+0.0")],
)
def test_demo_shows_the_difference_of_the_numbers_it_shows(federated, centralised, difference):
    """95.6 % beside 95.8 % differ by 0.2 points, whatever further digits say."""
    shown = view.comparison(ended(360, federated), 360, centralised)
    left, right = re.findall(r"(\d+\.\d)%", shown)
    assert f"{float(left) - float(right):+.1f}" == difference
    assert f"{difference} points" in shown
    assert "sites that are left" not in shown


def test_demo_says_of_how_many_rows_its_accuracy_is():
    """A site that is gone measures nothing."""
    shown = view.comparison(ended(270, 0.9), 360, 0.9)
    assert "270 test rows" in shown


def ended(num_samples: int, accuracy: float) -> Snapshot:
    """The end of a session whose last model has this accuracy."""
    evaluation = Evaluation(num_samples=num_samples, metrics={"accuracy": accuracy})
    last = inspection.RoundStatus(evaluation=evaluation)
    return snapshot(cause="completed", rounds=[last])
