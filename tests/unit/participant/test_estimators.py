"""Fitted estimators that stay at a participant, in memory and in its state directory."""

import numpy as np
import pytest

from support.logs import capture_logs
from unit.workloads.test_bagging import by_class, flowers, held
from xain_participant.sdk.estimators import FOLDER, KeptEstimators
from xain_workloads.ensembles.held import unpack_holdings
from xain_workloads.errors import DataError

ROWS = flowers().features[::10]


def given() -> tuple[dict[str, str], list[bytes], list[tuple[str, int]]]:
    """Metadata, what two trainings left, and how they are asked for."""
    data = flowers()
    model, kept = held(data, by_class(data)[:2])
    asked = [(one.digest, one.rows) for one in unpack_holdings(model.vector.tobytes())]
    return dict(model.metadata), kept, asked


def test_estimators_outlive_the_process_in_a_state_directory(tmp_path):
    metadata, kept, asked = given()
    first = KeptEstimators(tmp_path, "a")
    assert first.is_empty
    for round_, frames in enumerate(kept):
        first.keep("s", round_, metadata, frames)
    expected = first.votes(asked, ROWS)
    assert expected.mean.shape == (len(ROWS), 3)
    np.testing.assert_allclose(expected.mean.sum(axis=1), 1)
    again = KeptEstimators(tmp_path, "a")
    assert not again.is_empty
    assert np.array_equal(again.votes(asked, ROWS).mean, expected.mean)
    assert again.votes(asked, ROWS).lost == ()


def test_estimators_without_a_state_directory_stay_in_memory():
    metadata, kept, asked = given()
    estimators = KeptEstimators()
    estimators.keep("s", 0, metadata, kept[0])
    assert estimators.votes(asked, ROWS).lost == (asked[1][0],)
    with pytest.raises(DataError, match=r"none of .* 2 trainings"):
        KeptEstimators().votes(asked, ROWS)


def test_damaged_file_counts_as_lost_and_is_never_loaded(tmp_path):
    metadata, kept, asked = given()
    estimators = KeptEstimators(tmp_path)
    for frames in kept:
        estimators.keep("s", 0, metadata, frames)
    (path,) = (tmp_path / FOLDER).glob(f"*{asked[0][0]}*")
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    again = KeptEstimators(tmp_path)
    assert again.votes(asked, ROWS).lost == (asked[0][0],)
    path.write_bytes(b"")
    assert again.votes(asked, ROWS).lost == (asked[0][0],)


def test_rows_of_another_width_are_refused():
    metadata, kept, asked = given()
    estimators = KeptEstimators()
    estimators.keep("s", 0, metadata, kept[0])
    with pytest.raises(DataError, match="the model needs"):
        estimators.votes(asked, ROWS[:, :2])


class Few(KeptEstimators):
    max_files = max_memory_bytes = 1


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_estimators_of_earlier_sessions_are_dropped_oldest_first(tmp_path, is_in_memory):
    metadata, kept, asked = given()
    estimators = Few(None if is_in_memory else tmp_path)
    with capture_logs() as entries:
        for round_, frames in enumerate(kept):
            estimators.keep(f"session {round_}", round_, metadata, frames)
    assert [
        (one["round"], one["num_trainings"])
        for one in entries
        if one["event"] == "estimators_dropped"
    ] == [(1, 1)]
    assert estimators.votes(asked, ROWS).lost == (asked[0][0],)
    if not is_in_memory:
        assert [path.stem for path in (tmp_path / FOLDER).iterdir()] == [asked[1][0]]


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_estimators_of_the_running_session_are_never_dropped(tmp_path, is_in_memory):
    """The same holds after a restart of the participant."""
    metadata, kept, asked = given()
    folder = None if is_in_memory else tmp_path
    estimators = Few(folder)
    for round_, frames in enumerate(kept):
        estimators.keep("s", round_, metadata, frames)
        estimators = estimators if is_in_memory else Few(folder)
    assert estimators.votes(asked, ROWS).lost == ()


def test_estimators_of_the_latest_question_are_not_dropped(tmp_path):
    """A session that goes on from the ensemble of an earlier one asks for both."""
    metadata, kept, asked = given()
    estimators = Few(tmp_path)
    estimators.keep("earlier", 0, metadata, kept[0])
    estimators.votes(asked[:1], ROWS)
    estimators.keep("later", 1, metadata, kept[1])
    assert estimators.votes(asked, ROWS).lost == ()
    assert Few(tmp_path).votes(asked, ROWS).lost == ()
