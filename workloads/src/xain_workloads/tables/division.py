"""How the participants of a session divide their rows."""

from dataclasses import dataclass

MAX_FOLDS = 1000


@dataclass(frozen=True, slots=True)
class Division:
    """A division of a participant's rows into folds; partition.divided() carries it out.

    folds: 1 to MAX_FOLDS; 1: all rows are one fold.
    fold: number of the fold that is not trained on, from 0.
    seed: of the chance by which rows fall into folds, 0 or more.
    measures: models are measured on this fold. Otherwise they are measured on some rows of the
        other folds, as without a division.
    """

    folds: int
    fold: int = 0
    seed: int = 0
    measures: bool = False
