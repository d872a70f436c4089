"""Real S3 servers on this machine, each in a process of its own, to be killed and started again."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from xain_foundation.net.sockets import free_ports

READY_S = 90.0  # servers that start within seconds, on a machine that has other things to do
GRACE_S = 5.0


def find_program(name: str) -> str | None:
    """Path of a program beside our Python, or on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


@dataclass(frozen=True)
class Identity:
    """Credentials for a server, made up for one test run."""

    access_key_id: str = field(default_factory=lambda: f"AK{secrets.token_hex(9).upper()}")
    secret_access_key: str = field(default_factory=lambda: secrets.token_hex(20))

    def settings(self) -> dict[str, str]:
        """The credentials as keys of [storage]."""
        return {"access_key_id": self.access_key_id, "secret_access_key": self.secret_access_key}


class S3Server(ABC):
    """owner may do everything. The port, and what is stored, stay over restarts."""

    name = ""
    program = ""

    def __init__(self) -> None:
        self.owner = Identity()
        # Short, because it holds Unix sockets, whose paths may have about 100 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="s3-"))
        self.log_path = self.folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_ports(1)[0]
        self._num_buckets = 0

    @classmethod
    def missing(cls) -> str | None:
        """The reason why it cannot be started here; None if it can."""
        if find_program(cls.program) is None:
            return f"{cls.program} is not installed; it comes with the development requirements"
        return None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def settings(self, bucket: str, **others: object) -> dict[str, object]:
        """The keys of [storage]."""
        return {
            "kind": "s3",
            "endpoint": self.endpoint,
            "bucket": bucket,
            **self.owner.settings(),
            **others,
        }

    def client(self, identity: Identity | None = None) -> Any:
        """A plain boto3 client, for what a test does behind the store's back."""
        identity = identity or self.owner
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=identity.access_key_id,
            aws_secret_access_key=identity.secret_access_key,
            config=Config(
                connect_timeout=5,
                read_timeout=30,
                retries={"mode": "standard", "total_max_attempts": 1},
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def new_bucket(self) -> str:
        """Create a bucket that no other test uses."""
        self._num_buckets += 1
        bucket = f"bucket-{self._num_buckets}-{secrets.token_hex(3)}"
        with contextlib.closing(self.client()) as client:
            client.create_bucket(Bucket=bucket)
        return bucket

    def start(self) -> None:
        """Returns when it takes objects."""
        assert self._process is None, "it runs already"
        self._spawn()
        self._wait_until_ready()

    def kill(self) -> None:
        """kill -9, or what the server can take and still find its data again."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        """End the server in any state, and remove all that it stored."""
        if self._process is not None:
            self._end(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """The last lines that it wrote."""
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-40:])

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # no process outlives a test that cannot begin
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _command(self) -> Sequence[str]: ...

    def _environment(self) -> Mapping[str, str]:
        return {}

    def _spawn(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=self.folder,
                env={**os.environ, **self._environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        with contextlib.closing(self.client()) as client:
            while True:
                try:
                    self._use(client)
                except (BotoCoreError, ClientError) as error:
                    if self._process.poll() is not None:
                        raise AssertionError(f"{self.name} has ended:\n{self.log()}") from error
                    if time.monotonic() > deadline:
                        raise AssertionError(f"{self.name} is not ready:\n{self.log()}") from error
                    time.sleep(0.1)  # a poll, not a race: it ends when the server answers
                else:
                    return

    def _use(self, client: Any) -> None:
        """Create, write, read: the parts of a server do not come up together."""
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket="ready")
        client.put_object(Bucket="ready", Key="ready", Body=b"ready")
        client.get_object(Bucket="ready", Key="ready")["Body"].read()

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        assert process is not None, "it does not run"
        process.send_signal(number)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class SeaweedFS(S3Server):
    """`weed server` with the S3 gateway. Conditional writes work.

    other_identity: a second identity, which may use the bucket "elsewhere" only.
    guest: a third, which may do what its policy, an IAM document, allows; None: nothing.
    guests: further ones with policies of their own, by name.
    """

    name = "SeaweedFS"
    program = "weed"

    def __init__(
        self, policy: str | None = None, policies: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self.other_identity = Identity()
        self.guest = Identity()
        self._ports = free_ports(7)
        identities = [
            _seaweed_identity("owner", self.owner, "Admin"),
            _seaweed_identity("other", self.other_identity, "Read:elsewhere", "Write:elsewhere"),
        ]
        self.guests = {name: Identity() for name in policies or {}}
        documents = dict(policies or {}) | ({} if policy is None else {"guest": policy})
        for name in documents:
            guest = _seaweed_identity(name, self.guests.get(name, self.guest))
            identities.append({**guest, "policyNames": [f"of-{name}"]})
        known = [{"name": f"of-{name}", "content": text} for name, text in documents.items()]
        config = {"identities": identities, "policies": known}
        (self.folder / "s3.json").write_text(json.dumps(config))
        (self.folder / "data").mkdir()

    def grant(self, identity: Identity) -> None:
        """One more that may do everything, until revoke()."""
        self._configure(identity, f"-secret_key={identity.secret_access_key}", "-actions=Admin")
        self._wait_until_known(identity, known=True)

    def revoke(self, identity: Identity) -> None:
        self._configure(identity, "-delete")
        self._wait_until_known(identity, known=False)

    def _configure(self, identity: Identity, *flags: str) -> None:
        user = (f"-user={identity.access_key_id}", f"-access_key={identity.access_key_id}")
        program = find_program(self.program)
        assert program is not None
        master, master_grpc, _, _, filer, filer_grpc, _ = self._ports
        subprocess.run(
            [
                program,
                "shell",
                f"-master=127.0.0.1:{master}.{master_grpc}",
                f"-filer=127.0.0.1:{filer}.{filer_grpc}",
            ],
            input=" ".join(["s3.configure", *user, *flags, "-apply\n"]).encode(),
            cwd=self.folder,
            check=True,
            timeout=READY_S,
            capture_output=True,
        )

    def _wait_until_known(self, identity: Identity, *, known: bool) -> None:
        deadline = time.monotonic() + READY_S
        with contextlib.closing(self.client(identity)) as client:
            while True:
                try:
                    client.list_buckets()
                except ClientError as error:
                    is_known = error.response["Error"]["Code"] != "InvalidAccessKeyId"
                else:
                    is_known = True
                if is_known == known:
                    return
                assert time.monotonic() < deadline, f"{self.name} does not change who may use it"
                time.sleep(0.1)  # a poll, not a race: it ends when the server has heard of it

    def _command(self) -> Sequence[str]:
        program = find_program(self.program)
        assert program is not None
        names = (
            "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
            "filer.port", "filer.port.grpc", "s3.port.grpc",
        )  # fmt: skip
        return [
            program,
            "-logtostderr=true",
            "server",
            f"-dir={self.folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-volume.max=0",
            "-volume.preStopSeconds=0",
            "-master.volumeSizeLimitMB=64",
            "-master.peers=none",  # else it waits for an election, after a kill for some 15 s
            "-master.telemetry=false",
            f"-filer.localSocket={self.folder / 'filer.sock'}",
            "-s3",
            "-s3.autoCreateBucket=false",  # a bucket that was deleted must stay away
            f"-s3.port={self.port}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.localSocket={self.folder / 's3.sock'}",
            f"-s3.config={self.folder / 's3.json'}",
            *(f"-{name}={port}" for name, port in zip(names, self._ports, strict=True)),
        ]


def _seaweed_identity(name: str, identity: Identity, *actions: str) -> dict[str, object]:
    credentials = {"accessKey": identity.access_key_id, "secretKey": identity.secret_access_key}
    return {"name": name, "credentials": [credentials], "actions": list(actions)}


class MinioGateway(S3Server):
    """MinIO's gateway as `juicefs gateway` has it. It ignores If-None-Match."""

    name = "MinIO gateway"
    program = "juicefs"

    def _spawn(self) -> None:
        if not (self.folder / "meta.db").exists():
            program = find_program(self.program)
            assert program is not None
            subprocess.run(
                [
                    program,
                    "format",
                    self._database(),
                    "tests",
                    "--storage=file",
                    f"--bucket={self.folder / 'data'}",
                    "--trash-days=0",
                ],
                check=True,
                timeout=READY_S,
                capture_output=True,
            )
        super()._spawn()

    def _database(self) -> str:
        return f"sqlite3://{self.folder / 'meta.db'}"

    def _command(self) -> Sequence[str]:
        program = find_program(self.program)
        assert program is not None
        return [
            program,
            "gateway",
            self._database(),
            f"127.0.0.1:{self.port}",
            "--multi-buckets",
            "--keep-etag",
            "--no-banner",
            "--no-usage-report",
            "--backup-meta=0",
            f"--cache-dir={self.folder / 'cache'}",
            f"--log={self.folder / 'gateway.log'}",
        ]

    def _environment(self) -> Mapping[str, str]:
        return {
            "MINIO_ROOT_USER": self.owner.access_key_id,
            "MINIO_ROOT_PASSWORD": self.owner.secret_access_key,
            # The server must not write into the home of the user who runs the tests.
            "HOME": str(self.folder),
        }
