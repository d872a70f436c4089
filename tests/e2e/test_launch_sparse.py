"""`xain-coordinator launch --workload sparse` with processes: a model, deaths, and the end."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from e2e.test_launch import launched, name_of
from support.certificates import certified, needs_openssl
from support.launches import VARIABLE, kill, pid_with, processes_of
from xain_coordinator.cli.launch import processes, sparse
from xain_coordinator.cli.launch.interrupts import Interrupts
from xain_coordinator.cli.launch.logs import LogView
from xain_coordinator.cli.launch.supervisor import Launcher
from xain_foundation.settings.settings import resolve
from xain_parameters import connect_sync
from xain_workloads.sparse.generator import SHAPES, write

SPARSE = ("--workload=sparse", "--data=rows", "--servers=2", "--workers=2")
READY = "launch: ready: all 2 have joined"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of the shape of kdd12: two files in rows/, and test.svm."""
    made = tmp_path_factory.mktemp("sparse")
    (made / "rows").mkdir()
    shape = SHAPES["kdd12"].scaled(4e-5)
    for part, file in enumerate(("rows/a.svm", "rows/b.svm", "test.svm")):
        write(made / file, shape, 1, part, 3)
    return made


@pytest.fixture
def name(tmp_path: Path) -> str:
    return name_of(tmp_path)


def model_of(folder: Path, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / "xain-launch" / name / "model.npz") as file:
        return dict(file)


@needs_openssl
async def test_killed_server_and_worker_leave_the_same_model(folder, name, tmp_path):
    """With a replica, training goes on while both are started again, to the bits of an undisturbed
    training. The second launch of the name begins anew. In the first one all programs show
    certificates, the one that scores the model included."""
    # Hundreds of clocks: the kills come among the first of them.
    epochs = ("--worker-set=epochs=4", "--worker-set=batch=50", "--test=test.svm", "--quiet")
    arguments = (*SPARSE, *epochs, f"--name={name}", "--replicas=1")
    tls = [f"--set=tls.folder={certified(tmp_path / 'ours')}", "--set=tls.identity=cn"]
    async with launched(folder, *arguments, *tls, "--set=tls.roles.operator=peer") as shown:
        assert await shown.end() == 0, shown.output
    assert processes_of(name) == []
    undisturbed = model_of(folder, name)
    score = re.search(r"On [0-9,]+ rows of test.svm: log loss .*, AUC (0[.]\d+)", shown.output)
    assert score, shown.output
    assert float(score[1]) > 0.8

    async with launched(folder, *arguments) as shown:
        await shown.until(lambda output: READY in output)
        os.kill(pid_with(name, "--set=server.name=server-1"), signal.SIGKILL)
        await shown.until(lambda output: "server-1 was killed; it is started again" in output)
        os.kill(pid_with(name, "--worker=worker-2"), signal.SIGKILL)
        assert await shown.end() == 0, shown.output
    assert "worker-2 was killed; it is started again" in shown.output
    assert processes_of(name) == []
    scheduler = folder / "xain-launch" / name / "logs/scheduler.log"
    assert '"rolled_back"' not in scheduler.read_text()
    disturbed = model_of(folder, name)
    assert disturbed.keys() >= {"keys", "values"}
    for what, array in undisturbed.items():
        np.testing.assert_array_equal(disturbed[what], array)


@pytest.fixture
def saving(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[sparse.SparseLaunch]:
    """A launch with a table to save, whose only server does not answer."""
    monkeypatch.setenv(VARIABLE, name)
    values = {"launch.servers": "1", "scheduler.log": "true"}
    resolved = resolve(sparse.SparseConfig, None, "", values)
    request = sparse.plan(resolved, str(folder / "rows"), "", folder / name, {})
    backend = processes.ProcessBackend("127.0.0.1")
    interrupts = Interrupts()
    view = LogView(request.names, colors=False, is_quiet=True)
    launch = sparse.SparseLaunch(request, Launcher(backend, view, print, interrupts.pause))
    with interrupts.installed():
        try:
            launch.start_servers()
            with connect_sync(launch.address, worker="w") as server:
                server.dense("w", (8,))
            os.kill(pid_with(name, "--set=server.name=server-1"), signal.SIGSTOP)
            yield launch
        finally:
            kill(name)
            launch.stop()


def at_first_look(launch: sparse.SparseLaunch, do: Callable[[], None]) -> None:
    """Do something as soon as the launch looks after its programs."""
    look, is_done = launch._supervisor.look, False

    def looked() -> None:
        nonlocal is_done
        if not is_done:
            is_done = True
            do()
        look()

    launch._supervisor.look = looked


def test_server_killed_while_the_model_is_saved_is_started_again(saving, name):
    assert pid_with(name, "--set=scheduler.worker_lease_s=60")
    pid = pid_with(name, "--set=server.name=server-1")
    at_first_look(saving, lambda: os.kill(pid, signal.SIGKILL))
    number, status = saving._save()
    (job,) = status.jobs.values()
    assert number in job.cuts
    assert saving._supervisor.deaths == {"server-1": 1}


def test_interrupt_while_the_model_is_saved_ends_the_launch(saving, name):
    def interrupt() -> None:
        assert any(thread.name.startswith("checkpoint") for thread in threading.enumerate())
        signal.raise_signal(signal.SIGINT)

    at_first_look(saving, interrupt)
    with pytest.raises(KeyboardInterrupt):
        saving._save()
    os.kill(pid_with(name, "--set=server.name=server-1"), signal.SIGCONT)
    saving.stop()
    assert processes_of(name) == []
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint"):
            thread.join(60)
            assert not thread.is_alive()
