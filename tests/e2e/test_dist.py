"""Wheels as a site installs them."""

import os
import subprocess
import sys
import venv
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

from support.xain_sdk import environment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(ROOT / "deploy" / "dist.py"), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def wheel(folder: Path, name: str) -> Path:
    (found,) = folder.rglob(f"{name}-*.whl")
    return found


def metadata(path: Path) -> Message:
    with ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def requirements(path: Path) -> list[str]:
    return metadata(path).get_all("Requires-Dist", [])


class Machine:
    """A fresh environment that borrows packages of others, and none of ours, from this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.bin = folder / "bin"
        (site_packages,) = folder.glob("lib/python*/site-packages")
        borrowed = Path(np.__file__).parents[1]
        (site_packages / "borrowed.pth").write_text(f"{borrowed}\n")

    def install(self, *wheels: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install"]
        flags = ["--quiet", "--no-index", "--no-deps", "--ignore-installed", "--no-compile"]
        subprocess.run([*pip, *flags, *map(str, wheels)], check=True)

    def install_xain(self) -> None:
        """Install XAIN's own SDK and wire package from the index, as `pip install --no-deps
        xain-sdk xain-proto` does. Raises NotInstalled."""
        lock = environment.LOCK.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = [line for line in lock.splitlines() if line.startswith("xain-")]
        wanted = self.bin.parent / "xain.lock"
        wanted.write_text("\n".join(lines))
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install"]
        flags = ["--quiet", "--no-deps", "--require-hashes", "-r", str(wanted)]
        done = subprocess.run([*pip, *flags], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise environment.NotInstalled(done.stderr.strip()[-1000:])

    def run(self, program: str, *arguments: str) -> str:
        command = [str(self.bin / program), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.bin.parent
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout


def test_one_wheel_is_enough_for_a_site(dist, tmp_path):
    """The wheel of the participant requires packages of others only, and works on its own."""
    path = wheel(dist, "xain_participant")
    assert not [text for text in requirements(path) if text.startswith("xain")]
    assert not [
        text
        for text in requirements(path)
        if "extra" not in text and text.startswith(("scikit", "pyarrow", "torch", "boto", "xgb"))
    ]
    assert any(text.startswith("scikit-learn") for text in requirements(path))
    site = Machine(tmp_path / "site")
    site.install(path)
    assert "inspect" in site.run("xain-participant", "--help")
    shown = site.run("python", "-c", "import xain; import xain_wire; xain.rounds; print(xain_wire)")
    assert str(tmp_path) in shown
    assert not [name for name in ZipFile(path).namelist() if name.startswith("xain_messaging")]
    site.install(wheel(dist, "xain_messaging"))
    assert "Proxy" in site.run("python", "-c", "import xain_messaging; print(xain_messaging.Proxy)")


def test_coordinator_shares_no_file_with_the_participant(dist, tmp_path):
    """Both on one machine: the coordinator finds the libraries in the participant's wheel."""
    wheels = [wheel(dist, "xain_participant"), wheel(dist, "xain_coordinator")]
    first, second = (set(ZipFile(path).namelist()) for path in wheels)
    assert not first & second
    ours = [text for text in requirements(wheels[1]) if text.startswith("xain")]
    assert ours == [f"xain-participant=={metadata(wheels[0])['Version']}"]
    machine = Machine(tmp_path / "machine")
    machine.install(*wheels)
    assert "demo" in machine.run("xain-coordinator", "--help")
    assert {path.name.split("-")[0] for path in (dist / "libraries").iterdir()} == {
        "xain_wire",
        "xain_foundation",
        "xain_membership",
        "xain_parameters",
        "xain_workloads",
    }


def test_script_that_lacks_the_wheel_of_the_session_is_told_of_it(dist, tmp_path):
    site = Machine(tmp_path / "site")
    site.install(wheel(dist, "xain_participant"))
    look = "import xain\ntry:\n    xain.simulate\nexcept ImportError as error:\n    print(error)"
    session = wheel(dist, "xain_session")
    assert site.run("python", "-c", look) == (
        f"xain.simulate needs xain-session: pip install {session.name}\n"
    )
    version = metadata(session)["Version"]
    assert f"xain-participant=={version}" in requirements(session)
    site.install(wheel(dist, "xain_coordinator"), session)
    assert "function simulate" in site.run("python", "-c", "import xain; print(xain.simulate)")


def test_xain_of_the_index_changes_nothing_of_ours(dist, tmp_path):
    """XAIN's packages, installed over ours, have other names, so that `import xain` and each of our
    programs work as before, and XAIN's package can be imported too."""
    wheels = [wheel(dist, "xain_participant"), wheel(dist, "xain_coordinator")]
    machine = Machine(tmp_path / "machine")
    machine.install(*wheels)
    try:
        machine.install_xain()
    except environment.NotInstalled as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"XAIN's packages cannot be installed: {error}")
    location = machine.run(
        "python", "-c", "import xain_sdk, xain_proto; print(xain_proto.__file__)"
    )
    assert str(tmp_path) in location
    used = "import xain; from xain_wire.fl import coordinator_pb2, inspection_pb2_grpc; xain.rounds"
    machine.run("python", "-c", used)
    programs = sorted(path.name for path in machine.bin.glob("xain-*"))
    assert {"xain-coordinator", "xain-participant"} <= set(programs)
    for program in programs:
        assert "--help" in machine.run(program, "--help")
    assert "rounds.rounds" in machine.run("xain-coordinator", "check-config")
    (machine.bin.parent / "rows.csv").write_text("a,y\n1,2\n2,4\n3,6\n")
    arguments = ["--data", "rows.csv", "--target", "y"]
    assert "rows.csv" in machine.run("xain-participant", "inspect", *arguments)
