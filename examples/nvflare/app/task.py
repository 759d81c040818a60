"""The data of each client, and local training: ordinary PyTorch."""

import functools

import torch
import torch.nn.functional as F

from fedbatchnorm.data import datasets, partition
from fedbatchnorm.simulation.recipe import stream


@functools.cache
def load_data(dataset):
    """Loaded once for a process."""
    return datasets.load(dataset)


def batches_of(args, client, server_round, epochs):
    """A client's data, batch by batch, in another order in every epoch of every round."""
    data = load_data(args.dataset)
    labels, rng = data.train.y.numpy(), stream(args.seed, "partition")
    part = torch.from_numpy(partition.gamma_similarity(labels, args.clients, args.gamma, rng)[client])
    rng = stream(args.seed, "batches", server_round, client)
    for _ in range(epochs):
        for index in part[torch.from_numpy(rng.permutation(len(part)))].split(args.batch):
            yield data.inputs(data.train.x[index]), data.train.y[index]


def train_locally(model, batches, args):
    """SGD with momentum over the batches; returns the mean loss, the examples and the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model.train()
    total, examples, steps = 0.0, 0, 0
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total, examples, steps = total + loss.item() * len(y), examples + len(y), steps + 1
    return total / max(1, examples), examples, steps


@torch.no_grad()
def accuracy(model, dataset):
    """On the test set."""
    data = load_data(dataset)
    model.eval()
    batches = zip(data.test.x.split(500), data.test.y.split(500), strict=True)
    right = sum((model(data.inputs(x)).argmax(1) == y).sum().item() for x, y in batches)
    return right / len(data.test.y)
