"""Lines of 3 to 7 KB/s, both ways and by every way.

Limits of time are a tenth of the real ones, and so are the sizes that belong to them.
"""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from integration.conftest import InRound
from support.fault_proxy import FaultProxy
from support.waiting import until
from support.wire import npy
from xain_coordinator.server.weights.downloads import Downloads
from xain_coordinator.server.weights.weights_port import WeightsPort
from xain_coordinator.updates.bodies import StallTimer
from xain_foundation.net.sockets import free_ports
from xain_participant.stages.parts import PartSize
from xain_participant.wire.client import CoordinatorClient, Refused, open_channel
from xain_participant.wire.direct import DirectTransfer, OfferFailed
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.limits import LEAST_BYTES, MAX_INLINE_BYTES, STALLED_S
from xain_workloads.tables.profile import DataProfile

SCALE = 10
VECTOR = np.random.default_rng(3).standard_normal(4_000, dtype=np.float32)  # 160 KB, scaled
SMALL = np.zeros(MAX_INLINE_BYTES // SCALE // 4, np.float32)
PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    for timed in (StallTimer, WeightsPort):
        monkeypatch.setattr(timed, "stalled_s", STALLED_S / SCALE)
    monkeypatch.setattr(StallTimer, "least_bytes", LEAST_BYTES // SCALE)
    for name in ("part_s", "first_bytes", "least_bytes"):
        monkeypatch.setattr(PartSize, name, type(value := getattr(PartSize, name))(value / SCALE))
    for name in ("hand_in_timeout_s", "work_timeout_s", "part_timeout_s"):
        value = getattr(CoordinatorClient, name)
        monkeypatch.setattr(CoordinatorClient, name, value / SCALE)
    for owner in (CoordinatorClient, Downloads):
        monkeypatch.setattr(owner, "max_inline_bytes", MAX_INLINE_BYTES // SCALE)
    most = CoordinatorClient.max_beside_heartbeats_bytes // SCALE
    monkeypatch.setattr(CoordinatorClient, "max_beside_heartbeats_bytes", most)


@pytest.fixture
def port_proxy() -> Iterator[FaultProxy]:
    """On the way to the weights port."""
    with FaultProxy(free_ports(1)[0]) as proxy:
        yield proxy


class Site:
    """A participant behind slow lines. failed: why weights did not go through the weights port."""

    def __init__(self, proxy: FaultProxy, *, direct: bool = False, **options: Any) -> None:
        self.failed: list[OfferFailed] = []
        self.client = CoordinatorClient(
            f"127.0.0.1:{proxy.port}",
            "a",
            direct=DirectTransfer() if direct else None,
            on_offer_failed=self.failed.append,
            **options,
        )

    async def again(self, call: Any, *args: Any) -> Any:
        """Call as an agent does: what is refused is tried again, and goes on."""
        for _ in range(100):
            try:
                return await asyncio.to_thread(call, *args)
            except Refused:
                await asyncio.sleep(0.1)  # the pause between two tries
        raise AssertionError("it never came through")


async def begun(
    in_round: InRound, port_proxy: FaultProxy, vector: np.ndarray[Any, Any], **server: Any
) -> Any:
    """A coordinator in round 1, with this model, which waits for the participant "a"."""
    settings = dict(server)
    if settings.get("weights_port") != "off":
        address = f"127.0.0.1:{port_proxy.port}"
        settings |= {"weights_port": port_proxy.upstream, "weights_address": address}
    coordinator, a = await in_round("a", rounds={"rounds": 2}, server=settings)
    await a.hand_in(vector)
    await a.until(pb.ROUND, 1)
    coordinator._server.service._downloads.stalled_s = STALLED_S / SCALE
    return coordinator


@pytest.mark.parametrize("bytes_per_s", [7_000, 4_000, 3_000])
@pytest.mark.parametrize("way", ["gRPC", "weights port"])
async def test_weights_pass_a_slow_line_once(in_round, proxy, port_proxy, way, bytes_per_s):
    """A model comes down and an update goes up, and next to nothing travels twice. Heartbeats
    beside them are heard."""
    is_grpc = way == "gRPC"
    server = {"weights_port": "off"} if is_grpc else {}
    coordinator = await begun(in_round, port_proxy, VECTOR, **server)
    proxy.upstream = coordinator.port
    site = Site(proxy, direct=not is_grpc)
    with site.client as client:
        await asyncio.to_thread(client.rendezvous)
        work = await site.again(client.start_round)
        assert not work.model.data
        carrier = proxy if is_grpc else port_proxy
        for line in (proxy, port_proxy):
            line.throttle(bytes_per_s)
        beats = asyncio.create_task(heartbeats(site))
        down = carrier.num_bytes_down
        model = await site.again(client.get_weights, work.model)
        down = carrier.num_bytes_down - down
        up = carrier.num_bytes_up
        ref = await site.again(client.put_weights, 1, model + 1, work.upload)
        up = carrier.num_bytes_up - up
        beats.cancel()
        await site.again(client.end_round, client.end_request(1, ref, 1, ""))
    assert site.failed == []
    assert model.tobytes() == VECTOR.tobytes()
    size = len(npy(VECTOR))
    assert size <= down < 1.5 * size
    assert size <= up < 1.5 * size
    await until(lambda: coordinator.driver.session.model.ref.key == "2/global")


async def heartbeats(site: Site) -> None:
    while True:
        await site.again(site.client.heartbeat, pb.TRAINING, 1)
        await asyncio.sleep(0.5)  # between two heartbeats


async def test_small_update_that_comes_slowly_holds_up_no_heartbeat(in_round, proxy, port_proxy):
    """An update inside its call goes through the connection of transfers, so heartbeats are
    answered while it is on its way."""
    coordinator = await begun(in_round, port_proxy, SMALL[:-100])
    proxy.upstream = coordinator.port
    site = Site(proxy)
    with site.client as client:
        await asyncio.to_thread(client.rendezvous)
        work = await site.again(client.start_round)
        model = client.get_weights(work.model)
        proxy.throttle(2_000)
        ref = client.put_weights(1, model)
        assert ref.data
        handing_in = asyncio.create_task(
            site.again(client.end_round, client.end_request(1, ref, 1, ""))
        )
        await asyncio.to_thread(client.heartbeat, pb.TRAINING, 1)
        assert not handing_in.done()
        await handing_in


async def test_small_model_comes_inside_its_call_on_a_slow_line(in_round, proxy, port_proxy):
    """The call has the time that its largest answer takes, which is more than a heartbeat has. A
    connection on which bytes come is alive, whatever waits behind them."""

    def hasty(target: str, silence_s: tuple[float, float]) -> grpc.Channel:
        return open_channel(target, (silence_s[0] / SCALE, silence_s[1] / SCALE))

    coordinator = await begun(in_round, port_proxy, SMALL[:-100])
    proxy.upstream = coordinator.port
    site = Site(proxy, call_timeout_s=0.5, channel=hasty)
    with site.client as client:
        await site.again(client.heartbeat, pb.READY, -1)
        proxy.throttle(3_000)
        work = await site.again(client.start_round)
    assert len(work.model.data) > 6_000


async def test_statistics_of_a_site_come_inside_its_rendezvous_on_a_slow_line(start, proxy):
    """A call has the time that its request takes, beside its own limit."""
    coordinator = await start()
    proxy.upstream = coordinator.port
    profile = DataProfile(num_samples=10, num_features=1, statistics=bytes(6_000))
    with CoordinatorClient(f"127.0.0.1:{proxy.port}", "a", call_timeout_s=0.5) as client:
        proxy.throttle(7_000)
        with pytest.raises(Refused) as caught:
            await asyncio.to_thread(client.rendezvous, profile)
    assert caught.value.reason != ""  # it has arrived, and is judged


async def test_download_that_breaks_off_is_kept_for_the_next_try(in_round, proxy, port_proxy):
    """A try that fails altogether loses none of the bytes that have come."""
    coordinator = await begun(in_round, port_proxy, VECTOR, weights_port="off")
    proxy.upstream = coordinator.port
    site = Site(proxy)
    with site.client as client:
        await asyncio.to_thread(client.rendezvous)
        work = await site.again(client.start_round)
        proxy.throttle(20_000)
        down = proxy.num_bytes_down
        refused = []

        def get() -> None:
            try:
                client.get_weights(work.model)
            except Refused as error:
                refused.append(error)

        first = threading.Thread(target=get)
        first.start()
        await until(lambda: client.transfer is not None and client.transfer.share >= 0.4)
        proxy.refuse()
        proxy.cut()
        await asyncio.to_thread(first.join)
        assert len(refused) == 1
        proxy.heal()
        model = await site.again(client.get_weights, work.model)
    assert model.tobytes() == VECTOR.tobytes()
    assert proxy.num_bytes_down - down < 1.5 * len(npy(VECTOR))
