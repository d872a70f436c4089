"""Permutation importance: how much larger the loss of a model is with one column permuted.

A site permutes the values of one column of the table among its held-out rows, several times, and
sends the sum of the differences in loss, and of their squares. The sums add up over sites: each row
is permuted among the rows of its own site.
Source: Breiman 2001, "Random forests", section 10, for any model by Fisher, Rudin and Dominici
2019, "All models are wrong, but many are useful".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf

from xain_workloads.measures.figures import Figure, mean_figure
from xain_workloads.measures.tallies import are_sums

REPEATS = 5  # permutations of a column
MAX_COLUMNS = 1000  # of a model that are permuted: the first ones
MAX_MODELS = 2  # the last one, and the best one before it
SHOWN = 20  # columns of which the importances at single sites are kept


@dataclass(frozen=True, slots=True)
class Importance:
    """Sums over held-out rows of the loss with a column permuted less the loss without.

    round: number of the model. loss: sum of the loss without.
    repeats: permutations of a column, of which there are the fewest.
    columns: positions in the columns of the model, ascending.
    totals, squares: for each of these columns, sums of the rows' differences, each of which is the
        mean over the permutations, and of the squares of these.
    num_samples: rows that `loss` is of. rows: those that the sums of each column are of; 0 and
        empty as a site sends it.
    """

    round: int
    loss: float
    repeats: int
    columns: tuple[int, ...]
    totals: tuple[float, ...]
    squares: tuple[float, ...]
    num_samples: int = 0
    rows: tuple[int, ...] = ()

    @property
    def figures(self) -> dict[int, Figure]:
        """The mean difference in loss by column, with its 95 % interval, the largest first. Only
        added() gives importances with the numbers of rows for it."""
        sums = zip(self.columns, self.totals, self.squares, self.rows, strict=True)
        found = {
            at: mean_figure(total, squares, rows, least=-inf) for at, total, squares, rows in sums
        }
        return dict(sorted(found.items(), key=lambda one: (-one[1].value, one[0])))

    def of(self, columns: Sequence[int]) -> "Importance":
        """Copy the importance with these columns alone, as far as it has them. Only for importances
        that added() has made."""
        kept = [at for at, column in enumerate(self.columns) if column in columns]
        return replace(
            self,
            columns=tuple(self.columns[at] for at in kept),
            totals=tuple(self.totals[at] for at in kept),
            squares=tuple(self.squares[at] for at in kept),
            rows=tuple(self.rows[at] for at in kept),
        )


def added(sites: Iterable[tuple[int, Iterable[Importance]]]) -> tuple[Importance, ...]:
    """The importances of the rows of all sites, by model. sites: (held-out rows, importances)."""
    by_round: dict[int, list[tuple[int, Importance]]] = {}
    for num_samples, importances in sites:
        for one in importances:
            by_round.setdefault(one.round, []).append((num_samples, one))
    return tuple(_added(number, known) for number, known in sorted(by_round.items()))


def _added(number: int, sites: Sequence[tuple[int, Importance]]) -> Importance:
    """Add up the importances of one model over the sites, column by column."""
    sums: dict[int, list[tuple[float, float, int]]] = {}
    for num_samples, one in sites:
        for column, total, squares in zip(one.columns, one.totals, one.squares, strict=True):
            sums.setdefault(column, []).append((total, squares, num_samples))
    columns = sorted(sums)
    # fsum is exact, so that the order of the sites does not matter.
    return Importance(
        number,
        fsum(one.loss for _, one in sites),
        min(one.repeats for _, one in sites),
        tuple(columns),
        tuple(fsum(total for total, _, _ in sums[column]) for column in columns),
        tuple(fsum(squares for _, squares, _ in sums[column]) for column in columns),
        sum(num_samples for num_samples, _ in sites),
        tuple(sum(num_samples for _, _, num_samples in sums[column]) for column in columns),
    )


def check(importances: Sequence[Importance]) -> None:
    """Raise ValueError unless importances from the network can be those of one site."""
    if len({one.round for one in importances}) < len(importances) or len(importances) > MAX_MODELS:
        raise ValueError(f"there are importances of {len(importances)} models")
    for one in importances:
        columns = one.columns
        if not len(columns) == len(one.totals) == len(one.squares):
            raise ValueError(f"an importance has other sums than those of {len(columns)} columns")
        if columns and not 0 <= columns[0] <= columns[-1] < MAX_COLUMNS:
            raise ValueError(f"an importance is of column {columns[0]} to column {columns[-1]}")
        if list(columns) != sorted({*columns}):
            raise ValueError("the columns of an importance do not ascend")
        if one.round < 0 or one.repeats < 1:
            raise ValueError(f"an importance is of model {one.round}, and {one.repeats} times")
        if one.loss < 0 or not are_sums((one.loss, *one.totals), one.squares):
            raise ValueError(f"sums of an importance of model {one.round} are not those of losses")
