"""Waits of any length.

What waits for us counts in small numbers, and refuses math.inf. So nobody waits for longer than
LONGEST_S at once: who is to wait on looks at the deadline, and waits again.
"""

import time
from typing import Final

LONGEST_S: Final = 3600.0


def left_s(deadline: float) -> float:
    """Return the seconds of one wait until a deadline on time.monotonic(), which may be
    math.inf."""
    return min(max(0.0, deadline - time.monotonic()), LONGEST_S)
