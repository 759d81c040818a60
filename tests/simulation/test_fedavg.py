"""FedAvg equals a plain loop over clients, for every scheme, to the last few digits."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedbatchnorm.data import datasets, partition
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.recipe import Recipe, stream
from fedbatchnorm.simulation.schemes import SCHEMES
from fedbatchnorm.simulation.simulator import Simulation

sys.path.insert(0, str(Path(__file__).parent))
from fedavg_twin import FedAvgTwin

SCHEMES_HERE = [name for name, scheme in SCHEMES.items() if "fedavg" in scheme.algorithms]
SETTINGS = {
    "steps": {"local_steps": 3},
    "one epoch, unequal clients": {"local_epochs": 1, "batch": 14},
    "two epochs, a cohort": {"local_epochs": 2, "cohort": 3, "batch": 40},
    "kept momentum, a cohort": {"local_steps": 2, "cohort": 3, "local_state": "keep"},
    "clipping": {"local_steps": 3, "clip": 0.1},
    "everything": {
        "local_epochs": 2,
        "batch": 30,
        "cohort": 3,
        "local_state": "keep",
        "clip": 0.5,
        "prox": 0.1,
        "weight_decay": 0.01,
        "schedule": "cosine",
        "server": "momentum",
        "momentum_kind": "dampened",
        "weighting": "equal",
    },
    "adam": {"local_steps": 3, "optimizer": "adam", "lr": 1e-4, "server": "adam", "server_lr": 0.05},
    "kept adam": {"local_steps": 2, "optimizer": "adam", "lr": 1e-4, "local_state": "keep", "cohort": 3},
}


def federation(
    scheme="fbn", model="mlp", kind=("dirichlet", 0.5), clients=5, engine="auto", device="cpu", **recipe
):
    """One client after another; test_abreast.py has the other way."""
    data = datasets.load("digits")
    settings = {
        "algorithm": "fedavg",
        "batch": 8,
        "rounds": 4,
        "precision": "float64",
        "switch": 2,
        "lr": 0.003,
    }
    recipe = Recipe(scheme=scheme, clients=clients, **settings | recipe)
    labels = data.train.y.numpy()[:300]
    parts = partition.split(kind[0], labels, recipe.honest(), kind[1], stream(0, "partition"))
    net = models.build(model, (1, 8, 8), 10, seed=0)
    for module in net.modules():
        if isinstance(module, nn.Dropout) and recipe.precision == "float64":
            module.p = 0.0
    twin = FedAvgTwin(net, data, parts, recipe)
    how = {"engine": engine, "device": device, "abreast": False}
    return Simulation(copy.deepcopy(net), data, parts, recipe, **how), twin


def both(simulation, twin, rounds=4):
    for step in range(rounds):
        fed = simulation.federation
        survey = fed.scheme.before.survey
        twin.round(fed.work(step), survey and fed.survey_batches(step, survey.images))
        simulation.round()


def assert_same(simulation, twin, rtol=1e-9, atol=1e-9):
    """Weights are near 0.1; small batches and Adam blow rounding up, hence not less."""
    ours, theirs = simulation.model.state_dict(), twin.model.state_dict()
    assert {k for k in ours if "tracked" not in k} == {k for k in theirs if "tracked" not in k}
    for name, value in theirs.items():
        if "tracked" not in name:
            message = lambda m, name=name: f"{name}: {m}"  # noqa: E731
            torch.testing.assert_close(ours[name].cpu(), value, msg=message, rtol=rtol, atol=atol)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("scheme", SCHEMES_HERE)
def test_every_scheme_equals_the_loop_over_clients(scheme, setting):
    simulation, twin = federation(scheme, **SETTINGS[setting])
    both(simulation, twin)
    assert_same(simulation, twin)
    for client, own in twin.own.items():
        with simulation.algorithm.as_client(int(client)):
            state = simulation.model.state_dict()
            for name, value in own.items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fbn", "naive", "hbn"])
def test_compiled_steps_equal_the_loop_over_clients(scheme):
    simulation, twin = federation(scheme, engine="compiled", local_epochs=1, batch=14, clip=1.0, rounds=2)
    both(simulation, twin, 2)
    assert simulation.engine == "compiled"
    assert_same(simulation, twin)


def test_a_layer_that_takes_no_part_keeps_its_statistics():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)
            self.unused = nn.BatchNorm1d(5)

        def forward(self, x):
            return self.last(self.norm(self.first(x.flatten(1)).relu()))

    data = datasets.load("digits")
    parts = partition.iid(data.train.y.numpy(), 3, stream(0, "partition"))
    for scheme in ("fbn", "naive", "fedtan", "silobn"):
        recipe = Recipe(algorithm="fedavg", scheme=scheme, clients=3, local_steps=2, batch=8, rounds=2)
        simulation = Simulation(Unused(), data, parts, recipe)
        simulation.round()
        model = simulation.model
        assert torch.equal(model.unused.running_mean, torch.zeros(5))
        assert torch.equal(model.unused.running_var, torch.ones(5))
        assert model.norm.running_mean.abs().max() > 0
