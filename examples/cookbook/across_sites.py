"""Evaluation across sites: the model of all on the held-out rows of each site, and of all sites.

python across_sites.py
"""

import threading

import numpy as np
from sklearn.datasets import load_breast_cancer

import xain

SITES = ("north", "east", "south")

# --- data, model and training, as without federation ---


def load(name):
    """Rows and outcomes of a site: to train on, and held out."""
    x, y = load_breast_cancer(return_X_y=True)
    x = np.hstack([(x - x.mean(axis=0)) / x.std(axis=0), np.ones((len(x), 1))])
    x, y = x[SITES.index(name) :: 3], y[SITES.index(name) :: 3]
    return x[:140], y[:140], x[140:], y[140:]


def probability(w, x):
    return 1 / (1 + np.exp(-x @ w))


def train(w, x, y, epochs):
    for _ in range(epochs):
        w = w - 0.3 * x.T @ (probability(w, x) - y) / len(x)
    return w


# --- at a site ---


def site(name, coordinator):
    x, y, x_test, y_test = load(name)
    rounds = xain.rounds({"w": np.zeros(31)}, id=name, coordinator=coordinator, evaluates=True)
    for round in rounds:
        w = round.weights["w"]
        if round.wants_evaluation:
            round.evaluate(y_test, probability(w, x_test))  # sums of them travel, no rows
        if round.task == "train":
            round.submit({"w": train(w, x, y, round.config.epochs)}, samples=len(x))


# --- at the server ---


def main():
    with xain.session(
        {"w": np.zeros(31)},
        rounds=6,
        epochs=5,
        min_participants=len(SITES),
        metric="auc",
        address="127.0.0.1:0",
    ) as session:
        for name in SITES:
            threading.Thread(target=site, args=(name, session.address), daemon=True).start()
        for round in session:
            record = round.run()
    for name, one in record.sites.items():
        print(f"{name}: AUC {one.evaluation['auc']:.3f}, accuracy {one.evaluation['accuracy']:.3f}")
    pooled = record.evaluation
    print(f"all rows: AUC {pooled['auc']:.3f}, accuracy {pooled['accuracy']:.3f}")


if __name__ == "__main__":
    main()
