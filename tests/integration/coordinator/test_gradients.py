"""Sessions in which participants send gradients, over real channels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.agents import run_agents
from xain_foundation.exit_statuses import CannotStart
from xain_wire.fl import coordinator_pb2 as pb
from xain_workloads.model import Model
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.workload import Workload, create

STEPS = 25
NUM = 7  # participants
ETA0 = 0.3


def settings(
    participants: int,
    options: dict[str, Any] | None = None,
    rule: dict[str, Any] | None = None,
    **rounds: Any,
) -> dict[str, dict[str, Any]]:
    return {
        "rounds": {
            "rounds": STEPS,
            "min_participants": participants,
            "start_participants": participants,
            **rounds,
        },
        "workload": {"name": "sgd", "options": {"mode": "gradient", **(options or {})}},
        "aggregation": {"rule": "gradient", "options": {"eta0": ETA0, **(rule or {})}},
    }


def parts(data: Dataset, num: int, *, by_label: bool) -> list[Dataset]:
    """Parts of unequal sizes; by label, most of them have rows of a few classes only."""
    rows = np.random.default_rng(1).permutation(data.num_samples)
    if by_label:
        rows = rows[np.argsort(data.target[rows], kind="stable")]
    cuts = np.sort(np.random.default_rng(2).choice(data.num_samples - 1, num - 1, False)) + 1
    return [data.subset(part) for part in np.split(rows, cuts)]


def descended(model: Model, data: Dataset, options: dict[str, Any], steps: int) -> np.ndarray:
    """Gradient descent on all rows in one place."""
    workload = create("sgd", {"mode": "gradient", **options})
    for step in range(steps):
        gradient = workload.train(model, data, epochs=1, epoch_base=step, seed=0).vector
        model = Model(model.vector - ETA0 * gradient, model.layout, model.metadata)
    return model.vector


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("wine", {"loss": "hinge", "penalty": "elasticnet", "alpha": 0.01}),
        ("breast_cancer", {"penalty": "l1"}),
        ("diabetes", {"task": "regression", "loss": "huber"}),
    ],
)
async def test_steps_are_those_on_the_union_of_the_rows(start, join, name, options):
    """However the rows are divided, by label here."""
    data = load(name, task=options.get("task", "classification"))
    known = {"classes": data.profile().classes}  # to those who lack some of them, too
    coordinator = await start(**settings(NUM, options), schema=known)
    await run_agents(coordinator, parts(data, NUM, by_label=True))
    session = coordinator.driver.session
    assert session.cause == "completed"
    found = await join(coordinator, "reader").model(STEPS)
    model = session.model
    begun = Model(np.zeros(len(found)), model.layout, model.metadata)
    expected = descended(begun, prepare(model.metadata, data), options, STEPS)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


async def test_a_lost_participant_leaves_the_mean_over_the_others(start, join):
    options = settings(1, rounds=2, start_participants=2)
    coordinator = await start(**options)
    a, b = join(coordinator, "a"), join(coordinator, "b")
    known = load("breast_cancer").profile()
    for member in (a, b):
        await member.rendezvous(
            pb.DataProfile(
                num_samples=known.num_samples,
                num_features=known.num_features,
                classes=known.classes,
            )
        )
    await a.until(pb.ROUND, 0)
    work = await a.start()
    size = (await a.model(0)).size
    await a.hand_in(np.full(size, 2.0), num_samples=10)
    await b.hand_in(np.full(size, 4.0), num_samples=30)
    await a.until(pb.ROUND, 1)
    stepped = await a.model(1)
    np.testing.assert_allclose(stepped, np.full(size, -ETA0 * 3.5))
    await b.heartbeat(pb.FINISHED)
    await a.start()
    await a.hand_in(np.full(size, 1.0), num_samples=10, round_=1)
    await a.until(pb.FINISHED, 1)
    last = await a.model(2)
    np.testing.assert_allclose(last, np.full(size, -ETA0 * 3.5 - ETA0))
    assert work.epochs == 1


async def test_restart_goes_on_with_the_schedule(start, join):
    """The rate of "adaptive" depends on all losses before, which the journal keeps."""
    rule = {"learning_rate": "adaptive", "n_iter_no_change": 1}
    options = settings(1, {}, rule, rounds=6)
    coordinator = await start(**options)
    a = join(coordinator, "a")
    known = load("breast_cancer").profile()
    profile = pb.DataProfile(
        num_samples=known.num_samples, num_features=known.num_features, classes=known.classes
    )
    await a.rendezvous(profile)
    await a.until(pb.ROUND, 0)
    size = (await a.model(0)).size
    point = '[{"measurement": "participant", "time": 1, "fields": {"loss": 1.0}}]'
    for round_ in range(3):
        await a.start()
        await a.end(await a.upload(np.full(size, 1.0), round_), 10, round_, metrics=point)
        await a.until(pb.ROUND, round_ + 1)
    await coordinator.stop()
    again = await start(**options)
    b = join(again, "a")
    await b.rendezvous(profile)
    await b.until(pb.ROUND, 3)
    await b.start()
    await b.end(await b.upload(np.full(size, 1.0), 3), 10, 3, metrics=point)
    await b.until(pb.ROUND, 4)
    found = await b.model(4)
    rates = ETA0 * np.array([1, 1, 1 / 5, 1 / 25])
    np.testing.assert_allclose(found, np.full(size, -rates.sum()))


def from_model_of(workload: Workload, folder: Path) -> dict[str, object]:
    """Arguments that begin a session with an exported model of breast_cancer."""
    profile = load("breast_cancer").profile()
    model = workload.initial_model([profile])
    np.save(folder / "begun.npy", model.vector)
    about = {
        "metadata": dict(model.metadata),
        "profile": {"num_features": profile.num_features, "classes": profile.classes},
    }
    (folder / "begun.json").write_text(json.dumps(about))
    return {"new_session": True, "from_model": str(folder / "begun.npy")}


async def test_model_of_gradients_does_not_begin_a_session_that_averages_models(start, tmp_path):
    """Participants train as the model's metadata say, and would send gradients to be averaged."""
    begun = from_model_of(create("sgd", {"mode": "gradient"}), tmp_path)
    told = 'trains in the mode "gradient".*workload.options.mode = "federated"'
    for workload in ({"name": "sgd"}, {}):
        with pytest.raises(CannotStart, match=told):
            await start(workload=workload, **begun)
    options = {"mode": "federated"}
    averaging = await start(workload={"name": "sgd", "options": options}, **begun)
    first = averaging.driver.session.model
    assert json.loads(first.metadata["options"])["mode"] == "federated"
    await averaging.stop()
    stepping = await start(aggregation={"rule": "gradient"}, **begun)
    assert stepping.driver.session.model is not None
    await stepping.stop()


async def test_locally_trained_network_is_gone_on_with_as_settings_say(start, tmp_path):
    """A network sends gradients by default, and one that was trained by "adam" cannot: the mode is
    named, and not an option that nobody has set."""
    begun = from_model_of(create("mlp", {"solver": "adam"}), tmp_path)
    told = 'was trained locally, .* set workload.options.mode = "federated"'
    with pytest.raises(CannotStart, match=told):
        await start(workload={"name": "mlp"}, **begun)
    averaging = await start(workload={"name": "mlp", "options": {"mode": "federated"}}, **begun)
    assert averaging.driver.session.model is not None
