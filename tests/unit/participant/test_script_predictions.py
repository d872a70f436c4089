"""Predictions that a script gives to round.evaluate()."""

import numpy as np
import pytest
import torch

from xain.predictions import tallies_of
from xain_workloads.measures.figures import figures

TRUE = [0, 1, 1, 0, 1]
SHARES = np.array([0.2, 0.9, 0.6, 0.4, 0.3])
BOTH = np.stack([1 - SHARES, SHARES], axis=1)


def test_probabilities_of_one_and_of_both_classes_are_the_same():
    assert tallies_of(TRUE, SHARES) == tallies_of(np.array(TRUE), BOTH)
    found = figures(tallies_of(TRUE, SHARES))
    assert found["accuracy"].value == 0.8
    assert found["log_loss"].value == pytest.approx(-np.log([0.8, 0.9, 0.6, 0.6, 0.3]).mean())


def test_torch_tensors_of_a_graph_are_taken():
    scores = torch.tensor(np.log(BOTH), requires_grad=True)
    found = tallies_of(torch.tensor(TRUE), scores.softmax(1))
    assert found.confusion == tallies_of(TRUE, BOTH).confusion
    coarse = tallies_of(torch.tensor(TRUE), scores.bfloat16().softmax(1))
    assert coarse.confusion == found.confusion


def test_classes_without_probabilities_have_a_confusion_matrix_alone():
    names = ["ill", "well"]
    found = tallies_of(["well", "ill", "ill"], ["well", "ill", "well"], names)
    assert found.confusion == (0, 0, 1, 0, 1, 1, 1, 1, 1)
    assert "log_loss" not in figures(found)
    assert tallies_of([1, 0, 0], [1, 0, 1]) == found


def test_floats_are_a_regression():
    found = figures(tallies_of([1.0, 2.0, 3.0], np.array([[1.0], [2.0], [4.0]], np.float32)))
    assert found["r2"].value == 0.5


@pytest.mark.parametrize(
    ("y_true", "y_pred", "classes", "why"),
    [
        ([], [], None, "no rows"),
        ([1, 0], [0.5], None, "must be \\(n,\\)"),
        ([1, 0], [[[0.5]]] * 2, None, "must be \\(n,\\)"),
        ([1, 0], [1.5, 0.5], None, "is no probability"),
        ([1, 7], [0.5, 0.5], None, "as floats for a regression"),
        ([1, 0], [[0.5, 0.4], [0.5, 0.5]], None, "apply softmax"),
        ([1.0, 0.0], [[0.5, 0.5]] * 2, None, "whole numbers"),
        (["a", "b"], ["a", "b"], None, "classes="),
        (["a", "c"], ["a", "b"], ["a", "b"], "'c' in y_true"),
        ([-1, 0], [0, 0], None, "class -1"),
        ([1, 0], [float("nan"), 0.5], None, "not finite"),
    ],
)
def test_predictions_that_do_not_fit_the_truth_are_refused(y_true, y_pred, classes, why):
    with pytest.raises(ValueError, match=why):
        tallies_of(y_true, y_pred, classes)
