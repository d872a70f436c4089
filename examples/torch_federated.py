"""Train a small network with other sites: python torch_federated.py DATA.npz

The file has images x, (n, 64), and labels y, (n,). torch_local.py beside it is the same script
without a federation.
"""

import sys

import numpy as np
import torch
from torch import nn

import xain


def load(path):
    data = np.load(path)
    x, y = torch.tensor(data["x"], dtype=torch.float32), torch.tensor(data["y"])
    return x.reshape(-1, 1, 8, 8) / 16, y


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def train(model, x, y, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(8):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    x, y = load(sys.argv[1])
    model = make_model()
    for round in xain.rounds(model):
        model.load_state_dict(round.weights)
        loss = train(model, x, y, epochs=round.config.epochs)
        round.submit(model.state_dict(), samples=len(x), metrics={"loss": loss})
    print(f"loss {loss:.3f}")


if __name__ == "__main__":
    main()
