"""A robust rule of one's own, in the script's own file, beside the average: one site of five lies.

python robust_rule.py
"""

import threading

import numpy as np

import xain

SITES = ("liar", "north", "east", "south", "west")
TRUTH = np.array([2.0, -1.0, 0.5])

# --- data, model and training, as without federation ---


def load(name):
    chance = np.random.default_rng(SITES.index(name))
    x = chance.normal(size=(100, 3))
    return x, x @ TRUTH + 0.1 * chance.normal(size=100)


def train(w, x, y, epochs):
    for _ in range(epochs):
        w = w - 0.2 * x.T @ (x @ w - y) / len(x)
    return w


# --- at a site ---


def site(name, coordinator):
    x, y = load(name)
    for round in xain.rounds({"w": np.zeros(3)}, id=name, coordinator=coordinator):
        w = train(round.weights["w"], x, y, round.config.epochs)
        if name == "liar":
            w = -10 * w
        round.submit({"w": w}, samples=len(x))


# --- at the server ---


class NearMedian(xain.Rule):
    """The average of the updates that are near to the median of each coordinate.

    factor: how many times the median distance an update may be away.
    """

    needs_base = False  # it moves no update towards the global model

    def __init__(self, factor):
        self.factor = factor

    def survey(self, differences):
        """Squared distances to the median in a block of columns, which are added up over blocks.
        differences: (k, b). Returns (k,)."""
        return np.square(differences - np.median(differences, axis=0)).sum(axis=1)

    def weigh(self, surveyed, num_samples):
        """Weights of the k updates, and behind them that of the global model."""
        distances = np.sqrt(surveyed)
        is_near = distances <= self.factor * np.median(distances)
        return np.append(np.where(is_near, num_samples, 0.0), 0.0)

    def combine(self, tile, weights):
        """The average of a slice, (k, t), row by row. Returns (t,)."""
        rows = zip(weights, tile.astype(np.float64), strict=True)
        return sum(weight * row for weight, row in rows) / weights.sum()


def distance_of(rule, folder):
    """Distance from the truth of the last model of a rule."""
    with xain.session(
        {"w": np.zeros(3)},
        rounds=6,
        epochs=5,
        min_participants=len(SITES),
        rule=rule,
        data_dir=folder,
        address="127.0.0.1:0",
    ) as session:
        for name in SITES:
            threading.Thread(target=site, args=(name, session.address), daemon=True).start()
        for round in session:
            round.run()
    return np.linalg.norm(session.result.weights["w"] - TRUTH)


def main():
    print(f"average: {distance_of('weighted_average', 'average'):.3f} from the truth")
    print(f"near the median: {distance_of(NearMedian(3.0), 'near-median'):.3f} from the truth")


if __name__ == "__main__":
    main()
