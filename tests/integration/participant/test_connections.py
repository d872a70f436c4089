"""Connections that die without a word, are cut, or are only slow."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from integration.participant.agents import Adder
from integration.participant.conftest import Serve
from integration.participant.scripted import PATIENCE_S, Ledger, ScriptedCoordinator
from support.fault_proxy import FaultProxy
from support.waiting import wait_until
from xain_coordinator.config.sections.server import ServerSettings
from xain_participant import Agent, CoordinatorClient, Refused
from xain_participant.agent.protocol import MIN_BACKOFF_S
from xain_participant.wire import client as client_module
from xain_participant.wire.client import CALLS_SILENCE_S, TRANSFERS_SILENCE_S, open_channel
from xain_participant.wire.download import Download
from xain_wire.fl import coordinator_pb2 as pb

# Several chunks of a download, and so little that the kernel takes all of it: an upload whose bytes
# gRPC cannot get rid of ends only when the kernel gives up on the connection, after 20 s.
BIG = np.arange(100_000, dtype=np.float32)
CHUNK_BYTES = 1 << 17


@pytest.fixture
def server(serve: Serve) -> ScriptedCoordinator:
    server = serve(Ledger(model=BIG, members={"ward-7"}))
    server.chunk_bytes = CHUNK_BYTES
    return server


@pytest.fixture
def proxy(server: ScriptedCoordinator) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


def open_hasty(target: str, silence_s: tuple[float, float]) -> grpc.Channel:
    """A channel that finds out soon that its connection is dead. On a busy machine a living one may
    be taken for dead, too, which must not matter."""
    return open_channel(target, (silence_s[0] / 50, silence_s[1] / 20))


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[CoordinatorClient]:
    target = f"127.0.0.1:{proxy.port}"
    with CoordinatorClient(
        target, "ward-7", call_timeout_s=PATIENCE_S, channel=open_hasty
    ) as client:
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
        """The call's answer, or the status that it was refused with."""
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


def is_heard(client: CoordinatorClient) -> bool:
    try:
        return heartbeat(client) == pb.ROUND
    except Refused:
        return False


def test_call_on_a_dead_connection_is_refused_and_the_next_one_takes_another(client, proxy):
    """The peer has vanished without a word."""
    proxy.blackhole(new=False)
    with pytest.raises(Refused) as caught:
        heartbeat(client)
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE
    wait_until(lambda: is_heard(client))  # gRPC may refuse calls until it has closed the dead one
    assert client.start_round().round == 0
    assert client.put_weights(0, BIG).key == "0/ward-7"


def test_stream_on_a_dead_connection_is_refused_and_can_be_had_again(client, proxy):
    streams = []

    def is_told() -> bool:
        streams.append(client.watch())
        with suppress(Refused):  # see open_hasty()
            return next(streams[-1]).state == pb.ROUND
        return False

    wait_until(is_told)
    proxy.blackhole(new=False)
    with pytest.raises(Refused):
        next(streams[-1])
    wait_until(is_told)


def test_heartbeat_passes_an_upload_that_does_not_move(client, server, proxy):
    may_upload = hold(server, "PutWeights")
    upload = Call(lambda: client.put_weights(0, BIG))
    server.wait_until(lambda: server.calls["PutWeights"] == 1)
    assert heartbeat(client) == pb.ROUND
    assert proxy.num_open == 2
    may_upload.set()
    assert upload.answer().key == "0/ward-7"


@pytest.mark.parametrize("method", ["Heartbeat", "PutWeights", "EndTrainingRound"])
def test_call_that_the_coordinator_works_on_is_not_given_up(server, method):
    """A coordinator that takes its time answers pings meanwhile."""
    with CoordinatorClient(
        server.target, "ward-7", call_timeout_s=PATIENCE_S, channel=open_hasty
    ) as client:
        client.rendezvous()
        ref = client.put_weights(0, BIG)
        server.calls.clear()
        calls = {
            "Heartbeat": lambda: heartbeat(client),
            "PutWeights": lambda: client.put_weights(0, BIG),
            "EndTrainingRound": lambda: client.end_round(client.end_request(0, ref, 5, "[]")),
        }
        may_answer = hold(server, method)
        call = Call(calls[method])
        server.wait_until(lambda: server.calls[method] == 1)
        time.sleep(sum(TRANSFERS_SILENCE_S) / 20)  # longer than a dead connection is kept
        may_answer.set()
        assert not isinstance(call.answer(), grpc.StatusCode)
        assert server.calls[method] == 1


def test_connection_of_transfers_is_closed_when_none_is_under_way(proxy):
    """gRPC sends no pings over it: one that died during a training would hold up the upload."""
    channel = partial(open_channel, idle_s=0.05)
    with CoordinatorClient(f"127.0.0.1:{proxy.port}", "ward-7", channel=channel) as client:
        client.rendezvous()
        seen = client.watch()
        next(seen)
        client.put_weights(0, BIG)
        assert proxy.num_accepted == 2
        wait_until(lambda: proxy.num_open == 1)
        assert heartbeat(client) == pb.ROUND
        client.put_weights(0, BIG)
        assert proxy.num_accepted == 3


def test_download_on_a_dead_connection_goes_on_over_another(client, server, proxy, monkeypatch):
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
    server.wait_until(lambda: server.calls["GetWeights"] == 2)
    may_send.set()
    assert download.answer().tobytes() == BIG.tobytes()
    assert server.download_offsets == [0, CHUNK_BYTES]


def test_a_closed_client_ends_an_attempt(client, server):
    """A participant that stops need not wait for a coordinator that does not answer."""
    may_beat = hold(server, "Heartbeat")
    unanswered = Call(lambda: heartbeat(client))
    server.wait_until(lambda: server.calls["Heartbeat"] == 1)
    client.close()
    assert unanswered.answer() is grpc.StatusCode.CANCELLED
    may_beat.set()


# --- the agent ---


@pytest.fixture
def agent(proxy: FaultProxy, adder: Adder) -> Agent:
    adder.may_finish.clear()
    return Agent(adder, f"127.0.0.1:{proxy.port}", "ward-7", channel=open_hasty)


@pytest.fixture
def running(agent: Agent) -> Iterator[Call]:
    """An agent that takes part through the proxy."""
    running = Call(agent.run)
    yield running
    agent.stop()
    running.answer()


def test_dead_connection_is_found_within_the_default_lease():
    """After a heartbeat that was answered, the next one is tried again before the lease is over."""
    server = ServerSettings()
    lease_s = server.heartbeat_time_s + server.heartbeat_timeout_s
    assert sum(CALLS_SILENCE_S) + MIN_BACKOFF_S < lease_s


def test_dead_connection_costs_no_lease(running, adder, server, proxy):
    """In the middle of a training its heartbeats take another one; the result goes there, too."""
    assert adder.entered.wait(PATIENCE_S)
    proxy.blackhole(new=False)
    heard = server.calls["Heartbeat"]
    server.wait_until(lambda: server.calls["Heartbeat"] > heard + 3)
    server.wait_until(lambda: server.calls["Watch"] >= 2)
    adder.may_finish.set()
    assert running.answer() == 0
    assert server.calls["Rendezvous"] == 1
    assert adder.trained == [0, 1]


def test_long_upload_is_logged_with_its_progress_which_heartbeats_carry(
    running, adder, server, proxy, caplog
):
    """People at the participant and at the coordinator see that it goes on, and how fast."""
    caplog.set_level("INFO", logger="xain_participant")
    assert adder.entered.wait(PATIENCE_S)
    proxy.throttle(100_000)  # four seconds for an upload
    adder.may_finish.set()

    def percents() -> list[int]:
        lines = [r.getMessage() for r in caplog.records if "uploading" in r.getMessage()]
        return [int(found[1]) for line in lines if (found := re.search(r"percent\D+(\d+)", line))]

    wait_until(lambda: len(percents()) >= 2)
    proxy.heal()
    assert running.answer() == 0
    assert percents() == sorted(percents())
    # A heartbeat that is lost with the session's end is logged and not received.
    assert server.transfers
    received = [(pb.Transfer.UPLOAD, percent) for percent in percents()]
    assert server.transfers == received[: len(server.transfers)]


def test_a_watch_that_says_nothing_is_made_up_for_by_heartbeats(server, adder, launch):
    """A proxy that speaks HTTP may let a stream hang and everything else pass."""
    may_watch = hold(server, "Watch")
    assert launch(adder, server.target).code() == 0
    may_watch.set()
    assert server.calls["Watch"] == 1
    assert adder.trained == [0, 1]
