"""Importance of columns in status, report and CSV."""

import csv
import io

import pytest
from rich.console import Console

from support.inspected import snapshot
from xain_coordinator.cli.importance import sentence, show, to_csv, told
from xain_coordinator.cli.report.page import page
from xain_coordinator.cli.status import frame
from xain_coordinator.inspection.client import Snapshot
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection


def importances(
    metric: str = "log_loss", *, weighs_classes: bool = False
) -> inspection.ColumnImportances:
    """Two of three columns: the first one matters at both sites, the second at none."""
    found = inspection.ColumnImportances(
        round=7,
        metric=metric,
        weighs_classes=weighs_classes,
        loss=0.5,
        num_samples=120,
        repeats=5,
        num_columns=3,
        sites={"north": 70, "south": 50},
    )
    age = found.columns.add(column="age <i>", num_samples=120)
    age.difference.CopyFrom(pb.Figure(value=0.25, low=0.1, high=0.4))
    age.sites["north"].CopyFrom(pb.Figure(value=0.3, low=0.1, high=0.5))
    age.sites["south"].CopyFrom(pb.Figure(value=0.2, low=0.0, high=0.4))
    noise = found.columns.add(column="noise", num_samples=120)
    noise.difference.CopyFrom(pb.Figure(value=-0.01, low=-0.03, high=0.01))
    return found


def finished() -> Snapshot:
    return snapshot(phase="finished", cause="completed", importance=importances())


def printed(console: Console) -> str:
    return console.file.getvalue()


def console() -> Console:
    return Console(file=io.StringIO(), width=400)


def test_status_names_the_columns_that_matter():
    screen = console()
    screen.print(frame(finished()))
    (line,) = (one for one in printed(screen).splitlines() if one.startswith("importance"))
    assert "age <i> 0.25 more log loss with the column shuffled (model 7)" in line
    assert "noise" not in line


@pytest.mark.parametrize(
    ("metric", "weighs_classes", "told"),
    [
        ("mse", False, "age <i> +50.0% more mean squared error with the column shuffled"),
        ("log_loss", True, "age <i> 0.25 more log loss, with rows weighed by their class, with"),
        ("error", False, "age <i> 0.25 more error rate with"),
    ],
)
def test_sentence_says_which_loss_grows(metric, weighs_classes, told):
    assert sentence(importances(metric, weighs_classes=weighs_classes)).startswith(told)


def test_columns_without_any_importance_are_told_in_a_sentence():
    found = importances()
    del found.columns[0]
    assert sentence(found).startswith("no single column matters to model 7 beyond chance on")


def test_table_for_people_has_figures_caveat_and_what_is_left_out():
    screen = console()
    show(importances(), screen)
    text = printed(screen)
    (age,) = (one for one in text.splitlines() if one.startswith("age <i>"))
    assert age.split()[2:] == ["0.25", "0.1", "to", "0.4", "+50.0%"]
    assert "It is 0.5 on these 120 rows otherwise" in text
    assert "the mean of 5 shuffles" in text
    assert "1 of 3 columns were left out" in text
    assert "not what causes the outcome" in text


def test_rows_that_are_not_in_an_importance_are_told():
    """A slow site has had no time for a column, and another has sent no importances at all."""
    found = importances()
    assert "fewer rows" not in told(found)
    assert "no importances" not in told(found)
    found.columns[1].num_samples = 80
    found.num_held_out = 200
    assert "1 of the columns are of fewer rows" in told(found)
    assert "Sites with 80 other held-out rows have sent no importances of it." in told(found)


def test_csv_has_a_line_for_each_column_and_for_each_site():
    rows = list(csv.DictReader(io.StringIO(to_csv(importances()))))
    told = [(one["column"], one["site"], one["importance"], one["rows"]) for one in rows]
    assert told == [
        ("age <i>", "", "0.25", "120"),
        ("age <i>", "north", "0.3", "70"),
        ("age <i>", "south", "0.2", "50"),
        ("noise", "", "-0.01", "120"),
    ]
    assert (rows[0]["model"], rows[0]["metric"], rows[0]["low"]) == ("7", "log_loss", "0.1")


def test_report_has_a_section_with_the_columns_at_each_site():
    part = page(finished()).split("<h2>Which columns does model 7 need?</h2>")[1].split("<h2>")[0]
    (age,) = (line for line in part.split("<tr>") if "age &lt;i&gt;" in line)
    for cell in ("<b>0.25</b>", "0.1 to 0.4", "+50.0%", ">0.3<", ">0.2<"):
        assert cell in age
    (noise,) = (line for line in part.split("<tr>") if "noise" in line)
    assert "-0.01" in noise
    assert "not what causes the outcome" in part
    bare = finished()
    bare.status.ClearField("importance")
    assert "Which columns does model" not in page(bare)
