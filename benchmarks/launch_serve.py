"""Seconds of fits in `xain-coordinator launch --serve`: the first of a ready launch, later ones,
and those after workers were killed.

    python benchmarks/launch_serve.py [--fits 5]

For the workloads sgd and bagging, with published estimators and with estimators that stay at the
workers, a launch of three workers is started and fits bundled data, as often as --fits says. The
first fit takes at most twice as long as the later ones, since a worker is ready only when it has
imported what its workload needs. Then, in launches that start no worker again, one and two of the
workers are killed, and the next fit is timed at once: it waits for the lease of the dead, or for
`rounds.start_timeout_s`, and is over within 10 s. Prints seconds; writes
bench-results/launch_serve.json.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import flags
import results

WORKERS = 3
WORKLOADS = {
    "sgd": ("--workload=sgd",),
    "bagging, published": ("--workload=bagging", "--rounds=1"),
    "bagging, held": ("--workload=bagging", "--rounds=1", "--set=workload.options.publish=false"),
}
DATA = "breast_cancer"


class Launch:
    """A launch that serves. ready_s: how long its start took."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "xain_coordinator", "launch", "--serve", f"--data={DATA}"]
        self._folder = folder
        began = time.perf_counter()
        with results.uninterrupted():
            self._process = subprocess.Popen(
                [*command, f"--work={folder}", "--quiet", f"--name=bench{os.getpid()}", *arguments],
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdout is not None
        self._url = ""
        for line in self._process.stdout:
            if (
                found := re.search(r"train with: curl -X POST (http://\S+)/v1/fit", line)
            ) is not None:
                self._url = found[1]
                break
        if not self._url:
            sys.exit("the launch ended before it was ready")
        self.ready_s = time.perf_counter() - began

    def fit(self) -> tuple[float, list[str]]:
        """Fit to the end. Returns seconds, and the workers that were missing."""
        request = urllib.request.Request(
            f"{self._url}/v1/fit", b'{"wait": true}', {"content-type": "application/json"}
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            missing: list[str] = json.load(answer)["missing"]
        return time.perf_counter() - began, missing

    def kill(self, worker: str) -> None:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            is_ours = f"--set=participant.state_dir={self._folder}/workers/{worker}".encode()
            if is_ours in command:
                os.kill(int(folder.name), signal.SIGKILL)

    def end(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()


@contextmanager
def launched(*arguments: str) -> Iterator[Launch]:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        launch = Launch(Path(folder).absolute(), arguments)
        try:
            yield launch
        finally:
            launch.end()


def measured(name: str, num_fits: int) -> dict[str, object]:
    """A row of the table of fits."""
    with launched(*WORKLOADS[name], f"--workers={WORKERS}") as launch:
        first, *later = (launch.fit()[0] for _ in range(num_fits))
        median = statistics.median(later)
        return {
            "workload": name,
            "ready_s": launch.ready_s,
            "first_fit_s": first,
            "later_fit_s_median": median,
            "first_to_later_ratio": first / median,
        }


def after_kills(name: str) -> Iterator[dict[str, object]]:
    """Rows of the table of fits after kills."""
    with launched(
        *WORKLOADS[name], f"--workers={WORKERS}", "--set=launch.max_restarts=0"
    ) as launch:
        launch.fit()
        for killed in range(1, WORKERS):
            launch.kill(f"worker-{WORKERS + 1 - killed}")
            seconds, missing = launch.fit()
            yield {
                "workload": name,
                "killed": killed,
                "missing": ", ".join(missing),
                "fit_s": seconds,
            }


def main() -> None:
    parser = flags.parser(__doc__, quick="two fits of one workload")
    parser.add_argument("--fits", type=int, default=5, help="of each launch")
    arguments = parser.parse_args()
    results.begin(quick=arguments.quick, any_load=arguments.any_load)
    names = list(WORKLOADS)[:1] if arguments.quick else list(WORKLOADS)
    num_fits = 2 if arguments.quick else arguments.fits
    fits = [measured(name, num_fits) for name in names]
    kills = [row for name in names for row in after_kills(name)]
    results.report("launch_serve", {"fits": fits, "after_kills": kills})


if __name__ == "__main__":
    main()
