"""The model: an ordinary one, with BatchNorm."""

import math

import torch
from torch import nn


class Net(nn.Module):
    """Two hidden layers, each linear, ReLU, BatchNorm; the same seed gives the same weights.

    NVFlare builds a new model on the server, from the arguments that it finds as attributes.
    """

    def __init__(self, inputs: int = 64, seed: int = 0):
        super().__init__()
        self.inputs, self.seed = inputs, seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(
                nn.Flatten(),
                nn.Linear(inputs, 128),
                nn.ReLU(),
                nn.BatchNorm1d(128),
                nn.Linear(128, 128),
                nn.ReLU(),
                nn.BatchNorm1d(128),
                nn.Linear(128, 10),
            )

    def forward(self, x):
        """Scores of the ten classes."""
        return self.layers(x)


def model_for(dataset, seed=0):
    """The model for the samples of this dataset."""
    return Net(math.prod({"digits": (1, 8, 8), "cifar10": (3, 32, 32)}[dataset]), seed)
