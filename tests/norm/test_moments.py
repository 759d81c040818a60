import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, vmap

from fedbatchnorm import Moments, Running, normalize
from fedbatchnorm.norm.moments import absorb, combine, measure, round_momentum, update_running

SHAPES = [(12, 3), (12, 3, 5), (12, 3, 4, 5), (12, 3, 2, 3, 4)]


def reference(x):
    """Mean and biased variance per channel in float64, from the definition."""
    values = x.double().movedim(1, 0).flatten(1)
    mean = values.sum(1) / values.shape[1]
    return mean, (values - mean[:, None]).square().sum(1) / values.shape[1]


def stack(rows):
    counts, means, variances = zip(*rows, strict=True)
    return Moments(torch.tensor(counts), torch.stack(means), torch.stack(variances))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("clients", [1, 3, 12])
def test_measure_equals_the_definition_for_each_client(shape, clients, generator):
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    seen = measure(x, clients)
    assert seen.mean.shape == seen.var.shape == (clients, 3)
    for i, part in enumerate(x.chunk(clients)):
        mean, var = reference(part)
        assert seen.count == part.numel() // 3
        torch.testing.assert_close(seen.mean[i], mean, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(seen.var[i], var, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("offset", [0.0, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("shape", [(64, 8), (100, 8, 32, 32), (400, 16, 28, 28)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_precision_survives_offsets_and_short_types(dtype, offset, shape, layout, generator):
    if layout == "channels_last" and len(shape) < 4:
        shape = (64, 8, 3, 3)
    # Channel 0 has a hundredth of the spread: the worst one decides.
    scale = torch.ones(shape[1]).index_fill_(0, torch.tensor([0]), 0.01 if offset < 1e4 else 1.0)
    x = torch.randn(shape, generator=generator) * scale.view(1, -1, *[1] * (len(shape) - 2)) + offset
    x = x.to(dtype)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    seen = measure(x)
    mean, var = reference(x)
    assert seen.mean.dtype == seen.var.dtype == torch.float32
    torch.testing.assert_close(seen.mean[0].double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(seen.var[0].double(), var, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((1_000_001, 2), torch.contiguous_format),
        ((25, 4, 111, 111), torch.channels_last),
        ((1, 4, 511, 511), torch.channels_last),
        ((1, 4, 511, 511), torch.contiguous_format),
        ((1, 2, 2049, 1023), torch.contiguous_format),
        ((37, 5, 9, 7), torch.channels_last),
        ((1025, 9, 2, 2), torch.contiguous_format),
        ((41, 500, 2, 2), torch.contiguous_format),
        ((2, 3000, 4, 4), torch.contiguous_format),
        ((1, 6000, 3, 3), torch.contiguous_format),
        ((33, 1100), torch.contiguous_format),
    ],
)
@pytest.mark.parametrize("values", ["normal", "sign"])
def test_precision_does_not_depend_on_how_the_count_divides(shape, layout, values, generator):
    x = torch.randn(shape, generator=generator)
    x = (x if values == "normal" else 0.7 * x.sign()).contiguous(memory_format=layout)
    seen = measure(x)
    mean, var = reference(x)
    torch.testing.assert_close(seen.mean[0].double(), mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(seen.var[0].double(), var, rtol=1e-5, atol=0)


@pytest.mark.parametrize("offset", [2.0, 100.0, 1e4])
@pytest.mark.parametrize("shape", [(40, 300, 2, 2), (1030, 20, 2, 2), (3, 2000, 3, 3)])
def test_short_planes_are_as_exact_as_long_ones(shape, offset, generator):
    x = torch.randn(shape, generator=generator) + offset
    x[:, 0] = offset + 0.1  # to be found constant
    x[:, 1] -= offset
    seen, (mean, var) = measure(x), reference(x)
    torch.testing.assert_close(seen.mean[0].double(), mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(seen.var[0].double(), var, rtol=2e-6, atol=0)
    assert seen.var[0, 0] == 0


def test_an_empty_batch_counts_zero():
    seen = measure(torch.zeros(0, 3, 4, 4))
    assert seen.count == 0
    assert seen.mean.tolist() == seen.var.tolist() == [[0.0, 0.0, 0.0]]
    assert measure(torch.zeros(4, 0)).mean.shape == (1, 0)


@pytest.mark.parametrize(("shape", "clients"), [((6,), 1), ((6, 2), 4), ((6, 2), 0)])
def test_measure_refuses_what_does_not_split(shape, clients):
    with pytest.raises(ValueError, match=r"shape \(6,\)|does not split"):
        measure(torch.zeros(shape), clients)


@pytest.mark.parametrize("shape", SHAPES)
def test_normalize_is_batch_norm_in_evaluation_mode_forward_and_backward(shape, generator):
    torch.manual_seed(0)
    bn = nn.BatchNorm1d(3).double().eval()
    bn.running_mean.uniform_(-1, 1), bn.running_var.uniform_(0.5, 2)
    for parameter in bn.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    flat = x.flatten(2) if x.dim() > 2 else x
    inputs = (x, bn.weight, bn.bias)
    y, _ = normalize(x, Running(bn.running_mean, bn.running_var), clients=3, weight=bn.weight, bias=bn.bias)
    torch.testing.assert_close(y.view_as(flat), bn(flat), rtol=1e-14, atol=1e-14)
    ours = torch.autograd.grad(y.sin().sum(), inputs)
    theirs = torch.autograd.grad(bn(flat).sin().sum(), inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_gradcheck():
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    running = Running(torch.randn(3).double(), torch.rand(3).double() + 0.5)

    def f(x, weight, bias):
        return normalize(x, running, weight=weight, bias=bias)[0]

    assert torch.autograd.gradcheck(f, (x, weight, bias))
    assert torch.autograd.gradgradcheck(f, (x, weight, bias))


def test_no_gradient_flows_through_the_statistics():
    mean, var = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    x = torch.randn(4, 3, requires_grad=True)
    y, seen = normalize(x, Running(mean, var))
    y.sum().backward()
    assert mean.grad is None
    assert var.grad is None
    assert not seen.mean.requires_grad
    assert not seen.var.requires_grad


def test_vmap_over_clients_equals_the_fold(generator):
    x = torch.randn(5 * 4, 3, 6, 6, generator=generator, dtype=torch.float64)
    weight = torch.ones(3, dtype=torch.float64)
    running = Running(torch.zeros(3).double(), torch.ones(3).double())

    def loss(weight, x):
        y, seen = normalize(x, running, weight=weight)
        return y.square().sum(), (seen.mean, seen.var)

    grads, (mean, var) = vmap(grad(loss, has_aux=True), (None, 0))(weight, x.unflatten(0, (5, 4)))
    folded = measure(x, clients=5)
    torch.testing.assert_close(mean.flatten(0, 1), folded.mean, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(var.flatten(0, 1), folded.var, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(
        grads, torch.stack([grad(loss, has_aux=True)(weight, p)[0] for p in x.chunk(5)])
    )


@pytest.mark.slow
def test_compiled_vmap_gives_each_client_its_moments(generator):
    x = torch.randn(5, 4, 3, 6, 6, generator=generator)
    running = Running(torch.zeros(3), torch.ones(3))

    def loss(weight, x):
        y, seen = normalize(x, running, weight=weight)
        return y.square().sum(), (seen.mean, seen.var)

    step = vmap(grad(loss, has_aux=True), (None, 0))
    torch.testing.assert_close(
        torch.compile(step)(torch.ones(3), x), step(torch.ones(3), x), rtol=1e-4, atol=1e-5
    )


def random_rows(seed, n, c=3, offset=0.0):
    g = torch.Generator().manual_seed(seed)
    batches = [
        torch.randn(int(torch.randint(1, 9, (), generator=g)), c, generator=g, dtype=torch.float64)
        * torch.rand(c, generator=g, dtype=torch.float64)
        + torch.randn(c, generator=g, dtype=torch.float64)
        + offset
        for _ in range(n)
    ]
    return batches, [Moments(len(b), *reference(b)) for b in batches]


seeds = st.integers(0, 2**32)


@given(seeds, st.integers(1, 12), st.sampled_from([0.0, 1e3]))
def test_combine_equals_the_union(seed, n, offset):
    batches, rows = random_rows(seed, n, offset=offset)
    union = combine(stack(rows))
    mean, var = reference(torch.cat(batches))
    assert int(union.count) == sum(map(len, batches))
    torch.testing.assert_close(union.mean, mean, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(union.var, var, rtol=1e-11, atol=1e-20 + 1e-24 * offset**2)


@given(seeds, st.integers(2, 12), st.randoms())
def test_combine_does_not_depend_on_the_order_of_clients(seed, n, random):
    _, rows = random_rows(seed, n, offset=1e3)
    expected = combine(stack(rows))
    random.shuffle(rows)
    assert all(map(torch.equal, combine(stack(rows)), expected))


@given(seeds, st.integers(2, 8), st.integers(1, 7))
def test_combine_is_associative(seed, n, cut):
    _, rows = random_rows(seed, n + 1)
    cut = min(cut, n)
    left, right = combine(stack(rows[:cut])), combine(stack(rows[cut:]))
    for one, other in zip(combine(stack([left, right])), combine(stack(rows)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@given(seeds, st.integers(1, 8))
def test_a_client_without_values_is_the_identity(seed, n):
    _, rows = random_rows(seed, n)
    nobody = Moments(0, torch.full((3,), 7.0).double(), torch.full((3,), 9.0).double())
    for one, other in zip(combine(stack([*rows, nobody])), combine(stack(rows)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)


@given(seeds, st.floats(-5, 5).filter(lambda a: abs(a) > 1e-3), st.floats(-100, 100))
def test_combine_is_affine_equivariant(seed, a, b):
    _, rows = random_rows(seed, 5)
    moved = [Moments(r.count, a * r.mean + b, a * a * r.var) for r in rows]
    plain, union = combine(stack(rows)), combine(stack(moved))
    torch.testing.assert_close(union.mean, a * plain.mean + b, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(union.var, a * a * plain.var, rtol=1e-9, atol=1e-11)


def test_combine_of_nobody_is_zero():
    union = combine(stack([Moments(0, torch.ones(2).double(), torch.ones(2).double())]))
    assert int(union.count) == 0
    assert union.mean.tolist() == union.var.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["mean", "var"])
def test_absorb_refuses_and_counts_what_is_not_finite(bad, field):
    seen = Moments(torch.tensor(4), torch.ones(2).double(), torch.ones(2).double())
    new = Moments(3, torch.zeros(2, 2), torch.zeros(2, 2))
    getattr(new, field)[1, 0] = bad
    after, refused = absorb(seen, new)
    expected, _ = absorb(seen, Moments(3, torch.zeros(1, 2), torch.zeros(1, 2)))
    assert int(refused) == 1
    assert all(map(torch.equal, after, expected))


@given(st.floats(1e-6, 1), st.integers(1, 50))
def test_a_round_of_steps_weighs_as_much_as_its_steps(momentum, steps):
    kept = 1.0
    for _ in range(steps):
        kept *= 1 - momentum
    assert round_momentum(momentum, 0, steps) == pytest.approx(1 - kept, rel=1e-9)


def test_a_momentum_of_none_averages_over_all_steps():
    running = Running(torch.zeros(1).double(), torch.ones(1).double(), momentum=None)
    for value in (3.0, 5.0, 10.0):
        running = update_running(running, Moments(1, torch.tensor([value]), torch.zeros(1)))
    assert running.mean.item() == pytest.approx(6.0)
    assert running.tracked == 3


def test_update_casts_back_and_keeps_the_counter_an_integer():
    running = update_running(
        Running(torch.zeros(1), torch.ones(1)),
        Moments(4, torch.ones(1).double(), torch.ones(1).double()),
        steps=2.4,
    )
    assert running.mean.dtype == running.var.dtype == torch.float32
    assert (type(running.tracked), running.tracked) == (int, 2)
