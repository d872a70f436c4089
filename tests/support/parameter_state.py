"""A slow, obvious version of a replica: a dict of rows, one Python float at a time, and helpers to
compare states bit by bit."""

import math
from typing import Any

import msgspec
import numpy as np

from xain_parameters.keys import END
from xain_parameters.messages import Entry, Pull, Push
from xain_parameters.replica import Replica
from xain_parameters.specs import Plugin, RangeView, TableSpec
from xain_parameters.tables import initialisers, rules


def table(number, *, bound=None, dim=1, is_dense=False, dtype="float32", update=None, init=None):
    return TableSpec(
        number,
        f"table{number}",
        bound,
        dim,
        is_dense,
        dtype,
        Plugin.of(update or rules.Add()),
        Plugin.of(init or initialisers.Zeros()),
    )


def range_view(number, start=0, stop=END, epoch=1):
    return RangeView(number, start, stop - 1, epoch, ("s1",))


def keys_of(numbers):
    return np.array(list(numbers), np.uint64)


def push(spec, *, clock=0, part=0, start=0, stop=0, is_held=False, **options):
    return Push(
        request=1,
        view=(1, 1),
        range=1,
        table=spec.number,
        opened=0,
        clock=clock,
        part=part,
        is_held=is_held,
        start=start,
        stop=stop,
        **options,
    )


def pull(spec, start=0, stop=0):
    return Pull(1, (1, 1), 1, spec.number, 0, start, stop)


def send(replica, worker, head, keys, values):
    """Prepare and apply, as a primary does. Returns (entry, keys, values), or None if known."""
    entry = replica.prepare(worker, head, keys, values)
    if entry is None:
        return None
    replica.apply(entry, keys, values)
    return entry, keys, values


def everything(replica: Replica) -> dict[int, dict[int, dict[str, bytes]]]:
    """The bytes of all fields of all rows, by table and key."""
    found: dict[int, dict[int, dict[str, bytes]]] = {}
    for spec in replica.tables:
        rows = found.setdefault(spec.number, {})
        for keys, fields in replica.rows(spec.number):
            for i, key in enumerate(keys.tolist()):
                rows[key] = {name: array[i].tobytes() for name, array in fields.items()}
    return found


def step(rule: rules.Rule, row: dict[str, Any], pushed: list[float], real: type) -> None:
    """Update a row, one number at a time. row: lists by name, and counts."""
    for i, g in enumerate(map(real, pushed)):
        w = row["values"][i]
        match rule:
            case rules.Add():
                w = w + g
            case rules.Assign():
                w = g
            case rules.SGD(rate):
                w = w - g * real(rate)
            case rules.Momentum(rate, momentum):
                v = row["velocity"][i] = row["velocity"][i] * real(momentum) + g
                w = w - v * real(rate)
            case rules.Adagrad(rate, epsilon):
                s = row["squares"][i] = row["squares"][i] + g * g
                w = w - g * real(rate) / (np.sqrt(s) + real(epsilon))
            case rules.Adam(rate, beta1, beta2, epsilon):
                t = row["steps"] + 1
                m = row["mean"][i] = row["mean"][i] * real(beta1) + g * real(1 - beta1)
                v = row["squares"][i] = row["squares"][i] * real(beta2) + g * g * real(1 - beta2)
                m_hat = float(m) / (1 - beta1**t)
                v_hat = float(v) / (1 - beta2**t)
                w = real(float(w) - rate * m_hat / (math.sqrt(v_hat) + epsilon))
            case rules.FTRL(rate, beta, l1, l2):
                before, n = row["n"][i], row["n"][i] + g * g
                sigma = (np.sqrt(n) - np.sqrt(before)) / real(rate)
                z = row["z"][i] = row["z"][i] + g - sigma * w
                row["n"][i] = n
                if abs(z) <= l1:
                    w = real(0)
                else:
                    scale = (real(beta) + np.sqrt(n)) / real(rate) + real(l2)
                    w = -(z - real(math.copysign(l1, z))) / scale
        row["values"][i] = w
    if "steps" in row:
        row["steps"] += 1


def state_of(replica: Replica) -> Any:
    """All of a replica beside its rows, in a form that can be compared."""
    held = sorted(replica._held, key=lambda each: each.order)
    return (
        replica.sequence,
        replica.opened,
        {worker: msgspec.structs.asdict(known) for worker, known in replica._known.items()},
        [(each.meta, each.piece().body.tobytes()) for each in held],
    )


class Oracle:
    """Rows by table and key, updated one number at a time."""

    def __init__(self, tables: list[TableSpec]) -> None:
        self.tables = {spec.number: spec for spec in tables}
        self.rules = {spec.number: rules.made(spec.update) for spec in tables}
        self.rows: dict[int, dict[int, dict[str, Any]]] = {spec.number: {} for spec in tables}
        self.held: list[Any] = []
        for spec in tables:
            if spec.is_dense:
                for key in range(spec.bound or 0):
                    self.row(spec, key)

    def row(self, spec: TableSpec, key: int) -> dict[str, Any]:
        if key not in self.rows[spec.number]:
            init = initialisers.made(spec.init)
            values = init.rows(keys_of([key]), spec.dim, np.dtype(spec.dtype))
            zero = np.dtype(spec.dtype).type(0)
            row: dict[str, Any] = {"values": list(values[0])}
            for name, kind in self.rules[spec.number].state.items():
                row[name] = 0 if kind == "count" else [zero] * spec.dim
            self.rows[spec.number][key] = row
        return self.rows[spec.number][key]

    def apply(self, entry: Entry, keys: Any, values: Any) -> None:
        if entry.kind == "push":
            if entry.is_held:
                self.held.append((entry, keys, values))
            else:
                self._update(entry, keys, values)
        elif entry.kind == "open":
            due = [each for each in self.held if each[0].clock < entry.clock]
            self.held = [each for each in self.held if each[0].clock >= entry.clock]
            for each in sorted(due, key=lambda e: (e[0].clock, e[0].worker, e[0].table, e[0].part)):
                self._update(*each)

    def _update(self, entry: Entry, keys: Any, values: Any) -> None:
        spec = self.tables[entry.table]
        numbers = range(entry.start, entry.stop) if keys is None else keys.tolist()
        for key, pushed in zip(numbers, values.tolist(), strict=True):
            step(self.rules[spec.number], self.row(spec, key), pushed, np.dtype(spec.dtype).type)

    def assert_equals(self, replica: Replica) -> None:
        for number, rows in self.rows.items():
            found: dict[int, dict[str, Any]] = {}
            for keys, fields in replica.rows(number):
                for i, key in enumerate(keys.tolist()):
                    found[key] = {name: array[i].tolist() for name, array in fields.items()}
            assert found.keys() == rows.keys()
            is_exact = not isinstance(self.rules[number], rules.Adam)
            for key, row in rows.items():
                for name, expected in row.items():
                    if is_exact:
                        assert found[key][name] == expected
                    else:
                        np.testing.assert_allclose(found[key][name], expected, rtol=2e-5, atol=1e-7)
