"""Weights of stale updates: smaller ones; the difference goes to the present global model.

An update's staleness τ is the number of models published since the one that it was trained from.
Its weight n_k becomes n_k · s(τ), with s(τ) = 1 / sqrt(1 + τ), and the global model weighs what the
updates have lost:

    new = Σ n_k s(τ_k) / N · w_k  +  (1 - Σ n_k s(τ_k) / N) · base,  N = Σ n_k

With one update this is FedAsync's mixing, with s(τ) as α; with several, the same over a buffer.
Dividing by the discounted weights instead would give a buffer of equally stale updates their full
weight back.

Sources: Xie et al. 2019, Asynchronous Federated Optimization, Algorithm 1, with the polynomial s
and a = 1/2; Nguyen et al. 2022, Federated Learning with Buffered Asynchronous Aggregation, which
has the same s.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def mixing_weights(num_samples: NDArray[np.int64], staleness: Sequence[int]) -> NDArray[np.float64]:
    """The weights of k updates, and behind them that of the global model: (k + 1,), of sum N.

    num_samples: (k,), n_k, non-negative; all zero means equal weights.
    staleness: τ_k, non-negative.
    """
    weights = num_samples.astype(np.float64)
    if not weights.any():
        weights[:] = 1
    # A root and a quotient are the same to the bit on every machine; a power need not be.
    discounts = 1 / np.sqrt(1 + np.array(staleness, np.float64))
    lost = weights * (1 - discounts)
    return np.append(weights * discounts, lost.sum())
