"""Bias, ReLU, normalizing and measuring in one operator: against the formula in float64, on every device."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fedbatchnorm.norm import fused

sys.path.insert(0, str(Path(__file__).parent))
from share_twin import with_share

EPS = 1e-5
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 1e-2}
SUMS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-5}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def inputs(device, shape, dtype, *, shift=True, weight=True, bias=True, mean=0.0):
    """Random inputs, vectors in float32 or better."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.promote_types(dtype, torch.float32)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    c = shape[1]
    z = (draw(*shape) + mean).to(device, dtype)
    if z.dim() == 4:
        z = z.to(memory_format=torch.channels_last)
    vectors = [draw(c) if shift else None, draw(c) + mean, draw(c).square() + 0.5]
    vectors += [draw(c) if weight else None, draw(c) if bias else None]
    gradient = draw(*shape).to(device, dtype)
    return z, [None if v is None else v.to(device, vector) for v in vectors], gradient


def plain(z, shift, mean, var, weight, bias, *, eps, clients, before, after, share=0.0):
    """The formula, word for word; in float64."""
    over = (-1, *[1] * (z.dim() - 2))
    x = z if shift is None else z + shift.view(over)
    x = F.relu(x) if before else x
    scale = (var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    y = (with_share(x, clients, eps, share) - mean.view(over)) * scale.view(over)
    y = y if bias is None else y + bias.view(over)
    seen = x.detach().unflatten(0, (clients, -1))
    dims = [1, *range(3, seen.dim())]
    seen_var, seen_mean = torch.var_mean(seen, dims, correction=0)
    return F.relu(y) if after else y, seen_mean, seen_var


def gradients(function, z, vectors, gradient, **settings):
    """Outputs, and the gradients of z, shift, weight and bias (None where there is no such input)."""
    leaves = [None if t is None else t.detach().clone() for t in (z, *vectors)]
    for leaf in (leaves[0], leaves[1], leaves[4], leaves[5]):
        if leaf is not None:
            leaf.requires_grad_()
    outputs = function(*leaves, **settings)
    outputs[0].backward(gradient)
    assert not outputs[1].requires_grad
    assert not outputs[2].requires_grad
    assert leaves[2].grad is None
    assert leaves[3].grad is None
    return outputs, [None if t is None else t.grad for t in (leaves[0], leaves[1], leaves[4], leaves[5])]


def error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item()


def same(first, second):
    """Whether two pairs of lists, outputs and gradients, agree to the bit."""
    pairs = zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def check(z, vectors, gradient, function=fused.relu_normalize, **settings):
    """Everything the kernels compute against the plain formula in float64."""
    settings = {"eps": EPS, "clients": 1, "before": True, "after": False, **settings}
    if settings["before"] or settings["after"]:  # float32 and float64 may see a value at a kink on two sides
        exact = [None if v is None else v.double() for v in vectors]
        u = z.double() if exact[0] is None else z.double() + exact[0].view(-1, *[1] * (z.dim() - 2))
        y = plain(z.double(), *exact, **{**settings, "after": False})[0]
        gradient = torch.where((u.abs() < 1e-4) | (y.abs() < 1e-4), 0, gradient)
    share = settings.pop("share", 0.0)
    given = {"share": torch.tensor(share, device=z.device, dtype=torch.float64)} if share else {}
    outputs, grads = gradients(function, z, vectors, gradient, **settings, **given)
    double = [None if v is None else v.double() for v in vectors]
    wanted, wanted_grads = gradients(plain, z.double(), double, gradient.double(), **settings, share=share)
    layout = torch.channels_last if z.dim() == 4 else torch.contiguous_format
    assert outputs[0].dtype == z.dtype
    assert outputs[0].is_contiguous(memory_format=layout)
    assert outputs[1].dtype == outputs[2].dtype == torch.promote_types(z.dtype, torch.float32)
    assert grads[0].dtype == z.dtype
    assert error(outputs[0], wanted[0]) < TOLERANCE[z.dtype]
    assert error(grads[0], wanted_grads[0]) < TOLERANCE[z.dtype]
    for got, want in zip((*outputs[1:], *grads[1:]), (*wanted[1:], *wanted_grads[1:]), strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert got.shape == want.shape
            assert error(got, want) < SUMS[z.dtype]
    return outputs


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("shift", "weight", "before", "after"), list(itertools.product([False, True], repeat=4))
)
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_every_combination(device, dtype, shift, weight, before, after, share):
    case = inputs(device, (6, 5, 4, 3), dtype, shift=shift, weight=weight, bias=weight)
    check(*case, clients=3, before=before, after=after, share=share)


@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True)])
def test_weight_or_bias_alone(device, weight, bias):
    check(*inputs(device, (4, 3, 2, 2), torch.float32, weight=weight, bias=bias), clients=2, after=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 64, 100, 130])
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_channels_and_clients(device, dtype, channels, clients, share):
    case = inputs(device, (clients * 2, channels, 7, 5), dtype)
    check(*case, clients=clients, after=True, share=share)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels", [3, 130])
def test_two_dimensions(device, dtype, channels):
    check(*inputs(device, (33, channels), dtype), clients=3, after=True)
    check(*inputs(device, (33, channels), dtype), clients=3, after=True, share=1.0)


def start_programs(monkeypatch, device, forward, backward=1):
    """Make the kernels start this many programs; elsewhere there are none."""
    if device == "cuda":
        from fedbatchnorm.norm import kernels

        monkeypatch.setattr(kernels, "_FORWARD_PROGRAMS", forward)
        monkeypatch.setattr(kernels, "_BACKWARD_PROGRAMS", backward)


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.parametrize("clients", [1, 3])
def test_many_tiles_a_program(monkeypatch, programs, clients):
    """Rows of a client that are no multiple of a tile, several tiles a run, a last run that is shorter."""
    from fedbatchnorm.norm import kernels

    device = "cuda"
    start_programs(monkeypatch, device, programs * clients, programs)
    tiles = kernels.choose_tiles(
        407, 64, torch.float32, groups=clients, programs=programs * clients, most=256
    )
    assert 407 % (tiles.unroll * tiles.rows)
    assert tiles.run > tiles.unroll * tiles.rows
    check(*inputs(device, (clients * 11, 64, 37, 1), torch.float32), clients=clients)


@pytest.mark.parametrize("own", ["parameters", "statistics", "both"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (33, 130)])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_clients_with_vectors_of_their_own(device, own, dtype, shape, share):
    """What three clients get side by side is what each of them gets alone."""
    z, (shift, *rest), gradient = inputs(device, shape, dtype)
    factor = torch.linspace(0.5, 1.5, 3, device=device).to(shift)[:, None]
    kinds = ["parameters", "statistics", "statistics", "parameters", "parameters"]
    vectors = [
        v * factor if own in (kind, "both") else v for v, kind in zip((shift, *rest), kinds, strict=True)
    ]
    share = torch.tensor(share, device=device) if share else None
    settings = {"eps": EPS, "before": True, "after": True, "share": share}
    got, grads = gradients(fused.relu_normalize, z, vectors, gradient, clients=3, **settings)
    alone = []
    for i, (part, its) in enumerate(zip(z.chunk(3), gradient.chunk(3), strict=True)):
        mine = [v[i] if v.dim() == 2 else v for v in vectors]
        alone.append(gradients(fused.relu_normalize, part, mine, its, clients=1, **settings))
    for found, *want in zip(got, *(outputs for outputs, _ in alone), strict=True):
        assert error(found, torch.cat(want).double()) < TOLERANCE[dtype]
    for found, *want in zip(grads, *(theirs for _, theirs in alone), strict=True):
        want = torch.cat(want) if want[0].dim() > 1 else torch.stack(want)
        want = want if found.shape == want.shape else want.sum(0)
        assert found.shape == want.shape
        assert error(found, want.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("kinds", ["parameters", "statistics", "both"])
@pytest.mark.parametrize("apart", [(64, 64), (64, 96)], ids=["one matrix", "two matrices"])
def test_vectors_that_are_rows_of_matrices(device, kinds, apart):
    """Clients' vectors are read where they lie, whatever lies between them, to the same bits."""
    z, vectors, gradient = inputs(device, (6, 5, 4, 3), torch.float32)
    own = [i for i in range(5) if kinds == "both" or (kinds == "statistics") == (i in (1, 2))]
    settings = {"eps": EPS, "clients": 3, "before": True, "after": True}
    settings["share"] = torch.tensor(0.9, device=device)
    dense, spread = list(vectors), list(vectors)
    wide = [torch.full((3, size), torch.nan, device=device) for size in apart]
    for i in own:
        dense[i] = vectors[i] * torch.linspace(0.5, 1.5, 3, device=device)[:, None]
        spread[i] = wide[i % 2][:, 8 * i : 8 * i + 5].copy_(dense[i])
    found = []
    for these in (dense, spread):
        leaves = [v.detach().requires_grad_(i not in (1, 2)) for i, v in enumerate(these)]
        outputs = fused.relu_normalize(z, *leaves, **settings)
        learned = [leaf for leaf in leaves if leaf.requires_grad]
        found.append((outputs, torch.autograd.grad(outputs[0], learned, gradient)))
    assert same(*found)


@pytest.mark.parametrize("programs", [1, 4, 10_000])
def test_large_mean(device, monkeypatch, programs):
    """The variance survives a mean of 10,000 standard deviations."""
    start_programs(monkeypatch, device, programs)
    z, vectors, _ = inputs(device, (6, 20, 16, 16), torch.float32, mean=1e4, shift=False)
    settings = {"eps": EPS, "clients": 2, "before": True, "after": False}
    _, mean, var = fused.relu_normalize(z, *vectors, **settings)
    _, want_mean, want_var = plain(
        z.double(), *[None if v is None else v.double() for v in vectors], **settings
    )
    torch.testing.assert_close(mean.double(), want_mean, rtol=1e-7, atol=0)
    torch.testing.assert_close(var.double(), want_var, rtol=2e-4, atol=0)  # a run's mean is rounded to 1e-3


def test_a_first_tile_unlike_the_rest(device, monkeypatch):
    """The pivot is the first tile's mean: far from the others it still costs few digits."""
    start_programs(monkeypatch, device, 1)
    z, vectors, _ = inputs(device, (640, 64), torch.float32, shift=False)
    z[32:] += 1e4
    settings = {"eps": EPS, "clients": 1, "before": False, "after": False}
    _, mean, var = fused.relu_normalize(z, *vectors, **settings)
    want_var, want_mean = torch.var_mean(z.double(), 0, keepdim=True, correction=0)
    torch.testing.assert_close(mean.double(), want_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(var.double(), want_var, rtol=1e-5, atol=0)


def test_layouts(device):
    """A contiguous or strided input and gradient give what channels_last ones give, to the bit."""
    z, vectors, gradient = inputs(device, (6, 5, 4, 3), torch.float32)
    settings = {"eps": EPS, "clients": 2, "before": True, "after": True}
    last = gradient.to(memory_format=torch.channels_last)
    want = gradients(fused.relu_normalize, z, vectors, last, **settings)
    wide = torch.empty(6, 5, 4, 6, device=device)[..., ::2].copy_(z)
    spread = torch.ones((), device=device).expand(6, 5, 4, 3)
    for other in (z.contiguous(), wide):
        assert not other.is_contiguous(memory_format=torch.channels_last)
        got = gradients(fused.relu_normalize, other, vectors, gradient.contiguous(), **settings)
        assert same(got, want)
        assert got[0][0].is_contiguous(memory_format=torch.channels_last)
    check(z.contiguous(), vectors, spread, clients=2, after=True)


def test_not_a_number_is_seen(device):
    """One NaN shows in the output and in its client's and channel's statistics, and nowhere else."""
    z, vectors, _ = inputs(device, (6, 5, 4, 3), torch.float32)
    z[3, 2, 1, 1] = torch.nan
    out, mean, var = fused.relu_normalize(z, *vectors, eps=EPS, clients=3, before=True, after=True)
    assert out.isnan().sum() == 1
    assert mean.isnan().nonzero().tolist() == var.isnan().nonzero().tolist() == [[1, 2]]


def test_constant_channels_have_no_variance(device):
    z, vectors, _ = inputs(device, (6, 5, 4, 3), torch.float32, shift=False)
    _, mean, var = fused.relu_normalize(
        torch.full_like(z, 0.3), *vectors, eps=EPS, clients=2, before=True, after=False
    )
    assert (var >= 0).all()
    assert (var < 1e-12).all()
    torch.testing.assert_close(mean, torch.full_like(mean, 0.3))


def test_empty(device):
    vectors = inputs(device, (1, 5), torch.float32)[1]
    z = torch.empty(0, 5, 2, 2, device=device, requires_grad=True)
    out, mean, var = fused.relu_normalize(z, *vectors, eps=EPS, clients=2, before=True, after=False)
    out.sum().backward()
    assert z.grad.shape == out.shape == z.shape
    assert mean.shape == var.shape == (2, 5)


@pytest.mark.parametrize("shape", [(5,), (4, 5, 3), (7, 5)])
def test_refusals(device, shape):
    vector = torch.ones(5, device=device)
    with pytest.raises(ValueError):
        fused.relu_normalize(
            torch.ones(shape, device=device), None, vector, vector, None, None,
            eps=EPS, clients=2, before=True, after=False,
        )  # fmt: skip


def test_same_bits_twice(device):
    case, settings = inputs(device, (6, 64, 9, 9), torch.bfloat16), {"eps": EPS, "clients": 3, "before": True}
    first = gradients(fused.relu_normalize, *case, after=True, **settings)
    again = gradients(fused.relu_normalize, *case, after=True, **settings)
    assert same(first, again)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (6, 5)])
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_operators_are_sound(device, full, shape, layout):
    z, (shift, mean, var, weight, bias), gradient = inputs(
        device, shape, torch.float32, shift=full, weight=full, bias=full
    )
    z = z.contiguous() if layout == "contiguous" else z
    z.requires_grad_()
    for vector in (shift, weight, bias):
        if vector is not None:
            vector.requires_grad_()
    detached = [None if v is None else v.detach() for v in (gradient, z, shift, mean, var, weight, bias)]
    for share in (None, torch.tensor(0.9, device=device)):
        arguments = (z, shift, mean, var, weight, bias, EPS, 2, True, True, share)
        torch.library.opcheck(fused.operator, arguments)
        seen = (None, None) if share is None else fused.operator(*arguments)[1:]
        torch.library.opcheck(fused._operator_backward, (*detached, *seen, share, EPS, True, True))
        rows = [
            None if v is None else v.detach().expand(2, -1).clone() for v in (shift, mean, var, weight, bias)
        ]
        rows = [None if v is None else v.requires_grad_(i not in (1, 2)) for i, v in enumerate(rows)]
        torch.library.opcheck(fused.operator, (z, *rows, EPS, 2, True, True, share))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled(device, backend, dtype):
    compiled = torch.compile(fused.relu_normalize, fullgraph=True, backend=backend)
    check(*inputs(device, (6, 5, 4, 3), dtype), compiled, clients=3, after=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_between_convolutions(device, backend):
    """In a graph the layouts around the operator are the compiler's to choose: the values must not depend."""
    torch.manual_seed(0)
    first = torch.nn.Conv2d(3, 8, 3, device=device).to(memory_format=torch.channels_last)
    second = torch.nn.Conv2d(8, 4, 3, device=device).to(memory_format=torch.channels_last)
    mean, var = torch.zeros(8, device=device), torch.ones(8, device=device)
    weight, bias = torch.ones(8, device=device, requires_grad=True), torch.zeros(8, device=device)
    x = torch.randn(4, 3, 9, 9, device=device)

    def step(x, function):
        settings = {"eps": EPS, "clients": 2, "before": True, "after": False}
        z = F.conv2d(x, first.weight)
        out, seen_mean, seen_var = function(z, first.bias, mean, var, weight, bias, **settings)
        return second(out).square().mean(), seen_mean, seen_var

    def run(step, function):
        leaves = [first.weight, first.bias, second.weight, weight]
        loss, *seen = step(x, function)
        return [loss, *seen, *torch.autograd.grad(loss, leaves)]

    want = run(step, plain)
    got = run(torch.compile(step, fullgraph=True, backend=backend), fused.relu_normalize)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_in_a_captured_graph():
    """As compiled code calls it: the operator forward, and the one backward."""
    z, vectors, gradient = inputs("cuda", (30, 64, 16, 16), torch.bfloat16)
    share = torch.tensor(0.9, device="cuda")

    def step():
        forward = fused.operator(z, *vectors, EPS, 3, True, True, share)
        settings = share, EPS, True, True
        return [*forward, *fused._operator_backward(gradient, z, *vectors, *forward[1:], *settings)]

    want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for tensor in got:
        tensor.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0)
