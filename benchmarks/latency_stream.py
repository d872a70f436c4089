"""Cost of the latency stream for each call.

    python benchmarks/latency_stream.py [--calls N]

Calls an empty handler with and without a latency stream, and prints the microseconds of processor
time that the stream takes for each call: on the event loop, and with the thread that writes.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from xain_coordinator.server.calls.interceptor import COORDINATOR, _timed
from xain_coordinator.telemetry.log_files import LatencyFile

ROUNDS = 7


class Context:
    """The metadata of a call of a participant."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("user-agent", "grpc"), ("xain-participant-id", "a"))

    def code(self) -> int:
        return 0


async def seconds_per_call(answer: Any, num_calls: int) -> float:
    """Processor time of this thread, which is that of the event loop."""
    context = Context()
    began = time.thread_time()
    for _ in range(num_calls):
        await answer(None, context)
    return (time.thread_time() - began) / num_calls


async def main(num_calls: int) -> None:
    async def answer(requests: Any, context: Any) -> None:
        return None

    on_loop, in_all = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            bare = await seconds_per_call(answer, num_calls)
            began = time.process_time()
            latencies = LatencyFile(Path(folder) / f"{number}.jsonl")
            timed = _timed(f"{COORDINATOR}Heartbeat", answer, latencies)
            on_loop.append(await seconds_per_call(timed, num_calls) - bare)
            latencies.close()
            in_all.append((time.process_time() - began) / num_calls - bare)
    for what, costs in (("on the event loop", on_loop), ("with the thread", in_all)):
        low, middle, high = (1e6 * cost for cost in (min(costs), median(costs), max(costs)))
        print(f"{what}: {middle:.1f} us a call ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20_000)
    asyncio.run(main(parser.parse_args().calls))
