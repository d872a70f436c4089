"""XGBoost by its own API: each site in its order adds trees to the booster of those before it.

python xgboost_trees.py

A booster is bytes, and a model is numbers: two bytes travel as one number, which float32 holds
exactly, in a vector that is as long as the largest booster may become.
"""

import threading

import numpy as np
import xgboost as xgb
from sklearn.datasets import load_breast_cancer

import xain

SITES = ("north", "east", "south")
ROOM = 100_000  # numbers: boosters of up to 200 kB
PARAMS = {"objective": "binary:logistic", "max_depth": 3, "eta": 0.3, "nthread": 1}

# --- data and model ---


def load(part):
    """Rows and outcomes of one part of four, of which the last one is the test set."""
    x, y = load_breast_cancer(return_X_y=True)
    return xgb.DMatrix(x[part::4], y[part::4])


def to_vector(booster):
    """(ROOM,) float32: the number of bytes, and the bytes."""
    data = bytes(booster.save_raw("ubj"))
    pairs = np.frombuffer(data + bytes(len(data) % 2), np.uint16)
    vector = np.zeros(ROOM, np.float32)
    vector[0], vector[1 : 1 + len(pairs)] = len(data), pairs
    return vector


def to_booster(vector):
    """None for a vector of zeros, with which a session begins."""
    size = int(vector[0])
    data = vector[1:].astype(np.uint16).tobytes()[:size]
    return xgb.Booster(PARAMS, model_file=bytearray(data)) if size else None


# --- at a site ---


def site(number, coordinator):
    rows = load(number)
    for round in xain.rounds(np.zeros(ROOM, np.float32), id=SITES[number], coordinator=coordinator):
        before = to_booster(round.weights)
        booster = xgb.train(PARAMS, rows, round.config.epochs, xgb_model=before)
        round.submit(to_vector(booster), samples=rows.num_row())


# --- at the server ---


def main():
    test = load(3)
    with xain.session(
        np.zeros(ROOM, np.float32),
        rounds=6,
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
            booster = to_booster(record.weights)
            right = (booster.predict(test) > 0.5) == test.get_label()
            record.evaluate(accuracy=right.mean(), samples=test.num_row())
    print(f"accuracy {record.metrics['accuracy']:.3f} of {booster.num_boosted_rounds()} trees")


if __name__ == "__main__":
    main()
