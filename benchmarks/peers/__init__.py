"""The same workload on Flower and NVFLARE, from their published packages.

Each is installed into an environment of its own, .bench-peers/NAME-VERSION, when it is not there.
Their rounds are measured from beginning to beginning, after a warm-up, and their updates are
prepared before, random and distinct by participant. One that cannot be installed or run is
reported, and stops nothing.
"""

import statistics
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

import results

from peers import flare, flower, flower_ray
from peers.environments import PeerFailed

Row = dict[str, Any]

DEPLOYED: Final = {"Flower": flower, "NVFLARE": flare}
SIMULATED: Final = {"Flower on Ray": flower_ray}


def measure(
    participants: int,
    size: int,
    rounds: int,
    peers: Mapping[str, ModuleType] = DEPLOYED,
    *,
    sessions: int = 1,
    before: Callable[[], object] = lambda: None,
) -> list[Row]:
    """A row for each peer. size: of the model, in float32. rounds: of each session, after a warm-up
    of one. before: called before each session, to measure something else in turns."""
    rows: list[Row] = []
    for name, peer in peers.items():
        row: Row = {"peer": f"{name} {peer.VERSION}", "participants": participants}
        print(f"{row['peer']} with {participants} participants ...", file=sys.stderr, flush=True)
        seconds: list[float] = []
        peak_mb: float | None = None
        try:
            for _ in range(sessions):
                before()
                with results.scratch() as folder:
                    found = peer.run(folder, participants, size, rounds + 1)
                seconds += found.seconds[1:]
                peak_mb = max(peak_mb or 0.0, found.server_peak_mb or 0.0) or None
        except PeerFailed as failed:
            print(f"{row['peer']}: {failed}", file=sys.stderr)
            rows.append({**row, "failed": str(failed).splitlines()[0]})
            continue
        rows.append(
            {
                **row,
                "rounds": len(seconds),
                "round_s_median": statistics.median(seconds),
                "round_s_min": min(seconds),
                "round_s_max": max(seconds),
                "server_peak_mb": peak_mb,
            }
        )
    return rows


def beside(rows: list[Row], seconds: float) -> list[Row]:
    """The same rows with how many times longer they take than ours. seconds: our median."""
    return [
        {**row, "times_ours": row["round_s_median"] / seconds} if "round_s_median" in row else row
        for row in rows
    ]
