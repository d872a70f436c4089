"""Participants of XAIN 0.6.0: its own SDK, unchanged, against a coordinator and an S3 server."""

import asyncio
import json
import os
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.process import CoordinatorProcess, Process, ended
from support.s3_servers import SeaweedFS
from support.wire import Member
from support.xain_sdk import environment
from xain_coordinator.access.control import initialise
from xain_foundation.net.sockets import free_ports
from xain_participant.enrolment.joining import Token, join
from xain_participant.enrolment.kept import KeptCertificates
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2

# The environment is installed once, which takes as long as the network does.
pytestmark = pytest.mark.timeout(600)

PARTICIPANT = Path(environment.__file__).with_name("participant.py")
PATIENCE_S = 240.0
HURRY = 20  # XAIN's participants ask every 10 s, and wait 5 s before they try again


@pytest.fixture(scope="module")
def sdk_python() -> Path:
    try:
        return environment.sdk_python()
    except environment.NotInstalled as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))  # says why it is not installed


@pytest.fixture
def server(seaweedfs: SeaweedFS) -> SeaweedFS:
    return seaweedfs


class Bucket:
    """A bucket as XAIN's participants use it."""

    def __init__(self, server: SeaweedFS, client: Any) -> None:
        self.name = server.new_bucket()
        self._client = client

    def names(self) -> set[str]:
        """Keys outside the session's own part."""
        listed = self._client.list_objects_v2(Bucket=self.name)
        keys = {one["Key"] for one in listed.get("Contents", [])}
        firsts = {key: key.partition("/")[0] for key in keys}
        # The identity of a session has 12 characters, which may all be digits.
        return {key for key, first in firsts.items() if first.isdigit() and len(first) < 12}

    async def holds(self, key: str) -> None:
        while True:
            if key in self.names():
                return
            await asyncio.sleep(0.1)  # a poll, not a race: it ends when the object is there

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.name, Key=key, Body=data)

    def unpickle(self, key: str) -> Any:
        """Load an object as XAIN's SDK does."""
        return pickle.loads(self._client.get_object(Bucket=self.name, Key=key)["Body"].read())


@pytest.fixture
def bucket(server: SeaweedFS) -> Iterator[Bucket]:
    with closing(server.client()) as client:
        yield Bucket(server, client)


@asynccontextmanager
async def coordinator(
    folder: Path, server: SeaweedFS, bucket: Bucket, **rounds: int
) -> AsyncIterator[CoordinatorProcess]:
    settings = {f"rounds.{key}": value for key, value in rounds.items()}
    settings |= {"server.heartbeat_time_s": 3.0, "server.heartbeat_timeout_s": 3.0}
    storage = server.settings(bucket.name, format="xain-pickle")
    settings |= {f"storage.{key}": value for key, value in storage.items()}
    process = CoordinatorProcess(folder, settings)
    async with ended(process):
        await process.start()
        yield process


async def status(process: CoordinatorProcess) -> inspection_pb2.GetStatusResponse:
    member = Member(process.port, None)
    try:
        return await member.inspection.GetStatus(inspection_pb2.GetStatusRequest())
    finally:
        await member.close()


class SdkParticipant:
    """A process of the SDK. Its weights begin at `first` and grow by `step` in each round."""

    def __init__(self, folder: Path, name: str) -> None:
        self._config = folder / f"{name}.toml"
        self._log = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(
        self,
        python: Path,
        port: int,
        server: SeaweedFS,
        bucket: Bucket,
        num_samples: int,
        step: float,
        first: list[float],
    ) -> None:
        self._config.write_text(
            f'[coordinator]\nhost = "127.0.0.1"\nport = {port}\n'
            f'[storage]\nendpoint = "{server.endpoint}"\nbucket = "{bucket.name}"\n'
            f'access_key_id = "{server.owner.access_key_id}"\n'
            f'secret_access_key = "{server.owner.secret_access_key}"\n'
            '[logging]\nlevel = "warning"\n'
        )
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(str(python), str(PARTICIPANT), str(self._config)),
                *(str(number) for number in (HURRY, num_samples, step, *first)),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )

    async def finished(self) -> list[dict[str, Any]]:
        """Wait until it has ended by itself; returns what it was asked for."""
        assert self._process is not None
        output, _ = await self._process.communicate()
        assert self._process.returncode == 0, self._log.read_text()
        return [json.loads(line) for line in output.splitlines()]

    async def end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()


async def all_finished(*participants: SdkParticipant) -> list[list[dict[str, Any]]]:
    """Wait for all of them, or for the first that fails."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(participant.finished()) for participant in participants]
    return [task.result() for task in tasks]


async def test_participants_of_xain_run_a_session(tmp_path, sdk_python, server, bucket):
    """Two unchanged participants initialise, train two rounds and end by themselves. The models are
    the averages of what they handed in, weighted by their samples; bucket, epochs and metrics are
    as XAIN's own coordinator had them."""
    async with (
        coordinator(
            tmp_path, server, bucket, rounds=3, epochs=2, min_participants=2, max_participants=2
        ) as process,
        AsyncExitStack() as stack,
    ):
        first, second = SdkParticipant(tmp_path, "first"), SdkParticipant(tmp_path, "second")
        for participant in (first, second):
            stack.push_async_callback(participant.end)
        start = (sdk_python, process.port, server, bucket)
        await first.start(*start, num_samples=10, step=1.0, first=[1.0, 2.0, -3.0])
        await second.start(*start, num_samples=30, step=5.0, first=[3.0, 6.0, 1.0])
        async with asyncio.timeout(PATIENCE_S):
            calls = await all_finished(first, second)
        seen = await status(process)
        assert await process.stop() == 0
    assert (seen.state, seen.phase) == (pb.FINISHED, "finished")

    # Initial weights have no samples in round 0, so all count the same; then 10 of 40 add 1 and 30
    # add 5.
    models = [[], [2.0, 4.0, -1.0], [6.0, 8.0, 3.0], [10.0, 12.0, 7.0]]
    names = [participant[0]["id"] for participant in calls]
    for participant in calls:
        assert participant[1:] == [
            {"call": "init_weights"},
            {"call": "train_round", "epochs": 2, "epoch_base": 0, "weights": models[1]},
            {"call": "train_round", "epochs": 2, "epoch_base": 2, "weights": models[2]},
        ]
    for number, expected in enumerate(models):
        model = bucket.unpickle(f"{number}/global")
        assert (type(model), model.dtype) == (np.ndarray, np.float32)
        assert model.tolist() == expected
    uploads = {f"{number}/{name}" for number in range(3) for name in names}
    assert bucket.names() == uploads | {f"{number}/global" for number in range(4)}

    points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [point["fields"]["step"] for point in points if "step" in point["fields"]]
    assert sorted(steps) == [1.0] * 4 + [5.0] * 4  # an epoch, a point


class TunnelProcess(Process):
    """`xain-participant tunnel` for a site that has joined, on a port that stays the same."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, f"{name}-tunnel")
        self.port = free_ports(1)[0]
        self.kept = KeptCertificates(folder / name)

    async def start(self) -> None:
        """Returns when clients may connect."""
        flags = [f"--state-dir={self.kept.folder.parent}", f"--listen={self.port}"]
        self._process = await self.run(["-m", "xain_participant", "tunnel", *flags])
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    assert self.status is None, self.log()
                    await asyncio.sleep(0.02)  # a poll, not a race: it ends when the port is open
                else:
                    writer.close()
                    return


async def test_participants_of_xain_come_through_tunnels(tmp_path, sdk_python, server, bucket):
    """Unchanged participants train with a coordinator that lets nobody in without a certificate.
    They are known by the names in the certificates of their tunnels, also when they are started
    again after a tunnel and the coordinator were killed, each in the middle of a session."""
    initialise(tmp_path / "access", ["localhost"])
    async with (
        coordinator(
            tmp_path, server, bucket, rounds=4, epochs=1, min_participants=2, max_participants=2
        ) as process,
        AsyncExitStack() as stack,
    ):
        tunnels = [TunnelProcess(tmp_path, name) for name in ("north", "south")]
        for name, tunnel in zip(("north", "south"), tunnels, strict=True):
            token = Token(await process.told("tokens", "create", "--name", name), name)
            await asyncio.to_thread(join, tunnel.kept, token, f"127.0.0.1:{process.port}")
            stack.push_async_callback(tunnel.end)
            await tunnel.start()

        async def start(run: str) -> list[SdkParticipant]:
            started = []
            for number, tunnel in enumerate(tunnels):
                participant = SdkParticipant(tmp_path, f"{run}-{number}")
                stack.push_async_callback(participant.end)
                await participant.start(
                    *(sdk_python, tunnel.port, server, bucket),
                    num_samples=10,
                    step=4.0,
                    first=[2.0, 4.0],
                )
                started.append(participant)
            return started

        async with asyncio.timeout(PATIENCE_S):
            running = await start("first")
            for number, killed in ((1, tunnels[0]), (2, process)):
                await bucket.holds(f"{number}/global")
                await killed.kill()
                await killed.start()
                # XAIN's participants do not survive that.
                for participant in running:
                    await participant.end()
                running = await start(f"after-{number}")
            await all_finished(*running)
        seen = json.loads(await process.told("status", "--json"))
        assert await process.stop() == 0
    assert {one["participant_id"] for one in seen["participants"]} == {"north", "south"}
    models = [bucket.unpickle(f"{number}/global").tolist() for number in range(5)]
    assert models == [[], [2.0, 4.0], [6.0, 8.0], [10.0, 12.0], [14.0, 16.0]]
