"""Simulate many participants of one's PyTorch script on this machine: python simulate.py

100 participants have a hundredth of scikit-learn's digits each; 10 of them train each round, in two
processes with one model each.
"""

import sys
from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch_federated import make_model, train

import xain


@cache
def digits():
    """Images, labels, and those of the test set."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    parts = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    x_train, x_test, y_train, y_test = (torch.from_numpy(part) for part in parts)
    return x_train, y_train, x_test, y_test


def main(site):
    x, y, *_ = digits()
    x, y = x[site.index :: site.count], y[site.index :: site.count]
    model = make_model()
    for round in xain.rounds(model):
        model.load_state_dict(round.weights)
        torch.manual_seed(1000 * round.number + site.index)
        loss = train(model, x, y, epochs=round.config.epochs)
        round.submit(model.state_dict(), samples=len(x), metrics={"loss": loss})


def accuracy(weights):
    """Share of the test set that a model classifies correctly."""
    *_, x, y = digits()
    model = make_model()
    model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()}, strict=False)
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


if __name__ == "__main__":
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    done = xain.simulate(main, 100, workers=2, rounds=num_rounds, fraction=0.1, epochs=5)
    print(f"accuracy {accuracy(done.weights):.4f} after {done.seconds:.0f} s")
