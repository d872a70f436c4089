"""`xain-coordinator models`: the columns of its table."""

from xain_coordinator.cli.models import headings
from xain_coordinator.core.vocabulary.values import Evaluation
from xain_workloads.measures.figures import Figure


def test_figures_have_their_usual_order_whatever_order_they_arrive_in():
    """A message has no order of its metrics; "loss" is the log loss once more. Of the many figures
    the most important ones are shown."""
    names = ("loss", "log_loss", "dice", "auc", "brier", "accuracy")
    found = Evaluation(9, dict.fromkeys(names, 0.5), figures={"auc": Figure(0.5)})
    assert headings([found]) == ["accuracy", "auc", "log_loss", "dice"]


def test_averages_of_a_script_keep_their_loss():
    """Without figures the loss that a script has measured is all there is."""
    assert headings([Evaluation(9, {"loss": 0.5, "dice": 0.5})]) == ["dice", "loss"]
