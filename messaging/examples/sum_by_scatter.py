"""A sum by parts: a master scatters pieces of an array to workers, and adds up what they answer.

    python messaging/examples/sum_by_scatter.py [--workers 3] [--size 1000000] [--driver grpc]

Every peer is a process of its own. Where they find each other is started here too; with
--discovery HOST:PORT it is a coordinator's, and with redis://HOST a Redis.
"""

import argparse
import multiprocessing as mp
from contextlib import nullcontext

import numpy as np

from xain_foundation.logs.logs import configure
from xain_messaging import MembershipServer, Proxy, SessionType

GROUP = "sum"
PATIENCE_S = 60.0  # for what takes a second


def work(discovery: str, driver: str) -> None:
    """A worker: answers one piece with its sum."""
    configure("warning", console=True, third_party=False)
    with Proxy(GROUP, "worker", {"master": 1}, discovery=discovery, driver=driver) as proxy:
        message = proxy.receive_once()
        if message is not None:
            proxy.reply(message, body=message.body.sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--size", type=int, default=1_000_000, help="of the array")
    parser.add_argument("--driver", choices=["grpc", "zmq"], default="grpc")
    parser.add_argument("--discovery", default="")
    arguments = parser.parse_args()
    configure("warning", console=True, third_party=False)
    with MembershipServer() if not arguments.discovery else nullcontext() as server:
        discovery = arguments.discovery if server is None else server.target
        processes = [
            mp.get_context("spawn").Process(
                target=work, args=(discovery, arguments.driver), daemon=True
            )
            for _ in range(arguments.workers)
        ]
        for process in processes:
            process.start()
        array = np.arange(arguments.size)
        expected = {"worker": arguments.workers}
        with Proxy(
            GROUP, "master", expected, discovery=discovery, driver=arguments.driver
        ) as proxy:
            names = proxy.peers["worker"]
            pieces = zip(names, np.array_split(array, len(names)), strict=True)
            replies = proxy.scatter("sum", SessionType.TASK, pieces).complete()
            for reply in replies:
                print(f"{reply.source}: {reply.body}")
            print(f"sum: {sum(reply.body for reply in replies)}, numpy: {array.sum()}")
        for process in processes:
            process.join(PATIENCE_S)


if __name__ == "__main__":
    main()
