"""xain.simulate(): many participants in a few processes, against a coordinator of its own."""

import asyncio
import contextlib
import functools
import os
import select
import signal
import sqlite3
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import support.simulated as scripts
import xain
from support.process import PATIENCE_S


def test_participants_share_workers_and_keep_their_state(capfd):
    """main() is called for each round of a site; round.state is the site's, and lasts. A worker has
    its main thread and its event loop, with a thread of gRPC, while nothing is printed."""
    done = xain.simulate(scripts.count, 12, workers=2, rounds=6, fraction=0.25)
    assert done.weights["w"].tolist() == [6.0] * 3
    assert [entry["num_updates"] for entry in done.history] == [3] * 6
    assert all(entry["calls"] == 1 for entry in done.history)
    assert max(entry["n"] for entry in done.history) > 1
    assert [entry["threads"] for entry in done.history] == [3] * 6
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("round 6/6: 3 updates in ") for line in lines)


def test_simulated_participants_evaluate_the_last_model_too(tmp_path):
    """The journal has each participant's evaluation of the last model; the result has its figures
    beside the metrics of training, and the history those of the model that each round began with.
    """
    settings = {"evaluate.metric": "accuracy"}
    done = xain.simulate(
        scripts.evaluate,
        3,
        workers=1,
        rounds=2,
        evaluates=True,
        settings=settings,
        folder=tmp_path,
        progress=False,
    )
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
        rows = db.execute("SELECT body FROM record WHERE type = 'EvaluationAccepted'").fetchall()
    assert len(rows) == 3
    assert all("0.2" in text for (text,) in rows)
    assert done.metrics == pytest.approx({"loss": 0.5, "accuracy": 0.2})
    assert done.best is not None
    assert (done.best.model, done.best.value) == (done.model, pytest.approx(0.2))
    evaluations = [entry["evaluation"] for entry in done.history]
    assert evaluations == [{"accuracy": 0.0}, {"accuracy": pytest.approx(0.1)}]
    assert [entry["loss"] for entry in done.history] == [1.0, 0.5]


async def test_function_of_a_notebook_is_simulated(tmp_path):
    """Workers cannot import it, nor what it uses, and are given its code."""
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(
                "import numpy as np, xain\n"
                "def make_model():\n    return {'w': np.zeros(2, np.float32)}\n"
                "def main(site):\n    for r in xain.rounds(make_model()):\n"
                "        r.submit({'w': r.weights['w'] + 1}, samples=1)\n"
                "xain.simulate(main, 2, workers=2, rounds=2, progress=False).weights['w'].tolist()"
            )
        ]
    )
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    await client.async_execute(env={**os.environ, "TMPDIR": str(tmp_path)})
    assert [o["data"]["text/plain"] for o in notebook.cells[0].outputs] == ["[2.0, 2.0]"]


def test_simulation_whose_sites_have_all_left_says_so():
    with pytest.raises(xain.SessionError, match="all simulated participants have left"):
        xain.simulate(
            functools.partial(scripts.break_off, num_staying=0),
            3,
            workers=2,
            rounds=4,
            progress=False,
        )


@pytest.mark.parametrize(
    ("main", "mistake"),
    [
        (scripts.fail, "a mistake of the script"),
        (scripts.fail_at_the_end, "a mistake after the loop"),
    ],
)
def test_mistake_of_the_script_ends_the_simulation_with_its_traceback(main, mistake):
    with pytest.raises(xain.SessionError) as caught:
        xain.simulate(main, 3, workers=1, rounds=2, progress=False)
    text = str(caught.value)
    assert text.startswith(f"main() failed at site-2: ZeroDivisionError('{mistake}')")
    assert "simulated.py" in text


async def waiting_script(folder: Path) -> asyncio.subprocess.Process:
    """A script whose first round lasts. folder: of its temporary files."""
    begun = folder / "begun"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        scripts.__file__,
        str(begun),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    )
    async with asyncio.timeout(PATIENCE_S):
        while not begun.exists():  # noqa: ASYNC110  # another process makes it
            await asyncio.sleep(0.02)  # a poll, not a race: it ends when the file is there
    return process


async def test_interrupt_ends_all_processes(tmp_path):
    """Ctrl-C, which the terminal sends to the script and to its workers."""
    process = await waiting_script(tmp_path)
    async with asyncio.timeout(PATIENCE_S):
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert process.returncode == -signal.SIGINT, errors.decode()
    assert errors.count(b"Traceback") == 1, errors.decode()
    left = await asyncio.to_thread(lambda: list(tmp_path.glob("xain-*")))
    assert not left, "the folder of the coordinator is removed"


async def test_processes_end_with_a_killed_script(tmp_path):
    """A script that is killed stops neither its coordinator nor its workers."""
    process = await waiting_script(tmp_path)
    handles = [os.pidfd_open(pid) for pid in children_of(process.pid)]
    try:
        assert len(handles) >= 2, "a coordinator and a worker"
        process.kill()
        for handle in handles:
            ended, _, _ = await asyncio.to_thread(select.select, [handle], [], [], PATIENCE_S)
            assert ended
    finally:
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        await process.communicate()  # which lasts as long as its children


def children_of(pid: int) -> list[int]:
    """Numbers of the processes that a process has started and that are alive."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(") ")[2].split()[1]) == pid:
                found.append(int(folder.name))
    return found
