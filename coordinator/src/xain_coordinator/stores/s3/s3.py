"""Weights in an S3 bucket: AWS, or a server that speaks its protocol.

Objects lie under "PREFIX/KEY" (s3_names.py). What is published once is claimed first
(s3_claims.py). A server that is away, or refuses us, raises StoreUnavailable: its callers wait.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, cast

import xxhash

from xain_coordinator.ports import (
    KeyExists,
    KeyNotFound,
    Reader,
    StoreError,
    StoreUnavailable,
    object_changed,
)
from xain_coordinator.stores.s3.s3_bucket import (
    Bucket,
    Declined,
    Piece,
    Refused,
    connect,
)
from xain_coordinator.stores.s3.s3_claims import Claims
from xain_coordinator.stores.s3.s3_names import MAX_NAME_BYTES, key_to_name, name_to_key
from xain_coordinator.stores.s3.s3_requests import Requests, results
from xain_coordinator.stores.settings import StoreSettings
from xain_foundation.logs.logger import get_logger
from xain_foundation.settings.hints import hint

log = get_logger(__name__)

MAX_PARTS_IN_FLIGHT = 3  # of one upload
# A part waits in memory up to here and in a file from there on: many may upload at once.
SPOOL_BYTES = 256 << 10

# Readers at a time that a caller had better use. Amazon's S3 takes 20 to 100 ms for a request.
NUM_PARALLEL = 16

NUM_DELETIONS = 4  # at a time

_TRIAL = ".trial"


class S3Store:
    """A WeightsStore, and DirectAccess to it.

    prefix: of all keys, or "". spool: the folder, created if it is missing, for the files in which
    uploads wait.
    """

    num_parallel = NUM_PARALLEL

    def __init__(self, bucket: Bucket, prefix: str, spool: Path) -> None:
        """Make the folder in which parts of uploads wait. Raises StoreError."""
        self.bucket = bucket
        self._prefix = f"{key_to_name(prefix)}/" if prefix else ""
        self.spool = spool
        self.requests = Requests()
        self.claims = Claims(bucket, self._prefix)

        try:
            spool.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise StoreError(
                f"cannot use the folder {spool}, in which uploads wait: {reason}"
            ) from error

    def try_out(self, *, signed: bool) -> None:
        """Make once each kind of request that a session makes, so that an operator hears now of
        what the server refuses, and not at the end of a round. No object stays.

        signed: with requests by signed URLs. Where participants reach the server by another address
        than this process does, that address may be closed to this process: then only a warning is
        logged. Raises StoreUnavailable while the server is away, and StoreError, Refused among
        them, for all that no retry helps against.
        """
        bucket = self.bucket
        folder = f"{self._prefix}{_TRIAL}/{uuid.uuid4().hex}"
        created, copied, joined, sent = (f"{folder}/{number}" for number in range(4))

        def create() -> None:
            """Upload an object that is written only once."""
            upload = S3Upload(self, _TRIAL, created)
            upload.write(b"x")
            upload.commit(overwrite=False)  # claims, and If-None-Match where the server knows it

        def copy() -> None:
            """Copy that object."""
            first = bucket.get(_TRIAL, created, 0, 1)
            bucket.copy(_TRIAL, created, copied, first.etag, self.requests.sizes.copy_part)

        def upload_in_parts() -> None:
            """Upload another object in one part."""
            upload_id = bucket.begin(_TRIAL, joined)
            etag = bucket.put_part(_TRIAL, joined, upload_id, 1, b"x")
            bucket.complete(_TRIAL, joined, upload_id, [etag])

        def abort_parts() -> None:
            """Begin an upload in parts, and abort it."""
            bucket.abort(_TRIAL, joined, bucket.begin(_TRIAL, joined))

        def use_signed_urls() -> None:
            """Write and read an object by signed URLs; a public address that cannot be reached is
            logged."""
            try:
                bucket.use_signed_url("put_object", _TRIAL, sent, b"x")
                bucket.use_signed_url("get_object", _TRIAL, sent)
            except Refused:
                raise
            except StoreUnavailable as error:
                if bucket.public_host == bucket.host:
                    raise
                log.warning("signed_urls_not_tried", error=str(error))

        kinds: dict[str, Callable[[], object]] = {
            "listing": lambda: list(bucket.names(f"{folder}/")),
            "creating an object once": create,
            "reading a range": lambda: bucket.get(_TRIAL, created, 0, 1),
            "copying": copy,
            "uploading in parts": upload_in_parts,
            "giving up an upload in parts": abort_parts,
            "signed URLs": use_signed_urls,
            "deleting": lambda: bucket.delete(_TRIAL, created),
        }
        if not signed:
            del kinds["signed URLs"]
        trouble: StoreError | None = None
        for kind, request in kinds.items():
            try:
                request()
            except Refused as error:
                trouble = Refused(f"{error}; what was tried: {kind}")
                break
            except StoreUnavailable:
                raise  # to delete anything would fail, too
            except StoreError as error:
                trouble = StoreError(f"{error}; what was tried: {kind}")
                break
            except Declined as answer:
                what = f"the S3 server at {bucket.host} cannot be used"
                trouble = StoreError(f"{what}: {kind} ends with {answer}")
                break
        for name in (created, copied, joined, sent):
            with contextlib.suppress(StoreError):
                bucket.delete(_TRIAL, name)
        if trouble is not None:
            raise trouble

    def close(self) -> None:
        """Close the store. Requests under way end normally; waiting requests raise
        StoreUnavailable."""
        self.requests.close()
        self.bucket.close()

    # --- WeightsStore ---

    def open(self, key: str, start: int = 0, length: int | None = None) -> "S3Reader":
        """Open an object with a GET of its first bytes, or of those that will be read first. Raises
        KeyNotFound and StoreUnavailable."""
        name = self._name(key)
        sizes = self.requests.sizes
        length = sizes.head if length is None else min(max(length, 1), sizes.range)
        try:
            first = self.bucket.get(key, name, start, length)
        except Declined:
            # The object ends before `start`, or is empty.
            start, first = 0, self._head(key, name, sizes.head)
        return S3Reader(self.bucket, self.requests, key, name, start, first)

    def upload(self, key: str, label: str = "", size_bytes: int = 0) -> "S3Upload":
        """Begin an upload. The server gets no request until there is a part to send."""
        return S3Upload(self, key, self._name(key))

    def find_unfinished(self, key: str, label: str) -> None:
        """Find nothing: the part that a process was filling ends with it, and the bucket's
        lifecycle rule removes the parts that were sent."""

    def sweep(self) -> None: ...

    def put(self, objects: Mapping[str, bytes]) -> None:
        """Write small objects, each by one request, several at a time. Raises StoreUnavailable."""
        names = {key: self._name(key) for key in objects}
        results(
            [
                self.requests.submit(self.bucket.put, key, names[key], data)
                for key, data in objects.items()
            ]
        )

    def settle(self, key: str) -> None:
        """Check that the object is there: whatever S3 shows is durable. Raises KeyNotFound and
        StoreUnavailable."""
        # An object that S3 shows is durable.
        self._head(key, self._name(key), 1)

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that begin with a prefix, in any order. Raises StoreUnavailable, while
        iterating."""
        folder = prefix.rpartition("/")[0]
        try:
            start = f"{self._prefix}{key_to_name(folder)}/" if folder else self._prefix
        except ValueError:
            return  # no key begins like this
        for name in self.bucket.names(start):
            key = name_to_key(name.removeprefix(self._prefix))
            if key is not None and key.startswith(prefix):
                yield key

    def delete(self, *keys: str) -> None:
        """Remove objects, NUM_DELETIONS at a time. Raises StoreUnavailable."""
        # One request for each object, since not every server deletes many at once; and few at a
        # time, since reads of an aggregation queue behind them, and no caller waits for deletions.
        names = [(key, self._name(key)) for key in keys]
        for start in range(0, len(names), NUM_DELETIONS):
            few = names[start : start + NUM_DELETIONS]
            results([self.requests.submit(self.bucket.delete, *each) for each in few])

    # --- DirectAccess ---

    def download_url(self, key: str) -> str:
        return self.bucket.signed_url("get_object", self._name(key))

    def upload_url(self, key: str) -> str:
        return self.bucket.signed_url("put_object", self._name(key))

    def copy(self, source: str, target: str, size_bytes: int) -> int:
        """Copy an object within the bucket, unless it has another size. Returns its size. Raises
        KeyNotFound, and StoreUnavailable, also if it is replaced meanwhile."""
        from_, to = self._name(source), self._name(target)
        head = self._head(source, from_, 1)
        if head.size != size_bytes:
            return head.size
        if not head.size:
            self.bucket.put(target, to, b"")
            return 0
        try:
            self.bucket.copy(source, from_, to, head.etag, self.requests.sizes.copy_part)
        except Declined:
            raise object_changed(source) from None
        return head.size

    def _head(self, key: str, name: str, length: int) -> Piece:
        """First bytes of an object, with its size and ETag; none of an empty one. Raises
        KeyNotFound.

        A GET, because the answer to a HEAD cannot tell a missing object from a missing bucket.
        """
        try:
            return self.bucket.get(key, name, 0, length)
        except Declined:
            return Piece(b"", 0, "")  # an empty object has no first byte

    def _name(self, key: str) -> str:
        """Name of the object with this key, below the prefix. Raises ValueError if it is too
        long."""
        name = self._prefix + key_to_name(key)
        size = len(name.encode())
        if size > MAX_NAME_BYTES:
            raise ValueError(
                f"{key[:64]!r}... cannot be a key: with its prefix it has {size} bytes in S3, "
                f"the limit is {MAX_NAME_BYTES}"
            )
        return name


class S3Reader(Reader):
    """Reader of one object. If another object replaces it, reading raises StoreUnavailable."""

    def __init__(
        self, bucket: Bucket, requests: Requests, key: str, name: str, start: int, first: Piece
    ) -> None:
        self._bucket = bucket
        self._requests = requests
        self._key = key
        self._name = name
        self._etag = first.etag
        self._closed = False
        self.size = first.size
        # Bytes that came with the opening, until the last of them is read.
        self._first = first.data
        self._first_offset = start

    def read(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the object. Raises
        StoreUnavailable."""
        buffer = bytearray(min(length, max(self.size - offset, 0)))
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer: by what came with the opening, and by requests of ranges side by side.
        Returns how many bytes there are. Raises StoreUnavailable."""
        if self._closed:
            raise ValueError("the reader is closed")
        end = min(offset + len(buffer), self.size)
        if offset >= end:
            return 0
        known = b""
        if offset >= self._first_offset:
            known = self._first[offset - self._first_offset : end - self._first_offset]
            if end >= self._first_offset + len(self._first):
                self._first = b""  # mostly read in order, and many readers may stay open for long
        buffer[: len(known)] = known
        step = self._requests.sizes.range
        starts = range(offset + len(known), end, step)
        pieces = [
            (start, buffer[start - offset : min(start + step, end) - offset]) for start in starts
        ]
        if len(pieces) == 1:
            self._range_into(*pieces[0])
        elif pieces:
            results([self._requests.submit(self._range_into, *piece) for piece in pieces])
        return end - offset

    def _range_into(self, start: int, buffer: memoryview) -> None:
        """Read one range by one request. Raises StoreUnavailable unless it is of the object that
        was opened."""
        try:
            size, etag, count = self._bucket.get_into(
                self._key, self._name, start, buffer, self._etag
            )
        except (Declined, KeyNotFound):
            raise object_changed(self._key) from None
        # Should the server not look at If-Match, we do.
        if (size, etag, count) != (self.size, self._etag, len(buffer)):
            raise object_changed(self._key)

    def close(self) -> None:
        self._closed = True
        self._first = b""


class S3Upload:
    """Up to sizes.part one request, beyond that parts that are sent while the next is filled. A
    failed write or commit ends it: nothing of it stays, if the server can still be asked to."""

    def __init__(self, store: S3Store, key: str, name: str) -> None:
        self._bucket = store.bucket
        self._requests = store.requests
        self._sizes = store.requests.sizes
        self._claims = store.claims
        self._spool = store.spool
        self._key = key
        self._name = name
        self._is_over = False
        self._digest = xxhash.xxh3_128()
        self._file: IO[bytes] | None = None  # the part that is being filled
        self._file_bytes = 0
        self._upload_id = ""  # on the server; "" until there is more than one part
        self._parts: list[tuple[Future[str], IO[bytes]]] = []  # their ETags, and where they wait

    def write(self, chunk: bytes | memoryview) -> None:
        """Append bytes to the part that is being filled; a full one is sent while the next is
        filled. After a failure the upload is over. Raises StoreUnavailable."""
        self._require_open()
        view = memoryview(chunk).cast("B")
        with self._ended_by_failure():
            self._digest.update(view)
            while view:
                if self._file_bytes == self._sizes.part:
                    self._send_part()
                taken = view[: self._sizes.part - self._file_bytes]
                self._keep(taken)
                view = view[len(taken) :]

    def commit(self, *, overwrite: bool) -> None:
        """Make the object visible under its key. Raises KeyExists, KeyClaimed or StoreUnavailable.
        After the latter the object may be there all the same: the answer may have got lost."""
        self._require_open()
        with self._ended_by_failure():
            if self._upload_id:
                self._send_part()
                results([part for part, _ in self._parts])
            if overwrite:
                self._make_visible()
            else:
                self._publish()
        self._end()

    def abort(self) -> None:
        """End the upload, and have the server drop the parts that were sent, if it can be asked."""
        if self._is_over:
            return
        self._end()
        if self._upload_id:
            # Parts that stay if this fails are removed by the bucket's lifecycle rule.
            with contextlib.suppress(StoreError):
                self._bucket.abort(self._key, self._name, self._upload_id)

    def suspend(self) -> None:
        self.abort()

    def _keep(self, data: memoryview) -> None:
        """Append bytes to the part that is being filled. Raises StoreUnavailable if the disk
        fails."""
        try:
            if self._file is None:
                self._file = self._new_file()
            self._file.write(data)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise StoreUnavailable(
                f"cannot keep a part of an upload in {self._spool}: {reason}"
            ) from error
        self._file_bytes += len(data)

    def _new_file(self) -> IO[bytes]:
        """A buffer in memory while it is small, then on the disk, since many may upload at once."""
        return cast(IO[bytes], SpooledTemporaryFile(SPOOL_BYTES, dir=str(self._spool)))

    def _send_part(self) -> None:
        """Send the filled part in a thread, and begin the next; MAX_PARTS_IN_FLIGHT at a time. The
        first one begins the upload on the server."""
        if not self._upload_id:
            self._upload_id = self._bucket.begin(self._key, self._name)
        number = len(self._parts) + 1
        if number > MAX_PARTS_IN_FLIGHT:
            self._parts[-MAX_PARTS_IN_FLIGHT][0].result()
        file = self._file
        assert file is not None, "a part has bytes"
        self._parts.append((self._requests.submit(self._put_part, number, file), file))
        self._file, self._file_bytes = None, 0

    def _put_part(self, number: int, file: IO[bytes]) -> str:
        """Send a part. Returns its ETag. Raises StoreUnavailable if the server has ended the
        upload."""
        with file:
            file.seek(0)
            try:
                return self._bucket.put_part(self._key, self._name, self._upload_id, number, file)
            except Declined:
                raise self._gone() from None

    def _publish(self) -> None:
        """Make the object visible unless its key is taken, under a claim that keeps other content
        away. Raises KeyExists, KeyClaimed and StoreUnavailable."""
        claims = self._claims.take(self._key, self._name, self._digest.hexdigest(), self._is_taken)
        try:
            # The condition is against writers without a claim; a server may ignore it.
            self._make_visible(only_if_free=True)
        except KeyExists:
            self._claims.drop(self._key, claims)
            raise
        self._claims.drop(self._key, claims)

    def _is_taken(self) -> bool:
        """Whether an object lies under the key, an empty one too."""
        try:
            self._bucket.get(self._key, self._name, 0, 1)
        except KeyNotFound:
            return False
        except Declined:
            pass  # it is empty
        return True

    def _make_visible(self, *, only_if_free: bool = False) -> None:
        """Complete or write the object. Raises KeyExists if another one is there and
        only_if_free."""
        try:
            if self._upload_id:
                etags = [part.result() for part, _ in self._parts]
                self._bucket.complete(
                    self._key, self._name, self._upload_id, etags, only_if_free=only_if_free
                )
            else:
                self._bucket.put(
                    self._key, self._name, self._file or b"", only_if_free=only_if_free
                )
        except Declined as answer:
            status = answer.status
        else:
            return
        if status == 412:
            raise KeyExists(self._key)
        if status in (400, 501):  # it does not know the condition
            self._make_visible()
            return
        if status == 404 and only_if_free and self._is_taken():
            raise KeyExists(self._key)  # by our own request, whose answer got lost
        raise self._gone()

    def _gone(self) -> StoreUnavailable:
        """The error of an upload that the server has ended."""
        return StoreUnavailable(
            f"the S3 server at {self._bucket.host} has ended the upload of {self._key!r}, because "
            "somebody else writes it at the same time or because unfinished ones are removed there"
        )

    @contextlib.contextmanager
    def _ended_by_failure(self) -> Iterator[None]:
        """Abort the upload if the block raises; the error is raised again."""
        try:
            yield
        except BaseException:  # half an object is removed
            self.abort()
            raise

    def _require_open(self) -> None:
        """Check that the upload is not over. Raises ValueError."""
        if self._is_over:
            raise ValueError(f"the upload of {self._key!r} is over")

    def _end(self) -> None:
        """End the upload: send no more, and close its file."""
        self._is_over = True
        for part, _ in self._parts:
            part.cancel()
        wait([part for part, _ in self._parts])
        for _, file in self._parts:
            file.close()
        if self._file is not None:
            self._file.close()


def open_s3(settings: StoreSettings, *, try_out: bool = True) -> S3Store:
    """Open the store of [storage]. try_out: and make each kind of request of a session once. Raises
    StoreUnavailable if the server cannot be reached, and StoreError where a person must act."""
    bucket = connect(settings)
    try:
        store = S3Store(bucket, settings.prefix, settings.path)
        try:
            bucket.check(settings.prefix)
        except Refused as error:
            if not error.is_no_bucket:
                raise
            if not settings.create_bucket:
                raise StoreError(
                    f"{error}; create it, or "
                    + hint("xain-coordinator", "storage.create_bucket = true")
                ) from None
            bucket.create(settings.region)
        if try_out:
            store.try_out(signed=settings.presigned)
    except BaseException as error:  # no other code closes its connections
        bucket.close()
        if isinstance(error, Refused):
            raise StoreError(str(error)) from None
        raise
    return store
