"""JAX: a tree of parameters travels as one flat vector.

python jax_tree.py
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_digits

import xain

SITES = ("north", "east")

# --- data, model and training, as without federation ---


def load(part):
    """Images and labels of one part of three, of which the last one is the test set."""
    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))[part::3]
    return jnp.asarray(x[rows] / 16), jnp.asarray(y[rows])


def make_params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "hidden": (0.1 * jax.random.normal(keys[0], (64, 32)), jnp.zeros(32)),
        "out": (0.1 * jax.random.normal(keys[1], (32, 10)), jnp.zeros(10)),
    }


def scores(params, x):
    w, b = params["hidden"]
    v, c = params["out"]
    return jnp.tanh(x @ w + b) @ v + c


def loss(params, x, y):
    logs = jax.nn.log_softmax(scores(params, x))
    return -jnp.take_along_axis(logs, y[:, None], 1).mean()


@jax.jit
def step(params, x, y, lr):
    return jax.tree.map(lambda p, g: p - lr * g, params, jax.grad(loss)(params, x, y))


# --- at a site ---


def site(number, coordinator):
    x, y = load(number)
    vector, to_tree = ravel_pytree(make_params())
    rounds = xain.rounds(np.asarray(vector), id=SITES[number], coordinator=coordinator)
    for round in rounds:
        params = to_tree(jnp.asarray(np.asarray(round.weights)))
        for _ in range(round.config.epochs):
            params = step(params, x, y, round.config.lr)
        vector, _ = ravel_pytree(params)
        round.submit(
            np.asarray(vector), samples=len(x), metrics={"loss": float(loss(params, x, y))}
        )


# --- at the server ---


def main():
    vector, to_tree = ravel_pytree(make_params())
    x, y = load(len(SITES))
    with xain.session(
        np.asarray(vector),
        rounds=10,
        epochs=30,
        min_participants=len(SITES),
        train={"lr": 1.0},
        address="127.0.0.1:0",
    ) as session:
        for number in range(len(SITES)):
            threading.Thread(target=site, args=(number, session.address), daemon=True).start()
        for round in session:
            record = round.run()
            params = to_tree(jnp.asarray(np.asarray(record.weights)))
            right = scores(params, x).argmax(1) == y
            record.evaluate(accuracy=float(right.mean()), samples=len(x))
    print(f"accuracy {record.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
