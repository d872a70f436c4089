"""Ensembles as fitted estimators of scikit-learn, which vote, or are stacked.

scikit-learn is imported when it is needed: a coordinator lists and joins estimators without it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.tables.reading.scales import Scale

Array = NDArray[np.float64]


def voting_classifier(
    members: Sequence[Any], weights: Sequence[float], classes: Sequence[str], vote: str
) -> Any:
    """Make a VotingClassifier of fitted members, as a fit does. members: see with_all_classes()."""
    from sklearn.ensemble import VotingClassifier

    voting = VotingClassifier(_named("estimator", members), voting=vote, weights=list(weights))
    voting.estimators_ = list(members)
    voting.le_ = _encoder(classes)
    voting.classes_ = voting.le_.classes_
    return voting


def with_all_classes(member: Any, num_classes: int, num_features: int) -> Any:
    """Put an estimator into a BaggingClassifier of its own, which gives zeros to the classes that
    the estimator does not know. Raises ValueError if the estimator knows other classes."""
    from sklearn.base import clone
    from sklearn.ensemble import BaggingClassifier

    positions = np.arange(num_classes)
    known = np.asarray(getattr(member, "classes_", ()))
    if known.ndim != 1 or known.dtype.kind != "i" or not np.isin(known, positions).all():
        raise ValueError(f"an estimator of the ensemble has the classes {known}")
    bag = BaggingClassifier(clone(member), n_estimators=1)
    bag.estimators_ = [member]
    bag.estimators_features_ = [np.arange(num_features)]
    bag.classes_ = positions
    bag.n_classes_ = num_classes
    bag.n_features_in_ = num_features
    return bag


def voting_regressor(members: Sequence[Any], weights: Sequence[float]) -> Any:
    """Make a VotingRegressor of fitted members, as a fit leaves it."""
    from sklearn.ensemble import VotingRegressor

    voting = VotingRegressor(_named("estimator", members), weights=list(weights))
    voting.estimators_ = list(members)
    return voting


def stacking_classifier(
    votings: Sequence[Any], coefficients: Array, classes: Sequence[str], num_columns: int
) -> Any:
    """Make a StackingClassifier of fitted votings, as a fit leaves it.

    votings: of the sites. coefficients: (d, k); see stacking.features_of().
    num_columns: of a row, that are features beside the votes.
    """
    from sklearn.ensemble import StackingClassifier
    from sklearn.linear_model import LogisticRegression

    final = LogisticRegression()
    final.classes_ = np.arange(len(classes))
    final.coef_ = np.ascontiguousarray(coefficients[:-1].T)
    final.intercept_ = coefficients[-1].copy()
    final.n_features_in_ = len(coefficients) - 1
    final.n_iter_ = np.ones(1, np.int32)
    stacking = StackingClassifier(
        _named("site", votings), final, stack_method="predict_proba", passthrough=num_columns > 0
    )
    stacking._label_encoder = _encoder(classes)
    stacking.classes_ = stacking._label_encoder.classes_
    stacking.stack_method_ = ["predict_proba"] * len(votings)
    return _stacked(stacking, votings, final)


def stacking_regressor(
    votings: Sequence[Any], coefficients: Array, scale: Scale, num_columns: int
) -> Any:
    """Make a StackingRegressor of fitted votings, as a fit leaves it.

    votings: of the sites. coefficients: (d, 1), of votes and a target that are scaled.
    num_columns: of a row, that are features beside the votes.
    """
    from sklearn.ensemble import StackingRegressor
    from sklearn.linear_model import Ridge

    votes, columns = np.split(coefficients[:-1, 0], [len(votings)])
    final = Ridge()
    final.coef_ = np.concatenate([votes, columns * scale.scale])
    constant = float(coefficients[-1, 0]) * scale.scale
    final.intercept_ = scale.center * (1 - float(votes.sum())) + constant
    final.n_features_in_ = len(final.coef_)
    stacking = StackingRegressor(_named("site", votings), final, passthrough=num_columns > 0)
    stacking.stack_method_ = ["predict"] * len(votings)
    return _stacked(stacking, votings, final)


def _stacked(stacking: Any, votings: Sequence[Any], final: Any) -> Any:
    stacking.estimators_ = list(votings)
    stacking.final_estimator_ = final
    return stacking


def _named(kind: str, fitted: Sequence[Any]) -> list[tuple[str, Any]]:
    """Pair names of estimators with unfitted copies of them, as a fit leaves them: fitted ones
    would be written into a file of skops again at each level."""
    from sklearn.base import clone

    return [(f"{kind}{number}", clone(one)) for number, one in enumerate(fitted)]


def _encoder(classes: Sequence[str]) -> Any:
    """A LabelEncoder of these classes, in their order, as a fit leaves it."""
    from sklearn.preprocessing import LabelEncoder

    encoder = LabelEncoder()
    encoder.classes_ = np.array(classes, dtype=np.str_)
    return encoder
