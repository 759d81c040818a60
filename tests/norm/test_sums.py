"""Sums that no order of their terms changes, against Python's exact ones."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbatchnorm.norm.flat import of_layers, spread, union
from fedbatchnorm.norm.moments import Moments, absorb
from fedbatchnorm.norm.sums import weighted_mean

values = st.floats(-1e150, 1e150, allow_subnormal=True)
rows = st.lists(st.tuples(st.integers(0, 2**53), values, values), min_size=1, max_size=60)


def prepared(rows):
    counts = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    x = torch.tensor([row[1:] for row in rows], dtype=torch.float64)
    x[counts == 0] = 0
    share = counts / max(math.fsum(counts.tolist()), 1)
    return share.unsqueeze(1).expand_as(x), x


def exact(share, x):
    """Slow and obvious: the products as they are rounded, added up as fractions."""
    return [
        float(sum(Fraction(float(s * v)) for s, v in zip(share[:, i], x[:, i], strict=True)))
        for i in range(x.shape[1])
    ]


@given(rows, st.randoms())
def test_any_order_gives_the_same_bits_and_the_exact_sum_to_rounding(rows, random):
    share, x = prepared(rows)
    found = weighted_mean(share, x)
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert torch.equal(weighted_mean(*prepared(shuffled)), found)
    for ours, wanted, column in zip(found.tolist(), exact(share, x), x.T, strict=True):
        largest = float(column.abs().max())
        assert abs(ours - wanted) <= 2**-52 * abs(wanted) + 2**-75 * largest + 5e-324 * len(rows)


@given(rows, st.integers(1, 20))
def test_rows_without_weight_are_as_if_they_were_not_there(rows, others):
    found = weighted_mean(*prepared(rows))
    assert torch.equal(weighted_mean(*prepared([(0, 1.0, 2.0)] * others + rows)), found)


def test_a_canceling_sum_is_not_lost():
    x = torch.tensor([[1e16], [4.0], [-1e16], [0.0]], dtype=torch.float64)
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 1, 3]):
        assert weighted_mean(torch.full_like(x, 0.25), x[order]).item() == 1.0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 2**32))
def test_layers_side_by_side_are_absorbed_as_each_alone(sizes, n, seed):
    g = torch.Generator().manual_seed(seed)
    channels = sum(sizes)
    mean, var = torch.randn(n, channels, generator=g).double(), torch.rand(n, channels, generator=g).double()
    broken = torch.rand(n, channels, generator=g) < 0.1
    mean[broken] = math.nan
    count = torch.randint(0, 9, (n, len(sizes)), generator=g)
    flat = union(count, mean, var, torch.tensor(sizes))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        part = slice(start, start + size)
        nothing = Moments(torch.tensor(0), torch.zeros(size).double(), torch.zeros(size).double())
        alone, refused = absorb(nothing, Moments(count[:, i], mean[:, part], var[:, part]))
        assert (int(flat.count[i]), int(flat.refused[i])) == (int(alone.count), int(refused))
        torch.testing.assert_close(flat.mean[part], alone.mean, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(flat.var[part], alone.var, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("sizes", [[], [0], [2, 0, 3], [0, 2, 0]])
def test_layers_without_channels_have_their_place(sizes):
    channels = sum(sizes)
    sizes = torch.tensor(sizes, dtype=torch.int64)
    assert torch.equal(of_layers(torch.ones(channels, dtype=torch.bool), sizes), sizes)
    assert torch.equal(
        spread(torch.arange(len(sizes)), sizes, channels).bincount(minlength=len(sizes)), sizes
    )
