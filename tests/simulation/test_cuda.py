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

DSGD = [name for name, scheme in SCHEMES.items() if "dsgd" in scheme.algorithms]

pytestmark = pytest.mark.gpu


def images():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (200, 3, 8, 8), generator=generator, dtype=torch.uint8)
    y = torch.randint(10, (200,), generator=generator)
    mean, std = torch.full((3, 1, 1), 127.5), torch.full((3, 1, 1), 73.9)
    return Dataset(Split(x, y), Split(x[:50], y[:50]), mean, std, tuple("abcdefghij"))


def federation(scheme, device="cuda", model="cnn", dropout=True, engine="auto", **recipe):
    recipe = Recipe(**{"scheme": scheme, "clients": 4, "batch": 5, "rounds": 6} | recipe)
    net = models.build(model, (3, 8, 8), 10, seed=0)
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout) and not dropout:
            module.p = 0.0
    data, parts = images(), np.array_split(np.arange(200), recipe.honest())
    twin = Twin(copy.deepcopy(net), data, parts, recipe)
    return Simulation(net, data, parts, recipe, device=device, engine=engine), twin


@pytest.mark.parametrize("engine", ["auto", "eager"])
@pytest.mark.parametrize("model", ["cnn", "mlp", "resnet20"])
@pytest.mark.parametrize("scheme", DSGD)
def test_a_folded_round_equals_the_loop_over_clients(scheme, model, engine):
    simulation, twin = federation(scheme, model=model, dropout=False, engine=engine, precision="float64")
    for _ in range(6):
        simulation.round()
        twin.round()
    assert simulation.engine == {"auto": "CUDA graphs", "eager": "eager"}[engine]
    assert {layer.fused for layer in simulation.layers.values()} <= {engine == "auto"}
    for name, value in simulation.model.state_dict().items():
        torch.testing.assert_close(value.cpu(), twin.model.state_dict()[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("engine", ["auto", "eager"])
@pytest.mark.parametrize("scheme", DSGD)
def test_dropout_follows_the_seed_and_nobody_s_random_state_is_touched(scheme, engine):
    losses = []
    for i in range(2):
        torch.cuda.manual_seed(i)
        before = torch.cuda.get_rng_state()
        simulation, _ = federation(scheme, precision="float64", engine=engine)
        losses.append([simulation.round().item() for _ in range(3)])
        assert torch.equal(before, torch.cuda.get_rng_state())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("scheme", DSGD)
def test_lower_precisions_stay_near(scheme, precision):
    found = {}
    for kind in ("float64", precision):
        simulation, _ = federation(scheme, dropout=False, precision=kind, rounds=4)
        found[kind] = [simulation.round().item() for _ in range(4)]
        assert 0 <= simulation.evaluate().accuracy <= 1
    tolerance = {"float32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}[precision]
    assert found[precision] == pytest.approx(found["float64"], rel=tolerance)


def test_switches_are_given_back():
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    simulation, _ = federation("fbn", precision="float32")
    simulation.round()
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_dropout_in_a_replayed_graph_follows_the_round_s_seed():
    """With a learning rate and a momentum of nearly 0, round 0 run again draws the same masks."""
    losses = {}
    for dropout in (True, False):
        simulation, _ = federation("fbn", dropout=dropout, precision="float64", lr=1e-12, beta=1e-12)
        found = []
        for step in (0, 0, 1, 0):
            simulation.step = step
            found.append(simulation.round().item())
        assert found[1] == pytest.approx(found[0], rel=1e-9)
        assert found[3] == pytest.approx(found[0], rel=1e-9)
        losses[dropout] = found
    for step in (0, 2):
        assert losses[True][step] != pytest.approx(losses[False][step], rel=1e-4)
    ratio = [a / b for a, b in zip(losses[True], losses[False], strict=True)]
    assert ratio[2] != pytest.approx(ratio[0], rel=1e-4)  # other masks in round 1


LIARS = {
    "statistics": {"attack": "foe", "defense": "nnm+median"},
    "undefended": {"attack": "sf"},
    "gradients": {"attack": "foe:10", "targets": "all", "defense": "nnm+trimmed_mean"},
    "not a number": {"attack": "nan", "targets": "all", "defense": "nnm+median"},
    "krum": {"attack": "alie", "targets": "all", "defense": "arc+multi_krum"},
    "line search": {"attack": "opt_alie", "targets": "all", "defense": "nnm+krum"},
    "clipping": {"attack": "mimic", "targets": "all", "defense": "clipping+centred_clipping"},
}


@pytest.mark.parametrize("kind", LIARS)
@pytest.mark.parametrize("scheme", ["fbn", "naive"])
def test_with_liars_graphs_equal_the_cpu(scheme, kind):
    lies = {"byzantine": 1, "precision": "float64", "dropout": False, "model": "mlp"} | LIARS[kind]
    on_gpu, _ = federation(scheme, **lies)
    on_cpu, _ = federation(scheme, device="cpu", **lies)
    for _ in range(6):
        on_gpu.round()
        on_cpu.round()
    assert on_gpu.engine == "CUDA graphs"
    for name, value in on_gpu.state().items():
        torch.testing.assert_close(value.cpu(), on_cpu.state()[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("attack", ["gaussian", "spike"])
def test_what_a_graph_cannot_hold_is_eager_and_says_so(attack):
    with pytest.warns(RuntimeWarning, match=f"without compiled code or CUDA graphs: {attack} against median"):
        simulation, _ = federation("fbn", byzantine=1, attack=attack, defense="median")
    simulation.round()
    assert simulation.engine == "eager"


@pytest.mark.parametrize("during", [False, True])
def test_a_failed_capture_falls_back_and_loses_nothing(monkeypatch, during):
    """Where graphs cannot be had at all, and where a capture breaks off in its middle."""

    def broken(*args, **kwargs):
        raise RuntimeError("no graphs today")

    def broken_in_capture(*args):
        return broken() if torch.cuda.is_current_stream_capturing() else share(*args)

    want, _ = federation("fbn", precision="float64", engine="eager")
    simulation, _ = federation("fbn", precision="float64")
    share = simulation.algorithm._share
    if during:
        monkeypatch.setattr(simulation.algorithm, "_share", broken_in_capture)
    else:
        monkeypatch.setattr(torch.cuda, "graph", broken)
    with pytest.warns(RuntimeWarning, match="RuntimeError: no graphs today"):
        simulation.round()
    monkeypatch.undo()
    simulation.round()
    for _ in range(2):
        want.round()
    assert simulation.engine == "eager"
    for name, value in simulation.state().items():
        torch.testing.assert_close(value, want.state()[name], rtol=1e-9, atol=1e-12)


def test_compiled_code_is_used_again_by_the_next_run():
    for seed in range(3):
        simulation, _ = federation("fbn", seed=seed)
        simulation.round()
        simulation.evaluate()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if seed == 0:
            first = graphs
    assert graphs == first


def test_a_checkpoint_goes_on_as_graphs():
    whole, _ = federation("fixbn", dropout=False, precision="float64")
    for _ in range(6):
        whole.round()
    half, _ = federation("fixbn", dropout=False, precision="float64")
    for _ in range(2):
        half.round()
    after, _ = federation("fixbn", dropout=False, precision="float64")
    after.load_state({name: value.cpu() for name, value in half.state().items()}, 2)
    for _ in range(4):
        after.round()
    for name, value in after.state().items():
        torch.testing.assert_close(value, whole.state()[name], rtol=1e-9, atol=1e-12)


def test_auto_takes_the_gpu():
    assert choose_device("auto").type == "cuda"
    assert describe_device(choose_device("auto")) == torch.cuda.get_device_name()
