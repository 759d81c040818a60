"""Compiled rounds equal the loop over clients; what cannot be compiled says so, and nothing is lost."""

import copy
import sys
from pathlib import Path

import pytest
import torch

from fedbatchnorm.data import datasets, partition
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.recipe import Recipe, stream
from fedbatchnorm.simulation.schemes import SCHEMES
from fedbatchnorm.simulation.simulator import Simulation

sys.path.insert(0, str(Path(__file__).parent))
from twin import Twin

DSGD = [name for name, scheme in SCHEMES.items() if "dsgd" in scheme.algorithms]

RING = datasets.load("gaussian_ring")


def federation(engine="compiled", **settings):
    recipe = Recipe(**{"clients": 4, "batch": 8, "rounds": 100, "precision": "float64"} | settings)
    labels = RING.train.y.numpy()
    parts = partition.gamma_similarity(labels, recipe.honest(), 0.0, stream(0, "partition"))
    model = models.build("mlp", (2,), 10, seed=0)
    twin = Twin(copy.deepcopy(model), RING, parts, recipe)
    return Simulation(model, RING, parts, recipe, engine=engine), twin


@pytest.mark.slow
@pytest.mark.parametrize("scheme", DSGD)
def test_100_compiled_rounds_equal_the_loop_over_clients(scheme):
    simulation, twin = federation(scheme=scheme)
    for _ in range(100):
        simulation.round()
        twin.round()
    assert simulation.engine == "compiled"
    for name, value in simulation.model.state_dict().items():
        torch.testing.assert_close(value, twin.model.state_dict()[name], rtol=1e-9, atol=1e-10)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    again, _ = federation(scheme=scheme, seed=1)
    again.round()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # used again by the next run


@pytest.mark.slow
def test_compiled_gradients_of_each_client_equal_eager_ones():
    lies = {"byzantine": 1, "attack": "foe:10", "targets": "all", "defense": "nnm+median", "rounds": 10}
    fast, slow = (federation(engine, **lies)[0] for engine in ("compiled", "eager"))
    for _ in range(10):
        fast.round()
        slow.round()
    assert (fast.engine, slow.engine) == ("compiled", "eager")
    for name, value in fast.state().items():
        torch.testing.assert_close(value, slow.state()[name], rtol=1e-9, atol=1e-10)


def test_on_a_cpu_rounds_are_eager_unless_asked_for():
    assert federation("auto")[0].engine == "eager"
    with pytest.raises(ValueError, match="engine is 'warp'; it must be one of auto, eager, compiled"):
        federation("warp")
