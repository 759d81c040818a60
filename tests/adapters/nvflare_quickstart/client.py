"""A client: receive, train, send."""

import nvflare.client as flare
import torch
import torch.nn.functional as F
from model import Net
from nvflare.app_common.abstract.fl_model import FLModel
from sklearn.datasets import load_digits


def batches_of(site):
    """The client's own digits: even ones at site-1, odd ones at site-2."""
    x, y = load_digits(return_X_y=True)
    mine = y % 2 == int(site[-1]) - 1
    x, y = torch.from_numpy(x[mine]).float() / 16, torch.from_numpy(y[mine])
    return list(zip(x.split(64), y.split(64), strict=True))


def train(model, batches):
    """One pass over the data; returns the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    model = Net()
    flare.init()
    batches = batches_of(flare.get_site_name())
    while flare.is_running():
        received = flare.receive()
        model.load_state_dict(received.params)
        loss = train(model, batches)
        meta = {"NUM_STEPS_CURRENT_ROUND": len(batches)}
        flare.send(FLModel(params=model.state_dict(), metrics={"loss": loss}, meta=meta))


if __name__ == "__main__":
    main()
