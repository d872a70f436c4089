"""round.state: versions by round, and what they may hold."""

from pathlib import Path

import numpy as np
import pytest
import torch

from support.logs import capture_logs
from xain.state import ScriptState


@pytest.fixture(params=["memory", "folder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "folder" else None


def again(state: ScriptState, folder: Path | None) -> ScriptState:
    """The state as the next process finds it."""
    return state if folder is None else ScriptState(folder, "a")


def test_round_begins_with_the_state_of_the_round_before(folder):
    state = ScriptState(folder, "a")
    for number in (3, 4, 7):
        state.save("s", number, {"n": number}, {})
        state = again(state, folder)
    assert state.load("s", 8)[0] == {"n": 7}


def test_round_that_is_trained_again_begins_as_the_first_time(folder):
    """However often: its own version counts for later rounds only."""
    state = ScriptState(folder, "a")
    state.save("s", 3, {"n": 3}, {})
    for attempt in range(3):
        state = again(state, folder)
        assert state.load("s", 4)[0] == {"n": 3}
        state.save("s", 4, {"n": 4, "attempt": attempt}, {})
    assert again(state, folder).load("s", 5)[0] == {"n": 4, "attempt": 2}


def test_another_session_begins_with_nothing(folder):
    state = ScriptState(folder, "a")
    state.save("s", 3, {"n": 3}, {})
    assert state.load("t", 9) == ({}, {})
    state.save("t", 0, {"n": 0}, {})
    assert again(state, folder).load("t", 1)[0] == {"n": 0}


def test_arrays_and_json_values_come_back(folder):
    values = {
        "c": {"w": np.arange(6.0).reshape(2, 3), "deep": [np.ones(1, np.int64), None]},
        "text": "ü",
        "number": np.float32(0.5),
        "flag": True,
    }
    state = ScriptState(folder, "a")
    state.save("s", 1, values, {"count": np.array(7)})
    read, counters = again(state, folder).load("s", 2)
    assert read["c"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read["c"]["deep"][0].dtype == np.int64
    assert (read["c"]["deep"][1], read["text"], read["number"], read["flag"]) == (
        None,
        "ü",
        0.5,
        True,
    )
    assert counters["count"].item() == 7


def test_tensors_come_back_as_tensors(folder):
    state = ScriptState(folder, "a")
    state.save("s", 1, {"c": torch.ones(2, dtype=torch.bfloat16, requires_grad=True)}, {})
    read, _ = again(state, folder).load("s", 2)
    assert read["c"].dtype == torch.bfloat16
    assert read["c"].tolist() == [1, 1]


def test_state_of_an_optimizer_comes_back(folder):
    """An optimizer that is given the state, whose keys are numbers, takes the same next step."""

    def step(parameter, optimizer):
        parameter.grad = torch.ones(3) * parameter.detach()
        optimizer.step()

    ours = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    first = torch.optim.Adam([ours], lr=0.1)
    step(ours, first)
    state = ScriptState(folder, "a")
    state.save("s", 1, {"opt": first.state_dict(), "$": 1, "flags": {None: 1, True: 2, 0.5: 3}}, {})
    read, _ = again(state, folder).load("s", 2)
    assert read["$"] == 1
    assert read["flags"] == {None: 1, True: 2, 0.5: 3}
    theirs = torch.nn.Parameter(ours.detach().clone())
    second = torch.optim.Adam([theirs], lr=9.0)
    second.load_state_dict(read["opt"])
    step(ours, first)
    step(theirs, second)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"f": len}, r"round.state\['f'\] is builtin_function_or_method"),
        ({"a": [1, {"b": {1}}]}, r"round.state\['a'\]\[1\]\['b'\] is set"),
        ({"a": {(1, 2): 2}}, r"round.state\['a'\] has a key \(1, 2\)"),
        ({"a": np.array(["x"])}, r"round.state\['a'\] is an array of <U1"),
    ],
)
def test_values_that_cannot_be_kept_are_named(values, message):
    with pytest.raises(TypeError, match=message):
        ScriptState(None, "a").save("s", 1, values, {})


def test_damaged_file_is_not_read(tmp_path):
    """The version before it counts, and the log says so."""
    state = ScriptState(tmp_path, "a")
    state.save("s", 1, {"n": 1}, {})
    state.save("s", 2, {"n": 2}, {})
    newest = tmp_path / "script-state-1.bin"
    data = bytearray(newest.read_bytes())
    data[-3] ^= 1
    newest.write_bytes(data)
    with capture_logs() as logs:
        read, _ = ScriptState(tmp_path, "a").load("s", 3)
    assert read == {"n": 1}
    assert [entry["event"] for entry in logs] == ["state_damaged"]


def test_script_without_state_writes_nothing(tmp_path):
    state = ScriptState(tmp_path, "a")
    state.save("s", 1, {}, {})
    assert list(tmp_path.iterdir()) == []
