"""Types of a script's session, as mypy finds them."""

from pathlib import Path

from mypy import api

ROOT = Path(__file__).parents[3]
CACHE = ".mypy_cache"

SCRIPT = """
from collections.abc import Mapping
from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import xain
from xain_session.record import Record

class Tensor:
    pass

class Network:
    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def __call__(self, row: object) -> object:
        return row

Vector = NDArray[np.float64]
zeros: Vector = np.zeros(3)

def made() -> Network:
    return Network()

with xain.session({"w": zeros}, rounds=3) as named:
    for round_ in named:
        round_.configure(lr=0.1, by_site={"a": {"epochs": 3}})
        record = round_.run()
        assert_type(record, Record[Mapping[str, Vector]])
        assert_type(record.metrics, Mapping[str, float])
        assert_type(record.evaluation, Mapping[str, float])
    assert_type(named.result.weights, Mapping[str, Vector])
with xain.session(Network()) as network:
    assert_type(network.result.weights, Mapping[str, Tensor])
with xain.session(made) as function:
    assert_type(function.result.weights, Mapping[str, Tensor])
with xain.session(np.zeros(3)) as flat:
    assert_type(flat.result.weights, NDArray[np.floating])
with xain.connect("ward:50051", Network(), tls="operator") as elsewhere:
    assert_type(elsewhere.result.weights, Mapping[str, Tensor])
"""


def test_weights_metrics_and_records_have_types(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # The settings and the cache of `make types`, so that only the script is looked at anew.
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / CACHE)]
    told, _, status = api.run([*settings, str(script)])
    assert status == 0, told
