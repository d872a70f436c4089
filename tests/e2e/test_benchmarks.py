"""Every benchmark runs, and writes the figures that docs/performance.md shows; none is asserted."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "performance.md"

# Figures that each must tell; a list is a table, of which these words are columns.
EXPECTED: dict[str, dict[str, str]] = {
    "baselines": {
        "": "tcp_mb_per_s bare_grpc_mb_per_s disk_mb_per_s",
        "memory": "threads copy_gb_per_s float64_accumulation_gb_per_s",
    },
    "round_overhead": {"": "round_ms_median bare_grpc_ms ratio_to_bare_grpc"},
    "scripted": {"": "alone_ms script_ms ratio_to_alone"},
    "bulk_round": {"": "participants round_s_median"},
    "large_model": {
        "by_participants": (
            "participants round_s_median useful_mb_per_s coordinator_peak_mb participant_peak_mb "
            "bare_grpc_s ratio_to_bare_grpc bulk_round_s ratio_to_bulk_round"
        ),
        "by_durability": "data round_s_median",
    },
    "aggregation": {
        "memory": "float64_accumulation_gb_per_s",
        "by_rule": "rule updates gb_per_s ratio_to_accumulation",
    },
    "gradient_steps": {"": "step_ms bare_grpc_ms ratio_to_bare_grpc numpy_in_one_process_ms"},
    "pipeline": {"": "samples_per_s_in_two_stages samples_per_s_alone ratio ratio_to_two_threads"},
    "recovery": {"": "serving_s_median round_ends_s_median sent_twice_mb_up"},
    "fleet": {
        "fleets": (
            "participants join_s told_s told_s_ratio round_s heartbeat_cpu_ms "
            "heartbeat_cpu_ms_ratio memory_kb back_s opening_p99_ms"
        ),
        "aggregation": (
            "aggregation_s aggregating_p99_ms transferring_p99_ms opening_p99_ms "
            "numpy_aggregating_p99_ms aggregating_p99_ms_ratio"
        ),
    },
    "launch_serve": {
        "fits": "workload ready_s first_fit_s later_fit_s_median first_to_later_ratio",
        "after_kills": "workload killed missing fit_s",
    },
    "learning": {"cases": "table workload sites split library federated difference within"},
    "messaging": {
        "transports": "transport round_trips_per_s gb_per_s",
        "incast": "peers messages_per_s",
    },
    "parameter_server": {
        "dense": (
            "servers mb gb_per_s tcp_gb_per_s pyzmq_gb_per_s grpcio_gb_per_s ratio_to_tcp "
            "ratio_to_grpcio"
        ),
        "sparse": "servers dim keys push_mkeys_per_s pull_mkeys_per_s",
        "small": (
            "lists push_raw_ms push_ratio_to_raw push_ratio_to_least push_kv_ratio_to_table "
            "pull_raw_ms pull_ratio_to_raw pull_ratio_to_least pull_kv_ratio_to_table"
        ),
        "latency": "servers pull_4_kib_p50_ms pull_4_kib_p99_ms tcp_p99_ms",
        "jobs": "push alone_p50_ms beside_p50_ms p50_ratio_to_alone",
        "replication": "replicas push_ms pull_ms",
        "checkpoint": "checkpoint_s clock_ms clock_meanwhile_ms",
        "recovery": "kept_by detected_s restarted_s reloaded_s paused_s",
    },
    "parallelisms": {"cases": "parallelism centralised score difference megabytes seconds"},
    "real_tables": {
        "unspoilt": "table sites refused warned",
        "mistakes": "mistake tables named",
        "trainings": "table workload best loss_best loss_last score_best score_last",
    },
    "restart": {"": "serving_s_median without_snapshot_s"},
    "since": {"figures": "figure before now ratio"},
    "simulation": {
        "": "accuracy round_s_median centralised_epoch_s ratio_to_centralised_epoch",
        "light": "participants threads_of_worker round_s fleet_round_s ratio_to_fleet",
    },
}
# One case stands for all: tests of their own train with the others.
ONLY = {
    "learning": ("--workloads=sgd", "--splits=random"),
    "parallelisms": ("--only=gradient",),
    "since": ("HEAD", "--only=a-call,tables"),
}
ABOUT = {"date", "cpu", "cores", "memory_gib", "python", "numpy", "grpcio"}


async def run(script: str, *arguments: object, folder: Path) -> str:
    """The output of a benchmark that succeeds. folder: where it leaves its figures."""
    status, out, err = await ended(script, *arguments, folder=folder)
    assert status == 0, err
    return out


async def ended(script: str, *arguments: object, folder: Path) -> tuple[int | None, str, str]:
    """Run a benchmark to its end; returns its status, its output and what it said of errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(BENCHMARKS / f"{script}.py"), *map(str, arguments)),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return process.returncode, out.decode(), err.decode()


def figures(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "bench-results" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
async def test_benchmark_prints_and_writes_its_figures(name, tmp_path):
    """With tiny sizes it prints and writes all its figures, says where they come from, and leaves
    nothing else behind."""
    printed = await run(name, "--quick", *ONLY.get(name, ()), folder=tmp_path)
    found = figures(tmp_path, name)
    assert found["about"].keys() >= ABOUT
    for table, words in EXPECTED[name].items():
        keys = set(words.split())
        rows = found[table] if table else [found]
        assert rows
        assert all(keys <= row.keys() for row in rows), (table, rows)
        assert all(key in printed for key in keys)
    assert [path.name for path in tmp_path.iterdir()] == ["bench-results"]
    assert [path.name for path in (tmp_path / "bench-results").iterdir()] == [f"{name}.json"]


async def test_the_page_shows_the_figures(tmp_path):
    """tables.py puts the figures between their marks, and leaves all else as it is."""
    about = {
        **dict.fromkeys((*ABOUT, "system", "load_before", "revision"), "x"),
        "busy_cores": 0.1,
    }
    made = {"round_ms_median": 1.5, "rows": [{"rule": "mean", "gb_per_s": 2.0}], "about": about}
    (tmp_path / "bench-results").mkdir()
    (tmp_path / "bench-results" / "one.json").write_text(json.dumps(made))
    page = tmp_path / "page.md"
    page.write_text(
        "Before.\n<!-- one -->\nold\n<!-- end -->\nBetween.\n"
        "<!-- one: rows -->\nold\n<!-- end -->\n<!-- two -->\nkept\n<!-- end -->\n"
        "<!-- one: columns -->\nkept\n<!-- end -->\nAfter.\n"
    )
    await run("tables", page, folder=tmp_path)
    shown = page.read_text()
    assert "old" not in shown
    assert shown.count("kept") == 2
    assert shown.startswith("Before.\n")
    assert shown.endswith("After.\n")
    assert shown.count("round ms median") == 1
    assert shown.count("| mean | 2 |") == 2
    again = page.read_text()
    await run("tables", page, folder=tmp_path)
    assert page.read_text() == again


def test_marks_of_the_page_are_benchmarks():
    """Every mark in docs/performance.md is that of a benchmark, or of its second file."""
    page = PAGE.read_text(encoding="utf-8")
    marks = re.findall(r"^<!-- (\w+)(?:: [\w, ]+)? -->$", page, re.MULTILINE)
    names = marks[::2]
    assert names
    assert set(marks[1::2]) == {"end"}
    scripts = tuple(path.stem for path in BENCHMARKS.glob("*.py"))
    assert all(name.startswith(scripts) for name in names)


@pytest.mark.real_exec  # a fork server of its own would be one more child
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="who is left is looked up in /proc")
async def test_a_benchmark_that_is_stopped_leaves_nobody(tmp_path):
    """SIGTERM in the middle of it: coordinator and participants end with it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(BENCHMARKS / "recovery.py"), "--participants=2", "--kills=1000"),
        *("--size=1000", "--any-load"),
        cwd=tmp_path,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        while len(children_of(process.pid)) < 3:  # a coordinator and two agents
            assert process.returncode is None
            await asyncio.sleep(0.05)  # a poll: it ends when they are there
        children = children_of(process.pid)
        process.terminate()
        assert await process.wait() == 143
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert not any(is_there(pid) for pid in children)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def children_of(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in listed.split()]
