"""The table of schemes, one layer at a time, against torch's own BatchNorm."""

import pytest
import torch
from torch import nn

from fedbatchnorm.norm.moments import Running
from fedbatchnorm.simulation.schemes import PAPER, SCHEMES, average, with_own_batch

SHAPES = [(12, 3), (12, 3, 5), (12, 3, 4, 4), (12, 3, 2, 3, 2)]
LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def test_the_schemes_are_there():
    assert PAPER == ("centralized", "fbn", "fixbn", "naive")
    more = {"groupnorm", "layernorm", "hbn", "fedbn", "silobn", "fedtan", "none", "fbn_blend"}
    assert set(SCHEMES) == {*PAPER, *more}
    for name, scheme in SCHEMES.items():
        changes = scheme.before is not scheme.after
        assert changes == (name == "fixbn")
        assert scheme.phase(4, 5) is scheme.before
        assert scheme.phase(5, 5) is scheme.after


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_own_batches_folded_equal_batch_norm_one_client_after_another(shape, clients):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    start = Running(torch.rand(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 0.5)
    layer = LAYERS[len(shape)](3).double()
    nn.init.normal_(layer.weight, generator=generator)
    nn.init.normal_(layer.bias, generator=generator)
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    outputs, means, variances = [], [], []
    for part in x.chunk(clients):
        layer.running_mean, layer.running_var = start.mean.clone(), start.var.clone()
        outputs.append(layer(part))
        means.append(layer.running_mean)
        variances.append(layer.running_var)
    wanted = torch.cat(outputs)
    wanted_grads = torch.autograd.grad(wanted, [x, layer.weight, layer.bias], grad)

    y, seen = with_own_batch(x, start, clients=clients, weight=layer.weight, bias=layer.bias)
    torch.testing.assert_close(y, wanted)
    found = torch.autograd.grad(y, [x, layer.weight, layer.bias], grad)
    torch.testing.assert_close(found, wanted_grads)
    after = average(start, seen)
    torch.testing.assert_close(after.mean, torch.stack(means).mean(0))
    torch.testing.assert_close(after.var, torch.stack(variances).mean(0))


@pytest.mark.parametrize("scheme", ["centralized", "fbn"])
def test_both_exact_schemes_end_with_the_statistics_of_the_union(scheme):
    generator = torch.Generator().manual_seed(0)
    batches = torch.randn((20, 4, 6, 3), generator=generator).double() + torch.arange(4).view(4, 1, 1)
    layer = nn.BatchNorm1d(3).double()
    running = Running(torch.zeros(3).double(), torch.ones(3).double())
    phase = SCHEMES[scheme].before
    for step, batch in enumerate(batches):
        layer(batch.flatten(0, 1))
        _, seen = phase.normalize(batch.flatten(0, 1), running, clients=1 if phase.union else 4)
        running = phase.share(running._replace(tracked=step), seen)
    torch.testing.assert_close(running.mean, layer.running_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(running.var, layer.running_var, rtol=1e-12, atol=0)


def test_a_single_value_has_no_statistics_of_its_own():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        with_own_batch(torch.randn(3, 2), Running(torch.zeros(2), torch.ones(2)), clients=3)
