"""The same workload on Flower and NVFLARE, from their published packages.

Each is installed into an environment of its own, .bench-peers/NAME-VERSION, when it is not there.
Their rounds are measured from beginning to beginning, after a warm-up, and their updates are
prepared before, random and distinct by participant. One that cannot be installed or run is
reported, and stops nothing.
"""

import statistics
import sys
from typing import Any

import results

from peers import flare, flower
from peers.environments import PeerFailed

Row = dict[str, Any]

PEERS = {"Flower": flower, "NVFLARE": flare}


def measure(participants: int, size: int, rounds: int) -> list[Row]:
    """A row for each peer. size: of the model, in float32. rounds: after a warm-up of one."""
    rows: list[Row] = []
    for name, peer in PEERS.items():
        row: Row = {"peer": f"{name} {peer.VERSION}", "participants": participants}
        print(f"{row['peer']} with {participants} participants ...", file=sys.stderr, flush=True)
        try:
            with results.scratch() as folder:
                found = peer.run(folder, participants, size, rounds + 1)
        except PeerFailed as failed:
            print(f"{row['peer']}: {failed}", file=sys.stderr)
            rows.append({**row, "failed": str(failed).splitlines()[0]})
            continue
        seconds = found.seconds[1:]
        rows.append(
            {
                **row,
                "rounds": len(seconds),
                "round_s_median": statistics.median(seconds),
                "round_s_min": min(seconds),
                "round_s_max": max(seconds),
                "server_peak_mb": found.server_peak_mb,
            }
        )
    return rows


def beside(rows: list[Row], seconds: float) -> list[Row]:
    """The same rows with how many times longer they take than ours. seconds: our median."""
    return [
        {**row, "times_ours": row["round_s_median"] / seconds} if "round_s_median" in row else row
        for row in rows
    ]
