"""Train LoRA adapters of a large frozen model: only the adapters travel.

python lora.py DATA.npz, with the data of torch_federated.py. The "large" model is made here; one's
own comes from a file that every site has. A module's frozen parameters stay at home, so no line
differs from any other script.
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch_federated import load

import xain


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.second = nn.Linear(256, 256)
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        hidden = torch.relu(self.first(x.flatten(1)))
        return self.head(torch.relu(self.second(hidden)))


def make_model():
    torch.manual_seed(0)  # the frozen part must be the same at every site
    config = LoraConfig(r=4, target_modules=["first", "second"], modules_to_save=["head"])
    return get_peft_model(Classifier(), config)


def train(model, x, y, epochs):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def main():
    x, y = load(sys.argv[1])
    model = make_model()
    for round in xain.rounds(model):
        model.load_state_dict(round.weights)
        loss = train(model, x, y, epochs=round.config.epochs)
        round.submit(model, samples=len(x), metrics={"loss": loss})


if __name__ == "__main__":
    main()
