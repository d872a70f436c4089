"""The S3 store beside plain requests: large objects to and from a real SeaweedFS.

    python benchmarks/s3_store.py [--size-mib 256] [--repeats 5]

Raw is boto3 with one PutObject or one GetObject of the same bytes, from and to memory, on the same
server. The store checks more (a claim before it publishes, an ETag with each range) and keeps less
in memory: parts of 16 MiB wait in files, reads come in ranges. Prints medians and ratios; writes
bench-results/s3_store.json.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import flags
import results

from support.s3_servers import SeaweedFS
from xain_coordinator.config.sections.storage import StorageSettings
from xain_coordinator.stores.reading import READ_BYTES
from xain_coordinator.stores.s3.s3 import open_s3

CHUNK_BYTES = 1 << 20  # as an upload comes in


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = flags.parser(__doc__, quick="a small object, to see that it works")
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    results.begin(quick=arguments.quick, any_load=arguments.any_load)
    if arguments.quick:
        arguments.size_mib, arguments.repeats = 1, 1
    data = os.urandom(arguments.size_mib << 20)
    with SeaweedFS() as server, tempfile.TemporaryDirectory() as folder:
        report(arguments.size_mib, measure(server, data, arguments.repeats, folder))


def measure(server: Any, data: bytes, repeats: int, folder: str) -> dict[str, list[float]]:
    """Seconds of each repeat, by kind of work; the kinds alternate, so that noise hits all."""
    bucket = server.new_bucket()
    client = server.client()
    settings = StorageSettings.model_validate(server.settings(bucket, path=folder, timeout_s=60))
    taken: dict[str, list[float]] = {name: [] for name in ("put_raw", "put", "get_raw", "get")}
    with contextlib.closing(open_s3(settings)) as store, contextlib.closing(client):

        def put() -> None:
            upload = store.upload(f"{repeat}/store")
            view = memoryview(data)
            for offset in range(0, len(data), CHUNK_BYTES):
                upload.write(view[offset : offset + CHUNK_BYTES])
            upload.commit(overwrite=False)

        def get() -> None:
            with store.open(f"{repeat}/store") as reader:
                for offset in range(0, reader.size, 4 * READ_BYTES):
                    reader.read(offset, 4 * READ_BYTES)

        for repeat in range(repeats + 1):
            key = {"Bucket": bucket, "Key": f"{repeat}/raw"}
            works: dict[str, Callable[[], object]] = {
                "put_raw": lambda key=key: client.put_object(Body=data, **key),
                "put": put,
                "get_raw": lambda key=key: client.get_object(**key)["Body"].read(),
                "get": get,
            }
            for name, work in works.items():
                taken[name].append(seconds(work))
            for name in ("raw", "store"):
                client.delete_object(Bucket=bucket, Key=f"{repeat}/{name}")
    return {name: times[1:] for name, times in taken.items()}  # the first repeat warms up


def report(size_mib: int, taken: dict[str, list[float]]) -> None:
    median = {name: statistics.median(times) for name, times in taken.items()}
    figures = {
        "size_mib": size_mib,
        **{f"{name}_mib_per_s": round(size_mib / value, 1) for name, value in median.items()},
        "put_ratio_to_raw": round(median["put"] / median["put_raw"], 2),
        "get_ratio_to_raw": round(median["get"] / median["get_raw"], 2),
    }
    results.report("s3_store", figures)


if __name__ == "__main__":
    main()
