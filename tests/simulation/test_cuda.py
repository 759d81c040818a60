"""The simulator on a GPU: equal to the CPU's twin in float64, the same bits again, and its precisions."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbatchnorm.data.datasets import Dataset, Split
from fedbatchnorm.experiments.environment import choose_device, describe_device
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.recipe import Recipe
from fedbatchnorm.simulation.schemes import SCHEMES
from fedbatchnorm.simulation.simulator import Simulation

sys.path.insert(0, str(Path(__file__).parent))
from twin import Twin

pytestmark = pytest.mark.gpu


def images():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (200, 3, 8, 8), generator=generator, dtype=torch.uint8)
    y = torch.randint(10, (200,), generator=generator)
    mean, std = torch.full((3, 1, 1), 127.5), torch.full((3, 1, 1), 73.9)
    return Dataset(Split(x, y), Split(x[:50], y[:50]), mean, std, tuple("abcdefghij"))


def federation(scheme, device="cuda", model="cnn", dropout=True, **recipe):
    recipe = Recipe(**{"scheme": scheme, "clients": 4, "batch": 5, "rounds": 6} | recipe)
    net = models.build(model, (3, 8, 8), 10, seed=0)
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout) and not dropout:
            module.p = 0.0
    data, parts = images(), np.array_split(np.arange(200), 4)
    twin = Twin(copy.deepcopy(net), data, parts, recipe)
    return Simulation(net, data, parts, recipe, device=device), twin


@pytest.mark.parametrize("model", ["cnn", "mlp", "resnet20"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_folded_round_equals_the_loop_over_clients(scheme, model):
    simulation, twin = federation(scheme, model=model, dropout=False, precision="float64")
    for _ in range(6):
        simulation.round()
        twin.round()
    for name, value in simulation.model.state_dict().items():
        torch.testing.assert_close(value.cpu(), twin.model.state_dict()[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dropout_follows_the_seed_and_nobody_s_random_state_is_touched(scheme):
    losses = []
    for i in range(2):
        torch.cuda.manual_seed(i)
        before = torch.cuda.get_rng_state()
        simulation, _ = federation(scheme, precision="float64")
        losses.append([simulation.round().item() for _ in range(3)])
        assert torch.equal(before, torch.cuda.get_rng_state())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_lower_precisions_stay_near(scheme, precision):
    found = {}
    for kind in ("float64", precision):
        simulation, _ = federation(scheme, dropout=False, precision=kind, rounds=4)
        found[kind] = [simulation.round().item() for _ in range(4)]
        assert 0 <= simulation.evaluate().accuracy <= 1
    tolerance = {"float32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}[precision]
    assert found[precision] == pytest.approx(found["float64"], rel=tolerance)


def test_switches_are_given_back():
    before = (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    simulation, _ = federation("fbn", precision="float32")
    simulation.round()
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision) == before


def test_auto_takes_the_gpu():
    assert choose_device("auto").type == "cuda"
    assert describe_device(choose_device("auto")) == torch.cuda.get_device_name()
