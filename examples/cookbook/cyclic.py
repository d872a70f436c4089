"""Cyclic weight transfer: one site trains a round, and the next site goes on with its model.

python cyclic.py

Source: Chang et al. 2018, "Distributed deep learning networks among institutions for medical
imaging".
"""

import threading

import numpy as np
from sklearn.datasets import load_breast_cancer

import xain

SITES = ("north", "east", "south")

# --- data, model and training, as without federation ---


def load(part):
    """Rows and outcomes of one part of four, of which the last one is the test set."""
    x, y = load_breast_cancer(return_X_y=True)
    x = np.hstack([(x - x.mean(axis=0)) / x.std(axis=0), np.ones((len(x), 1))])
    return x[part::4], y[part::4]


def train(w, x, y, epochs):
    for _ in range(epochs):
        w = w - 0.3 * x.T @ (1 / (1 + np.exp(-x @ w)) - y) / len(x)
    return w


def accuracy(w, x, y):
    return np.mean((x @ w > 0) == y)


# --- at a site ---


def site(number, coordinator):
    x, y = load(number)
    for round in xain.rounds({"w": np.zeros(31)}, id=SITES[number], coordinator=coordinator):
        w = train(round.weights["w"], x, y, round.config.epochs)
        round.submit({"w": w}, samples=len(x))


# --- at the server ---


def main():
    test = load(3)
    order = []
    with xain.session(
        {"w": np.zeros(31)},
        rounds=9,
        epochs=5,
        min_participants=1,
        settings={"rounds.start_participants": len(SITES)},
        address="127.0.0.1:0",
    ) as session:
        for number in range(len(SITES)):
            threading.Thread(target=site, args=(number, session.address), daemon=True).start()
        for round in session:
            round.select([SITES[round.number % len(SITES)]])
            record = round.run()
            record.evaluate(accuracy=accuracy(record.weights["w"], *test), samples=len(test[0]))
            order += record.sites
    print(f"accuracy {record.metrics['accuracy']:.3f} after {' '.join(order)}")


if __name__ == "__main__":
    main()
