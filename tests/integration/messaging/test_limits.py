"""Peers that take less at once than others send."""

from collections.abc import Callable

import numpy as np
import pytest

from support.logs import capture_logs
from support.messaging import PATIENCE_S, discovery_of, until
from xain_messaging.drivers.grpc_streams import GrpcDriver
from xain_messaging.drivers.zeromq import ZmqDriver
from xain_messaging.errors import BodyError
from xain_messaging.messages import Message
from xain_messaging.ports import Driver
from xain_messaging.proxy import Proxy

MOST = 10_000
SMALL, LARGE = np.zeros(MOST // 2, np.uint8), np.zeros(2 * MOST, np.uint8)

MakeDriver = Callable[[bool], Driver]  # with a limit, or without


def make_grpc(is_limited: bool) -> Driver:
    return GrpcDriver(max_message_bytes=MOST) if is_limited else GrpcDriver()


def make_zmq(is_limited: bool) -> Driver:
    return ZmqDriver(max_frame_bytes=MOST) if is_limited else ZmqDriver()


@pytest.mark.parametrize("make", [make_grpc, make_zmq])
def test_what_is_too_large_for_a_peer_does_not_block_the_rest(make: MakeDriver) -> None:
    """It is refused where it is sent; what was kept for a former process, which took more, is
    dropped with an error in the log, and what is behind it comes."""
    with discovery_of("in-process") as discovery:

        def join(name: str, is_limited: bool) -> Proxy:
            return Proxy(
                "limits", "peer", name=name, discovery=discovery, driver=make(is_limited),
                timeout_s=PATIENCE_S,
            )  # fmt: skip

        def tell(body: object) -> None:
            here.isend(Message("x", "here", "there", body))

        def body_of_next() -> object:
            """Of what comes there. With the answer comes the word that it is taken: without that,
            it would come once more to who is there next."""
            message = there.receive_once()
            assert message is not None
            there.reply(message, "taken", None)
            assert here.receive_once() is not None
            return message.body

        with join("here", False) as here:
            with join("there", True) as there:
                until(lambda: "there" in here.endpoint.roster, "it to be there")
                with pytest.raises(BodyError, match="'there' takes 10000"):
                    tell(LARGE)
                tell("first")
                assert body_of_next() == "first"
            with join("there", False) as there:
                until(lambda: "there" in here.endpoint.roster, "it to be back")
                tell(LARGE)
                assert len(body_of_next()) == len(LARGE)  # type: ignore[arg-type]  # an array
            until(lambda: "there" not in here.endpoint.roster, "it to be away")
            for body in (SMALL, LARGE, "last"):
                tell(body)
            with capture_logs() as logs, join("there", True) as there:
                assert len(body_of_next()) == len(SMALL)  # type: ignore[arg-type]  # an array
                assert body_of_next() == "last"
            assert here.endpoint.num_too_large == 1
            (error,) = [line for line in logs if line["log_level"] == "error"]
            assert error["peer"] == "there"
            assert "'there' takes 10000" in error["error"]
