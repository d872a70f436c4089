"""A round of a large model: 25 million float32, 100 MB, in 4 participant processes.

    python benchmarks/large_model.py [--participants 2,4,8,16] [--size 25000000] [--rounds 5]

The participants are real agents whose updates are there before they are asked: random, distinct by
participant and by round. A round lasts from its opening to the publication of its model, as the
coordinator records it: all get the model, all hand in, the updates are checked, synced to disk,
journalled and aggregated, and so is the new model. Useful are the bytes of the models that go down
and of the updates that come up.

coordinator_user_s, coordinator_system_s: processor time of the coordinator for a round.

Three tables: by number of participants, with the peak memory (VmHWM) of every process; durable
against in memory (the data directory in /dev/shm, where fsync costs nothing); and the coordinator's
peak memory by aggregation rule. Beside each, in the same run, the raw limits: the same bytes over
loopback TCP and over bare gRPC streams between as many processes, the disk, and a whole round of
the same work without protocol, journal and recovery (bulk_round.py).

With --peers also Flower and NVFLARE, installed into .bench-peers/ when they are not there.
Prints the tables; writes bench-results/large_model.json.

    python benchmarks/large_model.py --tls

The same rounds with certificates and without, in turn; writes bench-results/large_model_tls.json.

    python benchmarks/large_model.py --gpt2-large

One round of 800 million float32, 3.2 GB as GPT-2 large, and 6 participants whose update is one file
that they map into memory; they check the model and keep none of it (mapped_agent.py). Beside it a
published result of NVFLARE's streamed transfer. Takes 36 GB of the disk, and minutes.
Writes bench-results/large_model_gpt2.json.
"""

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import baselines
import flags
import numpy as np
import processes
import results
from bulk_round import bulk_round

# The first round brings the first weights, and the second is the first with a download.
WARM_UP_ROUNDS = 2
FEW = 4  # participants where their number does not matter
RULE_PARTICIPANTS = 8  # enough for rules that leave some of them out
RULE_ROUNDS = 2
PEER_ROUNDS = 3

GPT2_LARGE_SIZE = 800_000_000
GPT2_PARTICIPANTS = 6
# GPT-2 large by streamed tensors, 6 clients without training, on 32 vCPU with 256 GB. Source:
# examples/advanced/tensor-stream/COMPARISON.md of github.com/NVIDIA/NVFlare, of November 2025.
PUBLISHED = {
    "of": "NVFLARE 2.7, published",
    "round_s": 154.0,
    "server_peak_mb": 81.75 * 2**30 / 1e6,
}


def measure(
    folder: Path,
    participants: int,
    size: int,
    rounds: int,
    settings: Mapping[str, object] | None = None,
    *,
    is_closed: bool = False,
) -> processes.Session:
    """The session without its warm-up."""
    whole = processes.session(
        folder, participants, size, rounds + WARM_UP_ROUNDS, settings, is_closed=is_closed
    )
    return processes.Session(
        whole.seconds[WARM_UP_ROUNDS:],
        whole.coordinator_mb,
        whole.participants,
        whole.processor_time,
    )


def row(session: processes.Session, num_bytes: int) -> dict[str, Any]:
    """Figures of a session for the tables. num_bytes: size of the model."""
    seconds = statistics.median(session.seconds)
    participants, spent = session.participants, session.processor_time
    peaks = [one.peak_mb for one in participants if one.peak_mb is not None]
    extra = [
        one.peak_mb - one.prepared_mb
        for one in participants
        if one.peak_mb is not None and one.prepared_mb is not None
    ]
    return {
        "participants": len(participants),
        "round_s_median": seconds,
        "round_s_min": min(session.seconds),
        "round_s_max": max(session.seconds),
        "useful_mb_per_s": 2 * len(participants) * processes.mb(num_bytes) / seconds,
        "coordinator_user_s": spent and spent.user_s,
        "coordinator_system_s": spent and spent.system_s,
        "coordinator_peak_mb": session.coordinator_mb,
        "participant_peak_mb": max(peaks, default=None),
        # Without the update itself, which this training holds.
        "participant_extra_models": max(extra, default=0) / processes.mb(num_bytes) or None,
    }


def by_participants(given: argparse.Namespace, num_bytes: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for participants in given.participants:
        with results.scratch() as folder:
            found = row(measure(folder, participants, given.size, given.rounds), num_bytes)
            written = baselines.disk_seconds(folder, participants + 1, num_bytes)
        with results.scratch() as folder:
            bulk = statistics.median(bulk_round(folder, participants, num_bytes, given.rounds))
        limits = baselines.transport(participants, num_bytes)
        seconds = found["round_s_median"]
        rows.append(
            {
                **found,
                **limits,
                "disk_s": written,
                "bulk_round_s": bulk,
                "ratio_to_bare_grpc": seconds / limits["bare_grpc_s"],
                "ratio_to_bulk_round": seconds / bulk,
            }
        )
    return rows


def by_durability(given: argparse.Namespace, num_bytes: int) -> list[dict[str, Any]]:
    """One after the other, so that both meet the machine in the same mood."""
    rows: list[dict[str, Any]] = []
    folder = None if given.quick else processes.shm_folder()
    for where, parent in (("disk", results.FOLDER), ("memory", folder)):
        if parent is None:
            continue
        with results.scratch(parent) as scratch:
            session = measure(scratch, given.few, given.size, given.rounds)
        rows.append({"data": where, **row(session, num_bytes)})
    return rows


def by_encryption(given: argparse.Namespace, num_bytes: int) -> list[dict[str, Any]]:
    """Rows with and without TLS, measured in turn, so that load of the machine is alike for
    both."""
    rows: list[dict[str, Any]] = []
    for is_encrypted in (False, True) * (1 if given.quick else 2):
        with results.scratch() as folder:
            session = measure(folder, given.few, given.size, given.rounds, is_closed=is_encrypted)
        rows.append({"tls": is_encrypted, **row(session, num_bytes)})
    return rows


def by_rule(given: argparse.Namespace, num_bytes: int) -> list[dict[str, Any]]:
    from rules import cases  # what the rules are, and how to choose them

    rows: list[dict[str, Any]] = []
    for case in cases():
        participants = case.participants or RULE_PARTICIPANTS
        with results.scratch() as folder:
            session = processes.session(
                folder, participants, given.size, RULE_ROUNDS, case.settings
            )
        rows.append(
            {
                "rule": case.name,
                "participants": participants,
                "round_s": session.seconds[-1],
                "coordinator_peak_mb": session.coordinator_mb,
            }
        )
    return rows


def gpt2_large(size: int) -> list[dict[str, Any]]:
    """One round of a model that several of do not fit into memory."""
    with results.scratch() as folder:
        update = folder / "update"
        write_update(update, size)
        settings = {"rounds.initial_weights": "first", "server.heartbeat_timeout_s": 3600}
        found = processes.session(folder, GPT2_PARTICIPANTS, size, 1, settings, update=update)
    spent = found.processor_time
    return [
        {
            "of": "xain-coordinator",
            "round_s": found.seconds[0],
            "server_peak_mb": found.coordinator_mb,
            "server_user_s": spent and spent.user_s,
            "server_system_s": spent and spent.system_s,
            "cores": baselines.cores(),
        },
        {**PUBLISHED, "cores": 32},
    ]


def write_update(file: Path, size: int) -> None:
    """Random float32, of which one piece comes again and again: only its place differs."""
    piece = np.random.default_rng(0).standard_normal(min(size, 1 << 24), dtype=np.float32)
    with file.open("wb") as stream:
        for start in range(0, size, len(piece)):
            stream.write(piece[: size - start].data)


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument(
        "--participants",
        type=flags.numbers,
        default=[2, 4, 8, 16],
        metavar="N,N",
        help="numbers of participants; default: 2,4,8,16",
    )
    parser.add_argument("--size", type=int, default=25_000_000, help="of the model, in float32")
    parser.add_argument("--rounds", type=int, default=5, help="after the warm-up")
    parser.add_argument("--tls", action="store_true", help="with certificates and without, alone")
    parser.add_argument("--no-rules", action="store_true", help="without the table by rule")
    parser.add_argument("--peers", action="store_true", help="also Flower and NVFLARE")
    parser.add_argument("--gpt2-large", action="store_true", help="one round of 3.2 GB instead")
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    if given.gpt2_large:
        size = given.size if given.quick else GPT2_LARGE_SIZE
        results.report("large_model_gpt2", {"model_mb": 4 * size / 1e6, "rounds": gpt2_large(size)})
        return
    given.few = FEW
    if given.quick:
        given.participants, given.size, given.rounds = [2], 50_000, 1
        given.few, given.no_rules = 2, True
    num_bytes = 4 * given.size
    figures: dict[str, Any]
    if given.tls:
        figures = {"model_mb": processes.mb(num_bytes), "rows": by_encryption(given, num_bytes)}
        results.report("large_model_tls", figures)
        return
    durability = by_durability(given, num_bytes)
    figures = {
        "model_mb": processes.mb(num_bytes),
        "rounds": given.rounds,
        "by_participants": by_participants(given, num_bytes),
        "by_durability": durability,
    }
    if not given.no_rules:
        figures["by_rule"] = by_rule(given, num_bytes)
    if given.peers:
        import peers

        rows = peers.measure(given.few, given.size, rounds=1 if given.quick else PEER_ROUNDS)
        figures["peers"] = peers.beside(rows, durability[0]["round_s_median"])
    results.report("large_model", figures)


if __name__ == "__main__":
    main()
