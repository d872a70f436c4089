"""Rounds to aggregate, and what comes of them."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_coordinator.core.vocabulary.effects import Aggregate
from xain_coordinator.core.vocabulary.values import GlobalModel, Update, WeightsRef
from xain_coordinator.ports import WeightsStore
from xain_coordinator.updates.measuring import measure

Array = NDArray[Any]

ROUND = 3
EMPTY = GlobalModel(ROUND, WeightsRef("3/global", 0, ""), "float32", (0,))

# Options with which a rule works on five updates and does something.
OPTIONS: dict[str, dict[str, float | int | bool]] = {
    "centred_clipping": {"tau": 2.0, "num_iterations": 3},
    "norm_clipping": {"quantile": 0.5},
    "trimmed_mean": {"trim": 1},
}


def npy(vector: Array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, vector)
    return buffer.getvalue()


def put(store: WeightsStore, key: str, data: bytes) -> None:
    upload = store.upload(key)
    upload.write(data)
    upload.commit(overwrite=True)


def read(store: WeightsStore, key: str) -> bytes:
    with store.open(key) as reader:
        return reader.read(0, reader.size)


def load(store: WeightsStore, ref: WeightsRef) -> Array:
    return np.load(io.BytesIO(read(store, ref.key)), allow_pickle=False)


def hand_in(
    store: WeightsStore,
    vectors: Sequence[Array],
    num_samples: Sequence[int] | None = None,
    round_: int = ROUND,
) -> tuple[Update, ...]:
    """Updates p0, p1, …, with 1, 2, … samples if nothing is said of them."""
    updates = []
    for i, vector in enumerate(vectors):
        key, name = f"{round_}/p{i:03}", f"p{i:03}"
        put(store, key, npy(vector))
        count = i + 1 if num_samples is None else num_samples[i]
        updates.append(Update(name, measure(store, key), count))
    return tuple(updates)


def model_of(store: WeightsStore, vector: Array, round_: int = ROUND) -> GlobalModel:
    put(store, f"{round_}/global", npy(vector))
    found = measure(store, f"{round_}/global")
    return GlobalModel(round_, found.ref, found.dtype, found.shape)


def work_on(
    store: WeightsStore,
    rule: str,
    vectors: Sequence[Array],
    base: Array | None,
    num_samples: Sequence[int] | None = None,
    **rest: Any,
) -> Aggregate:
    """base: None in a round that initialises. Without options those of OPTIONS."""
    model = EMPTY if base is None else model_of(store, base)
    rest.setdefault("options", OPTIONS.get(rule, {}))
    return Aggregate(ROUND, rule, hand_in(store, vectors, num_samples), model, **rest)
