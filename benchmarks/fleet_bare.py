"""The raw limit beside fleet.py: a bare grpc.aio server with the coordinator's method names.

    python benchmarks/fleet_bare.py PORT HEARTBEAT_INTERVAL_MS

Answers with bytes made beforehand, and reads none. A line of input tells all streams of a round,
for which there is nothing left to do.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator

import grpc

from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.logs import configure
from xain_wire.fl import coordinator_pb2 as pb

SERVICE = "xain_proto.fl.Coordinator"
# The server queues as many calls as may come at once.
OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
]

STANDBY = pb.HeartbeatResponse(state=pb.STANDBY, session_id="bare").SerializeToString()
WAITING = pb.WatchResponse(state=pb.STANDBY, session_id="bare").SerializeToString()
TOLD = pb.WatchResponse(
    state=pb.ROUND, round=1, update_accepted=True, session_id="bare"
).SerializeToString()


async def serve(port: int, heartbeat_interval_ms: int) -> None:
    told = asyncio.Event()
    accepted = pb.RendezvousResponse(
        reply=pb.ACCEPT, heartbeat_interval_ms=heartbeat_interval_ms, session_id="bare"
    ).SerializeToString()

    async def rendezvous(request: bytes, context: object) -> bytes:
        return accepted

    async def heartbeat(request: bytes, context: object) -> bytes:
        return STANDBY

    async def watch(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield WAITING
        await told.wait()
        yield TOLD
        await asyncio.Event().wait()

    server = grpc.aio.server(options=OPTIONS)
    handlers = {
        "Rendezvous": grpc.unary_unary_rpc_method_handler(rendezvous),
        "Heartbeat": grpc.unary_unary_rpc_method_handler(heartbeat),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    get_logger("xain_coordinator").info("coordinator_serving")
    commands = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(commands)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    await commands.readline()
    told.set()
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("heartbeat_interval_ms", type=int)
    configure("info", console=False, third_party=False)
    given = parser.parse_args()
    asyncio.run(serve(given.port, given.heartbeat_interval_ms))


if __name__ == "__main__":
    main()
