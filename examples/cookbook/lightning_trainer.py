"""Lightning's Trainer at each site, with a LightningModule as it is.

python lightning_trainer.py
"""

import logging
import threading
import warnings

import lightning
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import xain

SITES = ("north", "east")

# --- data, model and training, as without federation ---


def load(part):
    """Images and labels of one part of three, of which the last one is the test set."""
    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))[part::3]
    return torch.tensor(x[rows] / 16, dtype=torch.float32), torch.tensor(y[rows])


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def make_trainer(epochs):
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


# --- at a site ---


def site(number, coordinator):
    rows = TensorDataset(*load(number))
    model = Model()
    for round in xain.rounds(model, id=SITES[number], coordinator=coordinator):
        model.load_state_dict(round.weights)
        trainer = make_trainer(round.config.epochs)
        trainer.fit(model, DataLoader(rows, batch_size=32))
        round.submit(model, samples=len(rows))


# --- at the server ---


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    torch.manual_seed(0)
    model, test = Model(), load(len(SITES))
    with xain.session(
        model,
        rounds=5,
        epochs=2,
        min_participants=len(SITES),
        address="127.0.0.1:0",
    ) as session:
        for number in range(len(SITES)):
            threading.Thread(target=site, args=(number, session.address), daemon=True).start()
        for round in session:
            record = round.run()
            model.load_state_dict(record.weights)
            record.evaluate(accuracy=accuracy(model, *test), samples=len(test[0]))
    print(f"accuracy {record.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
