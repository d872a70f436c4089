"""Weights of updates in asynchronous modes: by the samples of their sites, not by arrivals.

A model is made of the few updates that have come since the last one, and a fast site brings several
before a slow one brings its first. So an update weighs its site's share of the samples of all sites
that train, once for each model that was made since the site began: n_k (1 + τ_k), with τ_k the
update's staleness. What the updates do not weigh of those samples stays with the global model:

    new = Σ a_k · w_k  +  (1 - Σ a_k) · base,  a_k = n_k (1 + τ_k) / N

N is the number of samples of the sites that train, those of the updates among them. If the updates
weigh more than that, as a very late one does, they make the model alone, in these proportions. In
the long run each site has its share of the models, however often it brings an update; with weights
that fall with τ, as in FedAsync and FedBuff, the classes that a slow site alone has are forgotten.

Sources: Nguyen et al. 2022, Federated Learning with Buffered Asynchronous Aggregation, for the
buffer; Wang et al. 2020, Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, for weights that make up for the number of local contributions.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def mixing_weights(
    num_samples: NDArray[np.int64], staleness: Sequence[int], total_samples: int
) -> NDArray[np.float64]:
    """The weights of k updates, n_k (1 + τ_k), and behind them what they leave of N for the global
    model: (k + 1,). num_samples:
    (k,), n_k, non-negative. staleness: τ_k, non-negative. total_samples: N, positive."""
    weights = num_samples.astype(np.float64)
    whole = max(float(total_samples), float(weights.sum()))
    weights *= 1 + np.array(staleness, np.float64)
    return np.append(weights, max(0.0, whole - float(weights.sum())))
