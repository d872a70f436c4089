"""The coordinator dies and is started again on the same journal."""

import io
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from support.process import CoordinatorProcess
from support.wire import Member
from xain_coordinator.core.values import Phase
from xain_proto.fl import coordinator_pb2 as pb


async def test_a_restart_goes_on_with_the_same_round(start, join):
    """Number, selection and accepted updates are kept, and the aggregate is the undisturbed one."""
    rounds = {"rounds": 2, "min_participants": 2}
    first = await start(rounds=rounds)
    a, b = join(first, "a"), join(first, "b")
    await a.rendezvous()
    await b.rendezvous()
    await a.until(pb.ROUND, 0)
    ref = await a.hand_in([1.0])
    before = first.driver.session
    await first.stop()

    second = await start(rounds=rounds)
    assert second.driver.session == before
    assert second.driver.session.phase is Phase.COLLECTING
    a, b = join(second, "a"), join(second, "b")
    assert (await a.heartbeat()).update_accepted  # known without a rendezvous
    await a.end(ref)  # asked again: acknowledged again
    await b.hand_in([3.0])
    await a.until(pb.ROUND, 1)
    assert np.load(io.BytesIO(await a.download("1/global"))).tolist() == [2.0]


async def test_an_end_is_an_end_after_a_restart_too(start, join):
    """A finished session is served with its cause; a new one is opened only when asked for."""
    first = await start(rounds={"rounds": 1})
    a = join(first, "a")
    await a.rendezvous()
    await a.until(pb.ROUND, 0)
    await a.hand_in([1.0])
    await a.until(pb.FINISHED, 0)
    await first.stop()

    second = await start(rounds={"rounds": 1})
    assert second.driver.session.cause == "completed"
    assert (await join(second, "b").heartbeat()).state == pb.FINISHED
    await second.stop()

    third = await start(rounds={"rounds": 1}, new_session=True)
    assert third.driver.session.session_id != second.driver.session.session_id
    assert third.driver.session.phase is Phase.STANDBY


async def test_rules_stay_those_that_the_session_was_opened_with(start):
    """Another configuration after a restart does not change a session under way."""
    first = await start(rounds={"rounds": 7})
    await first.stop()
    second = await start(rounds={"rounds": 9})
    assert second.driver.session.rules.rounds == 7


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[CoordinatorProcess]:
    coordinator = CoordinatorProcess(
        tmp_path,
        {"rounds.rounds": 3, "rounds.min_participants": 3, "rounds.start_timeout_s": 0},
    )
    await coordinator.start()
    yield coordinator
    await coordinator.end()


@pytest.mark.e2e
async def test_kill_9_between_updates_loses_nothing(process):
    """Killed after each acknowledgement in turn, the session ends with the very bytes of a run
    that was never killed."""
    models = []
    for disturbed in (False, True):
        if disturbed:
            await process.end()
            await process.start("--new-session")
        members = [Member(process.port, name) for name in "abc"]
        for member in members:
            await member.rendezvous()
        for round_ in range(3):
            await members[0].until(pb.ROUND, round_)
            for number in range(3):
                vector = np.float32([round_, number, 0.1])
                await members[number].hand_in(vector, number + 1, round_)
                if disturbed:
                    await process.kill()
                    await process.start()
                    for member in members:
                        await member.close()
                    members = [Member(process.port, name) for name in "abc"]
        await members[0].until(pb.FINISHED, 2)
        models.append(await members[0].download("3/global"))
        for member in members:
            await member.close()
    assert models[0] == models[1]


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_drain_and_persist(process, number):
    """A watch ends with UNAVAILABLE, the process exits with 0, and the session is there again."""
    a = Member(process.port, "a")
    await a.rendezvous()
    call = a.watch()
    assert (await call.read()).state == pb.STANDBY
    assert await process.stop(number) == 0
    assert (await call.code()).name == "UNAVAILABLE"
    await a.close()
    await process.start()
    a = Member(process.port, "a")
    assert (await a.heartbeat()).state == pb.STANDBY
    await a.close()


@pytest.mark.e2e
async def test_a_second_coordinator_is_refused(process, tmp_path):
    """A busy port and a journal in use are errors with one clear line, never shared (X14)."""
    same_port = CoordinatorProcess(tmp_path / "other", {}, port=process.port)
    assert await same_port.fails() == 1
    assert f"cannot listen on 127.0.0.1:{process.port}" in same_port.log()
    same_journal = CoordinatorProcess(tmp_path, {})
    assert await same_journal.fails() == 1
    assert "journal" in same_journal.log()
    a = Member(process.port, "a")
    assert (await a.rendezvous()).reply == pb.ACCEPT
    await a.close()


@pytest.mark.e2e
async def test_xain_speaks_to_it_by_bytes_alone(process):
    """A client that knows nothing but XAIN 0.6.0's paths and field numbers is understood."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{process.port}") as channel:

        async def call(method: str, request: bytes) -> bytes:
            return await channel.unary_unary(f"/xain_proto.fl.Coordinator/{method}")(request)

        def fields(data: bytes) -> dict[int, int]:
            """The varint fields of a message."""
            found, i = {}, 0
            while i < len(data):
                key, i = data[i], i + 1
                if key & 7 == 2:
                    i += 1 + data[i]
                    continue
                value = shift = 0
                while True:
                    byte, i = data[i], i + 1
                    value |= (byte & 127) << shift
                    shift += 7
                    if byte < 128:
                        break
                found[key >> 3] = value
            return found

        assert fields(await call("Rendezvous", b"")).get(1, 0) == 0  # ACCEPT
        # Heartbeat{state: READY, round: -1}
        answer = fields(await call("Heartbeat", b"\x08\x03\x10" + b"\xff" * 9 + b"\x01"))
        assert (answer.get(1, 0), answer.get(2, 0)) == (0, 0)  # STANDBY, round 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("StartTrainingRound", b"")
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("EndTrainingRound", b"\x0a\x04uuid\x10\x05")
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
