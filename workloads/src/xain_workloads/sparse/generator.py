"""Made-up libsvm data of the shape of well-known data sets, at any scale.

Columns are drawn with probabilities that fall as 1 / rank, as words and user ids do, and targets
from a logistic model whose weights depend on (seed, column) only. So several files of one seed are
parts of one data set, and a model that is trained on them has something to find.

Shapes from the LIBSVM data page (Chang and Lin, binary classification): rows, columns and non-zero
values in a row of webspam (trigram) and kdd2012.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1_000  # rows


@dataclass(frozen=True, slots=True)
class Shape:
    """num_values: of a row, on the average. has_weights: values differ; otherwise all are 1."""

    num_rows: int
    num_columns: int
    num_values: int
    has_weights: bool

    def scaled(self, scale: float) -> "Shape":
        """Rows and columns times `scale`, and as many values in a row as fit."""
        num_columns = max(10, round(self.num_columns * scale))
        return Shape(
            max(1, round(self.num_rows * scale)),
            num_columns,
            min(self.num_values, num_columns // 4 + 1),
            self.has_weights,
        )


SHAPES: Final = {
    "webspam": Shape(350_000, 16_609_143, 3_728, has_weights=True),
    "kdd12": Shape(149_639_105, 54_686_452, 11, has_weights=False),
}


def write(path: Path, shape: Shape, seed: int, part: int = 0, num_parts: int = 1) -> None:
    """Write a part of the rows as a libsvm file; the parts of one seed are one data set.

    A file that is there already is replaced at once, so that its readers see whole files only.
    """
    unfinished = path.with_name(f"{path.name}.new")
    with unfinished.open("wb") as file:
        for text in lines(shape, seed, part, num_parts):
            file.write(text)
    unfinished.replace(path)


def lines(shape: Shape, seed: int, part: int = 0, num_parts: int = 1) -> Iterator[bytes]:
    """Draw the rows of a part, and yield their text, some at a time."""
    first = shape.num_rows * part // num_parts
    last = shape.num_rows * (part + 1) // num_parts
    chance = np.random.default_rng([seed, part, num_parts])
    for start in range(first, last, _BLOCK):
        num_rows = min(_BLOCK, last - start)
        counts = 1 + chance.poisson(shape.num_values - 1, num_rows)
        # Uniform in the logarithm: a density of 1 / rank.
        drawn = chance.random(counts.sum())
        columns = np.minimum(
            np.exp(drawn * np.log(shape.num_columns + 1.0)).astype(np.int64) - 1,
            shape.num_columns - 1,
        )
        yield _text(shape, seed, chance, np.split(columns, np.cumsum(counts)[:-1]))


def _text(
    shape: Shape, seed: int, chance: np.random.Generator, rows: list[NDArray[np.int64]]
) -> bytes:
    """Draw values and target of rows, and write them as lines of libsvm. rows: their columns."""
    texts = []
    for drawn in rows:
        columns = np.unique(drawn)
        values = chance.random(len(columns)) if shape.has_weights else np.ones(len(columns))
        values = np.maximum(np.round(values / np.linalg.norm(values), 4), 1e-4)
        score = 4.0 * float(values @ true_weights(columns, seed))
        target = b"+1" if chance.random() < 1 / (1 + np.exp(-score)) else b"-1"
        pairs = b" ".join(
            b"%d:%g" % pair for pair in zip(columns.tolist(), values.tolist(), strict=True)
        )
        texts.append(b"%b %b\n" % (target, pairs))
    return b"".join(texts)


def true_weights(columns: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """The weights that targets are drawn with, (m,) -> (m,), uniform in [-2, 2)."""
    x = columns.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 1) % 2**64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return 4.0 * (x >> np.uint64(11)).astype(np.float64) / 2.0**53 - 2.0
