"""Where drivers listen, and what others are told of that."""

import re
from functools import partial

import pytest

from support.drivers import Receiving, closing_all, received
from xain_messaging.drivers.grpc_streams import GrpcDriver
from xain_messaging.drivers.zeromq import ZmqDriver


@pytest.mark.parametrize("host", ["0.0.0.0", "", "[::]", "*", "[0:0::0]"])
def test_unreachable_host_is_not_told(host):
    """A driver that listens on all interfaces needs the address at which others find it."""
    for make_one in (lambda **told: GrpcDriver(f"{host}:0", **told), partial(ZmqDriver, host)):
        with pytest.raises(ValueError, match=r"pass.*advertise='10\.1\.2\.3'"):
            make_one()
    if host == "0.0.0.0":  # every machine has it
        here = GrpcDriver()
        there = Receiving(GrpcDriver(f"{host}:0", advertise="127.0.0.1", insecure=True))
        with closing_all(here, there):
            here.connect("there", there.address)
            here.send("there", [b"x"])
            assert received(there) == [b"x"]


def test_advertised_address_is_told_to_others():
    """Others reach the driver there, whatever it listens on."""
    pairs = [
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
