"""Requests on one bucket of an S3 server, with errors as those of the store.

No error of botocore leaves this module, not even as the cause of ours: what a server writes into
its answers may repeat our credentials, and what botocore says may name a signed URL.
"""

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

import boto3
import botocore.session
from boto3.s3.transfer import TransferConfig
from botocore import exceptions as boto
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import CredentialProvider, Credentials, ReadOnlyCredentials
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies
from s3transfer.exceptions import S3CopyFailedError
from urllib3.exceptions import HTTPError

from xain_coordinator.ports import KeyNotFound, StoreError, StoreUnavailable
from xain_coordinator.stores.secret_files import Secret, authorities_in
from xain_coordinator.stores.settings import StoreSettings
from xain_foundation.settings.hints import hint

# At debug their logs would hold headers, tokens and signed URLs, whatever level the program has.
for _name in ("botocore", "urllib3.connectionpool"):
    logging.getLogger(_name).setLevel(logging.WARNING)

NUM_ATTEMPTS = 3  # of each request; botocore waits between them, a random time of up to 1, then 2 s
MAX_CONNECT_S = 5.0
# Threads that read and write parts, those in which the coordinator calls a store, and those that
# read while it aggregates.
MAX_CONNECTIONS = 64
_PIECE_BYTES = 1 << 20

_CREDENTIALS: Final = frozenset(
    (
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "InvalidToken",
        "InvalidClientTokenId",
        "InvalidTokenId",
        "ExpiredToken",
        "ExpiredTokenException",
        "TokenRefreshRequired",
        "RequestTimeTooSkewed",
    )
)
_REGIONS: Final = frozenset(
    (
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "InvalidRegion",
        "PermanentRedirect",
        "TemporaryRedirect",
    )
)
# Errors of the way to the server, though their status blames the request.
_PASSING: Final = frozenset(
    ("BadDigest", "IncompleteBody", "OperationAborted", "RequestTimeout", "SlowDown", "Throttling")
)


class Refused(StoreUnavailable):
    """The server answers, and refuses every request until an operator changes its settings.

    is_no_bucket: because the bucket does not exist.
    """

    def __init__(self, message: str, *, is_no_bucket: bool = False) -> None:
        super().__init__(message)
        self.is_no_bucket = is_no_bucket


class Declined(Exception):
    """Answer with an HTTP status that the caller handles."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{code} (HTTP {status})")
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of an object. size: that of the whole object. etag: the same as long as it is."""

    data: bytes
    size: int
    etag: str


class Bucket:
    """Requests on one bucket, from any thread.

    signer: a client that signs URLs for the address at which participants reach the server.
    http: a session of botocore's, for requests by such URLs.
    Every request raises Refused, StoreUnavailable, and StoreError where the server cannot do what
    we need.
    """

    max_listed = 1000  # keys in a page, the most that S3 gives

    def __init__(self, client: Any, signer: Any, http: Any, name: str, url_lifetime_s: int) -> None:
        self.name = name
        self.host = _host_of(client.meta.endpoint_url)
        self.public_host = _host_of(signer.meta.endpoint_url)
        self._client = client
        self._signer = signer
        self._http = http
        self._url_lifetime_s = url_lifetime_s

    def close(self) -> None:
        """Close the connections of all clients."""
        self._client.close()
        self._signer.close()
        self._http.close()

    # --- the bucket itself ---

    def check(self, prefix: str) -> None:
        """Check that the bucket exists and can be listed.

        A listing, and not HeadBucket, whose refusals carry no code; and who may not list a bucket
        hears "forbidden" of an object that is merely not there.
        """
        self._call("list", "list_objects_v2", {"Prefix": prefix, "MaxKeys": 1})

    def create(self, region: str) -> None:
        """Create the bucket, unless it is ours already. Raises StoreError if it is somebody
        else's."""
        where: dict[str, Any] = {}
        if region != "us-east-1":  # which must not be named
            where = {"CreateBucketConfiguration": {"LocationConstraint": region}}
        try:
            self._call("create", "create_bucket", where, answers={409})
        except Declined as answer:
            if answer.code != "BucketAlreadyOwnedByYou":  # another of us was faster
                raise StoreError(
                    f"the bucket {self.name!r} on {self._server()} belongs to somebody else "
                    f"({answer.code}); choose another storage.bucket"
                ) from None

    # --- objects ---

    def get(self, key: str, name: str, offset: int, length: int, etag: str = "") -> Piece:
        """Read up to `length` > 0 bytes from `offset`.

        key: what errors call the object. etag: which object it must still be.
        Raises KeyNotFound, and Declined with 412 (another object) or 416 (it ends before `offset`).
        """
        buffer = memoryview(bytearray(length))
        size, found, count = self.get_into(key, name, offset, buffer, etag)
        return Piece(bytes(buffer[:count]), size, found)

    def get_into(
        self, key: str, name: str, offset: int, buffer: memoryview, etag: str
    ) -> tuple[int, str, int]:
        """Read a range into a buffer of its length. Returns the size of the whole object, its ETag,
        and the number of bytes read. Raises KeyNotFound, and Declined with 412 (another object) or
        416 (it ends before `offset`)."""
        length = len(buffer)
        wanted = {"Key": name, "Range": f"bytes={offset}-{offset + length - 1}"}
        if etag:
            wanted["IfMatch"] = etag
        for _ in range(NUM_ATTEMPTS):
            answer = self._call("read", "get_object", wanted, key=key, answers={412, 416})
            body = answer["Body"]
            try:
                size = self._size_in(answer, offset, length)
                count = _read_into(body, buffer)
            finally:
                body.close()
            if count is not None:
                return size, self._etag_in(answer), count
        # botocore tries requests again, but not the reading of what they bring.
        raise StoreUnavailable(f"{self._server()} broke off {NUM_ATTEMPTS} times in {key!r}")

    def put(self, key: str, name: str, body: Any, *, only_if_free: bool = False) -> None:
        """Write an object by one request. key: what errors call it. body: bytes, or a file, which
        is read from its beginning.

        Raises Declined if it was to be written only if the name is free: with 412 (it is not), 409
        (another writer is at it), 400 or 501 (the server does not know such a condition).
        """
        condition, answers = _condition(only_if_free)
        parameters = {"Key": name, "Body": body, **condition}
        for _ in range(NUM_ATTEMPTS):
            if not isinstance(body, bytes):
                body.seek(0)
            try:
                self._call("write", "put_object", parameters, key=key, answers=answers)
                return
            except Declined as answer:
                # A server that keeps objects in folders may have removed the folder, because it was
                # empty for a moment.
                if answer.status != 404:
                    raise
        raise StoreUnavailable(f"{self._server()} finds no place for {key!r} at the moment")

    def delete(self, key: str, name: str) -> None:
        """Delete the object `name`, if it exists."""
        with contextlib.suppress(KeyNotFound):  # S3 does not say so; some others do
            self._call("delete", "delete_object", {"Key": name}, key=key)

    def names(self, prefix: str) -> Iterator[str]:
        """The names that begin with `prefix`."""
        parameters: dict[str, Any] = {"Prefix": prefix, "MaxKeys": self.max_listed}
        while True:
            page = self._call("list", "list_objects_v2", parameters)
            for found in page.get("Contents", ()):
                yield found["Key"]
            if not page.get("IsTruncated"):
                return
            parameters["ContinuationToken"] = page["NextContinuationToken"]

    # --- uploads in parts ---

    def begin(self, key: str, name: str) -> str:
        """Begin an upload in parts. Returns its id."""
        answer = self._call("write", "create_multipart_upload", {"Key": name}, key=key)
        upload_id: str = answer["UploadId"]
        return upload_id

    def put_part(self, key: str, name: str, upload_id: str, number: int, body: Any) -> str:
        """Send a part of an upload. number: from 1. Returns the part's ETag. Raises Declined with
        404 if there is no such upload (any more)."""
        parameters = {"Key": name, "UploadId": upload_id, "PartNumber": number, "Body": body}
        answer = self._call("write", "upload_part", parameters, key=key, answers={404})
        etag: str = answer["ETag"]
        return etag

    def complete(
        self, key: str, name: str, upload_id: str, etags: list[str], *, only_if_free: bool = False
    ) -> None:
        """Make a visible object of the parts of an upload. Raises Declined: 404 without such an
        upload, and with only_if_free the statuses of put()."""
        parts = [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(etags, 1)]
        condition, answers = _condition(only_if_free)
        multipart = {"MultipartUpload": {"Parts": parts}, **condition}
        parameters = {"Key": name, "UploadId": upload_id, **multipart}
        self._call("write", "complete_multipart_upload", parameters, key=key, answers=answers)

    def abort(self, key: str, name: str, upload_id: str) -> None:
        """Abort the multipart upload, if it exists."""
        parameters = {"Key": name, "UploadId": upload_id}
        with contextlib.suppress(Declined):
            self._call("write", "abort_multipart_upload", parameters, key=key, answers={404})

    # --- copies ---

    def copy(self, key: str, source: str, target: str, etag: str, part_bytes: int) -> None:
        """Copy by boto3's transfer manager, a large object in parts that go at the same time.

        key: what errors call the source. etag: which object it must still be.
        Raises KeyNotFound, and Declined with 412 (another object); no part stays in the bucket.
        """
        parameters = {
            "Key": target,
            "CopySource": {"Bucket": self.name, "Key": source},
            "ExtraArgs": {"CopySourceIfMatch": etag},
            "Config": TransferConfig(
                multipart_threshold=part_bytes, multipart_chunksize=part_bytes
            ),
        }
        try:
            self._call("copy", "copy", parameters, key=key, answers={412})
        except S3CopyFailedError:  # another object since the transfer manager has looked at it
            raise Declined(412, "PreconditionFailed") from None

    # --- URLs ---

    def signed_url(self, operation: str, name: str) -> str:
        """Sign a URL for an object; no request is made. operation: "get_object" or "put_object"."""
        try:
            url: str = self._signer.generate_presigned_url(
                operation,
                Params={"Bucket": self.name, "Key": name},
                ExpiresIn=self._url_lifetime_s,
            )
        except boto.BotoCoreError as error:
            trouble = self._trouble(error, "sign")
        else:
            return url
        raise trouble

    def use_signed_url(self, operation: str, key: str, name: str, body: bytes = b"") -> None:
        """Read or write an object by a signed URL, as participants do; raise the store's error if
        that fails. operation: "get_object" or "put_object"."""
        method, verb = ("PUT", "write") if operation == "put_object" else ("GET", "read")
        verb = f"{verb} by a signed URL"
        request = AWSRequest(method, self.signed_url(operation, name), data=body or None)
        try:
            answer = self._http.send(request.prepare())
            text = answer.content
        except boto.BotoCoreError as error:
            trouble: Exception = self._trouble(error, verb, self.public_host)
        else:
            if answer.status_code in range(200, 300):
                return
            code = re.search(rb"<Code>([^<]*)</Code>", text)
            told = {
                "Error": {"Code": code[1].decode("ascii", "replace") if code else ""},
                "ResponseMetadata": {"HTTPStatusCode": answer.status_code},
            }
            refusal = boto.ClientError(told, operation)
            trouble = self._refusal(refusal, verb, key, frozenset(), self.public_host)
        raise trouble

    # --- answers ---

    def _call(
        self,
        verb: str,
        operation: str,
        parameters: Mapping[str, Any],
        *,
        key: str = "",
        answers: Set[int] = frozenset(),
    ) -> Any:
        """Make a request on the bucket, and return botocore's answer. verb, key: for the messages
        of errors. answers: HTTP statuses that are raised as Declined. Raises what _refusal() and
        _trouble() make of botocore's errors."""
        try:
            return getattr(self._client, operation)(Bucket=self.name, **parameters)
        except boto.ClientError as error:
            trouble = self._refusal(error, verb, key, answers)
        except boto.BotoCoreError as error:
            trouble = self._trouble(error, verb)
        # Here and not above, so that botocore's error is not the context of ours.
        raise trouble

    def _refusal(
        self, error: boto.ClientError, verb: str, key: str, answers: Set[int], host: str = ""
    ) -> Exception:
        """The error that an answer of the server means. verb, key: for its message. answers:
        statuses that are a Declined. host: that has answered; "": the one of the bucket."""
        status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = _harmless(error.response.get("Error", {}).get("Code", ""))
        what = repr(key) if key else f"the bucket {self.name!r}"
        server = _server(host or self.host)
        if code == "NoSuchBucket":
            return Refused(f"there is no bucket {self.name!r} on {server}", is_no_bucket=True)
        if code in _CREDENTIALS:
            return Refused(f"{server} refuses our credentials ({code})")
        if code in _REGIONS or status in (301, 307):
            return Refused(
                f"{server} says that storage.region, {self._client.meta.region_name}, "
                f"is not the region of the bucket {self.name!r} ({code})"
            )
        if status in (401, 403):
            return Refused(
                f"{server} does not allow us to {verb} {what} ({code}); "
                "our credentials need the right to read, write, delete and list there"
            )
        if status in answers:
            return Declined(status, code)
        if status == 404 and verb in ("read", "copy", "delete"):
            return KeyNotFound(key)
        if status == 429 or (status >= 500 and status != 501) or code in _PASSING:
            return StoreUnavailable(
                f"{server} cannot {verb} {what} at the moment ({code}, HTTP {status})"
            )
        return StoreError(f"{server} does not {verb} {what} ({code}, HTTP {status})")

    def _trouble(self, error: boto.BotoCoreError, verb: str, host: str = "") -> StoreError:
        """The error of a request that got no answer, by what botocore says: Refused where a person
        must act, StoreUnavailable where the server cannot be reached."""
        server = _server(host or self.host)
        match error:
            case boto.NoCredentialsError() | boto.PartialCredentialsError():
                return Refused(
                    "there are no S3 credentials: "
                    + hint("xain-coordinator", 'storage.access_key_id_file = "FILE"')
                    + " and storage.secret_access_key_file, or what boto3 looks for, such as "
                    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                )
            case boto.SSLError():
                return Refused(
                    f"{server} cannot be spoken to by TLS; is its certificate one that we trust "
                    "(storage.ca_file names a file with others)?"
                )
            case boto.HTTPClientError() | boto.ConnectionError():
                return StoreUnavailable(f"{server} cannot be reached ({type(error).__name__})")
            case boto.ParamValidationError():
                return StoreError(f"{self.name!r} cannot be the name of a bucket")
        return StoreUnavailable(f"cannot {verb} on {server}: {type(error).__name__}")

    def _server(self) -> str:
        """The server, as messages call it."""
        return _server(self.host)

    def _size_in(self, answer: Any, offset: int, length: int) -> int:
        """The size of the whole object, out of the answer to a ranged GET."""
        sent: int = answer["ContentLength"]
        if sent > length:
            self._unfit("answers a request for a range with more than that")
        if "ContentRange" not in answer and not offset:
            return sent  # the whole object, as is allowed
        span = re.fullmatch(
            rf"bytes {offset}-[0-9]+/([0-9]{{1,19}})", answer.get("ContentRange", "")
        )
        if span is None:
            self._unfit("does not say which part of how large an object it sends")
        return int(span[1])

    def _etag_in(self, answer: Any) -> str:
        """The ETag in an answer. Raises StoreError if there is none."""
        etag: str = answer.get("ETag", "")
        if not etag:
            self._unfit(
                "gives no ETag, by which a changed object is known "
                "(juicefs gateway does with --keep-etag)"
            )
        return etag

    def _unfit(self, reason: str) -> NoReturn:
        """Refuse the server, which cannot do what we need. Raises StoreError."""
        raise StoreError(f"{self._server()} cannot be used: it {reason}")


def _server(host: str) -> str:
    """A server, as messages call it."""
    return f"the S3 server at {host}"


def _host_of(url: str) -> str:
    """Host and port of a URL, without a name and a password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def _condition(only_if_free: bool) -> tuple[dict[str, str], Set[int]]:
    """Parameters of a write, and the statuses that a server may answer them with."""
    return ({"IfNoneMatch": "*"}, {400, 404, 409, 412, 501}) if only_if_free else ({}, {404})


def _read_into(body: Any, buffer: memoryview) -> int | None:
    """Read the body of an answer into a buffer, as far as it fits. Returns the number of bytes;
    None if the connection broke."""
    num_read = 0
    try:
        while num_read < len(buffer):
            # urllib3 makes bytes of each piece before it copies them.
            count: int = body.readinto(buffer[num_read : num_read + _PIECE_BYTES])
            if not count:
                break
            num_read += count
    except (boto.BotoCoreError, HTTPError, OSError):
        return None
    return num_read


def _harmless(code: str) -> str:
    """Error code of a server, shortened and without control characters for the log."""
    return re.sub(r"[^A-Za-z0-9._-]", "?", code)[:64]


def connect(settings: StoreSettings) -> Bucket:
    """The bucket of [storage]; no request is made yet. Raises StoreError if a file of credentials
    or of authorities cannot be read, or a value makes no sense to boto3."""
    given = _Given(settings)
    authorities = authorities_in("storage", settings.ca_file)
    core = botocore.session.get_session()
    if given.access_key:
        core.get_component("credential_provider").providers.insert(0, _Provider(given))
    trouble = ""
    try:
        session = boto3.session.Session(botocore_session=core, region_name=settings.region)
        client = session.client(
            "s3",
            endpoint_url=settings.endpoint or None,
            verify=authorities,
            config=_config(settings),
        )
        signer = session.client(
            "s3",
            endpoint_url=settings.public_endpoint or settings.endpoint or None,
            verify=authorities,
            config=_config(settings),
        )
    except (boto.BotoCoreError, ValueError) as error:
        # Told as it is: no server and no request has been involved yet.
        trouble = str(error)
    if trouble:
        raise StoreError(f"[storage] does not lead to an S3 server: {trouble}")
    http = URLLib3Session(
        verify=authorities or core.get_config_variable("ca_bundle") or True,
        proxies=get_environ_proxies(signer.meta.endpoint_url),
        timeout=(min(settings.timeout_s, MAX_CONNECT_S), settings.timeout_s),
    )
    return Bucket(client, signer, http, settings.bucket, settings.url_lifetime_s)


class _Given(Credentials):  # type: ignore[misc]  # botocore has no types
    """Credentials of [storage]; a request, or the signing of a URL, takes what their files hold
    then. Raises StoreError if a file cannot be read."""

    def __init__(self, settings: StoreSettings) -> None:
        names = ("access_key_id", "secret_access_key", "session_token")
        self._secrets = [Secret("storage", settings, name) for name in names]
        super().__init__(*self.get_frozen_credentials()[:3])

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """The credentials now, read from their files. Raises StoreError."""
        key_id, secret, token = (secret() for secret in self._secrets)
        return ReadOnlyCredentials(key_id, secret, token or None, None)


class _Provider(CredentialProvider):  # type: ignore[misc]  # botocore has no types
    """Credentials that come before those of the environment, of files, or of the machine's role."""

    METHOD = "xain-storage"

    def __init__(self, credentials: Credentials) -> None:
        super().__init__()
        self._credentials = credentials

    def load(self) -> Credentials:
        return self._credentials


def _config(settings: StoreSettings) -> Config:
    """botocore's settings of [storage]: timeouts, attempts, and what other servers than Amazon's
    know."""
    return Config(
        signature_version="s3v4",
        connect_timeout=min(settings.timeout_s, MAX_CONNECT_S),
        read_timeout=settings.timeout_s,
        retries={"mode": "standard", "total_max_attempts": NUM_ATTEMPTS},
        max_pool_connections=MAX_CONNECTIONS,
        tcp_keepalive=True,
        # Servers of one's own seldom have a DNS name for each bucket.
        s3={"addressing_style": "path" if settings.endpoint else "virtual"},
        # Other servers than Amazon's do not know the checksums that botocore adds by default, and a
        # plain PUT could not use a signed URL with them.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
