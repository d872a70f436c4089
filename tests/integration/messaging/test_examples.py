"""The examples, as somebody would run them."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "messaging" / "examples"


def run(name: str, *flags: str) -> str:
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            shown, errors = process.communicate(timeout=100)
        finally:  # with those that it has started
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    return shown


@pytest.mark.parametrize("driver", ["grpc", "zmq"])
def test_sum_by_scatter(driver):
    assert "sum: 499999500000, numpy: 499999500000" in run("sum_by_scatter.py", "--driver", driver)


def test_parameter_averaging():
    """The line is found, though nobody waits for the last two of five."""
    last = run("parameter_averaging.py").splitlines()[-1]
    _, slope, _, intercept, *_ = last.replace(",", "").replace(";", "").split()
    assert float(slope) == pytest.approx(2, abs=0.05)
    assert float(intercept) == pytest.approx(-1, abs=0.05)


def test_actor_learner():
    """An actor is killed and comes back; all that was asked is answered."""
    shown = run("actor_learner.py", "--driver", "zmq")
    assert "round 2: 1 answers, missing: actor-1" in shown
    assert "late: round 2 of actor-1" in shown
    assert "asked 12, answered 12" in shown


def test_every_example_is_run():
    """Here."""
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{path.name}"' in text for path in EXAMPLES.glob("*.py"))
