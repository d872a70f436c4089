"""Random numbers that are the same with every version of NumPy."""

import numpy as np


def random_state(seed: int) -> np.random.RandomState:
    """Random numbers of a seed of any size. Their streams never change, so that a model which is
    made again has the same bytes. SeedSequence spreads seeds that are close."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
