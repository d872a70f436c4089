"""A worker that counts the rows that it reads at the servers, each under its number and epoch.

    python rows_worker.py SCHEDULER NAME NUM_WORKERS NUM_EPOCHS FOLDER

FOLDER/rows has files with a number in each line, which workers divide by bytes. In an epoch with a
file FOLDER/gate-EPOCH the worker stops in the middle of each clock while the file is there. At the
end it writes what was read to FOLDER/NAME.json.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import xain_parameters as parameters

BATCH_ROWS = 5
LOOK_S = 0.02
JOB = "rows"
TABLE = "seen"


@dataclass(frozen=True)
class Lines:
    """Lines of files, each of the part in whose bytes it begins."""

    lines: tuple[bytes, ...]
    size: int
    fingerprint: int = 0

    def read(self, part: int, num_parts: int, start: int) -> Iterator[parameters.Piece]:
        begins = np.cumsum([0, *map(len, self.lines)])[:-1]
        low, high = (self.size * i // num_parts for i in (part, part + 1))
        mine = np.flatnonzero((low <= begins) & (begins < high))
        for first in range(start * BATCH_ROWS, len(mine), BATCH_ROWS):
            lines = [self.lines[i] for i in mine[first : first + BATCH_ROWS]]
            yield parameters.Piece(
                np.array(lines).astype(np.int64), len(lines), sum(map(len, lines))
            )


def lines_in(folder: Path) -> Lines:
    text = b"".join(file.read_bytes() for file in sorted(folder.iterdir()))
    return Lines(tuple(text.splitlines(keepends=True)), len(text))


def keys(epoch: int, rows: np.typing.NDArray[np.int64]) -> np.typing.NDArray[np.int64]:
    return epoch << 32 | rows


def main() -> None:
    target, name, num_workers, num_epochs, given = sys.argv[1:]
    folder = Path(given)
    with parameters.connect_sync(
        target, worker=name, job=JOB, workers=int(num_workers), timeout_s=120
    ) as server:
        seen = server.table(TABLE, 1)
        batches = server.batches(lines_in(folder / "rows"), int(num_epochs))
        for batch in batches:
            while (folder / f"gate-{batch.epoch}").exists():
                time.sleep(LOOK_S)  # a poll: it ends when the file is gone
            seen.push(keys(batch.epoch, batch.data), np.ones((batch.num_rows, 1), np.float32))
        reading = batches.reading()
        told = {"rows": reading.rows, "sizes": reading.sizes, "turns": batches.num_batches}
        (folder / f"{name}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
