"""Model, data and local training of a plain Flower app: scikit-learn's digits, one class at each client."""

import functools

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small network with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


digits = functools.cache(lambda: load_digits(return_X_y=True))


def load_data(partition, partitions):
    """A client's training data, with some classes alone, and the test data of all classes."""
    images, labels = digits()
    x = torch.from_numpy(images.astype(np.float32)).view(-1, 1, 8, 8) / 16
    y = torch.from_numpy(labels.astype(np.int64))
    own = y[:1200] % partitions == partition
    train = TensorDataset(x[:1200][own], y[:1200][own])
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(TensorDataset(x[1200:], y[1200:]), 200)


def train_locally(net, loader, lr):
    """One epoch of SGD; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def accuracy(net, loader):
    """The share of test images that are classified correctly."""
    net.eval()
    right = sum((net(x).argmax(1) == y).sum().item() for x, y in loader)
    return right / len(loader.dataset)
