"""How many: who must be connected, who is selected, when a round is complete.

Exact rational arithmetic. XAIN computed these in floats and waited for 99 participants where 100
were meant, or selected 8 of 25 where 7 were asked for.
"""

from fractions import Fraction
from math import ceil, floor

from xain_coordinator.core.values import Round


def exact_fraction(value: float | str | Fraction) -> Fraction:
    """The decimal that was written, not the binary float nearest to it: 0.1 is 1/10.

    Raises ValueError outside (0, 1].
    """
    fraction = Fraction(str(value))
    if not 0 < fraction <= 1:
        raise ValueError(f"must be greater than 0 and at most 1, got {value}")
    return fraction


def num_selected(num_connected: int, fraction: Fraction) -> int:
    """k = ceil(fraction · connected)."""
    return ceil(num_connected * fraction)


def num_required(min_participants: int, fraction: Fraction) -> int:
    """N, the smallest n with ceil(n · fraction) ≥ min_participants.

    ceil(x) ≥ m exactly when x > m - 1, so n is the first integer above (m - 1) / fraction.
    """
    return floor((min_participants - 1) / fraction) + 1


def is_complete(round_: Round, min_participants: int) -> bool:
    """Every selected participant has handed in, and they are enough."""
    return len(round_.updates) >= min_participants and not round_.outstanding
