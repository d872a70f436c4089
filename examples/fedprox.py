"""FedProx: the loss keeps each site near the global model, by [train] proximal_mu.

python fedprox.py DATA.npz, with the data and the network of torch_federated.py.

Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks".
"""

import sys

import torch
from torch import nn
from torch_federated import load, make_model

import xain


def train(model, x, y, epochs, proximal):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows]) + proximal()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def main():
    x, y = load(sys.argv[1])
    model = make_model()
    for round in xain.rounds(model):
        model.load_state_dict(round.weights)
        proximal = round.proximal_term(model)
        loss = train(model, x, y, epochs=round.config.epochs, proximal=proximal)
        # proximal() is now mu / 2 times the squared distance that the site has moved.
        metrics = {"loss": loss, "proximal": proximal()}
        round.submit(model.state_dict(), samples=len(x), metrics=metrics)


if __name__ == "__main__":
    main()
