"""Sessions whose weights lie in S3, while the server or the coordinator dies."""

import asyncio
import contextlib
import io
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from integration.conftest import Enter
from support.commands import status
from support.process import CoordinatorProcess
from support.s3_servers import Identity, MinioGateway, S3Server, SeaweedFS
from support.wire import Member
from xain_foundation.exit_statuses import EXIT_FENCED
from xain_wire.fl import coordinator_pb2 as pb

# Too large to travel inside its reference: it goes through the store, both ways.
VECTOR = np.linspace(-1, 1, 50_000, dtype=np.float32)

Launch = Callable[..., CoordinatorProcess]


@pytest.fixture(params=[MinioGateway])
def server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    """The test's own, to be killed. The gateway, since it is back in no time."""
    kind = request.param
    if (missing := kind.missing()) is not None:
        pytest.skip(missing)  # says what is not installed
    with kind() as running:
        yield running


def assert_discreet(text: str, identity: Identity) -> None:
    for secret in (*identity.settings().values(), "X-Amz", "Signature=", "AWS4"):
        assert secret not in text


@pytest.fixture
async def launch(server: S3Server, tmp_path: Path) -> AsyncIterator[Launch]:
    """Coordinators with their weights in a bucket that they make. None outlives the test."""
    processes = []
    for name, value in server.owner.settings().items():
        (tmp_path / name).write_text(value)

    def make(**others: object) -> CoordinatorProcess:
        settings = {
            "storage.kind": "s3",
            "storage.endpoint": server.endpoint,
            "storage.bucket": "weights",
            "storage.create_bucket": "true",
            "storage.access_key_id_file": tmp_path / "access_key_id",
            "storage.secret_access_key_file": tmp_path / "secret_access_key",
            "storage.timeout_s": 2,
            "rounds.rounds": 2,
            "rounds.min_participants": 2,
            # A member of these tests beats once, and its round may take as long as it takes.
            "server.heartbeat_timeout_s": 600,
        }
        process = CoordinatorProcess(tmp_path / "coordinator", {**settings, **others})
        processes.append(process)
        return process

    yield make
    for process in processes:
        await process.end()
        assert_discreet(process.log(), server.owner)


async def hand_in(member: Member, vector: Any, round_: int) -> None:
    """Hand in as a participant does, again as long as the store is away."""
    while True:
        try:
            await member.hand_in(vector, round_=round_)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(0.1)  # a poll, not a race: it ends when the store is back
        else:
            return


def keys(server: S3Server) -> list[str]:
    with contextlib.closing(server.client()) as client:
        return [each["Key"] for each in client.list_objects_v2(Bucket="weights")["Contents"]]


def read(server: S3Server, key: str) -> bytes:
    with contextlib.closing(server.client()) as client:
        return client.get_object(Bucket="weights", Key=key)["Body"].read()


def model(server: S3Server, round_: int) -> list[float]:
    (key,) = (key for key in keys(server) if key.endswith(f"/{round_}/global"))
    return np.load(io.BytesIO(read(server, key))).tolist()


async def begin(process: CoordinatorProcess, enter: Enter) -> list[Member]:
    """Two members in round 0."""
    await process.start()
    return await enter(process, "a", "b", round_=0)


@pytest.mark.parametrize("server", [SeaweedFS], ids=["seaweedfs"], indirect=True)
async def test_credentials_are_revoked_and_given_back(server, launch, enter, tmp_path):
    """The coordinator waits with the model, an operator hears why and hears no secret, and the same
    round goes on."""
    ours = Identity()
    server.grant(ours)
    for name, value in ours.settings().items():
        (tmp_path / name).write_text(value)
    process = launch()
    a, b = await begin(process, enter)
    await hand_in(a, VECTOR, 0)
    ref = await b.upload(3 * VECTOR)
    server.revoke(ours)
    await b.end(ref)  # it is stored and measured: nothing more is asked of the store
    await process.until_logged('"work": "aggregate"')
    for flags in ((), ("--json",)):
        shown = await status(process.port, *flags)
        assert "refuses our credentials (InvalidAccessKeyId)" in " ".join(shown.split())
        assert_discreet(shown, ours)
    assert (await a.heartbeat()).state == pb.ROUND

    server.grant(ours)
    await a.until(pb.ROUND, 1)
    assert model(server, 1) == (2 * VECTOR).tolist()
    assert "credentials" not in await status(process.port)
    assert await process.stop() == 0
    assert "refuses our credentials (InvalidAccessKeyId)" in process.log()
    assert_discreet(process.log(), ours)


async def test_a_participant_writes_a_model_of_its_own(server, launch, enter, join):
    """XAIN's hold credentials, which may allow it. The coordinator shows no participant two models
    of one round: it ends and says what may have happened, and goes on once that is put right."""
    process = launch(**{"storage.format": "xain-pickle"})
    a, b = await begin(process, enter)
    with contextlib.closing(server.client()) as client:
        client.put_object(Bucket="weights", Key="1/global", Body=b"mine")
        await a.hand_in(VECTOR)
        await b.hand_in(3 * VECTOR)
        assert await asyncio.wait_for(process.died(), 60) == EXIT_FENCED
        assert "or a participant has written it" in process.log()
        client.delete_object(Bucket="weights", Key="1/global")
    await process.start()
    a = join(process, "a")
    await a.until(pb.ROUND, 1)
    assert np.array_equal(pickle.loads(read(server, "1/global")), 2 * VECTOR)
