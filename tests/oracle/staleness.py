"""The weights of updates in asynchronous modes once more, for tests that follow them."""

from collections.abc import Sequence
from fractions import Fraction


def shares(
    num_samples: Sequence[int], staleness: Sequence[int], total: int
) -> tuple[list[Fraction], Fraction]:
    """Shares of the updates in the next model, and that of the present one: an update has the share
    of its site, n / total, once for each model since the site began."""
    weights = [n * (1 + tau) for n, tau in zip(num_samples, staleness, strict=True)]
    whole = max(total, sum(num_samples), sum(weights))
    return [Fraction(w, whole) for w in weights], 1 - Fraction(sum(weights), whole)
