"""A server's script for tests, which may kill itself between two lines of it or of xain_session.

    python -m support.session_script server FOLDER PORT [AT]    kill -9 at line AT of those that run
    python -m support.session_script local FOLDER 0 [AT]        the same with simulated sites
    python -m support.session_script ADDRESS FOLDER 0 [AT]      the same at a Ray cluster
    python -m support.session_script connect FOLDER 0 [AT]      the same with the coordinator that
                                                                runs in this folder
    python -m support.session_script sites PORT                 three sites, until the process ends

The last line of the server is its result as JSON, with `lines`: how many lines have run.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import xain
from xain_session.deployments import MARK

ROUNDS = 4
SITES = ("east", "north", "west")
SIMULATED = ("site-0", "site-1", "site-2")  # by xain.simulated()
MODEL = {"w": np.zeros(10), "b": np.ones(2)}
OURS = (os.sep + "xain_session" + os.sep, "session_script.py")


class Halfway(xain.Rule):
    """Half of the way to the median of the updates."""

    def __init__(self, share: float) -> None:
        self.share = share

    def combine(self, tile: Any, weights: Any) -> Any:
        return self.share * np.median(tile.astype(np.float64), axis=0)


class Lines:
    """Counts the lines of ours that the main thread runs, and kills the process at one of them."""

    def __init__(self, last: int, mark: Path) -> None:
        """mark: the file that says that the session is over: a kill behind it begins another."""
        self.number = 0
        self._last = last
        self._mark = mark

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        # A digest is computed before there is anything to lose, in more lines than all others.
        if file.endswith("digests.py") or not any(one in file for one in OURS):
            return None
        if event == "line":
            self.number += 1
            if self.number == self._last and not self._mark.exists():
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def opened(folder: Path, port: int, backend: str) -> xain.Session[Any]:
    if backend == "connect":
        return xain.connect(str(folder / "journal.sock"), MODEL, progress=False)
    participants = None
    if backend != "server":
        where: Any = {} if backend == "local" else {"backend": "ray", "address": backend}
        participants = xain.simulated(simulate, len(SITES), workers=2, **where)
    return xain.session(
        MODEL,
        rounds=ROUNDS,
        min_participants=len(SITES),
        rule=Halfway(0.9),
        metric="r2",
        data_dir=folder,
        address=f"127.0.0.1:{port}",
        participants=participants,
        linger_s=0.0,
        progress=False,
    )


def serve(folder: Path, port: int, last: int, backend: str) -> None:
    lines = Lines(last, folder / MARK)
    sites = SITES if backend in ("server", "connect") else SIMULATED
    sys.settrace(lines)
    with opened(folder, port, backend) as session:
        for round_ in session:
            round_.configure(
                lr=0.1 * 0.5**round_.number, by_site={sites[-1]: {"epochs": 3, "lr": 0.3}}
            )
            record = round_.run()
            if not record.evaluated:
                record.evaluate(r2=1.0 - 1.0 / (2.0 + float(np.abs(record.weights["w"]).sum())))
    sys.settrace(None)
    result = session.result
    told = {
        "model": result.model,
        "weights": {name: value.tolist() for name, value in result.weights.items()},
        "best": None if result.best is None else [result.best.model, result.best.value],
        "metrics": dict(result.metrics),
        "lines": lines.number,
    }
    sys.stdout.write(json.dumps(told) + "\n")


def train(name: str, port: int) -> None:
    while True:  # one session after the other
        for round_ in xain.rounds(MODEL, id=name, coordinator=f"127.0.0.1:{port}"):
            submit(round_, SITES.index(name) + 1)


def simulate(site: xain.Site) -> None:
    for round_ in xain.rounds(MODEL):
        submit(round_, site.index + 1)


def submit(round_: Any, number: int) -> None:
    step = round_.config.lr * round_.config.epochs
    weights = {key: value + step * number for key, value in round_.weights.items()}
    round_.submit(weights, samples=10 * number, metrics={"loss": step})


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "sites":
        (port,) = map(int, arguments)
        for name in SITES:
            threading.Thread(target=train, args=(name, port), daemon=True).start()
        threading.Event().wait()
    else:
        folder, port, *last = arguments
        serve(Path(folder), int(port), int(last[0]) if last else 0, what)


if __name__ == "__main__":
    main()
