"""Where drivers listen, what others are told of that, and what a driver carries."""

import re
from collections.abc import Callable
from functools import partial

import pytest

from support.drivers import Receiving, closing_all, received
from xain_messaging.drivers.grpc_streams import GrpcDriver
from xain_messaging.drivers.zeromq import ZmqDriver
from xain_messaging.errors import BodyError
from xain_messaging.links import MAX_HEAD_BYTES
from xain_messaging.ports import Driver


@pytest.mark.parametrize("host", ["0.0.0.0", "", "[::]", "*", "[0:0::0]"])
def test_a_host_that_nobody_can_reach_is_not_told(host: str) -> None:
    """Who listens everywhere says where the others find it."""
    for make_one in (lambda **told: GrpcDriver(f"{host}:0", **told), partial(ZmqDriver, host)):
        with pytest.raises(ValueError, match=r"pass.*advertise='10\.1\.2\.3'"):
            make_one()
    if host == "0.0.0.0":  # every machine has it
        here = GrpcDriver()
        there = Receiving(GrpcDriver(f"{host}:0", advertise="127.0.0.1"))
        with closing_all(here, there):
            here.connect("there", there.address)
            here.send("there", [b"x"])
            assert received(there) == [b"x"]


def test_others_are_told_what_is_advertised() -> None:
    """And reach it there, whatever it listens on."""
    pairs: list[tuple[Driver, Driver, str]] = [
        (GrpcDriver(), GrpcDriver("127.0.0.1:0", advertise="localhost"), r"localhost:\d+"),
        (ZmqDriver(), ZmqDriver("localhost", advertise="127.0.0.1"), r"tcp://127\.0\.0\.1:\d+"),
    ]
    for here, plain, address in pairs:
        there = Receiving(plain)
        with closing_all(here, there):
            assert re.fullmatch(address, there.address)
            here.connect("there", there.address)
            here.send("there", [b"x"])
            assert received(there) == [b"x"]


@pytest.mark.parametrize("make_one", [
    lambda: GrpcDriver(max_message_bytes=1000), lambda: ZmqDriver(max_frame_bytes=1000)
])  # fmt: skip
def test_what_a_driver_does_not_carry_is_refused_where_it_is_sent(
    make_one: Callable[[], Driver],
) -> None:
    """What it does carry arrives, whatever a head adds to it."""
    here, there = make_one(), Receiving(make_one())
    with closing_all(here, there):
        here.check([bytes(1000)])
        with pytest.raises(BodyError, match="1001 bytes"):
            here.check([bytes(1001)])
        here.connect("there", there.address)
        head = bytes(1000 + MAX_HEAD_BYTES)
        here.send("there", [head])
        assert received(there) == [head]
