"""Three sites bag estimators in processes of their own, on tables in CSV files."""

import io
from typing import Any

import numpy as np
import pytest

from e2e.test_trees import SITES, train, write_tables
from xain_workloads.bagging_options import BaggingOptions
from xain_workloads.ensembles import load, unpack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RULES: dict[str, Any] = {
    "rounds.rounds": 4,
    "rounds.min_participants": len(SITES),
    "workload.name": "bagging",
    "workload.options.publish": "true",
    "workload.options.estimators": 3,
    "workload.options.parameters": "{ max_depth = 4 }",
    "workload.preprocessing.scaling": "none",
    "aggregation.rule": "ensemble",
    "server.heartbeat_time_s": 1.0,
    "server.heartbeat_timeout_s": 200.0,
}


async def test_killed_coordinator_makes_the_same_ensemble(tmp_path):
    """93 % on rows that no site has, with a vote in numpy."""
    held_out = write_tables(tmp_path)
    undisturbed = await train(tmp_path / "undisturbed", tmp_path, None, RULES)
    model = np.load(io.BytesIO(undisturbed[-1]), allow_pickle=False).tobytes()
    options = BaggingOptions(publish=True)
    members = [load(frame.file, options, held_out.num_features) for frame in unpack(model)]
    assert len(members) == 4 * 3 * len(SITES)
    votes = np.mean([member.predict_proba(held_out.features) for member in members], axis=0)
    predicted = np.array(sorted(set(held_out.target.tolist())))[votes.argmax(axis=1)]
    assert np.mean(predicted == held_out.target) >= 0.93
    # Some commits are of the gathering; this one is in the middle of the rounds.
    assert await train(tmp_path / "killed", tmp_path, 12, RULES) == undisturbed
