"""Settings of simulated participants, and what they load."""

import subprocess
import sys
from typing import Any

import pytest

import xain


def main(site: xain.Site) -> None: ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"participants": 0}, "participants is 0"),
        ({"workers": 0}, "workers is 0"),
        ({"backend": "slurm"}, 'backend is \'slurm\'; it must be "local" or "ray"'),
        ({"address": "auto"}, 'address and resources are of backend="ray"'),
        ({"resources": {"num_gpus": 1.0}}, 'address and resources are of backend="ray"'),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        xain.simulated(**{"main": main, "participants": 3, **given})


def test_missing_ray_is_told_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    simulated = xain.simulated(main, 3, backend="ray")
    with (
        pytest.raises(xain.SimulationError, match=r'backend="ray" needs Ray: .*\[ray\]'),
        simulated.running("127.0.0.1:1"),
    ):
        raise AssertionError("it does not start")


def test_no_simulation_loads_ray_but_one_on_it() -> None:
    """Ray takes a second and a hundred modules to load."""
    look = (
        "import sys, xain; xain.simulated(print, 3, backend='ray'); assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", look], check=True, timeout=60)


@pytest.mark.parametrize("insecure", [False, True])
def test_coordinator_on_another_machine_is_called_in_the_clear_only_if_told(
    insecure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xain_session import worker

    monkeypatch.setattr(worker._Run, "run", lambda self: "ran")
    one = worker.Worker(main, worker.sites_of(2), "192.0.2.7:50051", insecure=insecure)
    if insecure:
        assert one.run() == "ran"
    else:
        with pytest.raises(ValueError, match=r"192\.0\.2\.7"):
            one.run()
