"""Graphs rewritten before they are compiled compute what they computed: values and gradients, in float64."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from fedbatchnorm.norm.fused import operator
from fedbatchnorm.simulation import fuse, models
from fedbatchnorm.simulation.recipe import Recipe
from fedbatchnorm.simulation.simulator import Simulation

sys.path.insert(0, str(Path(__file__).parent))
from test_cuda import images
from twin import Twin


class Norm(nn.Module):
    """FBN as one operator, with statistics that are not trivial."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 2.0, channels))
        self.bias = nn.Parameter(torch.linspace(0.5, -0.5, channels))
        self.register_buffer("mean", torch.linspace(-0.3, 0.4, channels))
        self.register_buffer("var", torch.linspace(0.5, 2.0, channels))

    def forward(self, x):
        y, *seen = operator(x, None, self.mean, self.var, self.weight, self.bias, 1e-5, 2, False, False, None)
        self.seen = seen
        return y


class KeywordReLU(nn.Module):
    def forward(self, x):
        return F.relu(input=x)


class Convolution(nn.Module):
    """A convolution whose settings are written as the function allows them."""

    def __init__(self, *settings):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(30, 3, 3, 3)), nn.Parameter(torch.randn(30))
        self.settings = settings

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, *self.settings)


class KeywordFlatten(nn.Module):
    """Flattens rows and columns apart from the batch and the last axis."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 7)

    def forward(self, x):
        return self.linear(torch.flatten(x, 1, end_dim=2))


class Written(nn.Module):
    """A model whose forward is written in a function."""

    def __init__(self, forward):
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 5, 3), Norm(5), nn.Linear(180, 7)
        self.how = forward

    def forward(self, x):
        return self.how(self, x)


def functional(model, x):
    """Convolution, ReLU, norm, ReLU, written in other words than modules."""
    return torch.relu(model.norm(model.conv(x).relu()))


def shared(model, x):
    """The ReLU's output and the normalized values are also used elsewhere: neither may go."""
    x = F.relu(model.conv(x))
    y = model.norm(x)
    return x + F.relu(y) * y


def shared_convolution(model, x):
    """The ReLU goes, but the convolution's output is used twice, and so its bias stays."""
    x = model.conv(x)
    return x * model.norm(F.relu(x))


def shared_in_place(model, x):
    """A ReLU in place changes what the other user of its input sees."""
    x = model.conv(x)
    y = model.norm(F.relu(x, inplace=True))
    return x + y


def changed_by_position(model, x):
    """inplace=True need not be a keyword."""
    y = model.conv(x) * 2
    z = F.relu(y)
    F.leaky_relu(y, 0.5, True)
    return model.norm(z) * y


def changed_after_the_relu(model, x):
    y = model.conv(x) * 2
    z = F.relu(y)
    y += 1
    return model.norm(z) * y


def relu_in_place_on_a_part(model, x):
    y = model.conv(x) * 2
    return model.norm(F.relu(y[:, :5], inplace=True)) + y


def changed_after_flattening(model, x):
    h = torch.flatten(model.conv(x), 1)
    F.relu_(h)
    return model.linear(h)


def image_changed_after_flattening(model, x):
    y = model.conv(x) * 2
    h = torch.flatten(y, 1)
    y += 1
    return model.linear(h) + y.mean()


def measured_and_not_used(model, x):
    y = model.conv(x)
    model.norm(F.relu(y))
    return y


def flat_used_twice(model, x):
    h = torch.flatten(model.conv(x), 1)
    return model.linear(h) + h.sum()


class Residual(nn.Module):
    """A block as in residual networks: one norm before a ReLU, and one before a sum."""

    def __init__(self, classes):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 32, 3, bias=False), nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(32), nn.BatchNorm2d(32)])
        self.linear = nn.Linear(32, classes)

    def forward(self, x):
        x = F.relu(self.norms[0](self.stem(x)), inplace=True)
        x = F.relu(x + self.norms[1](self.conv(x)))
        return self.linear(x.mean((2, 3)))


def check(model, rewrite, x=None):
    """Compile `model` with `rewrite` applied, and hold it against the model; returns what `rewrite` did."""
    torch.manual_seed(0)
    model = model.double().to(memory_format=torch.channels_last)
    if x is None:
        x = torch.randint(-2, 3, (4, 3, 8, 8)).double()  # many values are equal
    x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
    done = []

    def backend(module, inputs):
        done.append(rewrite(module.graph))
        module.graph.lint()
        module.recompile()
        return aot_eager(module, inputs)

    found = []
    for run in (model, torch.compile(model, backend=backend, fullgraph=True)):
        model.zero_grad()
        y = run(x)
        y.square().mean().backward()
        seen = [t for m in model.modules() for t in getattr(m, "seen", [])]
        found.append([y, *seen, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()
    (count,) = done
    return count


@pytest.mark.parametrize(
    ("model", "taken"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), Norm(5)), 1),
        (lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(inplace=True), Norm(5)), 1),
        (lambda: nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), Norm(5), nn.ReLU()), 1),
        (lambda: nn.Sequential(nn.Conv2d(3, 5, 3), Norm(5), nn.ReLU(inplace=True)), 1),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.ReLU(), Norm(5)), 1),
        (lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), Norm(5), nn.Tanh()), 0),
        (lambda: Written(functional), 1),
        (lambda: Written(shared), 0),
        (lambda: Written(shared_convolution), 1),
        (lambda: Written(shared_in_place), 0),
        (lambda: Written(changed_by_position), 0),
        (lambda: Written(changed_after_the_relu), 0),
        (lambda: Written(relu_in_place_on_a_part), 0),
        (lambda: Written(measured_and_not_used), 1),
        (lambda: nn.Sequential(nn.Conv2d(3, 5, 3), KeywordReLU(), Norm(5)), 1),
    ],
    ids=[
        "before",
        "in place",
        "after",
        "after, in place",
        "linear",
        "none",
        "functional",
        "shared",
        "bias",
        "shared, in place",
        "by position",
        "changed",
        "a part",
        "not used",
        "keyword",
    ],
)
def test_neighbors_are_taken_over(model, taken):
    assert check(model(), fuse.take_over_neighbors) == taken


def test_a_bias_that_others_need_stays():
    graphs = []

    def keep(graph):
        taken = fuse.take_over_neighbors(graph)
        graphs.append(next(n for n in graph.nodes if n.target is operator._opoverload))
        return taken

    check(Written(shared_convolution), keep)
    check(Written(functional), keep)
    assert [node.args[1] is None for node in graphs] == [True, False]


@pytest.mark.parametrize(
    ("convolution", "made"),
    [
        (lambda: nn.Conv2d(3, 30, 3), 1),
        (lambda: nn.Conv2d(3, 30, 3, padding=1, bias=False), 1),
        (lambda: nn.Conv2d(3, 30, (2, 3), stride=(2, 1), padding=(0, 2)), 1),
        (lambda: Convolution(1, 1, 1, 1), 1),
        (lambda: Convolution((2,), (1,), (1,), 1), 1),
        (lambda: Convolution(2), 0),
        (lambda: nn.Conv2d(3, 30, 3, padding="same"), 0),
        (lambda: nn.Conv2d(3, 30, 3, dilation=2), 0),
        (lambda: nn.Conv2d(3, 30, 3, groups=3), 0),
        (lambda: nn.Conv2d(3, 26, 3), 0),
        (lambda: nn.Sequential(nn.Conv2d(3, 30, 3), nn.Conv2d(30, 4, 3)), 1),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 40, 3)), 1),
    ],
    ids=[
        *(
            "plain",
            "padded",
            "strides",
            "numbers",
            "single",
            "defaults",
            "same",
            "dilated",
            "groups",
            "small",
        ),
        *("channels", "gradient"),
    ],
)
def test_the_first_convolution_is_a_product_of_patches(convolution, made):
    assert check(convolution(), fuse.convolve_by_patches) == made


@pytest.mark.parametrize(
    ("pool", "made"),
    [
        (lambda: nn.MaxPool2d(2), 1),
        (lambda: nn.MaxPool2d((2, 2), stride=(2, 2)), 1),
        (lambda: nn.MaxPool2d(2, stride=1), 0),
        (lambda: nn.MaxPool2d(2, padding=1), 0),
        (lambda: nn.MaxPool2d(2, dilation=2), 0),
        (lambda: nn.MaxPool2d(2, ceil_mode=True), 0),
        (lambda: nn.MaxPool2d(3), 0),
        (lambda: nn.MaxPool2d((2, 1)), 0),
        (lambda: nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(2), nn.MaxPool2d(2)), 2),
    ],
    ids=["2", "pairs", "overlap", "padding", "dilation", "ceil", "3", "2 x 1", "odd"],
)
def test_pooling_by_twos_is_written_out(pool, made):
    x = torch.randint(-2, 3, (4, 3, 12, 12)).double()
    assert check(nn.Sequential(nn.Conv2d(3, 4, 1), pool()), fuse.pool_by_twos, x) == made


def test_pooling_follows_torch_among_equals_and_without_a_number():
    x = torch.tensor([[1.0, 1, 2, 3], [1, 1, torch.nan, 2], [0, -1, 5, 5], [-1, 0, 4, 5]]).view(1, 1, 4, 4)
    found = []
    for pool in (F.max_pool2d, lambda x, size: fuse._PoolByTwos.apply(x)):
        leaf = x.clone().requires_grad_()
        y = pool(leaf, 2)
        y.backward(torch.tensor([[[[1.0, 2], [3, 4]]]]))
        found.append((y, leaf.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("head", "made"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(5 * 36, 7)), 1),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(5 * 36, 7, bias=False)), 1),
        (lambda: nn.Sequential(nn.Flatten(1, 2), nn.Linear(6, 7)), 0),
        (lambda: nn.Sequential(nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten(), nn.Linear(30, 7)), 1),
        (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(36, 7)), 0),
        (KeywordFlatten, 0),
        (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 7)), 0),
        (lambda: nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(5 * 36, 7)), 0),
    ],
    ids=["bias", "no bias", "partly", "pooled", "planes", "keyword", "one pixel", "apart"],
)
def test_an_image_is_flattened_as_it_lies(head, made):
    assert check(nn.Sequential(nn.Conv2d(3, 5, 3), head()), fuse.flatten_as_it_lies) == made


@pytest.mark.parametrize("how", [changed_after_flattening, image_changed_after_flattening, flat_used_twice])
def test_what_is_flat_and_used_otherwise_stays_flat(how):
    assert check(Written(how), fuse.flatten_as_it_lies) == 0


@pytest.mark.parametrize("bias", [True, False])
def test_patches_in_bfloat16_stay_in_bfloat16(bias):
    weight, shift = torch.randn(30, 3, 3, 3), torch.randn(30) if bias else None
    with torch.autocast("cpu", torch.bfloat16):
        y = fuse._product_of_patches(torch.randn(2, 3, 8, 8), weight, shift, (1, 1), (1, 1))
    assert y.dtype == torch.bfloat16


REWRITES = ("take_over_neighbors", "convolve_by_patches", "flatten_as_it_lies", "pool_by_twos")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rewritten"), [("cnn", [4, 1, 1, 2]), ("mlp", [2, 0, 1, 0]), ("residual", [1, 1, 0, 0])]
)
def test_fused_rounds_equal_the_loop_over_clients(model, rewritten, monkeypatch):
    """As on a GPU, with all that is rewritten there."""
    done = dict.fromkeys(REWRITES, 0)

    def counted(name, rewrite):
        def count(graph):
            done[name] = max(done[name], rewrite(graph))
            return done[name]

        return count

    for name in REWRITES:
        monkeypatch.setattr(fuse, name, counted(name, getattr(fuse, name)))
    monkeypatch.setattr(fuse, "_REWRITTEN", "cpu")
    recipe = Recipe(scheme="fbn", clients=4, batch=5, rounds=3, precision="float64")
    models_here = models.MODELS | {"residual": lambda shape, classes: Residual(classes)}
    monkeypatch.setattr(models, "MODELS", models_here)
    nets = [models.build(model, (3, 8, 8), 10, seed=0) for _ in range(2)]
    for module in [m for net in nets for m in net.modules() if isinstance(m, nn.Dropout)]:
        module.p = 0.0
    parts = np.array_split(np.arange(200), 4)
    twin = Twin(nets[0], images(), parts, recipe)
    simulation = Simulation(nets[1], images(), parts, recipe, engine="compiled", chunk=4)
    for layer in simulation.layers.values():
        layer.fused = True
    for _ in range(3):
        simulation.round()
        twin.round()
    assert simulation.engine == "compiled"
    assert list(done.values()) == rewritten
    for name, value in simulation.model.state_dict().items():
        torch.testing.assert_close(value, twin.model.state_dict()[name], rtol=1e-9, atol=1e-11)
