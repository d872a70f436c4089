"""Warnings of a session: each kind once, with how often and when last."""

from xain_coordinator.core.view.history import History
from xain_coordinator.core.view.session_warnings import MAX_KINDS
from xain_coordinator.core.vocabulary import events as e


def test_repeated_warning_is_one_sentence_with_its_number():
    """A failed evaluation counts from the first time on; what happens to one participant once, as
    an update that is refused, is told by its account."""
    history = History()
    history.apply(e.ModelEvaluated(1, None, 0.0, "no such file."))
    history.apply(e.UpdateRefused("a", 1, "not finite"))
    history.apply(e.TrainingFailed("b", 1, "KeyError"))
    assert history.warnings(is_over=False) == [
        "The coordinator's own evaluation failed: no such file (in round 1)."
    ]
    history.apply(e.TrainingFailed("b", 2, "KeyError", "'y'"))
    history.apply(e.UpdateRefused("a", 2, "not finite"))
    history.apply(e.ModelEvaluated(2, None, 0.0, "no such column"))
    assert history.warnings(is_over=True) == [
        "The training of b failed: KeyError: 'y' (2 times, the last in round 2).",
        "An update of a was refused: not finite (2 times, the last in round 2).",
        "The coordinator's own evaluation failed: no such column (2 times, the last in round 2).",
    ]
    assert history.copy() == history


def test_kinds_of_warnings_have_a_bound():
    """The oldest are dropped: a stream of participants whose code fails does not fill memory."""
    history = History()
    for number in range(3 * MAX_KINDS):
        history.apply(e.TrainingFailed(f"p{number}", 1, "KeyError"))
        history.apply(e.TrainingFailed(f"p{number}", 2, "KeyError"))
    found = history.warnings(is_over=False)
    assert len(found) == MAX_KINDS
    assert found[-1].startswith(f"The training of p{3 * MAX_KINDS - 1} failed")
