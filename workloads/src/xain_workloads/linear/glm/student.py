"""Student's t distribution.

Source: Abramowitz and Stegun 1964, sections 26.5 and 26.7; the continued fraction of the incomplete
beta function is evaluated as in Lentz 1976.
"""

from math import erfc, exp, isinf, lgamma, log, log1p, sqrt
from statistics import NormalDist

_TINY = 1e-300
_EPSILON = 1e-16
_MOST_TERMS = 10_000


def two_sided(statistic: float, df: float) -> float:
    """Two-sided p value of Student's t: the probability of a value at least as far from 0. df:
    degrees of freedom, above 0; infinite for the normal distribution."""
    if isinf(df):
        return erfc(abs(statistic) / sqrt(2))
    square = statistic * statistic
    return _incomplete_beta(df / (df + square), square / (df + square), df / 2, 0.5)


def quantile(share: float, df: float) -> float:
    """The value that Student's t does not exceed with this probability, above 0.5 and below 1."""
    normal = NormalDist().inv_cdf(share)
    if isinf(df):
        return normal
    low, high = 0.0, normal
    while two_sided(high, df) > 2 * (1 - share):
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if two_sided(middle, df) > 2 * (1 - share):
            low = middle
        else:
            high = middle
    return high


def _incomplete_beta(x: float, rest: float, a: float, b: float) -> float:
    """The regularised incomplete beta function at x; rest: 1 - x, with its digits."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(rest, x, b, a)
    logarithm = log(x) if x < 0.5 else log1p(-rest)
    logarithm_of_rest = log(rest) if rest < 0.5 else log1p(-x)
    front = lgamma(a + b) - lgamma(a) - lgamma(b) + a * logarithm + b * logarithm_of_rest
    return exp(front) * _continued_fraction(x, a, b) / a


def _continued_fraction(x: float, a: float, b: float) -> float:
    """Evaluate the continued fraction of the incomplete beta function (Lentz's method)."""
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, _MOST_TERMS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away(1 + term * d)
            c = _away(1 + term / c)
            fraction *= c * d
        if abs(c * d - 1) < _EPSILON:
            break
    return fraction


def _away(value: float) -> float:
    """The value, or the smallest number above 0 in the place of 0."""
    return value if abs(value) > _TINY else _TINY
