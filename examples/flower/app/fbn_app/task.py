"""The model, the data of each client, and one step of training: ordinary PyTorch."""

import functools

import torch
import torch.nn.functional as F

from fedbatchnorm.data import datasets, partition
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.recipe import stream
from fedbatchnorm.simulation.simulator import draw

MODEL = {"digits": "mlp", "cifar10": "cnn"}


@functools.cache
def load_data(name):
    """Loaded once for a process."""
    return datasets.load(name)


def new_model(config):
    """A fresh model with BatchNorm; the same seed gives the same weights."""
    data = load_data(config["dataset"])
    return models.build(
        MODEL[config["dataset"]], tuple(data.train.x.shape[1:]), len(data.classes), config["seed"]
    )


def batch_of(config, client, clients, step):
    """What a client trains on in a round: a batch from its own part of the data."""
    data = load_data(config["dataset"])
    rng = stream(config["seed"], "partition")
    parts = partition.gamma_similarity(data.train.y.numpy(), clients, config["gamma"], rng)
    index = draw(parts, config["batch"], stream(config["seed"], "batches", step))[client]
    return data.inputs(data.train.x[index]), data.train.y[index]


def train_step(model, x, y, velocity, config, step):
    """One step of SGD with dampened momentum; returns the loss."""
    model.train()
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    rate = config["lr"] / (1 + 3 * step // config["rounds"])
    with torch.no_grad():
        for name, p in model.named_parameters():
            velocity[name] = config["momentum"] * velocity.get(name, 0) + (1 - config["momentum"]) * p.grad
            p -= rate * velocity[name]
    return loss.item()


@torch.no_grad()
def accuracy(model, config):
    """On the test set."""
    data = load_data(config["dataset"])
    model.eval()
    batches = zip(data.test.x.split(500), data.test.y.split(500), strict=True)
    right = sum((model(data.inputs(x)).argmax(1) == y).sum().item() for x, y in batches)
    return right / len(data.test.y)
