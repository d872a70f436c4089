"""The way of a call through the coordinator is short."""

from support.walk import walk

# Figures of the same calls before an update had one ticket; see benchmarks/weight.py.
BEFORE = {"heartbeat": {"calls": 109, "moves": 27}, "update": {"calls": 340, "moves": 64}}


async def test_call_runs_few_functions_and_seldom_changes_its_folder(tmp_path):
    ways = await walk(tmp_path)
    update, last, heartbeat = ways["update"], ways["last update"], ways["heartbeat"]
    assert update["calls"] <= 0.62 * BEFORE["update"]["calls"]
    assert update["moves"] <= 0.42 * BEFORE["update"]["moves"]
    assert update["core"] <= 7
    assert last["core"] <= 14
    assert heartbeat["calls"] <= 0.62 * BEFORE["heartbeat"]["calls"]
    assert heartbeat["moves"] <= 0.5 * BEFORE["heartbeat"]["moves"]
