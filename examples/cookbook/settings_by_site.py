"""Settings by round and by site: FedProx for all, and one epoch less at a slow site.

python settings_by_site.py

Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks".
"""

import threading

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import xain

SITES = ("fast", "slow", "other")

# --- data, model and training, as without federation ---


def load(part):
    """A part of the digits; the sites have different digits, and the fourth part has all."""
    x, y = load_digits(return_X_y=True)
    is_test = np.random.default_rng(0).random(len(x)) < 0.25
    rows = is_test if part == 3 else ~is_test & (y % 3 == part)
    return torch.tensor(x[rows] / 16, dtype=torch.float32), torch.tensor(y[rows])


def make_model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model, x, y, epochs, lr, penalty):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for rows in torch.arange(len(x)).split(32):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows]) + penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


# --- at a site ---


def site(number, coordinator):
    x, y = load(number)
    model = make_model()
    for round in xain.rounds(model, id=SITES[number], coordinator=coordinator):
        model.load_state_dict(round.weights)
        penalty = round.proximal_term(model)  # mu / 2 * ||w - w_global||^2, mu is proximal_mu
        train(model, x, y, round.config.epochs, round.config.lr, penalty)
        round.submit(model, samples=len(x), metrics={"epochs": round.config.epochs})


# --- at the server ---


def main():
    torch.manual_seed(0)
    model, test = make_model(), load(3)
    with xain.session(
        model,
        rounds=12,
        epochs=3,
        min_participants=len(SITES),
        train={"proximal_mu": 0.01},
        address="127.0.0.1:0",
    ) as session:
        for number in range(len(SITES)):
            threading.Thread(target=site, args=(number, session.address), daemon=True).start()
        for round in session:
            round.configure(lr=0.1 if round.number < 8 else 0.03, by_site={"slow": {"epochs": 1}})
            record = round.run()
            model.load_state_dict(record.weights)
            record.evaluate(accuracy=accuracy(model, *test))
    epochs = {name: int(one.metrics["epochs"]) for name, one in record.sites.items()}
    print(f"accuracy {record.metrics['accuracy']:.3f}, epochs {epochs}")


if __name__ == "__main__":
    main()
