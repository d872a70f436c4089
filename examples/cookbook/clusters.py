"""Clustered federated learning: each site trains the one of two models that fits its rows best.

python clusters.py

Both models travel as one. A site multiplies its trained model by its number of rows and writes the
number beside it; rule `sum` adds both up, and the quotient is the average over the sites that have
chosen the model.

Source: Ghosh et al. 2020, "An Efficient Framework for Clustered Federated Learning".
"""

import threading

import numpy as np

import xain

SITES = ("north-0", "north-1", "north-2", "south-0", "south-1")
TRUTHS = {"north": np.array([2.0, -1.0, 0.5]), "south": np.array([-1.0, 2.0, 1.0])}
UNCHOSEN = 1e-6  # rows by which a site votes for the model that it leaves as it is

# --- data, model and training, as without federation ---


def load(name):
    chance = np.random.default_rng(SITES.index(name))
    x = chance.normal(size=(60, 3))
    return x, x @ TRUTHS[name.partition("-")[0]] + 0.1 * chance.normal(size=60)


def train(w, x, y, epochs):
    for _ in range(epochs):
        w = w - 0.2 * x.T @ (x @ w - y) / len(x)
    return w


def error(w, x, y):
    return np.mean((x @ w - y) ** 2)


# --- at a site ---


def site(name, coordinator):
    x, y = load(name)
    model = {"sums": np.zeros((2, 3)), "rows": np.ones(2)}
    for round in xain.rounds(model, id=name, coordinator=coordinator):
        models = round.weights["sums"] / round.weights["rows"][:, None]
        chosen = int(np.argmin([error(w, x, y) for w in models]))
        models[chosen] = train(models[chosen], x, y, round.config.epochs)
        rows = np.full(2, UNCHOSEN)
        rows[chosen] = len(x)
        sums = {"sums": models * rows[:, None], "rows": rows}
        round.submit(sums, samples=len(x), metrics={"chosen": chosen})


# --- at the server ---


def main():
    first = {"sums": np.random.default_rng(0).normal(size=(2, 3)), "rows": np.ones(2)}
    with xain.session(
        first,
        rounds=8,
        epochs=5,
        min_participants=len(SITES),
        rule="sum",
        address="127.0.0.1:0",
    ) as session:
        for name in SITES:
            threading.Thread(target=site, args=(name, session.address), daemon=True).start()
        for round in session:
            record = round.run()
    last = session.result.weights
    models = last["sums"] / last["rows"][:, None]
    for name, one in record.sites.items():
        chosen = int(one.metrics["chosen"])
        print(f"{name}: model {chosen}, error {error(models[chosen], *load(name)):.3f}")


if __name__ == "__main__":
    main()
