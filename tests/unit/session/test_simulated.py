"""Settings of simulated participants, and what they load."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Self

import pytest

import xain
from xain_session.simulation import simulated


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
def test_settings_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        xain.simulated(**{"main": main, "participants": 3, **given})


def test_missing_ray_is_told_with_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(xain.SessionError, match=r'backend="ray" needs Ray: .*\[ray\]'),
        xain.simulated(main, 3, backend="ray").running("127.0.0.1:1"),
    ):
        raise AssertionError("it does not start")


def test_no_simulation_loads_ray_but_one_on_it():
    """Ray takes a second and a hundred modules to load."""
    look = (
        "import sys, xain; xain.simulated(print, 3, backend='ray'); assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", look], check=True, timeout=60)


class Elsewhere:
    """A backend whose workers are on other machines, and never start."""

    host = "192.0.2.7"

    def start(self, name: str, call: Callable[[], str]) -> None: ...

    def wait(self, timeout_s: float) -> Mapping[str, str]:
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_other_machines_call_the_coordinator_in_the_clear_only_if_told(monkeypatch):
    """Neither the coordinator of the script nor one that is elsewhere."""
    target = "192.0.2.7:50051"
    with pytest.raises(ValueError, match="insecure"), xain.simulated(main, 3).running(target):
        raise AssertionError("it does not start")
    monkeypatch.setattr(simulated, "_backend_of", lambda *_: Elsewhere())
    with (
        pytest.raises(xain.SessionError, match=r"at 192\.0\.2\.7, .* insecure=True"),
        xain.simulated(main, 3).started(),
    ):
        raise AssertionError("it does not start")
    with xain.simulated(main, 3, insecure=True).running(target) as pool:
        assert not pool.is_over
