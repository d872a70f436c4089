"""FedAdam with a learning rate that falls from round to round, measured by the server's own code.

python fedadam.py

Source: Reddi et al. 2021, "Adaptive Federated Optimization".
"""

import threading

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import xain

SITES = ("ward-0", "ward-1", "ward-2")

# --- data, model and training, as without federation ---


def load(part):
    """Images and labels of one part of four, of which the last one is the test set."""
    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))[part::4]
    return torch.tensor(x[rows] / 16, dtype=torch.float32), torch.tensor(y[rows])


def make_model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model, x, y, epochs, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for rows in torch.arange(len(x)).split(32):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


# --- at a site ---


def site(number, coordinator):
    x, y = load(number)
    model = make_model()
    for round in xain.rounds(model, id=SITES[number], coordinator=coordinator):
        model.load_state_dict(round.weights)
        loss = train(model, x, y, round.config.epochs, round.config.lr)
        round.submit(model, samples=len(x), metrics={"loss": loss})


# --- at the server ---


def main():
    torch.manual_seed(0)
    model, test = make_model(), load(3)
    with xain.session(
        model,
        rounds=15,
        min_participants=len(SITES),
        metric="accuracy",
        settings={
            "aggregation.optimizer": "fedadam",
            "aggregation.optimizer_options": {"learning_rate": 0.03},
        },
        address="127.0.0.1:0",
    ) as session:
        for number in range(len(SITES)):
            threading.Thread(target=site, args=(number, session.address), daemon=True).start()
        for round in session:
            round.configure(lr=0.1 * 0.9**round.number)
            record = round.run()
            model.load_state_dict(record.weights)
            record.evaluate(accuracy=accuracy(model, *test), samples=len(test[0]))
    best = session.result.best
    print(f"accuracy {best.value:.3f} by model {best.model}")


if __name__ == "__main__":
    main()
