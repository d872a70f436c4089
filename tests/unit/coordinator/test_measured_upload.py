"""Memory of an upload while it comes, and while it waits to go on."""

import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import xxhash

from xain_coordinator.core.vocabulary.errors import InvalidUpdate
from xain_coordinator.core.vocabulary.values import GlobalModel, WeightsRef
from xain_coordinator.ports import Reader
from xain_coordinator.stores.files import FileStore
from xain_coordinator.updates.measured_upload import Announced, MeasuredUpload
from xain_coordinator.updates.measuring import BaseModel, Distance, Inspector
from xain_wire.np import npy_header
from xain_workloads.model import TensorSpec

MIB = 1 << 20
VECTOR = np.ones(2 * MIB // 4, dtype=np.float32)
DATA = npy_header(VECTOR.dtype, VECTOR.shape) + VECTOR.tobytes()
DIGEST = xxhash.xxh3_128(DATA).hexdigest()
ANNOUNCED = Announced(0, len(DATA), DIGEST)


class Store(FileStore):
    """Knows the readers that it has opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.readers: list[Reader] = []

    def open(self, key: str, offset: int = 0, length: int | None = None) -> Reader:
        self.readers.append(super().open(key, offset, length))
        return self.readers[-1]


def test_tiny_messages_are_measured_together(tmp_path):
    """However they are cut."""
    upload = MeasuredUpload(FileStore(tmp_path), "0/a", ANNOUNCED, Inspector())
    for at in range(64):
        upload.write(DATA[2 * at : 2 * at + 2])
    upload.write(DATA[128:])
    measured = upload.complete()
    assert (measured.ref.digest, measured.shape) == (DIGEST, VECTOR.shape)


def test_an_upload_holds_no_memory_between_batches(tmp_path):
    """The reader of the model is closed, and the model's memory freed, when the upload breaks off;
    both come back when it goes on."""
    store = Store(tmp_path)
    store.put({"0/global": npy_header(VECTOR.dtype, VECTOR.shape) + bytes(VECTOR.nbytes)})
    ref = WeightsRef("0/global", len(DATA), "")
    model = GlobalModel(round=0, ref=ref, dtype="float32", shape=VECTOR.shape)
    norm = float(np.sqrt(VECTOR.size))
    tracemalloc.start()
    try:
        distance = Distance(BaseModel(store, model), norm * 1.001)
        upload = MeasuredUpload(store, "0/a", ANNOUNCED, Inspector(distance))
        upload.write(DATA[:MIB])
        assert tracemalloc.get_traced_memory()[1] > MIB
        assert tracemalloc.get_traced_memory()[0] < MIB / 4
    finally:
        tracemalloc.stop()
    upload.write(DATA[MIB : MIB + 100])
    assert len(store.readers) == 1
    upload.pause()
    upload.write(DATA[MIB + 100 :])
    assert len(store.readers) == 2, "the model is opened again"
    assert upload.complete().ref.digest == DIGEST


def test_distance_leaves_out_the_control_variate(tmp_path):
    """Wherever the bytes are cut."""
    layout = (TensorSpec("w", (2,), "float32"), TensorSpec("control", (2,), "float32", "control"))
    store = Store(tmp_path)
    head = npy_header(np.dtype(np.float32), (4,))
    store.put({"0/global": head + bytes(16)})
    model = GlobalModel(0, WeightsRef("0/global", 0, ""), "float32", (4,), layout)
    data = head + np.float32([3, 4, 1000, 1000]).tobytes()
    for cut in (len(head) + 5, len(head) + 12, len(data)):
        for limit, is_near in ((5.001, True), (4.999, False)):
            inspector = Inspector(Distance(BaseModel(store, model), limit))
            inspector.feed(data[:cut])
            inspector.feed(data[cut:])
            with nullcontext() if is_near else pytest.raises(InvalidUpdate):
                inspector.result("0/a")
            inspector.close()
