"""FedAvg on a GPU: clients side by side as graphs equal the loop over clients on the CPU, in float64."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedbatchnorm.data.datasets import Dataset, Split
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.recipe import Recipe
from fedbatchnorm.simulation.simulator import Simulation

sys.path.insert(0, str(Path(__file__).parent))
from fedavg_twin import FedAvgTwin
from test_fedavg import SCHEMES_HERE, assert_same, both

pytestmark = pytest.mark.gpu
SETTINGS = {
    "steps": {"local_steps": 3, "clip": 1.0},
    "unequal epochs, a cohort, kept momentum": {
        "local_epochs": 1,
        "batch": 16,
        "cohort": 4,
        "local_state": "keep",
        "prox": 0.1,
        "schedule": "cosine",
        "server": "momentum",
    },
}


def federation(
    scheme,
    model="cnn",
    device="cuda",
    engine="auto",
    chunk=None,
    dropout=False,
    abreast=None,
    **recipe,
):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (240, 3, 8, 8), generator=generator, dtype=torch.uint8)
    y = torch.randint(10, (240,), generator=generator)
    mean, std = torch.full((3, 1, 1), 127.5), torch.full((3, 1, 1), 73.9)
    data = Dataset(Split(x, y), Split(x[:50], y[:50]), mean, std, tuple("abcdefghij"))
    settings = {
        "algorithm": "fedavg",
        "clients": 6,
        "batch": 10,
        "rounds": 4,
        "precision": "float64",
        "lr": 0.003,
    }
    recipe = Recipe(scheme=scheme, **settings | {"switch": 2} | recipe)
    parts = np.split(np.arange(240), [20, 55, 90, 130, 190])[: recipe.honest()]
    net = models.build(model, (3, 8, 8), 10, seed=0)
    for module in net.modules():
        if isinstance(module, nn.Dropout) and not dropout:
            module.p = 0.0
    twin = FedAvgTwin(net, data, parts, recipe)
    how = {"device": device, "engine": engine, "chunk": chunk, "abreast": abreast}
    return Simulation(copy.deepcopy(net), data, parts, recipe, **how), twin


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("scheme", SCHEMES_HERE)
def test_lanes_equal_the_loop_over_clients(scheme, setting):
    model = "cnn" if scheme in ("fbn", "naive") else "mlp"  # compiling takes most of the time
    simulation, twin = federation(scheme, model, chunk=3, **SETTINGS[setting])
    both(simulation, twin)
    assert simulation.engine == "CUDA graphs"
    assert_same(simulation, twin, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("model", ["mlp", "resnet20"])
def test_other_networks_too(model):
    simulation, twin = federation("fbn", model=model, local_steps=2)
    both(simulation, twin, 2)
    assert simulation.engine == "CUDA graphs"
    assert_same(simulation, twin, rtol=1e-8, atol=1e-8)


def test_eager_equals_the_loop_over_clients():
    simulation, twin = federation("naive", engine="eager", local_epochs=1)
    both(simulation, twin)
    assert simulation.engine == "eager"
    assert_same(simulation, twin, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("scheme", ["fbn", "groupnorm"])
def test_dropout_follows_the_seed_whatever_runs_beside_it(scheme):
    losses = []
    for lanes in (1, 3, 6, 6):
        simulation, _ = federation(scheme, chunk=lanes, dropout=True, local_steps=4, augment=True)
        losses.append([simulation.round().item() for _ in range(3)])
    for other in losses[1:]:
        assert losses[0] == pytest.approx(other, rel=1e-9)
    still, _ = federation(scheme, dropout=False, local_steps=4)
    assert still.round().item() != pytest.approx(losses[0][0], rel=1e-4)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precisions_stay_near(precision):
    found = {}
    for kind in ("float64", precision):
        simulation, _ = federation("fbn", precision=kind, local_steps=3)
        found[kind] = [simulation.round().item() for _ in range(3)]
        assert 0 <= simulation.evaluate().accuracy <= 1
    tolerance = {"tf32": 1e-2, "bf16": 5e-2}[precision]
    assert found[precision] == pytest.approx(found["float64"], rel=tolerance)


def test_a_failed_capture_falls_back_and_loses_nothing(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no graphs today")

    want, _ = federation("fbn", engine="eager", local_steps=2, local_state="keep")
    simulation, _ = federation("fbn", local_steps=2, local_state="keep")
    simulation.round()
    simulation.algorithm._lanes = []
    monkeypatch.setattr(torch.cuda, "graph", broken)
    with pytest.warns(RuntimeWarning, match="RuntimeError: no graphs today"):
        simulation.round()
    monkeypatch.undo()
    simulation.round()
    for _ in range(3):
        want.round()
    assert simulation.engine == "eager"
    for name, value in simulation.state().items():
        torch.testing.assert_close(value, want.state()[name], rtol=1e-9, atol=1e-10)


def test_a_checkpoint_from_a_gpu_continues_on_a_cpu():
    settings = {"local_steps": 2, "local_state": "keep", "server": "momentum", "cohort": 3}
    on_gpu, _ = federation("hbn", **settings)
    on_cpu, _ = federation("hbn", device="cpu", **settings)
    on_gpu.round()
    on_cpu.load_state({name: value.cpu() for name, value in on_gpu.state().items()}, 1)
    for _ in range(2):
        on_gpu.round()
        on_cpu.round()
    for name, value in on_gpu.state().items():
        torch.testing.assert_close(value.cpu(), on_cpu.state()[name], rtol=1e-8, atol=1e-8)


def test_byzantine_clients_as_on_the_cpu():
    lies = {"byzantine": 2, "attack": "foe", "targets": "all", "defense": "nnm+median", "local_steps": 2}
    on_gpu, _ = federation("fbn", **lies)
    on_cpu, _ = federation("fbn", device="cpu", **lies)
    for _ in range(3):
        on_gpu.round()
        on_cpu.round()
    for name, value in on_gpu.state().items():
        torch.testing.assert_close(value.cpu(), on_cpu.state()[name], rtol=1e-8, atol=1e-9)
