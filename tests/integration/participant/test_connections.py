"""Connections that die without a word, are cut, or are only slow."""

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from integration.participant.scripted import (
    PATIENCE_S,
    Ledger,
    ScriptedCoordinator,
    digest,
    npy,
)
from support.fault_proxy import FaultProxy
from xain_foundation.backoff import Backoff
from xain_participant import Agent, CoordinatorClient, Participant, Refused
from xain_participant import client as client_module
from xain_participant.download import Download
from xain_proto.fl import coordinator_pb2 as pb

# Several chunks of a download, and so little that the kernel takes all of it: an upload whose bytes
# gRPC cannot get rid of ends only when the kernel gives up on the connection, after 20 s.
BIG = np.arange(100_000, dtype=np.float32)
CHUNK_BYTES = 1 << 17


@pytest.fixture
def server(serve: Callable[..., ScriptedCoordinator]) -> ScriptedCoordinator:
    server = serve(Ledger(model=BIG, members={"ward-7"}))
    server.chunk_bytes = CHUNK_BYTES
    return server


@pytest.fixture
def proxy(server: ScriptedCoordinator) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


def hurry(client: CoordinatorClient) -> None:
    """Let a silence be shorter than an answer may take on a busy machine: that it is early must not
    matter."""
    connections = client._connections
    connections.silence_s = connections.grace_s = 0.3
    connections.min_pause_s, connections.backoff = 0.0, Backoff(0.0, 0.0)


def stall_soon(client: CoordinatorClient) -> None:
    """Give up transfers that do not move, also after the last chunk, and hand-ins, early."""
    client._connections.stall_s = client.hand_in_timeout_s = 0.2
    client.max_buffered_bytes = 0


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[CoordinatorClient]:
    with CoordinatorClient(
        f"127.0.0.1:{proxy.port}", "ward-7", call_timeout_s=PATIENCE_S
    ) as client:
        hurry(client)
        client.rendezvous()
        yield client


class Call:
    """Something that takes its time, in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._answer: Any = None
        self._refused: Refused | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answer = self._call()
        except Refused as refused:
            self._refused = refused

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def answer(self) -> Any:
        """Its answer, or the status that it was refused with."""
        self._thread.join(PATIENCE_S)
        assert self.is_over, "it has not come to an end"
        return self._refused.status if self._refused is not None else self._answer


def hold(server: ScriptedCoordinator, method: str, *, after: bool = False) -> threading.Event:
    """The next call of this method waits for the event."""
    may_go_on = threading.Event()

    def wait(_: Any) -> None:
        assert may_go_on.wait(PATIENCE_S)

    (server.after if after else server.before)[method].append(wait)
    return may_go_on


def heartbeat(client: CoordinatorClient) -> "pb.State.ValueType":
    return client.heartbeat(pb.READY, -1).state


def test_a_half_open_connection_is_replaced(client: CoordinatorClient, proxy: FaultProxy) -> None:
    """The peer has vanished, and nobody says so."""
    proxy.blackhole(new=False)
    before = proxy.num_accepted
    assert heartbeat(client) == pb.ROUND
    assert proxy.num_accepted == before + 1
    # Whatever comes next takes the new one.
    assert client.start_round().round == 0
    assert client.put_weights(0, BIG).key == "0/ward-7"


def test_a_stream_over_it_ends_and_can_be_had_again(
    client: CoordinatorClient, proxy: FaultProxy
) -> None:
    seen = iter(client.watch())
    assert next(seen).state == pb.ROUND
    waiting = Call(lambda: next(seen, "its end"))
    proxy.blackhole(new=False)
    heartbeat(client)
    assert waiting.answer() == "its end"
    assert next(iter(client.watch())).state == pb.ROUND


def test_a_slow_connection_carries_its_upload_to_the_end(
    client: CoordinatorClient, server: ScriptedCoordinator, proxy: FaultProxy
) -> None:
    """One that fills the line keeps heartbeats from getting through. To begin anew would fill it
    again, without end."""
    may_upload, may_beat = hold(server, "PutWeights"), hold(server, "Heartbeat")
    seen = iter(client.watch())
    assert next(seen).state == pb.ROUND
    upload = Call(lambda: client.put_weights(0, BIG))
    server.wait_until(lambda: server.calls["PutWeights"] == 1)
    assert heartbeat(client) == pb.ROUND, "over another one"
    # The stream has nothing to finish: it is to be had again where the news arrive.
    assert Call(lambda: next(seen, "its end")).answer() == "its end"
    may_upload.set()
    may_beat.set()
    assert upload.answer().key == "0/ward-7"
    assert server.calls["PutWeights"] == 1


def test_replaced_connection_is_closed_when_its_transfers_have_ended(
    client: CoordinatorClient, server: ScriptedCoordinator, proxy: FaultProxy
) -> None:
    """Nothing is left open, however often it happens."""
    for number in range(1, 4):
        may_upload, may_beat = hold(server, "PutWeights"), hold(server, "Heartbeat")
        upload = Call(lambda: client.put_weights(0, BIG))
        server.wait_until(lambda n=number: server.calls["PutWeights"] == n)
        heartbeat(client)
        may_upload.set()
        may_beat.set()
        upload.answer()
    poll(lambda: proxy.num_open == 1)


def poll(reached: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if reached():
            return
        waiting.wait(0.02)  # a poll, not a race: it ends when it is so
    raise AssertionError("it never happened")


def replace(client: CoordinatorClient, server: ScriptedCoordinator) -> None:
    """The connection, by a fresh one, which can only see that the old one is silent."""
    old = client._connections.current
    may_beat = hold(server, "Heartbeat")
    assert heartbeat(client) == pb.ROUND
    may_beat.set()
    assert old.is_retired


@pytest.mark.parametrize("method", ["PutWeights", "EndTrainingRound"])
def test_call_that_the_coordinator_works_on_is_not_repeated(
    client: CoordinatorClient,
    server: ScriptedCoordinator,
    method: str,
) -> None:
    """All bytes are there, and it takes its time: to begin anew would take as long again."""
    client._connections.stall_s = 0.05
    if method == "PutWeights":
        may_answer = hold(server, method, after=True)
        call = Call(lambda: client.put_weights(0, BIG).key)
        poll(lambda: server.calls[method] == 1 and not server.after[method])
    else:
        client.put_weights(0, BIG)
        may_answer = hold(server, method)
        ref = pb.WeightsRef(data=npy(BIG), digest=digest(npy(BIG)))
        call = Call(lambda: client.end_round(0, ref, 5, "[]"))
        server.wait_until(lambda: server.calls[method] == 1)
    replace(client, server)
    threading.Event().wait(4 * client._connections.stall_s)
    heartbeat(client)
    assert not call.is_over
    may_answer.set()
    assert call.answer() == ("0/ward-7" if method == "PutWeights" else None)
    assert server.calls[method] == 1


def test_an_upload_that_does_not_move_is_given_up(
    client: CoordinatorClient, server: ScriptedCoordinator, proxy: FaultProxy
) -> None:
    """Long before its own time limit, which is that of the slowest line."""
    stall_soon(client)
    may_upload = hold(server, "PutWeights")
    upload = Call(lambda: client.put_weights(0, BIG))
    server.wait_until(lambda: server.calls["PutWeights"] == 1)
    proxy.blackhole(new=False)
    poll(lambda: heartbeat(client) == pb.ROUND and upload.is_over)
    assert upload.answer() is grpc.StatusCode.CANCELLED
    may_upload.set()
    assert client.put_weights(0, BIG).key == "0/ward-7"


def test_a_download_that_does_not_move_goes_on_over_the_new_one(
    client: CoordinatorClient,
    server: ScriptedCoordinator,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From where it stands."""
    stall_soon(client)
    arrived = threading.Event()

    class Noted(Download):
        def add(self, chunk: bytes | memoryview) -> None:
            super().add(chunk)
            arrived.set()

    monkeypatch.setattr(client_module, "Download", Noted)
    may_send = hold(server, "GetWeights", after=True)
    ref = client.start_round().model
    download = Call(lambda: client.get_weights(ref))
    assert arrived.wait(PATIENCE_S)
    proxy.blackhole(new=False)
    poll(lambda: heartbeat(client) == pb.ROUND and download.is_over)
    may_send.set()
    assert download.answer().tobytes() == BIG.tobytes()
    assert server.download_offsets == [0, CHUNK_BYTES]


def test_a_closed_client_ends_an_attempt(
    client: CoordinatorClient, server: ScriptedCoordinator
) -> None:
    """Whoever stops need not wait for a coordinator that does not answer."""
    may_beat = [hold(server, "Heartbeat"), hold(server, "Heartbeat")]
    unanswered = Call(lambda: heartbeat(client))
    server.wait_until(lambda: server.calls["Heartbeat"] == 2)  # the second over the fresh one
    client.close()
    assert unanswered.answer() is grpc.StatusCode.CANCELLED
    for event in may_beat:
        event.set()


# --- the agent ---


class Adder(Participant):
    """Adds 1 to every weight, when it may."""

    def __init__(self) -> None:
        self.trained: list[float] = []
        self.entered = threading.Event()
        self.may_finish = threading.Event()

    def init_weights(self) -> Any:
        raise AssertionError("there is a model")

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        self.trained.append(float(weights[0]))
        self.entered.set()
        assert self.may_finish.wait(PATIENCE_S)
        return weights + 1, 5


@pytest.fixture
def adder() -> Iterator[Adder]:
    adder = Adder()
    yield adder
    adder.may_finish.set()


@pytest.fixture
def agent(proxy: FaultProxy, adder: Adder) -> Agent:
    agent = Agent(adder, f"127.0.0.1:{proxy.port}", "ward-7")
    hurry(agent._client)
    return agent


@pytest.fixture
def stalling_agent(agent: Agent) -> None:
    stall_soon(agent._client)


@pytest.fixture
def running(agent: Agent) -> Iterator[Call]:
    """An agent that takes part through the proxy."""
    running = Call(agent.run)
    yield running
    agent.stop()
    running.answer()


def test_dead_connection_costs_no_lease(
    running: Call, adder: Adder, server: ScriptedCoordinator, proxy: FaultProxy
) -> None:
    """In the middle of a training its heartbeats take another way; the result goes there, too."""
    assert adder.entered.wait(PATIENCE_S)
    proxy.blackhole(new=False)
    heard = server.calls["Heartbeat"]
    server.wait_until(lambda: server.calls["Heartbeat"] > heard + 3)
    server.wait_until(lambda: server.calls["Watch"] >= 2)
    adder.may_finish.set()
    assert running.answer() == 0
    assert server.calls["Rendezvous"] == 1
    assert adder.trained == [0, 1]


@pytest.mark.usefixtures("stalling_agent")
@pytest.mark.parametrize("method", ["EndTrainingRound", "PutWeights", "GetWeights"])
def test_calls_on_a_dead_connection_are_repeated(
    running: Call, adder: Adder, server: ScriptedCoordinator, proxy: FaultProxy, method: str
) -> None:
    """And nothing is trained again."""
    adder.may_finish.set()
    may_go_on = hold(server, method)
    server.wait_until(lambda: server.calls[method] == 1)
    proxy.blackhole(new=False)
    server.wait_until(lambda: server.calls[method] == 2)
    may_go_on.set()
    assert running.answer() == 0
    assert adder.trained == [0, 1]
    assert sorted(server.ledger.accepted) == [0, 1]


@pytest.mark.parametrize("reset", [True, False], ids=["RST", "FIN"])
@pytest.mark.parametrize("method", ["PutWeights", "GetWeights"])
def test_a_transfer_that_is_cut_in_the_middle_is_made_up_for(
    running: Call,
    adder: Adder,
    server: ScriptedCoordinator,
    proxy: FaultProxy,
    method: str,
    reset: bool,
) -> None:
    may_send = threading.Event()
    if method == "PutWeights":
        assert adder.entered.wait(PATIENCE_S)
        proxy.throttle(100_000)  # four seconds for an upload
        adder.may_finish.set()
        server.wait_until(lambda: server.calls[method] == 1)
    else:
        adder.may_finish.set()
        may_send = hold(server, method, after=True)
        poll(lambda: server.calls[method] == 1 and not server.after[method])
    proxy.cut(reset=reset)
    may_send.set()
    proxy.heal()
    assert running.answer() == 0
    assert server.calls[method] >= 3
    assert adder.trained == [0, 1]
    assert server.ledger.model[:2].tolist() == [2, 3]


def test_long_upload_is_logged_with_its_progress_which_heartbeats_carry(
    running: Call,
    adder: Adder,
    server: ScriptedCoordinator,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """People at the participant and at the coordinator see that it goes on, and how fast."""
    caplog.set_level("INFO", logger="xain_participant")
    assert adder.entered.wait(PATIENCE_S)
    proxy.throttle(100_000)  # four seconds for an upload
    adder.may_finish.set()

    def percents() -> list[int]:
        lines = [r.getMessage() for r in caplog.records if "uploading" in r.getMessage()]
        return [int(found[1]) for line in lines if (found := re.search(r"percent\D+(\d+)", line))]

    poll(lambda: len(percents()) >= 2)
    proxy.heal()
    assert running.answer() == 0
    assert percents() == sorted(percents())
    # A heartbeat that is lost with the session's end is logged and not received.
    assert server.transfers
    received = [(pb.Transfer.UPLOAD, percent) for percent in percents()]
    assert server.transfers == received[: len(server.transfers)]


def test_heartbeats_carry_the_progress_of_a_download(
    running: Call, adder: Adder, server: ScriptedCoordinator
) -> None:
    """A heartbeat carries no transfer while the participant trains."""
    may_send = hold(server, "GetWeights")
    adder.may_finish.set()
    server.wait_until(lambda: len(server.transfers) >= 2)
    assert set(server.transfers) == {(pb.Transfer.DOWNLOAD, 0)}
    adder.may_finish.clear()
    may_send.set()
    assert adder.entered.wait(PATIENCE_S)
    told, heard = list(server.transfers), len(server.heartbeats)
    server.wait_until(lambda: len(server.heartbeats) >= heard + 3)
    # One heartbeat may have been on its way when the download ended.
    assert len(server.transfers) <= len(told) + 1
    adder.may_finish.set()
    assert running.answer() == 0


def test_a_watch_that_says_nothing_is_made_up_for_by_heartbeats(
    server: ScriptedCoordinator, adder: Adder
) -> None:
    """A proxy that speaks HTTP may let a stream hang and everything else pass."""
    adder.may_finish.set()
    may_watch = hold(server, "Watch")
    agent = Agent(adder, server.target, "ward-7")
    hurry(agent._client)
    running = Call(agent.run)
    try:
        assert running.answer() == 0
    finally:
        agent.stop()
        may_watch.set()
    assert server.calls["Watch"] == 1
    assert adder.trained == [0, 1]
