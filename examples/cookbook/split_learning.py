"""Split learning over the messaging toolkit: sites that have different columns of the same rows
train one network together, with a third site that has the labels.

python split_learning.py

Each site of columns has the lower part of the network for them. Activations go to the site of the
labels and gradients of them come back; columns, labels and weights stay where they are.

Source: Vepakomma et al. 2018, "Split learning for health".
"""

import threading

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from xain_messaging import MembershipServer, Proxy, SessionType

SITES = {"lab": slice(0, 15), "imaging": slice(15, 30)}  # columns
TRAIN, TEST = torch.arange(400), torch.arange(400, 569)

# --- data and model ---


def columns(name):
    x, _ = load_breast_cancer(return_X_y=True)
    return torch.tensor((x - x.mean(axis=0)) / x.std(axis=0), dtype=torch.float32)[:, SITES[name]]


def labels():
    return torch.tensor(load_breast_cancer().target, dtype=torch.float32)


# --- at a site of columns ---


def site(name, discovery):
    x = columns(name)
    lower = nn.Sequential(nn.Linear(15, 4), nn.Tanh())
    optimizer = torch.optim.SGD(lower.parameters(), lr=0.5)
    with Proxy("split", "columns", {"labels": 1}, name=name, discovery=discovery) as proxy:
        for message in proxy.receive():
            if message.tag == "activations":
                out = lower(x[message.body])
                proxy.reply(message, body=out.detach().numpy())
            elif message.tag == "gradients":
                optimizer.zero_grad()
                out.backward(torch.from_numpy(message.body))
                optimizer.step()
                proxy.reply(message, body=None)
            else:
                proxy.stop()


# --- at the site of labels ---


def ask(proxy, tag, bodies):
    """Ask all sites of columns. Returns their answers in the order of the sites."""
    answers = proxy.scatter(tag, SessionType.TASK, zip(SITES, bodies, strict=True)).complete()
    by_site = {answer.source: answer.body for answer in answers}
    return [by_site[name] for name in SITES]


def main():
    torch.manual_seed(0)
    y = labels()
    upper = nn.Linear(4 * len(SITES), 1)
    optimizer = torch.optim.SGD(upper.parameters(), lr=0.5)
    with MembershipServer(settle_s=0) as server:
        for name in SITES:
            threading.Thread(target=site, args=(name, server.target), daemon=True).start()
        expected = {"columns": len(SITES)}
        with Proxy("split", "labels", expected, name="labels", discovery=server.target) as proxy:
            for _ in range(5):
                for rows in TRAIN.split(40):
                    parts = ask(proxy, "activations", [rows.numpy()] * len(SITES))
                    inputs = [torch.tensor(part, requires_grad=True) for part in parts]
                    scores = upper(torch.cat(inputs, 1)).squeeze(1)
                    optimizer.zero_grad()
                    nn.functional.binary_cross_entropy_with_logits(scores, y[rows]).backward()
                    optimizer.step()
                    ask(proxy, "gradients", [one.grad.numpy() for one in inputs])
            parts = ask(proxy, "activations", [TEST.numpy()] * len(SITES))
            right = (upper(torch.cat([torch.tensor(one) for one in parts], 1)).squeeze(1) > 0) == (
                y[TEST] > 0
            )
            proxy.broadcast("columns", "end", SessionType.NOTIFICATION, None)
    print(f"accuracy {right.float().mean():.3f} on {len(TEST)} rows")


if __name__ == "__main__":
    main()
