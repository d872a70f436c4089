import numpy as np

from xain_workloads.sparse.generator import SHAPES, lines, write
from xain_workloads.sparse.models import LogisticRegression, classes_of
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


def test_a_model_learns_from_made_up_rows(tmp_path):
    """Trained on the first half, it is clearly better than chance on the second."""
    write(tmp_path / "x.svm", SHAPES["kdd12"].scaled(5e-5), 0)
    source = Source(str(tmp_path))
    model, table, bias = LogisticRegression(), np.zeros((3_000, 1)), 0.0
    squares = np.full_like(table, 1e-8)
    for _ in range(2):
        for rows in source.read(source.shares(2)[0]):
            for batch in rows.batches(200):
                classes = classes_of(batch.targets)
                step = model.step(batch.features, classes, table[batch.keys], bias)
                squares[batch.keys] += step.gradient**2
                table[batch.keys] -= 0.2 * step.gradient / np.sqrt(squares[batch.keys])
                bias -= 0.2 * step.bias
    (rows,) = source.read(source.shares(2)[1])
    scores = model.scores(rows.features, table[rows.keys], bias)
    accuracy = ((scores > 0) == (rows.targets > 0)).mean()
    assert accuracy > 0.7
