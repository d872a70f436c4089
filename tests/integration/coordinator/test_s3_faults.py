"""Faults of S3: refused, missing, away, slow, broken off. Each ends in an error without secrets,
and a passing fault in StoreUnavailable."""

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import urllib3

from support.crooked import Answer, http_server, s3_error
from support.fault_proxy import FaultProxy
from support.logs import capture_logs
from support.s3_servers import Identity, S3Server, SeaweedFS
from support.stores import S3_SERVERS, get, put
from xain_coordinator.config.sections.storage import StorageSettings
from xain_coordinator.ports import KeyExists, StoreError, StoreUnavailable
from xain_coordinator.stores.s3.s3 import S3Store, open_s3
from xain_coordinator.stores.s3.s3_requests import Sizes

MIB = 1 << 20
TOKEN = "t0ken-that-nobody-issued"

Open = Callable[..., S3Store]


@pytest.fixture(autouse=True)
def no_credentials_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the credentials of the user who runs the tests, and of a cloud."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(params=S3_SERVERS)
def server(request: pytest.FixtureRequest) -> S3Server:
    return request.getfixturevalue(request.param)


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Open]:
    """Open stores; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_one(
            settings: dict[str, object], *, try_out: bool = True, **others: object
        ) -> S3Store:
            whole = {"path": tmp_path / "spool", **settings, **others}
            store = open_s3(StorageSettings.model_validate(whole), try_out=try_out)
            stack.callback(store.close)
            return store

        yield open_one


def everything_told(error: BaseException | None) -> str:
    """The error and all that led to it, as a traceback, a log or a debugger would show it."""
    told = ""
    while error is not None:
        told += f"{error} {error!r} {vars(error)} "
        error = error.__cause__ or error.__context__
    return told


def assert_discreet(error: BaseException, *secrets: str) -> None:
    told = everything_told(error)
    for secret in (*secrets, "X-Amz", "Signature=", "AWS4"):
        assert secret not in told
    assert "\n" not in str(error)


def refusal(connect: Open, settings: dict[str, object], *secrets: str) -> str:
    """Why no store can be opened: in words, and no StoreUnavailable, which would be waited for."""
    with pytest.raises(StoreError) as caught:
        connect(settings)
    assert not isinstance(caught.value, StoreUnavailable)
    assert_discreet(caught.value, *secrets)
    return str(caught.value)


# --- starting ---


@pytest.mark.parametrize("part", ["access_key_id", "secret_access_key"])
def test_wrong_credentials(connect, server, part):
    wrong, known = Identity().settings(), server.owner.settings()
    settings = server.settings("any", **{part: wrong[part]})
    said = refusal(connect, settings, *wrong.values(), *known.values())
    assert f"127.0.0.1:{server.port} refuses our credentials" in said


def test_credentials_without_rights(connect, seaweedfs):
    """Known to the server, and with nothing to do in this bucket."""
    other_identity = seaweedfs.other_identity.settings()
    settings = seaweedfs.settings(seaweedfs.new_bucket(), **other_identity)
    said = refusal(connect, settings, *other_identity.values())
    assert "to list the bucket" in said
    assert "read, write, delete and list" in said


@pytest.mark.parametrize("in_file", [False, True], ids=["value", "file"])
def test_a_session_token_that_is_refused(connect, server, tmp_path, in_file):
    """Such as one that has expired."""
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    token = {"session_token_file": str(path)} if in_file else {"session_token": TOKEN}
    known = server.owner.settings().values()
    assert "refuses our credentials" in refusal(
        connect, server.settings("any", **token), TOKEN, *known
    )


def test_credentials_from_the_environment(connect, server, monkeypatch):
    """boto3 finds its own credentials if the configuration has none."""
    nothing = {"access_key_id": "", "secret_access_key": ""}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.owner.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.owner.secret_access_key)
    put(connect(server.settings(server.new_bucket(), **nothing)), "1/global", b"x")


def test_credentials_that_change_in_their_files_are_used_from_then_on(connect, seaweedfs, tmp_path):
    """The open store sends requests and signs URLs with the new ones; a file that is gone for a
    moment changes nothing."""
    old, renewed = Identity(), Identity()

    def write(identity: Identity) -> None:
        for name, value in identity.settings().items():
            (tmp_path / name).write_text(f"{value}\n")

    seaweedfs.grant(old)
    write(old)
    settings = seaweedfs.settings(seaweedfs.new_bucket(), access_key_id="", secret_access_key="")
    settings |= {f"{name}_file": str(tmp_path / name) for name in old.settings()}
    store = connect(settings)
    for name in old.settings():
        (tmp_path / name).unlink()
    put(store, "1/a", b"x")
    seaweedfs.grant(renewed)
    seaweedfs.revoke(old)
    with pytest.raises(StoreUnavailable, match="refuses our credentials"):
        put(store, "1/b", b"y")
    write(renewed)
    put(store, "1/b", b"y")
    assert urllib3.request("GET", store.download_url("1/b")).data == b"y"
    seaweedfs.revoke(renewed)


@pytest.mark.parametrize("end", ["\n", "\r\n", "  "])
def test_credentials_with_a_line_end(connect, server, monkeypatch, end):
    """Line ends of files and of the environment are removed: no server would accept them."""
    known = server.owner.settings()
    padded = {name: f" {value}{end}" for name, value in known.items()}
    put(connect(server.settings(server.new_bucket(), **padded)), "1/global", b"x")


@pytest.mark.parametrize("character", ["\n", "\t", "\0", "\x7f", "\u2028"])
@pytest.mark.parametrize("name", ["access_key_id", "secret_access_key", "session_token"])
@pytest.mark.parametrize("in_file", [False, True], ids=["value", "file"])
def test_credentials_with_a_control_character(connect, tmp_path, name, character, in_file):
    """Refused in words, before anything is sent."""
    settings = {"kind": "s3", "endpoint": "http://127.0.0.1:1", "bucket": "b"}
    settings |= Identity().settings() | {name: f"hunter{character}2"}
    source = f"storage.{name}"
    if in_file:
        path = tmp_path / name
        path.write_text(f"hunter{character}2\n")
        settings |= {name: "", f"{name}_file": str(path)}
        source = f"storage.{name}_file (not shown)"
    said = f"{source} has a line end or another control character in it; remove it"
    assert refusal(connect, settings, "hunter") == said


def test_a_missing_bucket(connect, server):
    """Is created only if that is wanted; a second coordinator finds it."""
    settings = server.settings(f"new-{time.time_ns()}")
    assert re.search("no bucket .*create_bucket = true", refusal(connect, settings))
    put(connect(settings, create_bucket=True), "1/global", b"x")
    assert get(connect(settings, create_bucket=True), "1/global") == b"x"
    assert get(connect(settings), "1/global") == b"x"


def test_server_that_is_away(connect):
    """The error is one after which a later try helps."""
    settings = {
        "kind": "s3", "endpoint": "http://127.0.0.1:1", "bucket": "b", **Identity().settings()
    }  # fmt: skip
    with pytest.raises(StoreUnavailable, match=r"127.0.0.1:1 cannot be reached"):
        connect(settings)


# --- the trial at the start ---

BUCKET = "trial-bucket"

# An action of IAM that credentials lack: what the message names.
LACKING = {
    "ListBucket": ("to list the bucket 'trial-bucket'", ""),
    "GetObject": ("to read '.trial'", "creating an object once"),
    "PutObject": ("to write '.trial'", "creating an object once"),
    "CreateMultipartUpload": ("to write '.trial'", "uploading in parts"),
    "UploadPart": ("to write '.trial'", "uploading in parts"),
    "CompleteMultipartUpload": ("to write '.trial'", "uploading in parts"),
    "AbortMultipartUpload": ("to write '.trial'", "giving up an upload in parts"),
    "DeleteObject": ("to delete '.trial'", "deleting"),
}


def policy(action: str) -> str:
    """Policy that allows everything in the bucket but this action."""
    there = [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"]
    statements = [
        {"Effect": "Allow", "Action": ["s3:*"], "Resource": there},
        {"Effect": "Deny", "Action": [f"s3:{action}"], "Resource": there},
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


@pytest.fixture(scope="module")
def guarded() -> Iterator[SeaweedFS]:
    """A server with an identity for each action, which lacks it."""
    if (missing := SeaweedFS.missing()) is not None:
        pytest.skip(missing)  # says what is not installed
    with SeaweedFS(policies={action: policy(action) for action in LACKING}) as running:
        with contextlib.closing(running.client()) as client:
            client.create_bucket(Bucket=BUCKET)
        yield running


@pytest.mark.parametrize("action", LACKING)
def test_credentials_that_lack_one_right_are_refused_at_the_start(connect, guarded, action):
    """And not at the end of the first round. An operator must act, so that it is no error after
    which the start is tried again. Nothing stays in the bucket of what may be deleted."""
    identity = guarded.guests[action].settings()
    verb, tried = LACKING[action]
    said = refusal(connect, guarded.settings(BUCKET, **identity), *identity.values())
    assert f"does not allow us {verb} (AccessDenied)" in said
    assert said.endswith(f"what was tried: {tried}" if tried else "list there")
    with contextlib.closing(guarded.client()) as client:
        left = [found["Key"] for found in client.list_objects_v2(Bucket=BUCKET).get("Contents", ())]
        for key in left:
            client.delete_object(Bucket=BUCKET, Key=key)
    assert not left or action in ("DeleteObject", "ListBucket", "GetObject")


def test_signed_urls_that_are_refused_are_told_at_the_start(connect, server):
    """The server is reached directly, and participants are led to another address."""
    with http_server(lambda *_: s3_error(403, "SignatureDoesNotMatch")) as url:
        settings = server.settings(server.new_bucket(), public_endpoint=url)
        said = refusal(connect, settings)
        assert f"{url.removeprefix('http://')} refuses our credentials" in said
        assert said.endswith("what was tried: signed URLs")
        connect(settings, presigned=False)


def test_public_address_that_only_participants_reach_is_no_reason_not_to_start(connect, server):
    with capture_logs() as logs:
        store = connect(server.settings(server.new_bucket(), public_endpoint="http://127.0.0.1:1"))
        put(store, "1/global", b"x")
    (told,) = [entry for entry in logs if entry["event"] == "signed_urls_not_tried"]
    assert "127.0.0.1:1 cannot be reached" in told["error"]
    assert list(store.keys()) == ["1/global"]


# --- what a server may answer ---


@pytest.mark.parametrize(
    ("status", "code", "passing", "message"),
    [
        (403, "InvalidAccessKeyId", False, "refuses our credentials (InvalidAccessKeyId)"),
        (400, "ExpiredToken", False, "refuses our credentials (ExpiredToken)"),
        (403, "RequestTimeTooSkewed", False, "refuses our credentials (RequestTimeTooSkewed)"),
        (403, "QuotaExceeded", False, "does not allow us to list the bucket 'b' (QuotaExceeded)"),
        (
            400,
            "AuthorizationHeaderMalformed",
            False,
            "storage.region, us-east-1, is not the region",
        ),
        (501, "NotImplemented", False, "does not list the bucket 'b' (NotImplemented, HTTP 501)"),
        (400, "Bad\r\n\u202ecode", False, "(Bad??code, HTTP 400)"),
        (503, "SlowDown", True, "cannot list the bucket 'b' at the moment (SlowDown, HTTP 503)"),
        (429, "TooManyRequests", True, "at the moment (TooManyRequests, HTTP 429)"),
        (500, "InternalError", True, "at the moment (InternalError, HTTP 500)"),
        (507, "XMinioStorageFull", True, "at the moment (XMinioStorageFull, HTTP 507)"),
        (400, "RequestTimeout", True, "at the moment (RequestTimeout, HTTP 400)"),
    ],
)
def test_answers(connect, status, code, passing, message):
    """Passing errors are waited for, others raised at once; only the server's code is shown."""
    identity = Identity().settings()
    everything = " ".join([*identity.values(), TOKEN])
    with (
        http_server(lambda *_: s3_error(status, code, everything)) as url,
        pytest.raises(StoreError) as caught,
    ):
        connect({"kind": "s3", "endpoint": url, "bucket": "b", "session_token": TOKEN, **identity})
    assert isinstance(caught.value, StoreUnavailable) == passing
    assert message in str(caught.value)
    assert_discreet(caught.value, *identity.values(), TOKEN)
    assert str(caught.value).isprintable()


class OneObject:
    """A server whose only object is a mebibyte; `answer` is what a GET of it gets."""

    def __init__(self) -> None:
        self.answer: Callable[[int], Answer] = self.whole
        self.num_gets = 0

    def whole(self, _: int) -> Answer:
        data = b"x" * 1000
        headers = {"ETag": '"e"', "Content-Range": f"bytes 0-999/{MIB}"}
        return 206, headers, data

    def __call__(self, method: str, path: str) -> Answer:
        if method != "GET" or "list-type" in path:
            return 200, {}, b"<ListBucketResult/>"
        self.num_gets += 1
        return self.answer(self.num_gets)


@pytest.fixture
def one_object(connect: Open) -> Iterator[tuple[OneObject, S3Store]]:
    server = OneObject()
    with http_server(server) as url:
        settings = {"kind": "s3", "endpoint": url, "bucket": "b", **Identity().settings()}
        store = connect(settings, try_out=False)
        store.requests.sizes = Sizes(head=1000)
        yield server, store


def test_an_answer_that_breaks_off(one_object):
    """Is asked for again, a few times."""
    server, store = one_object

    def short(number: int) -> Answer:
        status, headers, data = server.whole(number)
        if number >= 3:
            return status, headers, data
        return status, {**headers, "Content-Length": "1000", "Connection": "close"}, data[:10]

    server.answer = short
    store.open("k").close()
    assert server.num_gets == 3
    server.answer = lambda number: short(0)
    with pytest.raises(StoreUnavailable, match="broke off 3 times in 'k'"):
        store.open("k")


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Content-Range": f"bytes 0-999/{MIB}"}, "gives no ETag"),
        ({"ETag": '"e"', "Content-Range": "bytes 0-999/*"}, "which part of how large an object"),
        ({"ETag": '"e"', "Content-Range": f"bytes 5-1004/{MIB}"}, "which part of how large"),
        ({"ETag": '"e"', "Content-Length": str(MIB)}, "with more than that"),
    ],
)
def test_a_server_that_cannot_be_used(one_object, headers, message):
    """Without ranges or ETags a reader could mix two objects, and waiting does not help."""
    server, store = one_object
    status = 206 if "Content-Range" in headers else 200
    body = b"x" * (1000 if status == 206 else MIB)
    server.answer = lambda _: (status, headers, body)
    with pytest.raises(StoreError, match=message) as caught:
        store.open("k")
    assert not isinstance(caught.value, StoreUnavailable)


def test_a_server_without_conditions(connect):
    """One that refuses If-None-Match instead of ignoring it is published on all the same."""
    objects = {}
    refused = []

    def answer(method: str, path: str) -> Answer:
        name = path.partition("?")[0].removeprefix("/b/")
        if "list-type" in path:
            listed = "".join(f"<Contents><Key>{each}</Key></Contents>" for each in objects)
            return 200, {}, f"<ListBucketResult>{listed}</ListBucketResult>".encode()
        if method == "PUT":
            if name == "1/global" and not refused:
                refused.append(name)
                return s3_error(501, "NotImplemented")
            objects[name] = b"x"
            return 200, {"ETag": '"e"'}, b""
        if method == "DELETE":
            objects.pop(name)
            return 204, {}, b""
        if name not in objects:
            return s3_error(404, "NoSuchKey")
        return 206, {"ETag": '"e"', "Content-Range": "bytes 0-0/1"}, b"x"

    with http_server(answer) as url:
        identity = Identity().settings()
        settings = {"kind": "s3", "endpoint": url, "bucket": "b", **identity}
        store = connect(settings, try_out=False)
        put(store, "1/global", b"x")
        with pytest.raises(KeyExists):
            put(store, "1/global", b"y")
    assert refused
    assert list(objects) == ["1/global"]


# --- while it runs ---


def uses_of(store: S3Store) -> dict[str, Callable[[], object]]:
    return {
        "open": lambda: store.open("1/a"),
        "settle": lambda: store.settle("1/a"),
        "put": lambda: store.put({"1/b": b"x", "1/c": b"y"}),
        "overwrite": lambda: put(store, "1/b", b"x", overwrite=True),
        "create": lambda: put(store, "1/b", b"x"),
        "keys": lambda: list(store.keys()),
        "delete": lambda: store.delete("1/a"),
        "copy": lambda: store.copy("1/a", "1/b", 1),
    }


def test_a_bucket_that_vanishes(connect, server):
    """Waited for, in words of its own: what it held is not taken for lost, and when it is back all
    is well."""
    settings = server.settings(server.new_bucket())
    store = connect(settings)
    with contextlib.closing(server.client()) as client:
        client.delete_bucket(Bucket=settings["bucket"])
        for name, use in uses_of(store).items():
            with pytest.raises(StoreUnavailable, match="there is no bucket") as caught:
                use()
            assert str(settings["bucket"]) in str(caught.value), name
        client.create_bucket(Bucket=settings["bucket"])
    put(store, "1/a", b"x")
    assert get(store, "1/a") == b"x"


def test_a_server_that_hangs(connect, seaweedfs):
    """The store gives up after a few times timeout_s, and works again once the server answers."""
    with FaultProxy(seaweedfs.port) as proxy:
        store = connect(
            seaweedfs.settings(seaweedfs.new_bucket(), timeout_s=0.5),
            endpoint=f"http://127.0.0.1:{proxy.port}",
        )
        put(store, "1/a", b"x" * MIB)
        proxy.blackhole()
        for use in (lambda: store.open("1/a"), lambda: put(store, "1/b", b"x")):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                use()
            assert time.monotonic() - began < 60
        proxy.heal()
        assert get(store, "1/a") == b"x" * MIB


def test_no_secret_in_debug_logs(connect, server, caplog):
    """The level is the lowest that an operator may ask for."""
    with caplog.at_level("DEBUG"):
        store = connect(server.settings(server.new_bucket()))
        put(store, "1/a", b"x")
        store.download_url("1/a")
    secrets = [*server.owner.settings().values(), "AWS4-HMAC", "X-Amz-Signature"]
    for secret in secrets:
        assert secret not in caplog.text
