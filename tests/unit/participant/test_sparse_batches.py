"""Batches of a part of rows, by their number."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from xain_participant.sparse_worker import Batches, Job
from xain_workloads.errors import DataError
from xain_workloads.sparse.models import BIAS, LogisticRegression
from xain_workloads.sparse.rows import Source


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """20 rows, the column of a row is its number."""
    (tmp_path / "x.svm").write_text("".join(f"{i % 2} {i}:1\n" for i in range(20)))
    return Source(str(tmp_path / "x.svm"))


def job(**fields: object) -> Job:
    # The fields by name are of several types.
    return Job("t", LogisticRegression(), batch_rows=3, **fields)  # type: ignore[arg-type]


def columns(batches: Batches, number: int) -> list[int] | None:
    batch = batches.batch(number)
    return None if batch is None else batch.keys[:-1].tolist()


def test_batches_go_on_over_epochs_and_end(source):
    """The last batch of an epoch has the rest of the rows."""
    with closing(Batches(job(num_epochs=2), source)) as batches:
        seen = [columns(batches, number) for number in range(14)]
        assert seen[0] == [0, 1, 2]
        assert seen[6] == [18, 19]
        assert seen[:7] == seen[7:]
        assert columns(batches, 14) is None
        assert columns(batches, 14) is None


@pytest.mark.parametrize("first", [0, 3, 6, 7, 12, 14, 99])
def test_batch_is_the_same_after_a_restart(source, first):
    with closing(Batches(job(num_epochs=2), source)) as batches:
        seen = [columns(batches, number) for number in range(15)]
    with closing(Batches(job(num_epochs=2), source)) as batches:
        for number in range(first, first + 3):
            assert columns(batches, number) == (seen[number] if number < 14 else None)


def test_earlier_batch_comes_again_after_a_rollback(source):
    with closing(Batches(job(num_epochs=2), source)) as batches:
        seen = [columns(batches, number) for number in range(11)]
        assert [columns(batches, number) for number in range(4, 11)] == seen[4:]


def test_parts_have_each_row_once(source):
    seen: list[int] = []
    for index in range(4):
        with closing(Batches(job(index=index, num_workers=4), source)) as batches:
            number = 0
            while (found := columns(batches, number)) is not None:
                seen += found
                number += 1
    assert sorted(seen) == list(range(20))


def test_part_without_a_line_is_empty(tmp_path):
    """One long line: it begins in the first part."""
    (tmp_path / "x.svm").write_text("1 " + " ".join(f"{i}:1" for i in range(100)) + "\n")
    source = Source(str(tmp_path / "x.svm"))
    for index in range(3):
        with closing(Batches(job(index=index, num_workers=3), source)) as batches:
            assert batches.is_empty == (index > 0)


def test_last_key_is_that_of_the_intercept(source):
    with closing(Batches(job(), source)) as batches:
        batch = batches.batch(0)
        assert batch is not None
        assert batch.keys[-1] == BIAS
        np.testing.assert_array_equal(batch.classes, [0, 1, 0])
    with closing(Batches(job(bound=20), source)) as batches:
        batch = batches.batch(0)
        assert batch is not None
        assert batch.keys[-1] == 20


def test_column_beyond_the_bound_is_refused(source):
    with (
        closing(Batches(job(bound=19), source)) as batches,
        pytest.raises(DataError, match=r"column 19; .*0 to 18"),
    ):
        batches.batch(6)
