"""The health check of the coordinator's image: is the coordinator in this container serving?

It asks where the image and XAIN_COORDINATOR_SERVER__PORT say that it listens; a port that is set in
a file or by a flag it does not know. Exit status 0 if it is serving; 1, with the reason in one
line, if it is not, also while it drains.
"""

# ruff: noqa: T201 - a script speaks by printing

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DEADLINE_S = 5.0

# gRPC would ask a proxy of the environment also for what is here.
OPTIONS = (("grpc.enable_http_proxy", 0),)


def main() -> int:
    address = f"127.0.0.1:{os.environ.get('XAIN_COORDINATOR_SERVER__PORT', '50051')}"
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}")
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
    return 0 if response.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
