"""Clients abreast, with stacked parameters, equal the loop over clients; so do the operators they need."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedbatchnorm.simulation import convolution, fedavg, fuse, linear, models, stacked
from fedbatchnorm.simulation.abreast import Abreast
from fedbatchnorm.simulation.convolution import client_conv
from fedbatchnorm.simulation.fold import fold
from fedbatchnorm.simulation.linear import client_linear
from fedbatchnorm.simulation.packing import Packing

sys.path.insert(0, str(Path(__file__).parent))
from test_fedavg import SETTINGS, assert_same, both
from test_fedavg_cuda import federation

ABREAST = ["fbn", "naive", "fixbn", "groupnorm", "none", "fedbn", "silobn", "fedtan"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def abreast(scheme, model="cnn", **settings):
    """A federation abreast, and its twin; counts the steps that were taken so."""
    simulation, twin = federation(scheme, model, **{"device": "cpu", "abreast": True} | settings)
    taken, inner = [], Abreast.train

    def train(self, rows, batches, phase, first, steps, *rest):
        taken.append(steps - first)
        return inner(self, rows, batches, phase, first, steps, *rest)

    return simulation, twin, taken, train


# Operators.


def images(device, clients=3, batch=2, inside=3, outside=4, size=(5, 4), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    x = draw(clients * batch, inside, *size).to(memory_format=torch.channels_last)
    gradient = draw(clients * batch, outside, *size).to(memory_format=torch.channels_last)
    flat = draw(clients, outside * inside * 9 + 5)  # as the weights of a client lie among its others
    weight = flat[:, :-5].unflatten(1, (outside, 3, 3, inside)).movedim(-1, 2) / inside
    return x, weight.detach(), draw(clients, outside), gradient


def loop(x, weight, bias):
    parts = zip(x.chunk(len(weight)), weight, weight if bias is None else bias, strict=True)
    return torch.cat([F.conv2d(p, w, None if bias is None else b, padding=1) for p, w, b in parts])


def with_gradients(function, x, weight, bias, gradient):
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves)
    y.backward(gradient)
    return [y, *(t.grad for t in leaves if t is not None)]


@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_for_each_client(device, bias):
    x, weight, shift, gradient = images(device)
    shift = shift if bias else None
    found = with_gradients(client_conv, x, weight, shift, gradient)
    for got, want in zip(found, with_gradients(loop, x, weight, shift, gradient), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert found[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_the_convolution_is_sound(device, bias, layout):
    x, weight, shift, gradient = images(device, 2, 1, 2, 2, (3, 2))
    if layout == "contiguous":
        x, weight, gradient = x.contiguous(), weight.contiguous(), gradient.contiguous()
    leaves = [x.requires_grad_(), weight.requires_grad_(), shift.requires_grad_() if bias else None]
    torch.library.opcheck(client_conv, tuple(leaves))
    torch.library.opcheck(convolution._input_gradient, (gradient, weight.detach()))
    torch.library.opcheck(convolution._weight_gradient, (gradient, x.detach(), weight.detach()))
    assert torch.autograd.gradcheck(client_conv, tuple(leaves))


def test_other_gradients_are_not_computed(device, monkeypatch):
    """The first layer's input needs none, and a frozen layer's weights do not."""
    x, weight, _, gradient = images(device)
    for name in ("_input_gradient", "_weight_gradient"):
        with monkeypatch.context() as patch:
            patch.setattr(convolution, name, None)
            leaf = (weight if name == "_input_gradient" else x).detach().requires_grad_()
            y = client_conv(x, leaf, None) if name == "_input_gradient" else client_conv(leaf, weight, None)
            y.backward(gradient)
            assert leaf.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("clients", "batch", "inside", "outside", "size"),
    [
        (1, 1, 16, 16, (1, 1)),
        (3, 2, 16, 32, (5, 7)),
        (2, 4, 48, 80, (4, 5)),
        (10, 5, 64, 64, (32, 32)),
        (4, 3, 64, 128, (16, 16)),
        (10, 50, 128, 128, (16, 16)),
        (2, 1, 256, 512, (4, 4)),
    ],
)
def test_kernels_are_near_float64(dtype, clients, batch, inside, outside, size):
    exact = images("cuda", clients, batch, inside, outside, size)
    near = [t.to(dtype) for t in exact]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        assert convolution._kernels_take(near[0], near[1])
        found = with_gradients(client_conv, near[0], near[1], near[2], near[3])
    want = with_gradients(client_conv, *(t.double() for t in near))
    for got, exactly in zip(found, want, strict=True):
        assert got.shape == exactly.shape
        error = (got.double() - exactly).abs().max() / exactly.abs().max()
        assert error < {torch.float32: 3e-3, torch.bfloat16: 1e-2}[dtype]
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in found[:2])


@pytest.mark.gpu
def test_kernels_give_the_same_bits_twice():
    x, weight, bias, gradient = (t.bfloat16() for t in images("cuda", 3, 4, 64, 64, (16, 16)))
    first, again = (with_gradients(client_conv, x, weight, bias, gradient) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inside", [1, 3])
def test_patches_for_each_client(device, bias, inside):
    x, weight, shift, gradient = images(device, inside=inside)
    shift = shift if bias else None

    def patches(x, weight, bias):
        return fuse._product_of_patches(x, weight, bias, (1, 1), (1, 1))

    found = with_gradients(patches, x, weight, shift, gradient)
    for got, want in zip(found, with_gradients(loop, x, weight, shift, gradient), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def products(device, clients=3, batch=2, inside=5, outside=4, dtype=torch.float64):
    """Samples, weights as they lie among a client's others, and an output's gradient."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    flat = draw(clients, outside * inside + 5)
    weight = flat[:, :-5].unflatten(1, (outside, inside))
    return draw(clients, batch, inside), weight, draw(clients, batch, outside)


def with_gradients_of_a_product(function, x, weight, gradient):
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    y = function(*leaves)
    y.backward(gradient)
    return [y, *(t.grad for t in leaves)]


def linear_loop(x, weight):
    return torch.stack([F.linear(part, w) for part, w in zip(x, weight, strict=True)])


def test_a_linear_layer_for_each_client(device):
    x, weight, gradient = products(device)
    found = with_gradients_of_a_product(client_linear, x, weight, gradient)
    for got, want in zip(found, with_gradients_of_a_product(linear_loop, x, weight, gradient), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    x, weight = x.requires_grad_(), weight.detach().requires_grad_()
    torch.library.opcheck(client_linear, (x, weight))
    torch.library.opcheck(linear._input_gradient, (gradient, weight.detach()))
    torch.library.opcheck(linear._weight_gradient, (gradient, x.detach(), weight.detach()))
    assert torch.autograd.gradcheck(client_linear, (x, weight))


def test_a_linear_layer_in_bfloat16_has_weights_in_float32(device):
    x, weight, gradient = products(device, dtype=torch.float32)
    half = with_gradients_of_a_product(client_linear, x.bfloat16(), weight, gradient.bfloat16())
    assert [t.dtype for t in half] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for got, want in zip(half, with_gradients_of_a_product(linear_loop, x, weight, gradient), strict=True):
        assert (got - want).norm() < 1e-2 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("clients", "batch", "inside", "outside"),
    [(1, 1, 512, 16), (3, 5, 640, 48), (10, 50, 8192, 128), (50, 10, 12544, 128), (2, 128, 1024, 192)],
)
def test_linear_kernels_are_near_float64(dtype, clients, batch, inside, outside):
    x, weight, gradient = products("cuda", clients, batch, inside, outside)
    near = x.to(dtype), weight.float(), gradient.to(dtype)
    torch.set_float32_matmul_precision("high")
    try:
        assert linear._kernels_take(near[0], near[1])
        found = with_gradients_of_a_product(client_linear, *near)
        again = with_gradients_of_a_product(client_linear, *near)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    want = with_gradients_of_a_product(linear_loop, near[0].double(), near[1].double(), near[2].double())
    for got, exactly in zip(found, want, strict=True):
        assert got.shape == exactly.shape
        assert (got.double() - exactly).norm() < {torch.float32: 1e-3, torch.bfloat16: 1e-2}[
            dtype
        ] * exactly.norm()


# Layouts.


def test_vectors_for_a_gpu_are_aligned():
    net = models.build("cnn", (3, 8, 8), 7, seed=0)
    layers = fold(net, 0.1)
    plain, aligned = Packing(net, layers, False), Packing(net, layers, True)
    assert aligned.size % 16 == 0
    assert (
        aligned.size
        > plain.size
        == len(plain.order)
        == len(aligned.order)
        == len(set(aligned.order.tolist()))
    )
    flat = torch.zeros(2, aligned.size)
    views = aligned.views(flat)
    assert all((view.storage_offset() % 16, view.stride(0) % 16) == (0, 0) for view in views)
    for view, p in zip(views, net.parameters(), strict=True):
        view.copy_(p.detach())
    want = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert torch.equal(flat[:, aligned.order], torch.stack([want, want]))
    values = [p.detach().expand(2, *p.shape) for p in net.parameters()]
    aligned.fill(written := torch.full_like(flat, torch.nan), values)
    assert torch.equal(written, flat)
    aligned.fill(written, [None, *values[1:]])
    assert not aligned.views(written)[0].any()
    assert torch.equal(aligned.views(written)[1], views[1])
    flat[:, aligned.order] = 0
    assert not flat.any()  # nothing lies in between


# Rounds.


@pytest.mark.parametrize("setting", ["everything", "kept adam", "steps"])
@pytest.mark.parametrize("scheme", ["fbn", "fedbn", "fedtan"])
def test_rounds_with_aligned_vectors(scheme, setting, monkeypatch):
    """As on a GPU: with room between parameters, and convolutions' weights channels_last."""
    monkeypatch.setattr(fedavg, "Packing", lambda model, layers, _: Packing(model, layers, True))
    model = "cnn" if setting == "steps" else "mlp"
    simulation, twin, *_ = abreast(scheme, model, **SETTINGS[setting])
    assert simulation.algorithm.packing.size > len(simulation.algorithm.packing.order)
    both(simulation, twin, 3)
    assert_same(simulation, twin)
    state = simulation.state()
    simulation.algorithm.load_state({name: value.clone() for name, value in state.items()})
    for name, value in simulation.state().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("scheme", ABREAST)
def test_rounds_equal_the_loop_over_clients(scheme, setting, monkeypatch):
    simulation, twin, taken, train = abreast(scheme, "mlp", **SETTINGS[setting])
    monkeypatch.setattr(Abreast, "train", train)
    both(simulation, twin)
    assert taken or "epoch" in setting or setting == "everything"
    assert_same(simulation, twin)


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "fbn", "clip": 1.0},
        {"scheme": "fbn", "cohort": 5, "chunk": 3},  # two passes, the second with a place left over
        {"scheme": "naive", "cohort": 4},
        {"scheme": "fixbn", "local_steps": 2},
        {"scheme": "groupnorm", "optimizer": "adam", "lr": 1e-4, "prox": 0.1},
    ],
    ids=str,
)
def test_convolutions_abreast_equal_the_loop_over_clients(settings, monkeypatch):
    simulation, twin, taken, train = abreast(**{"local_steps": 3} | settings)
    monkeypatch.setattr(Abreast, "train", train)
    both(simulation, twin, 3)
    assert taken == [simulation.recipe.local_steps] * 3
    assert_same(simulation, twin)


def states(settings, **other):
    """What the rounds of two simulations end with: abreast, and otherwise."""
    found = []
    for how in ({"abreast": True}, {"abreast": False} | other):
        simulation, _ = federation(**{"device": "cpu"} | settings | how)
        losses = [simulation.round() for _ in range(3)]
        found.append(simulation.state() | {"losses": torch.stack(losses)})
    return found


@pytest.mark.parametrize("setting", ["gradient", "drift", "limit", "uneven", "kept"])
def test_abreast_equals_lanes(setting):
    """What the twin does not know: a share of the gradient, losses, counters, and what clients keep."""
    settings = {
        "gradient": {"scheme": "fbn", "gradient": 0.9, "local_steps": 3},
        "drift": {"scheme": "fbn", "gradient": "auto", "local_steps": 3},
        "limit": {"scheme": "fbn", "gradient": 0.6, "limit": 1.5, "local_steps": 3},
        "uneven": {"scheme": "fbn", "gradient": 0.9, "local_epochs": 2, "batch": 7},
        "kept": {"scheme": "silobn", "local_state": "keep", "cohort": 3, "local_epochs": 1},
    }[setting]
    first, second = states(settings | {"model": "cnn" if setting == "gradient" else "mlp"})
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("small", "expected"), [(2**17, 2), (2**10, 0)])
def test_on_a_cpu_small_batches_go_abreast(small, expected, monkeypatch):
    monkeypatch.setattr(stacked, "_SMALL", small)
    simulation, twin, taken, train = abreast("fbn", "mlp", abreast=None, local_steps=2)
    monkeypatch.setattr(Abreast, "train", train)
    both(simulation, twin, 2)
    assert_same(simulation, twin)
    assert sum(taken) == 2 * expected  # a round has two steps


def test_byzantine_clients_lie_as_before():
    lies = {"byzantine": 2, "attack": "foe", "targets": "all", "defense": "nnm+median", "local_steps": 2}
    for got, want in zip(
        *(s.values() for s in states({"scheme": "fbn", "model": "mlp"} | lies)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_augmentation_and_dropout_follow_the_seed():
    losses = []
    for seed in (0, 0, 1):
        settings = {"dropout": True, "augment": True, "local_steps": 2, "seed": seed}
        simulation, *_ = abreast("fbn", **settings)
        losses.append([simulation.round().item() for _ in range(2)])
    assert losses[0] == losses[1] != losses[2]


class Odd(nn.Module):
    """A model that stacking cannot serve: it uses a parameter, or the batch, in a way of its own."""

    def __init__(self, how):
        super().__init__()
        self.norm, self.linear, self.how = nn.BatchNorm1d(192), nn.Linear(192, 10), how
        if how == "frozen":
            self.linear.bias.requires_grad_(False)
        if how == "parameter":
            self.scale = nn.Parameter(torch.ones(10))
        if how == "tied":
            self.other = nn.Linear(192, 10)
            self.other.weight = self.linear.weight
        if how == "strided":
            self.conv = nn.Conv2d(3, 3, 3, stride=2, padding=1)

    def forward(self, x):
        y = self.linear(self.norm(x.flatten(1)))
        if self.how == "functional":
            y = y + F.linear(x.flatten(1), self.linear.weight.view(-1, 10, 192)[0])
        return y - y.mean(0) if self.how == "batch" else y


@pytest.mark.parametrize("how", ["frozen", "parameter", "tied", "strided", "functional", "batch", "plain"])
def test_models_that_cannot_be_stacked_are_found_out(how, monkeypatch):
    from fedbatchnorm.simulation import models

    monkeypatch.setattr(models, "MODELS", models.MODELS | {"odd": lambda shape, classes: Odd(how)})
    settings = {"scheme": "fbn", "model": "odd", "local_steps": 2}
    if how == "plain":
        simulation, twin, *_ = abreast(**settings)
        both(simulation, twin, 2)
        assert_same(simulation, twin)
    else:
        with pytest.raises(ValueError, match=r"clients cannot train abreast: .{10}"):
            abreast(**settings)


def test_other_schemes_take_lanes(monkeypatch):
    simulation, twin, taken, train = abreast("hbn", "mlp", local_steps=2)
    monkeypatch.setattr(Abreast, "train", train)
    both(simulation, twin, 2)
    assert not taken
    assert_same(simulation, twin)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fbn", "naive", "groupnorm"])
def test_compiled_as_on_a_gpu(scheme, monkeypatch):
    """Graphs are rewritten: FBN takes over ReLU and bias; the first convolution is a product of patches."""
    done = {}

    def counted(name, rewrite):
        def count(graph):
            done[name] = max(done.get(name, 0), rewrite(graph))
            return done[name]

        return count

    for name in ("take_over_neighbors", "convolve_by_patches", "add_biases_apart"):
        monkeypatch.setattr(fuse, name, counted(name, getattr(fuse, name)))
    monkeypatch.setattr(fuse, "_REWRITTEN", "cpu")
    simulation, twin, taken, train = abreast(scheme, engine="compiled", local_steps=2, clip=1.0)
    monkeypatch.setattr(Abreast, "train", train)
    inner = Abreast.__init__

    def fused(self, *args):
        inner(self, *args)
        for layer in self.layers.values():
            layer.fused = True

    monkeypatch.setattr(Abreast, "__init__", fused)
    both(simulation, twin, 2)
    assert simulation.engine == "compiled"
    assert taken == [2, 2]
    assert done["convolve_by_patches"] == 1
    assert done["take_over_neighbors"] == (4 if scheme == "fbn" else 0)
    assert done["add_biases_apart"] == (0 if scheme == "fbn" else 3)
    assert_same(simulation, twin)


@pytest.mark.gpu
@pytest.mark.parametrize(("scheme", "model"), [("fbn", "cnn"), ("naive", "cnn"), ("groupnorm", "mlp")])
def test_graphs_equal_the_loop_over_clients(scheme, model, monkeypatch):
    settings = {"device": "cuda", "local_epochs": 1, "cohort": 5, "clip": 1.0, "chunk": 3}
    simulation, twin, taken, train = abreast(scheme, model, **settings)
    monkeypatch.setattr(Abreast, "train", train)
    both(simulation, twin, 3)
    assert simulation.engine == "CUDA graphs"
    assert taken
    assert_same(simulation, twin, rtol=1e-8, atol=1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize(("model", "gradient"), [("cnn", 0.9), ("cnn16", 0.0)])
def test_lower_precisions_stay_near(precision, model, gradient, monkeypatch):
    """By default, with Triton's kernels."""
    settings = {"model": model, "gradient": gradient, "local_steps": 3}
    exact, _ = federation("fbn", device="cpu", abreast=False, precision="float64", **settings)
    simulation, _, taken, train = abreast("fbn", device="cuda", abreast=None, precision=precision, **settings)
    monkeypatch.setattr(Abreast, "train", train)
    found = [[s.round().item() for _ in range(3)] for s in (simulation, exact)]
    assert taken == [3, 3, 3]
    assert simulation.engine == "CUDA graphs"
    assert found[0] == pytest.approx(found[1], rel={"tf32": 1e-2, "bf16": 5e-2}[precision])
    state, want = simulation.state(), exact.state()
    for name, value in state.items():
        if "running" in name:
            error = (value.cpu().double() - want[name]).norm() / want[name].norm()
            assert error < {"tf32": 1e-2, "bf16": 5e-2}[precision]


@pytest.mark.gpu
def test_what_fails_abreast_goes_on_in_lanes(monkeypatch):
    def broken(*args):
        raise RuntimeError("no kernels today")

    simulation, twin, *_ = abreast("fbn", "mlp", device="cuda", local_steps=2)
    monkeypatch.setattr(Abreast, "_step", broken)
    with pytest.warns(RuntimeWarning, match="in lanes, not abreast: RuntimeError: no kernels today"):
        both(simulation, twin, 2)
    assert simulation.engine == "CUDA graphs"
    assert_same(simulation, twin, rtol=1e-8, atol=1e-8)
