"""A share of BatchNorm's gradient: against autograd of the formula, in every way that a layer can run."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm.norm import gradient as gradient_module
from fedbatchnorm.norm.gradient import GRADIENT, Batch, hold
from fedbatchnorm.norm.moments import Running, measure, normalize

sys.path.insert(0, str(Path(__file__).parent))
from share_twin import with_share

EPS = 1e-5
SHAPES = [(12, 5), (8, 5, 7), (8, 5, 2, 2), (8, 5, 4, 4), (4, 5, 2, 3, 2)]


def formula(x, running, weight, bias, share, clients=1):
    """y = (x - m) / s with dx = (1/s) (g - share [mean(g) + b mean(g b)]), by autograd of BatchNorm."""
    shape = (-1, *[1] * (x.dim() - 2))
    y = with_share(x, clients, EPS, share) - running.mean.view(shape)
    y = y / (running.var.view(shape) + EPS).sqrt()
    return y * weight.view(shape) + bias.view(shape)


def case(shape, dtype=torch.float64, scale=2.0, offset=3.0):
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    c = shape[1]
    x = (draw(*shape) * scale + offset).requires_grad_()
    running = Running(draw(c), draw(c).square() + 0.5, eps=EPS)
    return x, running, draw(c).requires_grad_(), draw(c).requires_grad_(), draw(*shape)


def gradients(y, inputs, g):
    return torch.autograd.grad(y, inputs, g)


@pytest.fixture(params=["few calls", "few passes"])
def small(request, monkeypatch):
    """Layers are taken to be small, or large, whatever they are."""
    monkeypatch.setattr(gradient_module, "_FEW_CALLS_CPU", 2**30 if request.param == "few calls" else 0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("clients", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_formula(shape, clients, share):
    x, running, weight, bias, g = case(shape)
    y, _ = normalize(x, running, clients=clients, weight=weight, bias=bias, gradient=share)
    got = gradients(y, (x, weight, bias), g)
    want = gradients(formula(x, running, weight, bias, share, clients), (x, weight, bias), g)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("clients", [1, 2])
def test_the_forward_pass_does_not_depend_on_it(shape, clients):
    x, running, weight, bias, _ = case(shape, torch.float32)
    plain, seen = normalize(x, running, clients=clients, weight=weight, bias=bias)
    y, seen_too = normalize(x, running, clients=clients, weight=weight, bias=bias, gradient=0.9)
    assert torch.equal(y, plain)
    assert torch.equal(seen.mean, seen_too.mean)
    assert torch.equal(seen.var, seen_too.var)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2), (0, 1)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(8, 5, 4, 4), (8, 5, 2, 3)])
def test_what_is_not_to_be_trained_takes_no_gradient_and_changes_no_other(shape, layout, frozen):
    x, running, weight, bias, g = case(shape)
    inputs = [x.detach().to(memory_format=layout), weight.detach(), bias.detach()]
    for i, value in enumerate(inputs):
        value.requires_grad_(i not in frozen)
    y, _ = normalize(inputs[0], running, weight=inputs[1], bias=inputs[2], gradient=0.7)
    y.backward(g)
    want = gradients(formula(x, running, weight, bias, 0.7), (x, weight, bias), g)
    for i, value in enumerate(inputs):
        assert (value.grad is None) == (i in frozen)
        if value.grad is not None:
            torch.testing.assert_close(value.grad, want[i], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("offset", [0.0, 3.0, 100.0])
@pytest.mark.parametrize("shape", [(32, 64, 2, 2), (32, 64), (32, 16, 8, 8)])
def test_gradients_are_exact_in_float32(shape, offset):
    x, running, weight, bias, g = case(shape, torch.float32, scale=1.0, offset=offset)
    y, _ = normalize(x, running, weight=weight, bias=bias, gradient=0.7)
    got = gradients(y, (x, weight, bias), g)
    double = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    running = running._replace(mean=running.mean.double(), var=running.var.double())
    want = gradients(formula(double[0], running, *double[1:], 0.7), double, g.double())
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= (1e-6 + 1e-7 * offset) * b.abs().max()


def test_without_a_share_the_gradient_is_that_of_batchnorm_in_evaluation():
    x, running, weight, bias, g = case((8, 5, 4, 4), torch.float32)
    layer = nn.BatchNorm2d(5, eps=EPS).eval()
    with torch.no_grad():
        for own, value in zip(
            (layer.running_mean, layer.running_var, layer.weight, layer.bias),
            (running.mean, running.var, weight, bias),
            strict=True,
        ):
            own.copy_(value)
    layer.zero_grad()
    want = gradients(layer(x), (x, layer.weight, layer.bias), g)
    federated = fbn.convert(layer, gradient=0).train()
    got = gradients(federated(x), (x, layer.weight, layer.bias), g)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_with_all_of_it_nothing_moves_the_mean_or_the_scale():
    """rho = 1: the gradient is orthogonal to a constant and to the input, as BatchNorm's is."""
    x, running, _, _, g = case((64, 5), scale=1.0)
    y, seen = normalize(x, running, gradient=1.0)
    (dx,) = gradients(y, (x,), g)
    b = (x.detach() - seen.mean) / (seen.var + EPS).sqrt()
    assert dx.mean(0).abs().max() < 1e-12
    # b has a mean square of var / (var + eps), so a trace of the slope stays.
    assert (dx * b).mean(0).abs().max() < 1e-4


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("affine", [True, False])
def test_twice_differentiable(share, affine):
    x, running, weight, bias, _ = case((6, 3, 2, 2))
    weight, bias = (weight, bias) if affine else (None, None)

    def first_gradient(x, g):
        y, _ = normalize(x, running, weight=weight, bias=bias, gradient=share)
        return torch.autograd.grad(y, x, g, create_graph=True)[0]

    def by_hand(x, g):
        held = hold(x, Batch(*measure(x)[1:], EPS), share)
        y = (held - running.mean.view(-1, 1, 1)) / (running.var.view(-1, 1, 1) + EPS).sqrt()
        y = y if weight is None else y * weight.view(-1, 1, 1)
        return torch.autograd.grad(y, x, g, create_graph=True)[0]

    g = torch.randn_like(x).requires_grad_()
    got, want = (torch.autograd.grad(f(x, g).square().sum(), (x, g)) for f in (first_gradient, by_hand))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(1, 5), (1, 5, 4, 4), (6, 5)])
def test_a_single_value_and_constant_channels_stay_finite(shape):
    x, running, weight, bias, g = case(shape, torch.float32)
    x = x.detach().clone()
    x[:, 0] = 7.0
    x.requires_grad_()
    y, _ = normalize(x, running, weight=weight, bias=bias, gradient=0.9)
    got = gradients(y, (x, weight, bias), g)
    want = gradients(formula(x, running, weight, bias, 0.9), (x, weight, bias), g)
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_an_empty_batch_has_an_empty_gradient():
    layer = fbn.FederatedBatchNorm1d(3)
    x = torch.empty(0, 3, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    x, running, weight, bias, g = case((8, 5, 4, 4))
    want = gradients(formula(x, running, weight, bias, 0.9), (x, weight, bias), g)
    single = [t.detach().float() for t in (running.mean, running.var, weight, bias)]
    weight, bias = (t.requires_grad_() for t in single[2:])
    half = x.detach().to(dtype).requires_grad_()
    y, _ = normalize(half, Running(*single[:2], eps=EPS), weight=weight, bias=bias, gradient=0.9)
    got = gradients(y, (half, weight, bias), g.to(dtype))
    assert y.dtype == got[0].dtype == dtype
    for a, b in zip(got, want, strict=True):
        assert ((a.double() - b).norm() / b.norm()).item() < 3e-2


def test_channels_last_stays_channels_last():
    x, running, weight, bias, g = case((8, 5, 4, 4), torch.float32)
    last = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    y, _ = normalize(last, running, weight=weight, bias=bias, gradient=0.9)
    (dx,) = gradients(y, (last,), g.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert dx.is_contiguous(memory_format=torch.channels_last)
    want = gradients(formula(x, running, weight, bias, 0.9), (x,), g)
    torch.testing.assert_close(dx, want[0], rtol=1e-4, atol=1e-5)


def model(share):
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    return fbn.convert(nn.Sequential(*layers), gradient=share).double()


def loss_gradients(net, x):
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def test_mapped_over_clients_each_has_its_own_mean():
    net, x = model(0.9), torch.randn(3, 6, 1, 8, 8, dtype=torch.float64)
    parameters = {k: v.detach() for k, v in net.named_parameters()}
    buffers = dict(net.named_buffers())

    def loss(parameters, x):
        return torch.func.functional_call(net, (parameters, buffers), (x,)).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, part in enumerate(x):
        for (name, got), want in zip(mapped.items(), loss_gradients(net, part), strict=True):
            torch.testing.assert_close(got[i], want, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend):
    x = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    want = loss_gradients(model(0.9), x)
    torch._dynamo.reset()
    for got, w in zip(loss_gradients(torch.compile(model(0.9), backend=backend), x), want, strict=True):
        torch.testing.assert_close(got, w)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_compiled_layer_gives_what_an_eager_one_does(dtype, limit, affine):
    layers = [nn.BatchNorm2d(5, affine=affine).to(dtype) for _ in range(2)]
    eager, compiled = (fbn.convert(layer, gradient=0.7, limit=limit) for layer in layers)
    x, _, _, _, g = case((8, 5, 4, 4), dtype)
    torch._dynamo.reset()
    found = []
    for layer in (eager, torch.compile(compiled, backend="aot_eager")):
        own = x.detach().requires_grad_()
        y = layer(own)
        y.backward(g)
        weights = [p.grad for p in layer.parameters()]
        assert all(t.dtype == dtype for t in (y, own.grad, *weights))
        found.append([y, own.grad, *weights])
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 0.03, "atol": 0.03}
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize("clients", [1, 2])
def test_a_share_may_be_a_tensor_that_nobody_reads(clients, limit):
    """As rounds are captured on a GPU. On the meta device there is no value to be read."""
    x, running, weight, bias, g = case((8, 5, 4, 4))
    settings = {"clients": clients, "weight": weight, "bias": bias, "limit": limit}
    found = [
        gradients(normalize(x, running, **settings, gradient=share)[0], (x, weight, bias), g)
        for share in (0.7, torch.tensor(0.7, dtype=torch.float64))
    ]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    x, weight, bias, mean, var = (
        t.detach().to("meta").requires_grad_() for t in (x, weight, bias, *running[:2])
    )
    settings |= {"weight": weight, "bias": bias, "gradient": torch.tensor(0.7, device="meta")}
    y, _ = normalize(x, running._replace(mean=mean, var=var), **settings)
    assert gradients(y, (x,), g.to("meta"))[0].shape == x.shape


def test_with_activation_checkpointing():
    x = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    net, want = model(0.9), loss_gradients(model(0.9), x)
    y = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
    y.square().sum().backward()
    for p, w in zip(net.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, w)
    assert fbn.collect(net)["1"].count == 6 * 36


def test_convert_and_set_gradient():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    assert fbn.convert(net)[0].gradient == fbn.FederatedBatchNorm1d(2).gradient == GRADIENT
    assert fbn.convert(net, gradient=0.25)[0].gradient == 0.25
    assert fbn.convert(net)[1].gradient == 0.25  # what is federated stays as it is
    fbn.set_gradient(net, 0)
    assert [layer.gradient for layer in net] == [0.0, 0.0]
    fbn.revert(net)
    assert not hasattr(net[0], "gradient")
    assert fbn.convert(net)[0].gradient == GRADIENT


def limited(x, running, limit):
    """Channel by channel: the deviation at most `limit`, then the mean at most 2 (limit - 1) away."""
    columns = []
    for c, column in enumerate(x.movedim(1, 0)):
        u, spread = column.detach().mean().item(), column.detach().var(correction=0).item() + EPS
        s = max(running.var[c].item() + EPS, spread / limit**2) ** 0.5
        m, away = running.mean[c].item(), 2 * (limit - 1) * s
        m = u - away if u - m > away else u + away if m - u > away else m
        columns.append((column - m) / s)
    return torch.stack(columns, 1)


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_limit_brings_a_batch_that_is_too_wide_or_too_far_away_closer(shape, clients, share):
    x, running, _, _, g = case(shape, scale=3.0)
    running = running._replace(
        var=torch.tensor([0.1, 1.0, 4.0, 100.0, 20.0], dtype=torch.float64),
        mean=torch.tensor([9.0, 0.5, -20.0, 1.0, 30.0], dtype=torch.float64),
    )
    y, seen = normalize(x, running, clients=clients, gradient=share, limit=2.0)
    want = torch.cat([limited(part, running, 2.0) for part in x.chunk(clients)])
    torch.testing.assert_close(y, want)
    wide = seen.var > 4 * running.var
    assert wide.any()
    assert not wide.all()
    deviation = torch.stack(
        [p.detach().movedim(1, 0).flatten(1).std(1, correction=0) for p in y.chunk(clients)]
    )
    assert (deviation <= 2.0 + 1e-6).all()
    center = torch.stack([p.detach().movedim(1, 0).flatten(1).mean(1) for p in y.chunk(clients)])
    torch.testing.assert_close(
        center[:, 2:].abs(), torch.tensor([2.0, 0.0, 2.0]).double().expand(clients, 3), atol=0.5, rtol=0
    )
    assert (center.abs() <= 2.0 + 1e-6).all()
    (got,) = gradients(y, (x,), g)
    if not share:  # what divides is a constant
        (wanted,) = gradients(want, (x,), g)
        torch.testing.assert_close(got, wanted)


def test_within_the_limit_nothing_changes():
    x, running, weight, bias, _ = case((8, 5, 4, 4), torch.float32, scale=1.0)
    near = x.detach().mean((0, 2, 3)) + 1.5
    running = running._replace(var=torch.full_like(running.var, 2.0), mean=near)
    plain, _ = normalize(x, running, weight=weight, bias=bias)
    y, _ = normalize(x, running, weight=weight, bias=bias, limit=2.0)
    assert torch.equal(y, plain)


def test_convert_with_a_limit():
    net = fbn.convert(nn.Sequential(nn.BatchNorm1d(2)), limit=2)
    assert net[0].limit == 2.0
    assert net(torch.tensor([[-10.0, 0.0], [10.0, 0.0]]))[1, 0].item() == pytest.approx(2.0)
    fbn.set_gradient(net, 0.5, limit=4)
    assert net(torch.tensor([[-10.0, 0.0], [10.0, 0.0]]))[1, 0].item() == pytest.approx(4.0)
    assert fbn.revert(net)[0].__dict__.keys().isdisjoint({"limit", "gradient"})


def test_a_limit_that_goes_with_the_share():
    net, x = fbn.convert(nn.Sequential(nn.BatchNorm1d(1)), limit="auto"), torch.tensor([[90.0], [110.0]])
    for share, width, away in ((0.6, 2.0, 2.0), (0.8, 1.5, 1.0), (1.0, 1.0, 0.0)):
        fbn.set_gradient(net, share)
        y = net(x)
        assert y.std(correction=0).item() == pytest.approx(width)
        assert y.mean().item() == pytest.approx(away, abs=1e-4)
    # With all of BatchNorm's gradient that is BatchNorm itself, for a batch wider than the shared statistics.
    torch.testing.assert_close(y, nn.BatchNorm1d(1)(x))


@pytest.mark.parametrize("limit", [0.5, 0, -1, float("inf"), float("nan"), "two", True])
def test_a_limit_that_is_none(limit):
    with pytest.raises(ValueError, match=r"limit is .* it must be a number from 1 on, 'auto'"):
        fbn.convert(nn.Sequential(nn.BatchNorm1d(2)), limit=limit)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "half", True, None])
def test_a_share_that_is_none(share):
    net = nn.Sequential(nn.BatchNorm1d(2))
    if share is not None:
        with pytest.raises(ValueError, match="gradient is"):
            fbn.convert(net, gradient=share)
        assert type(net[0]) is nn.BatchNorm1d
    fbn.convert(net)
    with pytest.raises(ValueError, match=r"between 0 .* and 1"):
        fbn.set_gradient(net, share)


def test_layers_in_which_clients_are_alike_take_more():
    net = fbn.convert(nn.Sequential(*(nn.BatchNorm1d(1) for _ in range(4))), limit="auto")
    fbn.set_gradient(net, 0.7, between={"0": 0.0, "1": 0.005, "2": 0.9})
    assert [layer.gradient for layer in net] == [1.0, pytest.approx(0.85), 0.7, 0.7]
    y = net[0](torch.tensor([[90.0], [110.0]]))
    assert y.std(correction=0).item() == pytest.approx(1.0)  # the limit goes with the layer's own share
    fbn.set_gradient(net, 0.6)
    assert [layer.gradient for layer in net] == [0.6] * 4


@pytest.mark.parametrize(
    "between", [{"9": 0.1}, {"0": -0.1}, {"0": 1.1}, {"0": float("nan")}, {"0": "a"}, {"0": True}]
)
def test_a_part_between_clients_that_is_none(between):
    net = fbn.convert(nn.Sequential(nn.BatchNorm1d(1)), gradient=0.3)
    with pytest.raises(ValueError, match=r"between: .* layer '[09]'"):
        fbn.set_gradient(net, 0.7, between=between)
    assert net[0].gradient == 0.3
