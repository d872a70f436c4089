"""Results of benchmarks: print the figures, and keep them as JSON.

A figure that is a list of mappings is a table, one row each; any other is a line.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeGuard

FOLDER = Path("bench-results")
PACKAGES = ("numpy", "grpcio", "xain-coordinator")

Row = Mapping[str, Any]

# Other work shows in all figures. A load average does not tell of it: it holds the benchmark that
# has just ended, so that of several in a row only the first could be made.
QUIET_CORES = 0.5
SAMPLE_S = 2.0
SAMPLES = 3  # one passing moment of other work refuses nothing

_before: dict[str, object] = {}


def begin(*, quick: bool, any_load: bool) -> None:
    """Make ready to measure: note what other programs do on the machine, and refuse to measure
    beside more than QUIET_CORES of it, unless any_load. The figures of a quick run are for no
    table, so it waits for nothing.

    From now on SIGTERM ends the script as an exception does: whatever it has started ends with it.
    """

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    busy = None if quick else _quietest()
    _before.update(load_before=load, busy_cores=busy, any_load=any_load, quick=quick)
    if busy is not None and busy > QUIET_CORES and not any_load:
        sys.exit(
            f"other programs keep {busy:.2f} of {os.cpu_count()} cores busy, and figures for the "
            f"tables need at most {QUIET_CORES}: wait until they are done, or measure all the same "
            "with --any-load, which the tables then say"
        )


def _quietest() -> float | None:
    """The least of several samples of busy_cores(); the first that is quiet enough will do."""
    least: float | None = None
    for _ in range(SAMPLES):
        busy = busy_cores(SAMPLE_S)
        if busy is None:
            return None
        least = busy if least is None else min(least, busy)
        if least <= QUIET_CORES:
            break
    return least


def busy_cores(sample_s: float) -> float | None:
    """Number of busy cores, while this process slept. None where the system does not tell."""
    try:
        before = _cpu_ticks()
        time.sleep(sample_s)  # other processes are measured meanwhile
        after = _cpu_ticks()
    except OSError:
        return None  # not Linux
    busy, idle = (now - then for now, then in zip(after, before, strict=True))
    return (os.cpu_count() or 1) * busy / max(busy + idle, 1)


def _cpu_ticks() -> tuple[int, int]:
    """Ticks that all cores together were busy and idle since the machine was started."""
    with Path("/proc/stat").open(encoding="utf-8") as file:
        user, nice, system, idle, waiting, *interrupts = map(int, file.readline().split()[1:])
    # Interrupts of hardware and software, and time that the host gave to other machines. What
    # follows is the time of guests, which user and nice include.
    return user + nice + system + sum(interrupts[:3]), idle + waiting


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGTERM waits until the end: a process that is started within is known to the code that has
    to end it."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for number in came:
            signal.raise_signal(number)


def report(name: str, figures: Mapping[str, object]) -> None:
    """Print them, and write them to bench-results/NAME.json together with where and when."""
    result = {**figures, "about": about()}
    for key, value in figures.items():
        if is_table(value):
            print(f"\n{key}")
            print_table(value)
        else:
            print(f"{key:28} {shown(value)}")
    print()
    FOLDER.mkdir(exist_ok=True)
    target = FOLDER / f"{name}.json"
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def earlier(name: str, key: str) -> list[Row]:
    """A table of bench-results/NAME.json; empty if there is no such file."""
    source = FOLDER / f"{name}.json"
    if not source.exists():
        return []
    table: list[Row] = json.loads(source.read_text(encoding="utf-8"))[key]
    return table


@contextmanager
def scratch(parent: Path = FOLDER) -> Iterator[Path]:
    """A folder for the time being; by default on the disk that holds the checkout, since /tmp may
    be memory, where fsync costs nothing."""
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=parent) as name:
        yield Path(name).absolute()


def is_table(value: object) -> TypeGuard[Sequence[Row]]:
    return isinstance(value, list) and all(isinstance(row, Mapping) for row in value)


def columns(rows: Iterable[Row]) -> list[str]:
    """All keys of all rows, in order of appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def shown(value: object) -> str:
    """A figure as people read it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def print_table(rows: Sequence[Row]) -> None:
    names = columns(rows)
    cells = [names, *([shown(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def about() -> dict[str, object]:
    """The machine, the versions, the date."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        **_before,
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "revision": _revision(),
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None  # not Linux


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The git revision of the checkout; None without git."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--tags"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
