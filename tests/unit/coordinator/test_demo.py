"""The parts of the demo that need no other process."""

import io
import re
import signal
from pathlib import Path

import grpc
import numpy as np
import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from xain_coordinator.cli.demo import cli, view
from xain_coordinator.cli.demo.cli import Abandoned, _ask
from xain_coordinator.cli.demo.fleet import Fleet, FleetError
from xain_coordinator.cli.demo.interrupts import Interrupts
from xain_coordinator.cli.demo.training import accuracy_on, split
from xain_proto.fl import inspection_pb2 as inspection
from xain_workloads.data import Dataset
from xain_workloads.workload import create, evaluate, fit_centralised


def test_rows_of_classes_that_the_model_does_not_know_count_as_wrong():
    """Half of the test rows are of a class that nobody had when the model was made."""
    features = np.array([[-1.0], [-2.0], [1.0], [2.0]])
    known = Dataset(features, np.array(["a", "a", "b", "b"]))
    model = fit_centralised(create("sgd"), known, epochs=50, seed=0)
    assert accuracy_on(model, known) == 1.0
    assert accuracy_on(model, Dataset(features, np.array(["a", "a", "c", "c"]))) == 0.5


def test_accuracy_is_that_of_the_workload():
    """Where all classes are known the measure is the workload's own."""
    data = split(2, 0.5, 0)
    model = fit_centralised(create("sgd"), data.train, epochs=1, seed=0)
    assert accuracy_on(model, data.test) == evaluate(model, data.test)["accuracy"]


def test_alpha_has_a_largest_value():
    """Beyond it there would be no split; the option says so before anything is started."""
    result = CliRunner().invoke(cli.app, ["--alpha", "1e9"])
    assert result.exit_code == 2
    assert "--alpha" in result.output


def test_demo_gives_up_only_after_a_lease_without_participants():
    """Whoever starts a site again by hand has the length of a lease for it."""
    abandoned = Abandoned()
    assert not abandoned.after(0.0, True)
    assert not abandoned.after(2.9, True)
    assert not abandoned.after(3.1, False)  # somebody came
    assert not abandoned.after(3.2, True)
    assert not abandoned.after(6.1, True)
    assert abandoned.after(6.3, True)


class Answer(grpc.RpcError, grpc.Call):
    """What a stub raises."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "these are the details"


# The other methods of a call have no use here.
Answer.__abstractmethods__ = frozenset()


class Alive(Fleet):
    """A coordinator that runs all the time."""

    def __init__(self) -> None:
        pass

    def revive(self) -> bool:
        return False


def test_only_passing_refusals_are_borne():
    """A question is asked again while the coordinator is away, but not if it refuses."""
    left = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED]

    def question() -> str:
        if left:
            raise Answer(left.pop())
        return "answer"

    assert _ask(Alive(), question) == "answer"
    left.append(grpc.StatusCode.UNIMPLEMENTED)
    with pytest.raises(FleetError, match="UNIMPLEMENTED: these are the details"):
        _ask(Alive(), question)


def test_why_the_coordinator_did_not_start(tmp_path: Path):
    """The message quotes the log, since the folder may be gone when it is read."""
    fleet = Fleet(tmp_path, {"rounds.epochs": "many"}, {}, Interrupts())
    try:
        with pytest.raises(FleetError, match=r"(?s)did not start.*rounds\.epochs"):
            fleet.start()
    finally:
        fleet.stop()


def test_a_signal_waits_for_what_must_be_done_whole():
    """While it is held back nothing is raised, and afterwards it is not forgotten."""
    interrupts = Interrupts()
    done = []

    def hold() -> None:
        with interrupts.held():
            signal.raise_signal(signal.SIGTERM)
            done.append("whole")

    with interrupts.installed():
        with pytest.raises(KeyboardInterrupt):
            hold()
        signal.raise_signal(signal.SIGHUP)  # at once, and so the same wish
        interrupts.hold_to_the_end()
        signal.raise_signal(signal.SIGINT)
    assert done == ["whole"]
    assert interrupts.exit_status == 128 + signal.SIGTERM


def test_without_a_participant_to_run_it_says_what_to_install(monkeypatch):
    """A coordinator alone, as its container image has it, neither trains nor loads data."""
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    result = CliRunner().invoke(cli.app, [])
    assert result.exit_code == 1
    assert result.stderr == (
        "xain-coordinator demo: it runs participants here, too: pip install xain-participant\n"
    )


class Gone:
    """A participant's process that was killed."""

    def status(self) -> int:
        return 128 + signal.SIGKILL


class OneGone(Alive):
    def __init__(self) -> None:
        self.participants = {"site-1": Gone()}
        self.restarts = 1


@pytest.mark.parametrize(
    ("federated", "centralised", "difference"),
    [(0.9557, 0.9583, "-0.2"), (0.95649, 0.9574, "-0.1"), (0.9, 0.9, "+0.0")],
)
def test_demo_shows_the_difference_of_the_numbers_it_shows(federated, centralised, difference):
    """95.6 % beside 95.8 % differ by 0.2 points, whatever further digits say."""
    status = inspection.GetStatusResponse(cause="completed")
    shown = shown_text(view.comparison(status, OneGone(), federated, centralised))
    left, right = re.findall(r"(\d+\.\d)%", shown)
    assert f"{float(left) - float(right):+.1f}" == difference
    assert f"{difference} points" in shown
    assert "The coordinator was killed once and came back." in shown


def shown_text(renderable: RenderableType) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()
