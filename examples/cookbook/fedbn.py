"""FedBN: the batch normalisation stays at each site, whose scanner has a scale of its own.

python fedbn.py

Source: Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization".
"""

import threading

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import xain

SCALES = {"north": (1.0, 0.0), "east": (-3.0, 2.0), "south": (0.2, -5.0)}  # of a site's images
SITES = tuple(SCALES)

# --- data, model and training, as without federation ---


def load(name):
    """Images and labels of a site: to train on, and to test on."""
    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))[SITES.index(name) :: 3]
    scale, shift = SCALES[name]
    x = torch.tensor(scale * x[rows] / 16 + shift, dtype=torch.float32)
    y = torch.tensor(y[rows])
    return x[:200], y[:200], x[200:], y[200:]


def make_model():
    return nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model, x, y, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for _ in range(epochs):
        for rows in torch.arange(len(x)).split(25):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


# --- at a site ---


def site(name, coordinator):
    x, y, *test = load(name)
    model = make_model()
    for round in xain.rounds(model, id=name, coordinator=coordinator):
        model.load_state_dict(round.weights)  # of all, with this site's own normalisation
        before = accuracy(model, *test)
        train(model, x, y, round.config.epochs)
        round.submit(model, samples=len(x), metrics={"accuracy": before})


# --- at the server ---


def accuracy_of(personal, folder):
    """Accuracy of the last model at the sites. personal: patterns of tensors that stay at home."""
    torch.manual_seed(0)
    with xain.session(
        make_model(),
        rounds=10,
        epochs=3,
        min_participants=len(SITES),
        settings={"model.personal": personal},
        data_dir=folder,
        address="127.0.0.1:0",
    ) as session:
        for name in SITES:
            threading.Thread(target=site, args=(name, session.address), daemon=True).start()
        for round in session:
            record = round.run()
    return record.metrics["accuracy"]


def main():
    print(f"all tensors averaged: accuracy {accuracy_of([], 'averaged'):.3f}")
    print(f"FedBN: accuracy {accuracy_of(['0.*'], 'fedbn'):.3f}")


if __name__ == "__main__":
    main()
