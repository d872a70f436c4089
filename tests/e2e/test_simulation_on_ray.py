"""xain.simulate(backend="ray"): workers as actors of a cluster of two nodes on this machine."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import support.on_ray as script
from support.process import PATIENCE_S
from support.ray_nodes import ENVIRONMENT, Node, wait_for

pytest.importorskip("ray", reason="the extra xain-session[ray] is not installed")


@contextlib.contextmanager
def simulation(main: str, number: int, head: Node, folder: Path) -> Iterator[Callable[[], str]]:
    """A script that simulates on the cluster; see on_ray.py. Gives a function that waits for its
    result."""
    command = [sys.executable, script.__file__, main, str(number), head.address, str(folder)]
    with (folder.parent / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=ENVIRONMENT)

    def result() -> str:
        process.wait(PATIENCE_S)
        return (folder / "result").read_text()

    try:
        yield result
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def test_participants_of_a_killed_node_come_back_and_the_model_is_the_same(head, second, tmp_path):
    """Ray starts their worker anew on the head. They join under their names, in the same round."""
    folder, alone = tmp_path / "ray", tmp_path / "alone"
    folder.mkdir()
    alone.mkdir()
    with simulation("hold", 4, head, folder) as result:
        wait_for(lambda: list(folder.glob(f"* {second.name} *")))
        (site,) = (file.name.split()[0] for file in folder.glob(f"* {second.name} *"))
        second.kill()
        (folder / "go").touch()
        model = result()
    assert len(list(folder.glob(f"{site} *"))) == 2, "two workers have trained it"
    (alone / "go").touch()
    assert model == script.trained("hold", 4, str(alone)).hex()


def test_mistake_of_the_script_is_told_from_a_cluster(head, tmp_path):
    """The error has main's traceback."""
    folder = tmp_path / "ray"
    folder.mkdir()
    with simulation("fail", 3, head, folder) as result:
        text = result()
    assert text.startswith("main() failed at site-2: ZeroDivisionError('a mistake of the script')")
    assert "simulated.py" in text
