"""A model of Keras, on torch: its weights are a list of arrays, which travel by number.

python keras_model.py
"""

import os
import threading

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from sklearn.datasets import load_digits

import xain

SITES = ("north", "east")

# --- data, model and training, as without federation ---


def load(part):
    """Images and labels of one part of three, of which the last one is the test set."""
    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))[part::3]
    return x[rows].astype(np.float32) / 16, y[rows]


def make_model():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def accuracy(model, x, y):
    return model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"]


# --- at a site ---


def by_number(weights):
    """Weights of a model of Keras as arrays by name."""
    return {str(number): array for number, array in enumerate(weights)}


def site(number, coordinator, model):
    x, y = load(number)
    weights = by_number(model.get_weights())
    for round in xain.rounds(weights, id=SITES[number], coordinator=coordinator):
        model.set_weights(list(map(np.asarray, round.weights.values())))
        fitted = model.fit(x, y, epochs=round.config.epochs, verbose=0)
        weights = by_number(model.get_weights())
        round.submit(weights, samples=len(x), metrics={"loss": fitted.history["loss"][-1]})


# --- at the server ---


def main():
    keras.utils.set_random_seed(0)
    model, test = make_model(), load(len(SITES))
    with xain.session(
        by_number(model.get_weights()),
        rounds=5,
        epochs=2,
        min_participants=len(SITES),
        address="127.0.0.1:0",
    ) as session:
        for number in range(len(SITES)):
            args = (number, session.address, make_model())
            threading.Thread(target=site, args=args, daemon=True).start()
        for round in session:
            record = round.run()
            model.set_weights(list(map(np.asarray, record.weights.values())))
            record.evaluate(accuracy=accuracy(model, *test), samples=len(test[0]))
    print(f"accuracy {record.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
