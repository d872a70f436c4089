"""Columns of a site that are unlike those that a model was made from.

The coordinator checks the data of all sites where the first model is made. A site that joins later
is in none of these checks; but the model tells where its columns lie.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from xain_foundation.settings.hints import hint, quoted
from xain_workloads.tables.preprocessing import CategoryColumn, preprocessing_of
from xain_workloads.tables.reading.scales import Scale
from xain_workloads.tables.schema import shown
from xain_workloads.tables.table import Table

_SPREADS = 3.0  # of the model's rows, that the median of a site may lie outside
_UNKNOWN = 0.2  # share of a column's values beyond that of training
_MIN_ROWS = 10


def unlike_columns(metadata: Mapping[str, str], table: Table) -> Iterator[str]:
    """A sentence for each column of a table that is unlike the rows that a model was made from.

    Nothing is known of numbers that the model does not scale, as those of boosted trees, or that
    each site scales by its own statistics. Raises DataError if the metadata are no model's.
    """
    preprocessing = preprocessing_of(metadata)
    if preprocessing is None:
        return
    for column in preprocessing.columns:
        values = table.values.get(column.name)
        if values is None or len(values) < _MIN_ROWS:
            continue
        if isinstance(column, CategoryColumn):
            others = [one for one in values.tolist() if one not in column.categories]
            names = sorted({one for one in others if isinstance(one, str)})
            if names and len(others) / len(values) > column.unknown + _UNKNOWN:
                name = quoted(column.name)
                replace = hint("xain-participant", f'data.replace.{name}.NAME = "NAME"')
                yield (
                    f"column {column.name!r}: {len(others)} of {len(values)} values are unknown to"
                    f" the model, which knows {shown(column.categories, 10)}, and not"
                    f" {shown(names)}; {replace}"
                )
        elif column.scale != Scale() and not preprocessing.is_per_site and values.dtype.kind == "f":
            known = values[~np.isnan(values)]
            if len(known) < _MIN_ROWS:
                continue
            middle = float(np.median(known))
            spreads = (middle - column.scale.center) / column.scale.scale
            if abs(spreads) > _SPREADS:
                name = quoted(column.name)
                factor = hint("xain-participant", f"data.factors.{name} = N")
                side = "above" if spreads > 0 else "below"
                yield (
                    f"column {column.name!r}: its median, {middle:.4g}, is {abs(spreads):.1f}"
                    f" spreads {side} the mean of the rows that the model was made from,"
                    f" {column.scale.center:.4g}. If it is another unit,"
                    f" {factor}"
                )
