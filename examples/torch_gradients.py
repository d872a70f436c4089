"""Distributed SGD of any PyTorch module: python torch_gradients.py DATA.npz

Each round is one step. A site sends the mean gradient over its rows, and the coordinator steps
against the mean over all sites, which is that over all rows. The coordinator has

    [aggregation]
    rule = "gradient"
    options = { eta0 = 0.5 }

Data and network are those of torch_federated.py, without its batch norm, whose statistics would be
those of each site.
"""

import sys

import torch
from torch import nn
from torch_federated import load

import xain


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def main():
    torch.manual_seed(0)
    x, y = load(sys.argv[1])
    model = make_model()
    for round in xain.rounds(model):
        model.load_state_dict(round.weights)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        round.submit(gradients, samples=len(x), metrics={"loss": loss.item()})


if __name__ == "__main__":
    main()
