import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbatchnorm import Moments, Running, Sums, Update, from_sums, merge, to_sums


def clients(seed, n, offset):
    g = torch.Generator().manual_seed(seed)
    updates = []
    for _ in range(n):
        x = torch.randn(int(torch.randint(2, 20, (), generator=g)), 3, generator=g, dtype=torch.float64)
        x = x * (1 + torch.rand(3, generator=g)) + offset
        updates.append({"bn": Moments(len(x), x.mean(0), x.var(0, correction=0))})
    return updates


@given(st.integers(0, 2**32), st.integers(1, 10), st.sampled_from([0.0, 1.0, -30.0, 1e3]))
def test_a_server_that_sees_only_sums_merges_the_same(seed, n, offset):
    updates = clients(seed, n, offset)
    shared = {"bn": Running(torch.zeros(3).double(), torch.ones(3).double(), tracked=4)}
    for _ in range(3):  # in the first round the shared mean is far from the data, then no longer
        expected = merge(shared, updates).statistics
        total = {"bn": sum(to_sums(update, shared)["bn"] for update in updates)}
        seen = from_sums(total, shared)
        assert seen.round == shared["bn"].tracked
        result = merge(shared, [seen])
        assert result.updated
        torch.testing.assert_close(result.statistics["bn"].mean, expected["bn"].mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(result.statistics["bn"].var, expected["bn"].var, rtol=1e-9, atol=1e-9)
        shared = expected


def test_nobody_saw_anything():
    shared = {"bn": Running(torch.zeros(2), torch.ones(2))}
    nothing = {"bn": Moments(0, torch.zeros(2), torch.zeros(2))}
    result = merge(shared, [from_sums(to_sums(nothing, shared), shared)])
    assert result.verdicts[0].reason == "empty"


def test_constant_values_have_variance_zero_not_a_hair_below():
    values = torch.linspace(-3, 3, 500, dtype=torch.float64)
    shared = {"bn": Running(torch.full_like(values, 0.3), torch.full_like(values, 0.7))}
    updates = [{"bn": Moments(7, values, torch.zeros_like(values))} for _ in range(9)]
    total = {"bn": sum(to_sums(update, shared)["bn"] for update in updates)}
    count, z, zz = total["bn"].count, total["bn"].z, total["bn"].zz
    assert (zz / count - (z / count).square()).min() < 0  # what rounding leaves
    assert from_sums(total, shared)["bn"].var.min() >= 0
    assert merge(shared, [from_sums(total, shared)]).updated


def test_impossible_sums_are_left_to_the_verdict():
    shared = {"bn": Running(torch.zeros(1), torch.ones(1))}
    total = {"bn": Sums(4, torch.tensor([8.0]), torch.tensor([1.0]))}
    assert merge(shared, [from_sums(total, shared)]).verdicts[0].reason == "impossible_moments"


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        (Sums(1.5, torch.zeros(2), torch.zeros(2)), "whole number"),
        (Sums(-1, torch.zeros(2), torch.zeros(2)), "whole number"),
        (Sums(float("nan"), torch.zeros(2), torch.zeros(2)), "whole number"),
        (Sums(float("inf"), torch.zeros(2), torch.zeros(2)), "whole number"),
        (Sums(1, torch.zeros(1), torch.zeros(2)), r"shape \(1,\)"),
    ],
)
def test_unusable_sums_name_the_layer(sums, message):
    shared = {"bn": Running(torch.zeros(2), torch.ones(2))}
    with pytest.raises(ValueError, match=f"layer 'bn'.*{message}"):
        from_sums({"bn": sums}, shared)


def test_sums_of_another_model_are_refused():
    shared = {"bn": Running(torch.zeros(2), torch.ones(2))}
    update = {"other": Moments(1, torch.zeros(2), torch.zeros(2))}
    with pytest.raises(ValueError, match=r"missing \['bn'\], unexpected \['other'\]"):
        to_sums(update, shared)


def test_sums_hide_neither_a_stale_round_nor_a_wrong_shape():
    shared = {"bn": Running(torch.zeros(2), torch.ones(2), tracked=5)}
    stale = Update({"bn": Moments(1, torch.zeros(2), torch.zeros(2))}, round=2)
    with pytest.raises(ValueError, match="of round 2, the statistics are of 5"):
        to_sums(stale, shared)
    with pytest.raises(ValueError, match=r"layer 'bn': moments of shape \(1,\)"):
        to_sums({"bn": Moments(1, torch.zeros(1), torch.zeros(2))}, shared)


def test_sums_only_add_to_sums():
    with pytest.raises(TypeError):
        1 + Sums(1, torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e3])
@pytest.mark.parametrize("seed", range(3))
def test_over_many_rounds_a_server_of_sums_stays_with_an_exact_one(seed, offset):
    """Each has statistics of its own, as two federations would; nothing is compared in between."""
    exact = {"bn": Running(torch.zeros(3).double(), torch.ones(3).double())}
    summed = dict(exact)
    for round_ in range(60):
        updates = clients(1000 * seed + round_, 32, offset)
        exact = merge(exact, updates).statistics
        total = {"bn": sum(to_sums(update, summed)["bn"] for update in updates)}
        summed = merge(summed, [from_sums(total, summed)]).statistics
    sd = exact["bn"].var.sqrt()
    assert (
        (summed["bn"].mean - exact["bn"].mean).abs() / torch.maximum(exact["bn"].mean.abs(), sd)
    ).max() < 1e-9
    assert (summed["bn"].var / exact["bn"].var - 1).abs().max() < 1e-9
