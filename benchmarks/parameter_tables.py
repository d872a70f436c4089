"""The tables of the parameter server without a network: rows pushed and pulled, beside bare numpy.

    python benchmarks/parameter_tables.py [--quick]

Each case is one table of one replica. A push is checked, made an entry and applied; a pull gives
the rows of as many random keys, sorted. Rates are keys or rows in millions a second of one thread's
processor time. bare is numpy on an array whose row numbers are known already: `out = t[rows]` for
each pull, and for each push `t[rows] += v`, or Adagrad's expressions. There is no bare numpy for
keys without a bound.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flags
import numpy as np
import results
from numpy.typing import NDArray

from xain_parameters.keys import END
from xain_parameters.messages import Pull, Push
from xain_parameters.replica import Replica
from xain_parameters.specs import Plugin, RangeView, TableSpec
from xain_parameters.tables import initialisers, rules

Array = NDArray[Any]
NUM_BATCHES = 16
ROUNDS = 3  # the best counts: other work only ever makes it slower
FILL_KEYS = 1 << 17


@dataclass(frozen=True, slots=True)
class Case:
    is_open: bool
    dim: int
    num_rows: int
    batch_keys: int
    rule: rules.Rule


CASES = [
    *(Case(False, 1, num_rows, 1 << 17, rules.Add()) for num_rows in (1_000_000, 50_000_000)),
    *(Case(False, dim, 1_000_000, 1 << 16, rules.Add()) for dim in (16, 64)),
    Case(False, 64, 1_000_000, 1 << 15, rules.Adagrad(0.05)),
    *(Case(True, 1, num_rows, 1 << 17, rules.Add()) for num_rows in (1_000_000, 50_000_000)),
    Case(True, 16, 1_000_000, 1 << 16, rules.Add()),
    Case(True, 64, 1_000_000, 1 << 15, rules.Adagrad(0.05)),
]
QUICK = [
    Case(is_open, dim, 2_000, 100, rule)
    for is_open in (False, True)
    for dim, rule in ((1, rules.Add()), (64, rules.Adagrad(0.05)))
]


def rate(num_keys: int, work: Callable[[int], None]) -> float:
    """Keys a second of the best round. work: of the batch of this number."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        for number in range(NUM_BATCHES):
            work(number)
        best = min(best, time.thread_time() - began)
    return NUM_BATCHES * num_keys / max(best, 1e-9)


class Server:
    """A replica with one table, which has all its rows."""

    def __init__(self, case: Case, keys: NDArray[np.uint64]) -> None:
        spec = TableSpec(
            number=1,
            name="t",
            bound=None if case.is_open else case.num_rows,
            dim=case.dim,
            is_dense=False,
            dtype="float32",
            update=Plugin.of(case.rule),
            init=Plugin.of(initialisers.Zeros()),
        )
        self._replica = Replica(RangeView(1, 0, END - 1, 1, ("s",)), [spec], generation=1)
        self._num_pushes = 0
        for begin in range(0, len(keys), FILL_KEYS):
            some = np.sort(keys[begin : begin + FILL_KEYS])
            self.push(some, np.ones((len(some), case.dim), np.float32))

    def push(self, keys: NDArray[np.uint64], values: Array) -> None:
        self._num_pushes += 1
        head = Push(1, (1, 1), 1, 1, 0, clock=0, part=self._num_pushes, is_held=False)
        entry = self._replica.prepare("w", head, keys, values)
        assert entry is not None
        self._replica.apply(entry, keys, values)

    def pull(self, keys: NDArray[np.uint64]) -> Array:
        return self._replica.pull(Pull(1, (1, 1), 1, 1, 0), keys)


class Bare:
    """numpy on rows by number."""

    def __init__(self, case: Case) -> None:
        self._table = np.ones((case.num_rows, case.dim), np.float32)
        self._squares = np.ones_like(self._table) if isinstance(case.rule, rules.Adagrad) else None

    def push(self, rows: NDArray[np.intp], values: Array) -> None:
        if self._squares is None:
            self._table[rows] += values
        else:
            self._squares[rows] += values * values
            self._table[rows] -= 0.05 * values / (np.sqrt(self._squares[rows]) + 1e-7)

    def pull(self, rows: NDArray[np.intp]) -> Array:
        out: Array = self._table[rows]
        return out


def measured(case: Case) -> dict[str, object]:
    rng = np.random.default_rng(0)
    if case.is_open:
        keys = rng.integers(0, 1 << 64, case.num_rows, dtype=np.uint64)
    else:
        keys = np.arange(case.num_rows, dtype=np.uint64)
    batches = [np.unique(rng.choice(keys, case.batch_keys)) for _ in range(NUM_BATCHES)]
    least = min(map(len, batches))
    batches = [batch[:least] for batch in batches]
    values = np.full((least, case.dim), 0.5, np.float32)

    def rates(table: Any, requests: Sequence[Array]) -> tuple[float, float]:
        push = rate(least, lambda number: table.push(requests[number], values))
        pull = rate(least, lambda number: table.pull(requests[number - 1]))
        return push, pull

    row: dict[str, object] = {
        "keys": "open" if case.is_open else "bounded",
        "dim": case.dim,
        "rows_m": case.num_rows / 1e6,
        "update": case.rule.name,
    }
    push, pull = rates(Server(case, keys), batches)
    together = 2 / (1 / push + 1 / pull)
    row |= {"pushed_m_per_s": push / 1e6, "pulled_m_per_s": pull / 1e6}
    row |= {"both_m_per_s": together / 1e6}
    if not case.is_open:
        push, pull = rates(Bare(case), [batch.astype(np.intp) for batch in batches])
        row |= {"of_bare": together / (2 / (1 / push + 1 / pull))}
    return row


def main() -> None:
    given = flags.parser(__doc__).parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    rows = [measured(case) for case in (QUICK if given.quick else CASES)]
    results.report("parameter_tables", {"tables": rows})


if __name__ == "__main__":
    main()
