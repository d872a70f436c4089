"""Ditto: beside the model of all, each site trains one of its own, which is held near to it.

python ditto.py

Source: Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization".
"""

import threading

import numpy as np

import xain

SITES = ("north", "east", "south", "west")
SIZE, STEPS, LR = 10, 10, 0.05

# --- data, model and training, as without federation ---


def load(name):
    """Rows to train and to test on. The truth of each site differs a little from the others'."""
    chance = np.random.default_rng(SITES.index(name))
    truth = np.linspace(-1, 1, SIZE) + 0.4 * chance.normal(size=SIZE)
    x = chance.normal(size=(220, SIZE))
    y = x @ truth + 0.5 * chance.normal(size=220)
    return x[:20], y[:20], x[20:], y[20:]


def train(w, x, y, pulled_to=None, strength=0.0):
    for _ in range(STEPS):
        pull = 0.0 if pulled_to is None else strength * (w - pulled_to)
        w = w - LR * (x.T @ (x @ w - y) / len(x) + pull)
    return w


def error(w, x, y):
    return np.mean((x @ w - y) ** 2)


# --- at a site ---


def site(name, coordinator):
    x, y, x_test, y_test = load(name)
    for round in xain.rounds({"w": np.zeros(SIZE)}, id=name, coordinator=coordinator):
        w = round.weights["w"]
        own = round.state.get("own", w)  # it never leaves the site, and lasts from round to round
        own = train(own, x, y, pulled_to=w, strength=round.config.strength)
        round.state["own"] = own
        errors = {"of_all": error(w, x_test, y_test), "of_its_own": error(own, x_test, y_test)}
        round.submit({"w": train(w, x, y)}, samples=len(x), metrics=errors)


# --- at the server ---


def main():
    with xain.session(
        {"w": np.zeros(SIZE)},
        rounds=20,
        min_participants=len(SITES),
        train={"strength": 0.1},
        address="127.0.0.1:0",
    ) as session:
        for name in SITES:
            threading.Thread(target=site, args=(name, session.address), daemon=True).start()
        for round in session:
            record = round.run()
    of_all, own = (record.metrics[name] for name in ("of_all", "of_its_own"))
    print(f"error of the model of all {of_all:.3f}, of the sites' own models {own:.3f}")


if __name__ == "__main__":
    main()
