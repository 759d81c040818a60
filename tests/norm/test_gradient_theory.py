"""What docs/training.md says about the gradient of a convolution before a federated layer, in float64."""

import pytest
import torch
import torch.nn.functional as F

from fedbatchnorm.norm.moments import Running, combine, measure, normalize, update_running

EPS = 1e-12  # what eps does is a test of its own
CLIENTS, BATCH, INSIDE, OUTSIDE, SIZE = 4, 6, 3, 5, 7
SHARES = [0.0, 0.3, 0.7, 1.0]


def draw(*size, seed):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def case():
    """Clients with data of their own, a convolution, shared statistics, and the gradient from above."""
    x = draw(CLIENTS * BATCH, INSIDE, SIZE, SIZE, seed=0)
    x += draw(CLIENTS, INSIDE, 1, 1, seed=1).repeat_interleave(BATCH, 0)
    weight, bias = draw(OUTSIDE, INSIDE, 3, 3, seed=2), draw(OUTSIDE, seed=3)
    running = Running(draw(OUTSIDE, seed=4), draw(OUTSIDE, seed=5).square() + 0.5, eps=EPS)
    g = draw(CLIENTS * BATCH, OUTSIDE, SIZE, SIZE, seed=6)
    g += draw(CLIENTS, OUTSIDE, 1, 1, seed=7).repeat_interleave(BATCH, 0)
    return x, weight, bias, running, g


def gradients(case, share, limit=None):
    """Of the sum over clients of <g, y>, for the convolution's weight and bias."""
    x, weight, bias, running, g = case
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    z = F.conv2d(x, weight, bias, padding=1)
    y, _ = normalize(z, running, clients=CLIENTS, gradient=share, limit=limit)
    return torch.autograd.grad(y, (weight, bias), g)


def along(weight, gradient):
    """<W, dL/dW> by channel."""
    return (weight * gradient).flatten(1).sum(1)


def merged(z, running):
    """The statistics after a merge with momentum 1, normalized with."""
    after = update_running(running, combine(_counted(measure(z, CLIENTS))), momentum=1.0)
    return normalize(z, after)[0]


def _counted(seen):
    return seen._replace(count=torch.full((CLIENTS,), seen.count))


def test_a_merge_undoes_scale_and_shift(case):
    x, weight, bias, running, _ = case
    a, c = draw(OUTSIDE, seed=8).abs() + 0.1, draw(OUTSIDE, seed=9)
    before = merged(F.conv2d(x, weight, bias, padding=1), running)
    after = merged(F.conv2d(x, a.view(-1, 1, 1, 1) * weight, bias + c, padding=1), running)
    torch.testing.assert_close(before, after)


def test_with_constants_the_gradient_moves_scale_and_shift(case):
    x, weight, _, running, g = case
    for_weight, for_bias = gradients(case, 0.0)
    dx = g / (running.var + EPS).sqrt().view(-1, 1, 1)
    z = F.conv2d(x, weight, padding=1)  # without the bias
    torch.testing.assert_close(along(weight, for_weight), (dx * z).sum((0, 2, 3)))
    torch.testing.assert_close(for_bias, dx.sum((0, 2, 3)))
    assert along(weight, for_weight).abs().min() > 1
    assert for_bias.abs().min() > 1


@pytest.mark.parametrize("share", SHARES)
def test_a_share_leaves_one_minus_it_along_scale_and_shift(case, share):
    _, weight, *_ = case
    (for_weight, for_bias), (all_of_it, all_of_bias) = gradients(case, share), gradients(case, 0.0)
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(along(weight, for_weight), (1 - share) * along(weight, all_of_it), **close)
    torch.testing.assert_close(for_bias, (1 - share) * all_of_bias, **close)


def test_eps_leaves_a_little_of_the_scale(case):
    """The client's own deviation has eps in it: of the scale's part 1 - rho var / (var + eps) is left."""
    x, weight, bias, running, g = case
    running, own = running._replace(eps=0.1), BATCH
    z = F.conv2d(x, weight, bias, padding=1)[:own].requires_grad_()
    var, mean = torch.var_mean(z.detach(), (0, 2, 3), correction=0, keepdim=True)
    b = (z.detach() - mean) / (var + 0.1).sqrt()
    slopes = []
    for share in (0.0, 0.7):
        y, _ = normalize(z, running, gradient=share)
        slopes.append((torch.autograd.grad(y, z, g[:own])[0] * b).sum((0, 2, 3)))
    torch.testing.assert_close(slopes[1], (1 - 0.7 * var / (var + 0.1)).flatten() * slopes[0])


@pytest.mark.parametrize("share", SHARES)
def test_weights_grow_in_a_step_as_the_share_allows(case, share):
    """|W - r G|^2 = |W|^2 - 2 r (1 - rho) <W, G of FBN> + r^2 |G|^2; with rho = 1 the last term alone."""
    _, weight, *_ = case
    rate, for_weight = 0.01, gradients(case, share)[0]
    grown = (weight - rate * for_weight).flatten(1).square().sum(1) - weight.flatten(1).square().sum(1)
    second = rate**2 * for_weight.flatten(1).square().sum(1)
    first = -2 * rate * along(weight, gradients(case, 0.0)[0])
    torch.testing.assert_close(grown, (1 - share) * first + second, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("share", SHARES)
def test_of_what_lies_between_clients_one_minus_the_share_is_learned(case, share):
    """Within clients all but the slope's share comes through; between clients, and of the mean, 1 - rho."""
    x, weight, bias, running, g = case
    h = g / (running.var + EPS).sqrt().view(-1, 1, 1)
    p = F.unfold(x, 3, padding=1)  # (samples, inside * 9, places): what each output sees
    z = F.conv2d(x, weight, bias, padding=1)
    parts = [t.unflatten(0, (CLIENTS, BATCH)).flatten(3).transpose(1, 2).flatten(2) for t in (h, z)]
    h, z = parts  # (clients, channels, values)
    p = p.unflatten(0, (CLIENTS, BATCH)).transpose(1, 2).flatten(2)
    count = h.shape[2]
    h_mean, p_mean = h.mean(2, keepdim=True), p.mean(2, keepdim=True)
    b = (z - z.mean(2, keepdim=True)) / z.std(2, correction=0, keepdim=True)
    slope = (h * b).mean(2, keepdim=True)
    within = ((h - h_mean - share * b * slope) @ (p - p_mean).transpose(1, 2)).sum(0)
    h_all, p_all = h_mean.mean(0), p_mean.mean(0)
    between = count * ((h_mean - h_all) @ (p_mean - p_all).transpose(1, 2)).sum(0)
    undone = count * CLIENTS * h_all @ p_all.T
    want = within + (1 - share) * (between + undone)
    torch.testing.assert_close(gradients(case, share)[0].flatten(1), want, rtol=1e-9, atol=1e-9)

    # BatchNorm on the union keeps what lies between clients and drops the rest.
    union = [t.transpose(0, 1).flatten(1) for t in (h, p)]
    centered = (union[0] - h_all) @ (union[1] - p_all).T
    torch.testing.assert_close(centered, ((h - h_mean) @ (p - p_mean).transpose(1, 2)).sum(0) + between)


@pytest.mark.parametrize("times", [1.0, 10.0])
def test_beyond_the_limit_the_size_of_the_weights_does_not_matter(case, times):
    x, weight, bias, running, g = case
    running = running._replace(var=torch.full_like(running.var, 1e-3), mean=torch.zeros_like(running.mean))
    z = times * F.conv2d(x, weight, bias, padding=1)
    y, _ = normalize(z, running, clients=CLIENTS, limit=2.0)
    own = y.unflatten(0, (CLIENTS, BATCH)).transpose(1, 2).flatten(2).std(2, correction=0)
    torch.testing.assert_close(own, torch.full_like(own, 2.0))
    first = gradients((x, weight, bias, running, g), 0.0, limit=2.0)[0]
    larger = gradients((x, times * weight, times * bias, running, g), 0.0, limit=2.0)[0]
    torch.testing.assert_close(larger, first / times)  # and so steps do not grow with the weights
