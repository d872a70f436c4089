"""SCAFFOLD through a real coordinator: control variates at the sites, and what they lead to."""

import asyncio
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.agents import ends_of, run_agents
from support.logs import capture_logs
from support.unlike import optimum, unlike_sites
from xain.result import fetch_last_model
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_foundation.exit_statuses import CannotStart
from xain_participant import Agent, WorkloadParticipant
from xain_participant.keep.variates import KeptVariates
from xain_participant.keep.versions import Versions
from xain_participant.sdk.participant import Assignment, call_train_round, take_metrics
from xain_workloads.exported import formats
from xain_workloads.model import CONTROL_LOST, Model, control_size, unflatten
from xain_workloads.scaffold import without_control
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import prepare, target_scale
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, initial_model

OPTIONS = {
    "task": "regression",
    "dtype": "float64",
    "penalty": "none",
    "eta0": 0.05,
    "batch_size": 100,
}


def settings(rounds: int, fraction: float = 1.0, **workload: Any) -> dict[str, Any]:
    return {
        "rounds": {
            "rounds": rounds,
            "epochs": 5,
            "min_participants": int(4 * fraction),
            "fraction_participants": fraction,
            "start_participants": 4,
            "max_participants": 4,
        },
        "workload": {
            "name": "sgd",
            "options": OPTIONS,
            "preprocessing": {"scaling": "none", "clip": 0},
            **workload,
        },
        "evaluate": {"every": 0},
    }


def last_model(coordinator: SessionCoordinator) -> Model:
    model = coordinator.driver.session.model
    with coordinator.store.open(model.ref.key) as reader:
        vector = np.load(io.BytesIO(reader.read(0, reader.size)), allow_pickle=False)
    return Model(vector, model.layout, model.metadata)


def distance(model: Model) -> float:
    """How far a model is from least squares over the rows of all sites."""
    scale = target_scale(model.metadata)
    sites = [prepare(model.metadata, Table.from_dataset(site)) for site in unlike_sites()]
    scaled = [replace(one, target=(one.target - scale.center) / scale.scale) for one in sites]
    model = without_control(model)
    coef, intercept = unflatten(model.vector, model.layout).values()
    return float(np.linalg.norm([*coef.ravel(), *intercept] - optimum(scaled)))


async def test_half_of_the_sites_a_round_end_in_the_optimum_of_all_rows(start):
    coordinator = await start(**settings(70, 0.5, remedy="scaffold"))
    await run_agents(coordinator, unlike_sites())
    assert distance(last_model(coordinator)) < 1e-5


def mixed() -> tuple[Dataset, Model]:
    """Iris, and a model of it with a control variate."""
    data = load("iris")
    workload = create("sgd", {"remedy": "scaffold"})
    return data, initial_model(workload, [Table.from_dataset(data).profile()])


def trained(
    own: KeptVariates, round_: int, counted: int, session: str = "s", epochs: int = 1
) -> tuple[bytes, dict[str, float]]:
    """The update of a round, and its metrics. counted: round in which the last one counted."""
    data, model = mixed()
    participant = WorkloadParticipant(data, variates=own)
    participant.on_model(model.layout, model.metadata)
    participant.on_round(Assignment(session, round_, counted_round=counted))
    vector, _ = call_train_round(participant, model.vector.copy(), epochs, round_)
    assert len(vector) == len(model.vector)
    return vector.tobytes(), take_metrics(participant)[-1].values


@pytest.mark.parametrize("restarts", [True, False])
def test_site_goes_on_from_the_variate_that_counted(tmp_path, restarts):
    """However many rounds it has trained since, whose updates never counted."""
    own = KeptVariates(tmp_path, "a")
    trained(own, 0, -1)
    expected = trained(own, 7, 0)
    for number in (1, 2, 3, 7):
        own = KeptVariates(tmp_path, "a") if restarts else own
        found = trained(own, number, 0)
    assert found[0] == expected[0]
    own = KeptVariates(tmp_path, "a") if restarts else own
    assert trained(own, 8, 7)[0] != trained(own, 8, 0)[0]
    assert CONTROL_LOST not in found[1]


def test_site_that_has_lost_its_variate_begins_with_the_servers():
    """The site tells it in its log and to the coordinator; also where another session has the
    round."""
    fresh, _ = trained(KeptVariates(), 5, -1)
    with capture_logs() as lines:
        own = KeptVariates()
        trained(own, 4, -1, "another")
        found, metrics = trained(own, 5, 4)
        assert trained(KeptVariates(), 5, 4, epochs=0)[1][CONTROL_LOST] == 1.0
    assert (found, metrics[CONTROL_LOST]) == (fresh, 1.0)
    assert [line["event"] for line in lines] == ["control_variate_lost"] * 2


async def test_site_that_comes_back_without_its_variate_spoils_no_model(start):
    """All begin anew, and the model ends in the optimum all the same."""
    coordinator = await start(**settings(70, remedy="scaffold"))
    sites = unlike_sites()
    own = [KeptVariates() for _ in sites]
    own[2] = Forgetful(after=20)
    target = f"127.0.0.1:{coordinator.port}"
    agents = [
        Agent(WorkloadParticipant(site, variates=kept), target, f"site-{i}")
        for i, (site, kept) in enumerate(zip(sites, own, strict=True))
    ]
    assert await ends_of(agents) == [0] * 4
    assert own[2].forgotten == 1
    assert distance(last_model(coordinator)) < 1e-5


class Forgetful(KeptVariates):
    """Loses its variate once, as a process without a state directory that is started again."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after
        self.forgotten = 0

    def on_round(self, assignment: Assignment) -> None:
        super().on_round(assignment)
        if assignment.round == self._after:
            self.forgotten += 1
            self._versions = Versions(None, "control", "")


@pytest.mark.parametrize(
    ("first", "second"),
    [("", "scaffold"), ("scaffold", ""), ("scaffold", "personal"), ("personal", "scaffold")],
)
async def test_session_begins_with_a_model_of_another_remedy(start, first, second):
    """The control variate is added, or taken away, and the weights are the same."""
    models, session = [], ""
    for number, remedy in enumerate((first, second)):
        more = {"new_session": True, "from_model": f"{session}/2"} if number else {}
        coordinator = await start(**settings(2, remedy=remedy), **more)
        session = coordinator.driver.session.session_id
        if number:
            models.append(last_model(coordinator))
        await run_agents(coordinator, unlike_sites())
        models.append(last_model(coordinator))
        await coordinator.stop()
    before, begun, after = models
    assert control_size(begun.layout) == control_size(after.layout) == 4 * (second == "scaffold")
    assert begun.metadata.get("personal") == ('["intercept"]' if second == "personal" else None)
    np.testing.assert_array_equal(without_control(before).vector, without_control(begun).vector)


@pytest.mark.parametrize("options", [OPTIONS, {}])
async def test_model_whose_options_ask_for_it_is_refused_where_no_variate_can_be(start, options):
    """The model brings its remedy along; the settings of the new session have none."""
    coordinator = await start(**settings(1, remedy="scaffold"))
    await run_agents(coordinator, unlike_sites())
    source = f"{coordinator.driver.session.session_id}/1"
    await coordinator.stop()
    given = settings(1, options=options) | {"aggregation": {"rule": "median"}}
    with pytest.raises(CannotStart, match='"median" makes no mean of control variates'):
        await start(**given, new_session=True, from_model=source)


async def test_exported_model_has_no_control_variate(start, tmp_path):
    coordinator = await start(**settings(2, remedy="scaffold"))
    await run_agents(coordinator, unlike_sites())
    model = last_model(coordinator)
    formats.write(tmp_path / "model.npz", model, {})
    read, _ = formats.read_weights(tmp_path / "model.npz")
    assert read.layout == model.layout[:-1]
    fetched = await asyncio.to_thread(fetch_last_model, f"127.0.0.1:{coordinator.port}", "reader")
    assert fetched.layout == model.layout[:-1]
