"""One upload on its way to the store, and the part of it that is kept when it breaks off.

A thread decodes, measures and writes the bytes, piece by piece. Between two pieces no weights stay
in memory but a tile or an element that a message has cut in two.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from xain_coordinator.core.vocabulary.errors import InvalidUpdate, Reason, Refusal
from xain_coordinator.core.vocabulary.values import StoredWeights
from xain_coordinator.ports import Unfinished, Upload, WeightsStore
from xain_coordinator.stores.reading import CHUNK_BYTES
from xain_coordinator.updates.measuring import BaseModel, Inspector
from xain_wire.fl.coordinator_pb2 import Encoding
from xain_wire.np import DeltaCodec, NpyHeader, parse_npy_header
from xain_wire.np.codec import MAX_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Announced:
    """The object as its sender announces it. digest: in hex; None if the sender names none."""

    round: int
    size_bytes: int
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """The beginning of an upload. offset: bytes of the object that the coordinator has already.
    encoding: of the bytes that follow. is_part: the sender ends it before the object is whole."""

    announced: Announced
    offset: int = 0
    encoding: "Encoding.ValueType" = Encoding.PLAIN
    is_part: bool = False


class Decoder:
    """Decoder of an encoded update: pieces of any size in, pieces of the object out.

    The header of the object comes first, as it is, then tile after tile; see xain_wire.np.delta.
    An upload that is continued leaves out what the coordinator has already.
    """

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._has_header = False
        self._num_elements = 0
        self._rest = bytearray()  # of the header or of a tile

    def resume(self, header: NpyHeader, offset: int) -> None:
        """Continue with the byte at `offset` of the object. Raises InvalidUpdate."""
        first, odd = divmod(offset - header.data_offset, header.dtype.itemsize)
        is_border = first % DeltaCodec.tile_elements == 0 or first == self._base.size
        if odd or not is_border or not 0 <= first <= self._base.size:
            raise InvalidUpdate(f"no tile of the update begins at its byte {offset}")
        self._has_header = True
        self._num_elements = first
        self._rest.clear()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes | memoryview]:
        """Decode received bytes. Each piece is valid until the next one is asked for. Raises
        InvalidUpdate."""
        codec = DeltaCodec()  # its buffers are larger than what there is between batches
        view = memoryview(data)
        if not self._has_header:
            self._rest += view
            header = self._header()
            if header is None:
                return
            start = bytes(self._rest[: header.data_offset])
            view = memoryview(bytes(self._rest[header.data_offset :]))
            self._rest.clear()
            self._has_header = True
            yield start
        while view:
            count = min(codec.tile_elements, self._base.size - self._num_elements)
            if not count:
                raise InvalidUpdate("the upload goes on after its last tile")
            tile_bytes = codec.encoded_bytes(count)
            if self._rest or len(view) < tile_bytes:
                missing = tile_bytes - len(self._rest)
                self._rest += view[:missing]
                view = view[missing:]
                if len(self._rest) < tile_bytes:
                    return
                yield self._decode(codec, bytes(self._rest), count)
                self._rest.clear()
            else:
                yield self._decode(codec, view[:tile_bytes], count)
                view = view[tile_bytes:]

    def _header(self) -> NpyHeader | None:
        """The header, once all of it has come; None before. Raises InvalidUpdate if it is none, or
        not that of an update of the model."""
        try:
            header = parse_npy_header(bytes(self._rest[:MAX_HEADER_BYTES]))
        except ValueError as error:
            raise InvalidUpdate(f"the upload cannot be read: it is {error}") from None
        if header is not None and not self._base.fits(header):
            raise InvalidUpdate(
                f"an encoded update must be {self._base.model.dtype} of shape "
                f"{self._base.model.shape} like its model, not {header.dtype.name} of shape "
                f"{header.shape}"
            )
        return header

    def _decode(self, codec: DeltaCodec, tile: bytes | memoryview, count: int) -> memoryview:
        """Decode a whole tile of `count` elements, the next of the update. Raises InvalidUpdate."""
        try:
            decoded = codec.decode(tile, self._base.elements(self._num_elements, count))
        except ValueError as error:
            raise InvalidUpdate(f"the upload cannot be decoded: {error}") from None
        self._num_elements += count
        return decoded.view("u1").data

    def release_buffer(self) -> None:
        """Release the model's buffer until more bytes come."""
        self._base.release_buffer()

    def close(self) -> None:
        """Release the buffer, and close the model."""
        self._base.close()


class MeasuredUpload:
    """An upload, measured and written to the store under `key`. Used by one thread at a time.

    label: see WeightsStore.upload.
    """

    chunk_bytes = CHUNK_BYTES  # an upload that is picked up goes on at a multiple

    def __init__(
        self,
        store: WeightsStore,
        key: str,
        announced: Announced,
        inspector: Inspector,
        label: str = "",
    ) -> None:
        self.key = key
        self.announced = announced
        self.label = label
        self.decoder: Decoder | None = None
        self._store = store
        self._inspector = inspector
        self._upload: Upload | None = None
        self._is_picked_up = False

    @property
    def offset(self) -> int:
        """Bytes of the object that are written."""
        return self._inspector.size

    @property
    def header(self) -> NpyHeader | None:
        """Header of the object, if it is written; else None."""
        return self._inspector.header

    @property
    def is_whole(self) -> bool:
        """Whether all announced bytes are written."""
        return self.offset == self.announced.size_bytes

    def write(self, data: bytes | memoryview) -> None:
        """Measure and write received bytes. A failure aborts the upload, since what was measured is
        no longer what was written. Raises InvalidUpdate, and the store's errors."""
        try:
            self._write(data)
        except BaseException:  # an upload that failed in any way cannot be continued
            self.abort()
            raise

    def _write(self, data: bytes | memoryview) -> None:
        """Decode, measure and write received bytes; the first begin an upload in the store. Raises
        InvalidUpdate, also for more bytes than announced, and the store's errors."""
        if self._upload is None:
            self._upload = self._store.upload(self.key, self.label, self.announced.size_bytes)
        for piece in (data,) if self.decoder is None else self.decoder.feed(data):
            if self.offset + len(piece) > self.announced.size_bytes:
                raise InvalidUpdate(
                    f"the upload is longer than the {self.announced.size_bytes} bytes announced"
                )
            self._inspector.feed(piece)
            self._upload.write(piece)
        # The next bytes may be a while in coming, and there may be many who wait for theirs.
        self._inspector.release_buffer()
        if self.decoder is not None:
            self.decoder.release_buffer()

    def pick_up(self, unfinished: Unfinished) -> bool:
        """Measure the part that an earlier process has written, to continue the upload after it.
        Returns whether enough of it is good; if not, the part is removed. Raises the store's
        errors."""
        try:
            size = self._read_again(unfinished)
            if size:
                self._upload = unfinished.resume(size)
        except InvalidUpdate:
            pass  # no fault of the sender: a disk may have lost it
        finally:
            if self._upload is None:
                unfinished.abort()
                self._close()
        self._is_picked_up = self._upload is not None
        return self._is_picked_up

    def _read_again(self, unfinished: Unfinished) -> int:
        """Measure the written part up to its last whole chunk: a write may have been cut short.
        Returns the number of bytes measured."""
        start = unfinished.read(0, MAX_HEADER_BYTES)
        try:
            header = parse_npy_header(start)
        except ValueError:
            header = None
        if header is None:
            return 0
        present = min(unfinished.size, self.announced.size_bytes) - header.data_offset
        end = header.data_offset + present - present % self.chunk_bytes
        while self.offset < end:
            piece = unfinished.read(self.offset, min(self.chunk_bytes, end - self.offset))
            if not piece:
                return 0
            self._inspector.feed(piece)
        return end if present >= self.chunk_bytes else 0

    @property
    def is_open(self) -> bool:
        """Whether the store has an open upload to abort."""
        return self._upload is not None

    def complete(self) -> StoredWeights:
        """Check the whole upload and make it durable. A failure aborts it. Raises InvalidUpdate,
        UPLOAD_MISSING if the digest is wrong of what was picked up, and the store's errors."""
        try:
            if self._upload is None:
                self.write(b"")  # an upload of nothing
            assert self._upload is not None
            if self.announced.digest not in (None, self._inspector.digest):
                if self._is_picked_up:
                    # After a power cut a file need not hold what its sender has sent.
                    raise Refusal(
                        Reason.UPLOAD_MISSING,
                        "what an earlier process had of the upload is damaged; begin again at 0",
                    )
                raise InvalidUpdate(
                    "the upload's digest is not the one announced; send it again from its beginning"
                )
            measured = self._inspector.result(self.key)
            # Until EndTrainingRound has accepted it, a participant may replace its own upload.
            self._upload.commit(overwrite=True)
            return measured
        finally:
            self.abort()

    def pause(self) -> None:
        """Release the buffers of an upload that broke off; the written part stays open."""
        self._close()

    def abort(self) -> None:
        """Remove the written part. Harmless after a commit."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.abort()
        self._close()

    def suspend(self) -> None:
        """Leave the written part for another process, where the store can."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.suspend()
        self._close()

    def _close(self) -> None:
        """Close the models that are read beside the upload. The decoder is gone then; a new one is
        set when the upload goes on."""
        self._inspector.close()
        if self.decoder is not None:
            self.decoder.close()
            self.decoder = None
