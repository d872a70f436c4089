"""Scales of columns of numbers, which neither one wrong cell nor one site of three sets for all."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from math import hypot, sqrt

import numpy as np

from xain_workloads.tables.reading.json_forms import Number, Positive
from xain_workloads.tables.statistics import Moments, NumberStatistics


@dataclass(frozen=True, slots=True)
class Scale:
    """Standardisation of numbers: (value - center) / scale. scale: above 0."""

    center: Number = 0.0
    scale: Positive = 1.0


# Figures of a normal distribution, in standard deviations: distances of the quantiles 0.05 and 0.95
# and of the quartiles, and the inverse of the median distance from the median.
_WIDTH, _QUARTILES, _BY_MEDIAN = 3.29, 1.35, 1.48
_FEW_BUCKETS = 4  # whose quantiles say less of the spread than the moments


class SiteScales:
    """Median and width of a column at each site: the distance of its quantiles 0.05 and 0.95.

    The typical one is the median over the sites of either. Neither one cell nor one of three sites
    moves it, as both move the mean and the standard deviation of all rows.
    """

    def __init__(self, parts: Iterable[NumberStatistics] = ()) -> None:
        self._medians = array("d")
        self._widths = array("d")
        self._ranges = array("d")
        for part in parts:
            self.note(part)

    def note(self, column: NumberStatistics) -> None:
        """Add the column of one site, unless the site tells nothing of it."""
        if not column.moments.count:
            return
        low, median, high = column.quantiles(np.array([0.05, 0.5, 0.95])).tolist()
        is_few = len(column.buckets) < _FEW_BUCKETS
        self._medians.append(median)
        self._widths.append(_WIDTH * sqrt(column.moments.variance) if is_few else high - low)
        self._ranges.append(column.buckets[-1][0] - column.buckets[0][0] if column.buckets else 0.0)

    def typical(self) -> Scale | None:
        """Typical centre and standard deviation of a site; None if most have one constant.

        The centre is the median of the sites' medians; the deviation joins that within the sites
        and that between their medians. Mostly one value: the width of the outermost buckets.
        """
        if not self._medians:
            return None
        center = float(np.median(self._medians))
        between = _BY_MEDIAN * float(np.median(np.abs(np.array(self._medians) - center)))
        within = float(np.median(self._widths)) / _WIDTH
        spread = hypot(within, between) or float(np.median(self._ranges)) / _WIDTH
        return Scale(center, spread) if spread > 0 else None


def scale_of(column: NumberStatistics, sites: SiteScales, scaling: str) -> Scale:
    """Scale of a column over all sites: by moments of all rows, or by quartiles if "robust"; by the
    typical scale of a site where these are far from it; Scale(), no scaling, for "none"."""
    if scaling == "none":
        return Scale()
    exact, typical = standard_scale(column.moments), sites.typical()
    if is_constant(column.moments) or typical is None:
        return exact
    if scaling == "robust":
        width = column.quantile(0.75) - column.quantile(0.25)
        if typical.scale / 4 <= width / _QUARTILES <= 4 * typical.scale:
            return Scale(column.quantile(0.5), width)
        return Scale(typical.center, _QUARTILES * typical.scale)
    return exact if exact.scale <= 2 * typical.scale else typical


def standard_scale(moments: Moments) -> Scale:
    """Mean and standard deviation; 1 for that of a constant."""
    return Scale(moments.mean, 1.0 if is_constant(moments) else sqrt(moments.variance))


def is_constant(moments: Moments) -> bool:
    """Whether the standard deviation is 0 but for rounding, as scikit-learn decides it."""
    epsilon = float(np.finfo(np.float64).eps)
    bound = moments.count * epsilon * moments.variance
    bound += (moments.count * moments.mean * epsilon) ** 2
    return moments.variance <= bound
