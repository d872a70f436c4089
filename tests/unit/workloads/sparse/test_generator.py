import numpy as np

from xain_workloads.sparse.generator import SHAPES, lines, write
from xain_workloads.sparse.rows import Source


def test_parts_of_a_seed_are_the_same_every_time(tmp_path):
    shape = SHAPES["kdd12"].scaled(1e-5)
    assert b"".join(lines(shape, 3, 1, 4)) == b"".join(lines(shape, 3, 1, 4))
    assert b"".join(lines(shape, 3, 1, 4)) != b"".join(lines(shape, 4, 1, 4))
    for part in range(4):
        write(tmp_path / f"{part}.svm", shape, 3, part, 4)
    source = Source(str(tmp_path))
    num_rows = sum(rows.num_rows for rows in source.read(source.shares(1)[0]))
    assert num_rows == shape.num_rows


def test_shape_is_that_of_the_data_set(tmp_path):
    shape = SHAPES["webspam"].scaled(1e-3)
    write(tmp_path / "x.svm", shape, 0)
    source = Source(str(tmp_path))
    (rows, *_) = source.read(source.shares(1)[0], 1 << 30)
    assert rows.num_rows == shape.num_rows == 350
    assert rows.keys.max() < shape.num_columns
    drawn = rows.features.nnz / rows.num_rows
    assert 0.2 * shape.num_values < drawn <= shape.num_values  # columns that are drawn twice
    norms = np.sqrt(rows.features.multiply(rows.features).sum(axis=1))
    assert np.allclose(norms, 1, atol=0.02)
