"""Flood of requests at the coordinator's HTTP face: who else is served meanwhile, with what memory?

For each kind of request --clients send it again and again, and the script prints what an honest
client of the face waited at most, with the tries that it took, and which statuses the flood was
answered with. Of the gRPC port it prints what connection_flood.py does: how long a new participant
takes to join, the longest gap between heartbeats, health checks that failed, and the peak memory of
the coordinator.
"""

import argparse
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import processes
from connection_flood import Seen

from xain_foundation.net.sockets import free_ports

BODY_BYTES = 4 << 20  # [http] max_body_bytes
HEAD = b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
PATIENCE_S = 120.0


def body(row: bytes) -> bytes:
    """The largest body, of this row again and again."""
    head, end = b'{"columns": ["a"], "rows": [', b"]}"
    times = (BODY_BYTES - len(head) - len(end)) // (len(row) + 1)
    return head + b",".join([row] * times) + end


BODIES = {
    "numbers": body(b"[" + b"1.5," * 11 + b"1.5]"),
    "texts": body(b"[" + b'"ab",' * 40 + b'"ab"]'),
    "mistakes": body(b"[" + b"1e999," * 11 + b"1e999]"),
    "empty rows": body(b"[]"),
}
HALF = {
    "half heads": HEAD,
    "half bodies": HEAD + b"content-length: 4000000\r\n\r\n" + b" " * 200_000,
}


def post(url: str, content: bytes, ended: threading.Event, codes: Counter[str]) -> None:
    """Send a body again and again."""
    json = {"content-type": "application/json"}
    while not ended.is_set():
        try:
            answer = httpx.post(
                f"{url}/v1/predict",
                content=content,
                headers=json,
                timeout=PATIENCE_S,
                trust_env=False,
            )
            codes[str(answer.status_code)] += 1
        except httpx.TransportError as error:
            codes[type(error).__name__] += 1


def hold(port: int, said: bytes, ended: threading.Event, codes: Counter[str]) -> None:
    """Hold a connection that says so much, and open another one when it ends."""
    while not ended.is_set():
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=0.5) as peer:
                peer.sendall(said)
                codes["opened"] += 1
                while not ended.is_set():
                    try:
                        if not peer.recv(4096):
                            break
                    except TimeoutError:
                        pass
        except OSError:
            ended.wait(0.05)


def is_served(url: str) -> bool:
    """Whether an honest client with a connection of its own is answered."""
    try:
        return httpx.get(f"{url}/v1/status", timeout=PATIENCE_S, trust_env=False).is_success
    except httpx.TransportError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16, help="that send whole bodies")
    parser.add_argument("--connections", type=int, default=600, help="that send half requests")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--kinds", nargs="+", default=[*BODIES, *HALF])
    given = parser.parse_args()
    for kind in given.kinds:
        (http_port,) = free_ports(1)
        url = f"http://127.0.0.1:{http_port}"
        settings = {
            "rounds.min_participants": 1000,
            "rounds.max_participants": 1000,
            "http.port": http_port,
        }
        codes: Counter[str] = Counter()
        waits: list[float] = []
        resets = 0
        ended = threading.Event()
        with tempfile.TemporaryDirectory() as folder:
            coordinator = processes.CoordinatorProcess(Path(folder), settings)
            coordinator.start()
            seen = Seen(coordinator.port, Path(folder))
            if kind in BODIES:
                work = [(post, (url, BODIES[kind], ended, codes))] * given.clients
            else:
                work = [(hold, (http_port, HALF[kind], ended, codes))] * given.connections
            threads = [threading.Thread(target=one, args=arguments) for one, arguments in work]
            for thread in threads:
                thread.start()
            until = time.monotonic() + given.seconds
            while (began := time.monotonic()) < until:
                while not is_served(url):
                    resets += 1
                waits.append(time.monotonic() - began)
                time.sleep(0.1)  # between two probes, not measured
            ended.set()
            for thread in threads:
                thread.join()
            seen.end()
            memory = coordinator.peak_memory_mb
            coordinator.stop()
        print(
            f"{kind}: {len(waits)} answers of the face, {max(waits):.1f} s at most, {resets} more"
            f" tries, gap of heartbeats {seen.gap_s:.1f} s,",
            f"{len(seen.joins)} joined, longest {max(seen.joins, default=0.0):.1f} s,",
            f"peak {memory:.0f} MB, {dict(codes)}, {dict(seen.results)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
