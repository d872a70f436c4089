"""Flower's simulation: one process with the server, and actors of Ray that run the clients."""

from pathlib import Path

from peers.environments import Found, PeerFailed, environment, intervals, tree, wait

PACKAGE, VERSION = "flwr[simulation]", "1.41.0"
RUN = Path(__file__).parent / "flower_simulation" / "run.py"
ACTORS = 2  # as many as xain.simulate() has workers
ROUND_LIMIT_S = 120.0
START_LIMIT_S = 120.0


def run(folder: Path, participants: int, size: int, rounds: int) -> Found:
    """Raises PeerFailed."""
    programs = environment(PACKAGE, VERSION)
    times = folder / "times"
    command = [programs / "python", RUN, times, participants, size, rounds, ACTORS]
    environ = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "FLWR_HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # as other programs and our workers; by default 15, the last
    }
    with tree(command, folder / "simulation.log", environ, server=str(RUN)) as main:
        wait(main, [], START_LIMIT_S + rounds * ROUND_LIMIT_S)
        noted = times.read_text(encoding="utf-8").split() if times.exists() else []
        seconds = intervals([float(line) for line in noted])
        if len(seconds) != rounds:
            raise PeerFailed(f"it made {len(seconds)} rounds, not {rounds}\n{main.tail()}")
        return Found(seconds, main.peak_mb)
