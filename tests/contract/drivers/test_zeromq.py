"""Properties of the ZeroMQ driver alone."""

import pytest
import zmq

from support.drivers import Receiving, closing_all, received
from xain_messaging.drivers.zeromq import MAX_WAITING, ZmqDriver


def test_fast_sender_over_zeromq_waits():
    """The sender waits until some messages are received; the rest waits there, in order."""
    there, here = Receiving(ZmqDriver()), Receiving(ZmqDriver())
    with closing_all(there, here):
        here.connect("there", there.address)
        num_sent = 3 * MAX_WAITING  # far more than the buffers of a connection hold
        for i in range(num_sent):
            here.send("there", [b"%d" % i, bytes(1 << 20)])
        assert [received(there)[0] for _ in range(50)] == [b"%d" % i for i in range(50)]
        here.close(0.5)
        rest = list(iter(lambda: there.receive(0.5), None))
        assert len(rest) < num_sent - 50


def test_a_peer_that_is_not_sent_to_costs_no_connection():
    """In a group of hundreds all connections would be ten thousands. A peer that cannot be reached
    is known with the first packet to it, which leaves no socket behind."""
    there, here = Receiving(ZmqDriver()), ZmqDriver()
    with closing_all(there, here):
        for number in range(100):
            here.connect(f"p{number}", there.address)
        here.connect("odd", "no address of zmq")
        assert not here._sockets
        for _ in range(2):
            with pytest.raises(zmq.ZMQError):
                here.send("odd", [b"x"])
        here.send("p7", [b"x"])
        assert received(there) == [b"x"]
        assert list(here._sockets) == ["p7"]
