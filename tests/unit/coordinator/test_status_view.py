"""Output of `xain-coordinator status` for people."""

import io

import numpy as np
from rich.console import Console

from support.inspected import snapshot
from xain_coordinator.cli.status import MAX_LINES, frame
from xain_workloads.tables.checks.describe import TableOne
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.table import Table


def shown(table_one: TableOne | None) -> str:
    text = io.StringIO()
    Console(file=text, width=100).print(frame(snapshot(phase="collecting"), table_one))
    return text.getvalue()


def test_data_of_all_sites_are_shown_and_a_long_table_is_cut():
    data = Dataset(np.arange(600.0).reshape(20, 30), np.repeat(["no", "yes"], 10))
    profile = Table.from_dataset(data).profile()
    table = TableOne.of([("north", profile), ("south", profile)]).for_sites(2)
    lines = shown(table).splitlines()
    begin = lines.index("Data") + 1
    assert lines[begin].split() == ["rows", "n", "of", "2", "sites"]
    assert lines[begin + 1].split()[-3:] == ["20", "(50.0", "%)"]
    assert lines[begin + MAX_LINES].startswith("the whole table: xain-coordinator describe")


def test_status_without_described_data_has_no_section_of_them():
    assert "Data" not in shown(None)
