"""Trackers: the figures of each round go to TensorBoard, and to a tracker of one's own.

python trackers.py, and then tensorboard --logdir runs
"""

import csv
import threading
from pathlib import Path

import numpy as np

import xain

SITES = ("north", "east")
TRUTH = np.array([2.0, -1.0, 0.5])

# --- data, model and training, as without federation ---


def load(name):
    chance = np.random.default_rng(SITES.index(name))
    x = chance.normal(size=(100, 3))
    return x, x @ TRUTH + 0.1 * chance.normal(size=100)


def train(w, x, y):
    return w - 0.2 * x.T @ (x @ w - y) / len(x)


def error(w, x, y):
    return np.mean((x @ w - y) ** 2)


# --- at a site ---


def site(name, coordinator):
    x, y = load(name)
    for round in xain.rounds({"w": np.zeros(3)}, id=name, coordinator=coordinator):
        w = train(round.weights["w"], x, y)
        round.submit({"w": w}, samples=len(x), metrics={"error": error(w, x, y)})


# --- at the server ---


class Table:
    """A line for each round in a CSV file."""

    def __init__(self, path):
        self.path = Path(path)

    def on_round(self, record):
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow([record.round, record.samples, record.metrics["error"]])

    def on_end(self, result):
        print(f"{self.path} has {len(self.path.read_text().splitlines())} lines")


def main():
    with xain.session(
        {"w": np.zeros(3)},
        rounds=5,
        min_participants=len(SITES),
        trackers=[Table("rounds.csv"), xain.TensorBoard("runs")],
        address="127.0.0.1:0",
    ) as session:
        for name in SITES:
            threading.Thread(target=site, args=(name, session.address), daemon=True).start()
        for round in session:
            round.run()


if __name__ == "__main__":
    main()
