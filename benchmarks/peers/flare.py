"""NVFLARE's simulator: a process for each client, and one for the server."""

from pathlib import Path

from peers.environments import Found, PeerFailed, environment, intervals, prepare, tree, wait

PACKAGE, VERSION = "nvflare", "2.9.0"
JOB = Path(__file__).parent / "nvflare_job" / "job.py"
# The command line of the server goes on behind it; those of the clients have another module.
SERVER = "nvflare.private.fed.app.simulator.simulator\0"
ROUND_LIMIT_S = 60.0
START_LIMIT_S = 120.0


def run(folder: Path, participants: int, size: int, rounds: int) -> Found:
    """Raises PeerFailed."""
    programs = environment(PACKAGE, VERSION)
    sites = [f"site-{i + 1}" for i in range(participants)]
    prepare(folder, sites, size)
    # One more: what is noted is when rounds begin, so the last one has no end.
    command = [programs / "python", JOB, folder, str(participants), str(rounds + 1)]
    environ = {"PATH": f"{programs}:/usr/bin:/bin"}
    with tree(command, folder / "simulator.log", environ, server=SERVER) as main:
        wait(main, [], START_LIMIT_S + rounds * ROUND_LIMIT_S)
        noted = [folder / f"{site}.times" for site in sites]
        missing = [file.stem for file in noted if not file.exists()]
        if missing:
            raise PeerFailed(f"{missing[0]} has not trained\n{main.tail()}")
        # A round begins when the first of them gets the model.
        of_sites = [[float(line) for line in file.read_text().split()] for file in noted]
        seconds = intervals([min(times) for times in zip(*of_sites, strict=False)])
        if len(seconds) != rounds:
            raise PeerFailed(f"it made {len(seconds)} rounds, not {rounds}\n{main.tail()}")
        return Found(seconds, main.peak_mb)
