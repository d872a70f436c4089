"""Shares of rows that workers divide, in batches."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from xain_parameters import Piece
from xain_participant.sparse.sparse_worker import Job, Shares
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
    return Job("t", LogisticRegression(), batch_rows=3, **fields)


def columns(pieces: Iterator[Piece]) -> list[list[int]]:
    return [piece.data.keys[:-1].tolist() for piece in pieces if piece.num_rows]


def test_last_batch_of_a_part_has_the_rest_of_the_rows_and_the_bytes(source):
    pieces = list(Shares(source, job()).read(0, 1, 0))
    assert columns(iter(pieces))[0] == [0, 1, 2]
    assert columns(iter(pieces))[6] == [18, 19]
    assert [piece.num_rows for piece in pieces] == [3] * 6 + [2]
    assert [piece.size for piece in pieces] == [0] * 6 + [source.num_bytes]


@pytest.mark.parametrize("first", [0, 3, 6])
def test_reading_from_a_batch_on_gives_the_same_ones(source, first):
    data = Shares(source, job())
    assert columns(data.read(0, 1, first)) == columns(data.read(0, 1, 0))[first:]


def test_parts_have_each_row_once(source):
    data = Shares(source, job())
    pieces = [piece for part in range(4) for piece in data.read(part, 4, 0)]
    assert sorted(chain(*columns(iter(pieces)))) == list(range(20))
    assert sum(piece.size for piece in pieces) == data.size


def test_part_without_a_line_tells_its_bytes(tmp_path):
    """One long line: it begins in the first part."""
    (tmp_path / "x.svm").write_text("1 " + " ".join(f"{i}:1" for i in range(100)) + "\n")
    data = Shares(Source(str(tmp_path / "x.svm")), job())
    parts = [list(data.read(part, 3, 0)) for part in range(3)]
    assert [[piece.num_rows for piece in part] for part in parts] == [[1], [0], [0]]
    assert sum(piece.size for part in parts for piece in part) == data.size


def test_fingerprint_tells_other_batches(source):
    """One worker could not read on what another has left."""
    data = Shares(source, job())
    assert data.fingerprint == Shares(source, job(num_epochs=7)).fingerprint
    assert data.fingerprint != Shares(source, Job("t", LogisticRegression())).fingerprint


def test_last_key_is_that_of_the_intercept(source):
    batch = next(Shares(source, job()).read(0, 1, 0)).data
    assert batch.keys[-1] == BIAS
    assert batch.classes.tolist() == [0, 1, 0]
    assert next(Shares(source, job(bound=20)).read(0, 1, 0)).data.keys[-1] == 20


def test_column_beyond_the_bound_is_refused(source):
    with pytest.raises(DataError, match=r"column 19; .*0 to 18"):
        list(Shares(source, job(bound=19)).read(0, 1, 0))
