"""Weights of classes in the loss: class_weight = "balanced", from the counts of all sites.

A model carries the weights in metadata[KEY], so that each site weighs its rows alike. Rows weigh in
training; what is measured counts each row once.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from xain_foundation.settings.hints import hint
from xain_workloads.errors import DataError
from xain_workloads.options import require_choice
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.reading.json_forms import read, written
from xain_workloads.tables.reading.statistics_json import from_json

KEY = "class_weights"  # in the metadata of a model
CHOICES = ("", "balanced")


def require_class_weight(class_weight: str, task: str) -> None:
    """Raise ValueError unless an option class_weight fits the task."""
    require_choice("class_weight", class_weight, CHOICES)
    if class_weight and task != "classification":
        raise ValueError(
            f"class_weight is {class_weight!r}; it is for task = 'classification' only"
        )


def balanced(
    profiles: Sequence[DataProfile], classes: Sequence[str], withheld: Set[str] = frozenset()
) -> str:
    """Compute class weights n / (k * n_c), scikit-learn's "balanced", as JSON for metadata[KEY].

    A site does not tell how many rows it has of a rare class; the rows of no other class of this
    site are taken to be equally many of each such class. withheld: classes whose numbers of rows
    are not to be told; they weigh 1, and do not count in the weights of the others. Raises
    DataError if a site has sent no statistics.
    """
    counts = dict.fromkeys(classes, 0.0)
    for profile in profiles:
        if profile.num_samples == 0:
            continue
        if not profile.statistics:
            raise DataError(
                'class_weight = "balanced" needs the counts of the classes at all sites, and a'
                " participant sent no statistics (its table is too wide, or its version too old); "
                + hint("xain-coordinator", 'workload.options.class_weight = ""')
            )
        told = from_json(profile.statistics).class_counts
        for name in told.keys() & counts.keys():
            counts[name] += told[name]
        rare = [name for name in profile.classes if name not in told]
        for name in rare:
            counts[name] += max(profile.num_samples - sum(told.values()), 0) / len(rare)
    told_of = [name for name in classes if name not in withheld]
    total = sum(counts[name] for name in told_of)
    # A class that is declared, and that no site has, counts as one row.
    return written(
        [
            1.0 if name in withheld else total / (len(told_of) * max(counts[name], 1.0))
            for name in classes
        ]
    )


def class_weights(metadata: Mapping[str, str], num_classes: int) -> NDArray[np.float64] | None:
    """(num_classes,) weights in the order of metadata "classes"; None if all classes weigh alike.
    Raises ValueError if the metadata have others. They may come from the network."""
    if KEY not in metadata:
        return None
    form = list[Annotated[float, Meta(gt=0)]]
    weights = read(metadata[KEY], form, "the class weights in the metadata", ValueError)
    if len(weights) != num_classes:
        raise ValueError(f"the class weights in the metadata are not {num_classes} numbers above 0")
    return np.array(weights, dtype=np.float64)


def row_weights(
    metadata: Mapping[str, str], num_classes: int, codes: NDArray[Any]
) -> NDArray[np.float64] | None:
    """(n,) weights of rows; None if all weigh alike. codes: (n,) positions of classes."""
    weights = class_weights(metadata, num_classes)
    return None if weights is None else weights[codes]
