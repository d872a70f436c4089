"""The scripts in examples/, each against a real coordinator or a real parameter server."""

import asyncio
import difflib
import importlib
import inspect
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

from integration.conftest import config_for
from support.process import PATIENCE_S
from xain_coordinator.assembly.coordinator import SessionCoordinator

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.frameworks


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import an example, as one that its folder is the working directory of."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three files with a third of the digits each, and one to test on."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    files = []
    for i, rows in enumerate(np.array_split(order, 4)):
        files.append(tmp_path / f"part-{i}.npz")
        np.savez(files[-1], x=x[rows], y=y[rows])
    return files


async def train(
    module: ModuleType, files: list[Path], folder: Path, **sections: dict[str, Any]
) -> SessionCoordinator:
    """Run main() of an example in a thread for each file. Returns the coordinator, stopped."""
    sections.setdefault("rounds", {})["min_participants"] = len(files)
    coordinator = SessionCoordinator(config_for(folder, **sections))
    await coordinator.start()
    os.environ["XAIN_PARTICIPANT_COORDINATOR__PORT"] = str(coordinator.port)
    load, make_model, lock = module.load, module.make_model, threading.Lock()

    def make_model_alone() -> Any:
        """Each site of its own has a random generator of its own; these threads share one."""
        with lock:
            return make_model()

    # mypy does not know what the example defines.
    module.load = lambda _: load(threading.current_thread().name)
    module.make_model = make_model_alone
    sys.argv, argv = [module.__name__, ""], sys.argv
    try:
        threads = [threading.Thread(target=module.main, name=str(file)) for file in files]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
        assert coordinator.driver.session.cause == "completed"
        return coordinator
    finally:
        # Both are defined by the example, as above.
        module.load, module.make_model = load, make_model
        sys.argv = argv
        del os.environ["XAIN_PARTICIPANT_COORDINATOR__PORT"]
        await coordinator.stop()


def last_model(coordinator: SessionCoordinator) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors of the last model by name, and the kind of each."""
    model = coordinator.driver.session.model
    assert model is not None
    with coordinator.store.open(model.ref.key) as reader:
        vector = np.load(io.BytesIO(reader.read(0, reader.size)))
    tensors, start = {}, 0
    for spec in model.layout:
        tensors[spec.name] = vector[start : start + spec.size].reshape(spec.shape)
        start += spec.size
    return tensors, {spec.name: spec.kind for spec in model.layout}


def test_federated_script_differs_in_six_lines_at_most():
    """From the local one; blank lines and the docstring are not counted."""
    before, after = (
        [
            line
            for line in (EXAMPLES / name).read_text().split('"""')[2].splitlines()
            if line.strip()
        ]
        for name in ("torch_local.py", "torch_federated.py")
    )
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = [max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in changes if tag != "equal"]
    assert 0 < sum(changed) <= 6


async def test_fedprox_keeps_sites_near_the_global_model(example, parts, tmp_path):
    """The larger mu is, the nearer: the term is mu / 2 times the squared distance."""
    module = example("fedprox")
    distances = []
    for mu in (0.01, 5.0):
        folder = tmp_path / str(mu)
        folder.mkdir()
        await train(module, parts[:2], folder, rounds={"rounds": 2}, train={"proximal_mu": mu})
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        terms = [
            float(line.split('"proximal":')[1].split(",")[0]) for line in lines if "prox" in line
        ]
        distances.append(2 * max(terms) / mu)
    assert distances[1] < 0.5 * distances[0]


async def test_lora_sends_adapters_only(example, parts, tmp_path):
    """PEFT loads the tensors of the last model by their names."""
    module = example("lora")
    coordinator = await train(module, parts[:2], tmp_path, rounds={"rounds": 4, "epochs": 3})
    tensors, _ = last_model(coordinator)
    import peft
    import torch

    model = module.make_model()
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert tensors.keys() == peft.get_peft_model_state_dict(model).keys()
    assert 0 < sum(tensor.size for tensor in tensors.values()) < frozen / 10
    peft.set_peft_model_state_dict(model, {n: torch.tensor(t) for n, t in tensors.items()})
    x, y = module.load(parts[3])
    model.eval()
    assert (model(x).argmax(1) == y).float().mean() > 0.8


async def test_gradients_of_sites_are_those_of_all_rows(example, parts, tmp_path):
    """The reference are steps on all rows, by PyTorch's own SGD."""
    import torch

    module = example("torch_gradients")
    steps, rate = 20, 0.5
    coordinator = await train(
        module,
        parts[:3],
        tmp_path,
        rounds={"rounds": steps, "initial_weights": "first"},
        aggregation={"rule": "gradient", "options": {"eta0": rate}},
    )
    tensors, _ = last_model(coordinator)
    names = list(tensors)
    with coordinator.store.open("1/global") as reader:  # which the first site has made
        begun = np.load(io.BytesIO(reader.read(0, reader.size)))
    model = module.make_model()
    start = 0
    for parameter in model.parameters():
        values = begun[start : start + parameter.numel()].reshape(parameter.shape)
        parameter.data = torch.tensor(values, dtype=torch.float64)
        start += parameter.numel()
    x, y = (torch.cat(both) for both in zip(*map(module.load, parts[:3]), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
    assert names == list(model.state_dict())
    for name, expected in model.state_dict().items():
        np.testing.assert_allclose(tensors[name], expected, atol=1e-4)


def test_scaffold_finds_the_optimum_that_averaging_misses(example, capsys):
    module = example("scaffold")
    module.main()
    lines = capsys.readouterr().out.splitlines()
    distances = {line.split(":")[0]: float(line.split()[1]) for line in lines}
    assert distances["averaging"] > 0.01
    assert distances["scaffold"] < 1e-4


def test_simulated_sites_learn_the_digits():
    """A hundred sites of a script, in a process of its own as one starts it."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "simulate.py"), "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[1]) > 0.3, done.stdout  # by chance 0.1


def test_jobs_side_by_side_reach_what_scikit_learn_reaches(example):
    """Logistic regression, linear SVM and k-means beside scikit-learn's, and matrix factorisation
    beside alternating least squares in this process."""
    module = example("parameter_jobs")
    assert all(len(inspect.getsource(job).splitlines()) <= 20 for job in module.WORKERS)
    found = module.main()
    x, x_test, y, y_test = module.rows_of(load_breast_cancer)
    theirs = LogisticRegression(max_iter=1000).fit(x, y).score(x_test, y_test)
    assert found["logistic"] > theirs - 0.02
    x, x_test, y, y_test = module.rows_of(load_digits)
    assert found["svm"] > LinearSVC().fit(x, y).score(x_test, y_test) - 0.02
    x, *_ = module.rows_of(load_wine)
    means = KMeans(3, init=x[:3], n_init=1, max_iter=30, tol=0).fit(x)
    assert found["kmeans"] == pytest.approx(means.inertia_)
    x = load_digits().data / 16
    is_hidden = np.random.default_rng(0).random(x.shape) < 0.2
    assert found["factors"] < 1.05 * rmse_of_least_squares(x, is_hidden)


def rmse_of_least_squares(x: Any, is_hidden: Any, rank: int = 8, ridge: float = 1.0) -> float:
    """Root mean square error of hidden values, by matrix factorisation one row at a time."""
    factors = [np.random.default_rng(1).uniform(-0.5, 0.5, (n, rank)) for n in x.shape]
    for number in range(20):
        side = number % 2
        values, hidden = (x, is_hidden) if side == 0 else (x.T, is_hidden.T)
        other = factors[1 - side]
        for row, (value, is_out) in enumerate(zip(values, hidden, strict=True)):
            seen = other[~is_out]
            factors[side][row] = np.linalg.solve(
                seen.T @ seen + ridge * np.eye(rank), seen.T @ value[~is_out]
            )
    return float(np.sqrt(np.mean((factors[0] @ factors[1].T - x)[is_hidden] ** 2)))
