"""The programs of docs/session.md run."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from support.terminals import files_of
from xain_foundation.net.sockets import free_ports

pytestmark = pytest.mark.e2e

PAGE = (Path(__file__).parents[2] / "docs" / "session.md").read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:50051"
LONG_S = 300.0
SERVERS = {"server.py": r"r2 (0\.9\d|1\.00)\n", "async_server.py": r"loss 0\.0\d after 5 rounds\n"}
SITES = ("north", "lakeside")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page, whose address is a free port."""
    (port,) = free_ports(1)
    for name, text in files_of(PAGE).items():
        assert ADDRESS in text
        (tmp_path / name).write_text(text.replace(ADDRESS, f"127.0.0.1:{port}"))
    return tmp_path


@contextmanager
def sites(folder: Path) -> Iterator[None]:
    """The sites of the page, which end by themselves."""
    started = [subprocess.Popen([sys.executable, "ward.py", name], cwd=folder) for name in SITES]
    try:
        yield
        assert [site.wait(LONG_S) for site in started] == [0, 0]
    finally:
        for site in started:
            site.kill()
            site.wait()


@pytest.mark.parametrize("name", SERVERS)
def test_server_of_the_page_runs_with_its_sites(folder: Path, name: str) -> None:
    with sites(folder):
        done = subprocess.run(
            [sys.executable, name],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LONG_S,
            check=True,
        )
    assert re.fullmatch(SERVERS[name], done.stdout), done.stdout


async def test_server_of_the_page_runs_as_a_cell_of_a_notebook(folder: Path) -> None:
    cell = nbformat.v4.new_code_cell((folder / "server.py").read_text())
    notebook = nbformat.v4.new_notebook(cells=[cell])
    client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(folder)}})
    with sites(folder):
        await client.async_execute()
    printed = "".join(
        output["text"] for output in notebook.cells[0].outputs if output.get("name") == "stdout"
    )
    assert re.fullmatch(SERVERS["server.py"], printed), printed


def test_every_program_of_the_page_is_run() -> None:
    assert set(files_of(PAGE)) == {*SERVERS, "ward.py"}
