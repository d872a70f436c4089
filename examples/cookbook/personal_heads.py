"""Personalised heads: the sites share a body, and each has a last layer for its own classes.

python personal_heads.py
"""

import threading

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import xain

SITES = ("north", "east", "south")

# --- data, model and training, as without federation ---


def load(name):
    """Images and labels of a site, which numbers the ten classes in an order of its own."""
    x, y = load_digits(return_X_y=True)
    number = SITES.index(name)
    rows = np.random.default_rng(0).permutation(len(x))[number::3]
    order = np.random.default_rng(number).permutation(10)
    x, y = torch.tensor(x[rows] / 16, dtype=torch.float32), torch.tensor(order[y[rows]])
    return x[:200], y[:200], x[200:], y[200:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x))


def train(model, x, y, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for rows in torch.arange(len(x)).split(25):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


# --- at a site ---


def site(name, coordinator):
    x, y, *test = load(name)
    model = Model()
    for round in xain.rounds(model, id=name, coordinator=coordinator):
        model.load_state_dict(round.weights)  # the body of all, and this site's own head
        before = accuracy(model, *test)
        train(model, x, y, round.config.epochs)
        round.submit(model, samples=len(x), metrics={"accuracy": before})


# --- at the server ---


def main():
    torch.manual_seed(0)
    with xain.session(
        Model(),
        rounds=10,
        epochs=3,
        min_participants=len(SITES),
        settings={"model.personal": ["head.*"]},
        address="127.0.0.1:0",
    ) as session:
        for name in SITES:
            threading.Thread(target=site, args=(name, session.address), daemon=True).start()
        for round in session:
            record = round.run()
    for name, one in record.sites.items():
        print(f"{name}: accuracy {one.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
