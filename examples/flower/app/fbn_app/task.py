"""The model, the data of each client, and local training: ordinary PyTorch."""

import functools

import torch
import torch.nn.functional as F

from fedbatchnorm.data import datasets, partition
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.recipe import stream


@functools.cache
def load_data(name):
    """Loaded once for a process."""
    return datasets.load(name)


def new_model(config):
    """A fresh model with BatchNorm; the same seed gives the same weights."""
    data = load_data(config["dataset"])
    return models.build(config["model"], tuple(data.train.x.shape[1:]), len(data.classes), config["seed"])


def part_of(config, client, clients):
    """Which samples a client holds."""
    labels, rng = load_data(config["dataset"]).train.y.numpy(), stream(config["seed"], "partition")
    if config["alpha"] > 0:
        return partition.dirichlet(labels, clients, config["alpha"], rng)[client]
    return partition.gamma_similarity(labels, clients, config["gamma"], rng)[client]


def batches_of(config, client, clients, server_round, epochs):
    """A client's data, batch by batch, in another order in every epoch of every round."""
    data, part = load_data(config["dataset"]), torch.from_numpy(part_of(config, client, clients))
    rng = stream(config["seed"], "batches", server_round, client)
    for _ in range(epochs):
        for index in part[torch.from_numpy(rng.permutation(len(part)))].split(config["batch"]):
            if len(index):  # without data there is one empty piece
                yield data.inputs(data.train.x[index]), data.train.y[index]


def train_locally(model, batches, config):
    """SGD with momentum over the batches; returns the mean loss, the examples and the optimizer's steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    model.train()
    total, examples, steps = 0.0, 0, 0
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total, examples, steps = total + loss.item() * len(y), examples + len(y), steps + 1
    return total / max(1, examples), examples, steps  # a client may have no data


@torch.no_grad()
def accuracy(model, config):
    """On the test set."""
    data = load_data(config["dataset"])
    model.eval()
    batches = zip(data.test.x.split(500), data.test.y.split(500), strict=True)
    right = sum((model(data.inputs(x)).argmax(1) == y).sum().item() for x, y in batches)
    return right / len(data.test.y)
