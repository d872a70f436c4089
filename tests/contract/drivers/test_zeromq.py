"""What only the driver of ZeroMQ does."""

from support.drivers import Receiving, closing_all, received
from xain_messaging.drivers.zeromq import MAX_WAITING, ZmqDriver


def test_who_sends_too_much_over_zeromq_waits() -> None:
    """Until some of it has been received; what waits does so at the sender, and in order."""
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
