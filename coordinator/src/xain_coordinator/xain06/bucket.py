"""The bucket of XAIN's participants, whose pickles are translated to and from .npy objects.

They know one bucket, its bare keys, and pickles. Everything else in a coordinator knows .npy files
alone: a model is translated when it is published, an update when it is handed in.
"""

from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import chain

import numpy as np
import xxhash

from xain_coordinator.aggregation.publishing import AnotherModel, publish
from xain_coordinator.core.vocabulary.errors import InvalidUpdate, Reason
from xain_coordinator.core.vocabulary.keys import model_key, update_key
from xain_coordinator.core.vocabulary.values import GlobalModel
from xain_coordinator.ports import StoreError, WeightsStore
from xain_coordinator.stores.reading import chunks
from xain_coordinator.xain06.codec import find_array, pickle_around
from xain_wire.np import npy_header
from xain_workloads.errors import InvalidContent

PICKLE_BYTES = 1024  # what a pickle has beside the elements, and some more


class XainBucket:
    """The bare keys of a bucket that XAIN's participants read and write themselves.

    bare: the bucket from its root.
    store: the session's own part of it.
    max_update_bytes: larger updates are refused before they are read.
    """

    def __init__(self, bare: WeightsStore, store: WeightsStore, max_update_bytes: int) -> None:
        self._bare = bare
        self._store = store
        self._max_update_bytes = max_update_bytes

    def publish(self, model: GlobalModel) -> None:
        """Write the model as XAIN's participants read it. Idempotent. Raises AnotherModel if they
        are shown another one of that round already, and the stores' errors."""
        # Closed at once when a store fails, so that no reader stays open as long as the error does.
        try:
            with closing(self._pickled(model)) as pieces:
                publish(self._bare, model_key(model.round), pieces)
        except AnotherModel as error:
            raise AnotherModel(
                f"{error}; or a participant has written it, which its credentials must not allow: "
                "see docs/xain-0.6.md"
            ) from None

    def _pickled(self, model: GlobalModel) -> Generator[bytes, None, None]:
        """Pieces of the pickle of a model. Raises StoreError before the last one if the stored
        object has another digest than the model."""
        ref = model.ref
        dtype = np.dtype(model.dtype).newbyteorder("<")
        head, tail = pickle_around(dtype, model.shape)
        digest = xxhash.xxh3_128()
        yield head
        with self._store.open(ref.key) as reader:
            header = npy_header(dtype, model.shape)
            digest.update(reader.read(0, len(header)))
            for piece in chunks(reader, len(header)):
                digest.update(piece)
                yield piece
        if digest.hexdigest() != ref.digest:
            # Raised before the end, so that it is not shown.
            raise StoreError(f"the model {ref.key!r} has changed in the store")
        yield tail

    @contextmanager
    def reading(self, round_: int, name: str) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Open an update that a participant has put into the bucket. Gives its size as an .npy
        file, and the pieces of that file.

        Raises KeyNotFound, InvalidUpdate, TOO_LARGE, and the store's errors, also while the pieces
        are read.
        """
        key = update_key(round_, name)
        with self._bare.open(key) as reader:
            if reader.size > self._max_update_bytes + PICKLE_BYTES:
                raise InvalidUpdate(
                    f"an upload of {reader.size} bytes; at most {self._max_update_bytes} are taken",
                    Reason.TOO_LARGE,
                )
            try:
                array = find_array(reader)
                header = npy_header(array.dtype, array.shape)
                yield len(header) + array.num_bytes, chain((header,), array.pieces())
            except InvalidContent as error:
                raise InvalidUpdate(f"the upload {key!r} is no XAIN update: {error}") from None
