"""Warnings of a session reach everyone who looks: status, report, and the log at its end."""

import asyncio

import numpy as np

import xain
from integration.conftest import config_for
from support.logs import capture_logs
from support.process import PATIENCE_S
from xain_coordinator.cli.report.files import snapshot_of_files
from xain_coordinator.cli.report.page import page
from xain_coordinator.inspection.client import fetch


async def test_own_data_that_measure_nothing_are_told_by_status_report_and_end(start, tmp_path):
    """The coordinator has no code for the model of a script, so [evaluate] data cannot be used:
    one warning with its number, whoever looks."""
    sections = {
        "rounds": {"rounds": 3, "min_participants": 1, "initial_weights": "first"},
        "evaluate": {"data": "digits", "metric": "accuracy"},
    }

    def script(target: str) -> None:
        for round_ in xain.rounds({"w": np.zeros(2)}, coordinator=target, id="a"):
            round_.submit({"w": round_.weights["w"] + 1}, samples=1)

    with capture_logs() as logs:
        coordinator = await start(**sections)
        target = f"127.0.0.1:{coordinator.port}"
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(script, target)
        told = list((await asyncio.to_thread(fetch, target)).status.warnings)
        await coordinator.stop()
    (text,) = told
    failed = [line for line in logs if line["event"] == "evaluation_failed"]
    assert text.startswith(f"The coordinator's own evaluation failed: {failed[-1]['reason']}")
    assert text.endswith(f"({len(failed)} times, the last in round {failed[-1]['round']}).")
    assert len(failed) > 1
    assert [line["reason"] for line in logs if line["event"] == "session_warning"] == [text]
    # The report of the stopped coordinator, from its journal.
    stopped = config_for(tmp_path, **sections)
    snapshot = await asyncio.to_thread(snapshot_of_files, stopped)
    assert list(snapshot.status.warnings) == told
    assert "own evaluation failed" in page(snapshot)
