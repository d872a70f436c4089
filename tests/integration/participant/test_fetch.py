"""A site takes a model home: with what of the model is this site's own."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.agents import ends_of
from xain_participant import Agent, WorkloadParticipant
from xain_participant.agent.fetch import fetch
from xain_participant.tables.personal import PersonalTensors
from xain_workloads.errors import NoModel
from xain_workloads.exported import formats
from xain_workloads.model import Model, unflatten
from xain_workloads.tables.data import load
from xain_workloads.tables.preprocessing import preprocessing_of
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.tables.table import Table


def halves() -> list[Table]:
    """Iris at two sites, of which the second measures in millimetres."""
    whole = Table.from_dataset(load("iris"))
    first, second = whole.subset(np.arange(0, 150, 2)), whole.subset(np.arange(1, 150, 2))
    for values in second.values.values():
        values *= 10
    return [first, second]


async def trained(start: Any, folder: Path, **settings: Any) -> str:
    """HOST:PORT of a coordinator whose session has ended. Participants have their state in folders
    of their names."""
    coordinator = await start(
        rounds={"rounds": 2, "min_participants": 2}, **{"workload": {"name": "sgd"}, **settings}
    )
    address = f"127.0.0.1:{coordinator.port}"
    agents = []
    for part, name in zip(halves(), "ab", strict=True):
        (folder / name).mkdir()
        own = PersonalTensors(folder / name, name)
        agents.append(Agent(WorkloadParticipant(part, personal=own), address, name))
    assert await ends_of(agents) == [0, 0]
    return address


def fetched(address: str, to: Path, **options: Any) -> Model:
    fetch(address, "last", to, participant_id="a", dialect=Dialect(), **options)
    model = formats.read(to).model
    assert model is not None
    return model


async def test_file_of_a_site_scales_by_its_own_rows(start, tmp_path):
    """With scaling = "site" the same flowers get the same features at both sites; without the
    site's rows there is no file."""
    workload = {"name": "sgd", "preprocessing": {"scaling": "site"}}
    address = await trained(start, tmp_path, workload=workload)
    to = tmp_path / "model.npz"
    centers = []
    for part in halves():
        model = await asyncio.to_thread(fetched, address, to, rows=lambda part=part: part)
        preprocessing = preprocessing_of(model.metadata)
        assert not preprocessing.is_per_site
        centers.append([column.scale.center for column in preprocessing.numbers])
        means = [np.mean(part.values[column.name]) for column in preprocessing.numbers]
        np.testing.assert_allclose(centers[-1], means)
    assert all(9 < b / a < 11 for a, b in zip(*centers, strict=True))
    with pytest.raises(NoModel, match=r"by the rows of this site; add --data FILE"):
        await asyncio.to_thread(fetched, address, to)


async def test_file_of_a_site_has_its_own_tensors(start, tmp_path):
    """The global model has untrained personal tensors, the state directory the trained ones."""
    address = await trained(start, tmp_path, model={"personal": ["intercept"]})
    to = tmp_path / "model.npz"
    with pytest.raises(NoModel, match=r"intercept, stay at each site.* add --state-dir FOLDER"):
        await asyncio.to_thread(fetched, address, to)
    with pytest.raises(NoModel, match=r"of model 2 that stay at this site, intercept, are not in"):
        await asyncio.to_thread(fetched, address, to, state_dir=tmp_path / "other")
    a, b = [
        await asyncio.to_thread(fetched, address, to, state_dir=tmp_path / name) for name in "ab"
    ]
    tensors, others = unflatten(a.vector, a.layout), unflatten(b.vector, b.layout)
    assert tensors["coef"].tolist() == others["coef"].tolist()
    assert tensors["intercept"].any()
    assert tensors["intercept"].tolist() != others["intercept"].tolist()
