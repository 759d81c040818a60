"""Figures 1 and 2 of the paper as numbers."""

import pytest
import torch
from torch import nn

from fedbatchnorm.experiments.catalogue import RING_GAMMAS
from fedbatchnorm.simulation.ring import Ring, normalize_ring, separability

SEEDS = range(3)


@pytest.fixture(scope="module")
def results():
    schemes = ("centralized", "fbn", "fixbn", "naive")
    return {
        (scheme, gamma): [normalize_ring(Ring(scheme=scheme, gamma=gamma, seed=seed)) for seed in SEEDS]
        for scheme in schemes
        for gamma in RING_GAMMAS
    }


def error(results, scheme, gamma):
    return torch.stack([r.distance.mean() for r in results[scheme, gamma]]).mean().item()


def test_figure_1_naive_puts_the_classes_on_top_of_each_other(results):
    for naive, central in zip(results["naive", 0.0], results["centralized", 0.0], strict=True):
        assert separability(central.normalized, central.labels) > 0.99
        assert separability(naive.normalized, naive.labels) < 0.2  # guessing gives a tenth
        assert naive.normalized.mean(1).norm(dim=1).max() < 1e-3  # every class has its mean at the origin
        assert central.normalized.mean(1).norm(dim=1).min() > 1.2


def test_figure_2a_fbn_s_picture_is_nearly_the_centralized_one(results):
    for result in results["fbn", 0.0]:
        assert separability(result.normalized, result.labels) > 0.99
        last = (result.normalized - result.centralized).norm(dim=-1).mean()
        assert last < 0.05


def test_figure_2b_fixbn_is_separable_but_wrongly_scaled(results):
    for result in results["fixbn", 0.0]:
        assert separability(result.normalized, result.labels) > 0.99
        ratio = result.normalized.norm(dim=-1).mean() / result.centralized.norm(dim=-1).mean()
        # It divides by the deviation within a class, 1, in place of that of the ring, sqrt(1 + 10^2 / 2).
        assert ratio == pytest.approx(51**0.5, rel=0.05)


def test_figure_2c_fbn_s_error_is_flat_and_small_and_the_others_grow(results):
    fbn = [error(results, "fbn", gamma) for gamma in RING_GAMMAS]
    assert max(fbn) < 0.3
    assert max(fbn) < 1.4 * min(fbn)
    for scheme in ("fixbn", "naive"):
        found = [error(results, scheme, gamma) for gamma in RING_GAMMAS]
        assert found == sorted(found)
        assert found[-1] > 5 * found[0]
    # What a trial of the same settings gave.
    assert fbn[0] == pytest.approx(0.27, abs=0.02)
    assert fbn[-1] == pytest.approx(0.22, abs=0.02)
    assert error(results, "fixbn", 1.0) == pytest.approx(0.15, abs=0.02)
    assert error(results, "fixbn", 0.0) == pytest.approx(5.15, abs=0.15)
    assert error(results, "naive", 1.0) == pytest.approx(0.23, abs=0.02)
    assert error(results, "naive", 0.0) == pytest.approx(1.70, abs=0.02)


def test_the_running_statistics_are_batch_norm_s_on_the_union(results):
    result = results["fbn", 0.0][0]
    assert result.distance.shape == (100,)
    layer = nn.BatchNorm1d(2, affine=False, momentum=1.0)
    expected = layer(result.points.flatten(0, 1))
    torch.testing.assert_close(result.centralized.flatten(0, 1), expected)
    assert result.var.tolist() == pytest.approx([51, 51], rel=0.05)
    assert results["naive", 0.0][0].var.tolist() == pytest.approx([1, 1], rel=0.1)


def test_the_seed_decides_the_points():
    one, two, other = (normalize_ring(Ring(seed=seed, rounds=3)).points for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
