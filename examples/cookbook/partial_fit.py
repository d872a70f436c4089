"""An estimator of scikit-learn that learns by partial_fit, over the rows of three sites.

python partial_fit.py
"""

import threading

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

import xain

SITES = ("ward-0", "ward-1", "ward-2")

# --- data, model and training, as without federation ---


def load(part):
    """Images and labels of one part of four, of which the last one is the test set."""
    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))[part::4]
    return x[rows] / 16, y[rows]


def make_model():
    model = SGDClassifier(loss="log_loss", alpha=1e-3, random_state=0)
    model.classes_, model.coef_, model.intercept_ = np.arange(10), np.zeros((10, 64)), np.zeros(10)
    return model


# --- at a site ---


def site(number, coordinator):
    x, y = load(number)
    model = make_model()
    weights = {"coef": model.coef_, "intercept": model.intercept_}
    for round in xain.rounds(weights, id=SITES[number], coordinator=coordinator):
        model.coef_, model.intercept_ = round.weights["coef"], round.weights["intercept"]
        for _ in range(round.config.epochs):
            model.partial_fit(x, y, classes=np.arange(10))
        weights = {"coef": model.coef_, "intercept": model.intercept_}
        round.submit(weights, samples=len(x), metrics={"accuracy": model.score(x, y)})


# --- at the server ---


def main():
    model, test = make_model(), load(3)
    with xain.session(
        {"coef": model.coef_, "intercept": model.intercept_},
        rounds=10,
        min_participants=len(SITES),
        address="127.0.0.1:0",
    ) as session:
        for number in range(len(SITES)):
            threading.Thread(target=site, args=(number, session.address), daemon=True).start()
        for round in session:
            record = round.run()
            model.coef_, model.intercept_ = record.weights["coef"], record.weights["intercept"]
            record.evaluate(test_accuracy=model.score(*test), samples=len(test[0]))
    print(f"accuracy {model.score(*test):.3f} on rows that no site has")


if __name__ == "__main__":
    main()
