"""How far statistics drift, and the share of BatchNorm's gradient that follows from it."""

import pytest
import torch

import fedbatchnorm as fbn
from fedbatchnorm.aggregation.drift import FIRST_SHARE, LEAST, MOST, SOUND, drift, next_share
from fedbatchnorm.norm.moments import Moments, Running


def run(deviations, steps, share=FIRST_SHARE):
    share = torch.tensor(share, dtype=torch.float64)
    for deviation in deviations:
        share = next_share(share, torch.tensor(deviation, dtype=torch.float64), steps)
    return share.item()


def test_training_that_is_sound_gets_the_papers_gradient_with_one_step_a_round():
    assert run([0.1] * 100, steps=1) == 0
    assert run([SOUND * 0.99] * 1000, steps=1) == 0
    assert run([0.1] * 10, steps=1) > 0.7  # not at once: what is let go too fast runs away


def test_with_several_steps_a_part_is_always_held():
    assert run([0.01] * 100, steps=10) == pytest.approx(LEAST)
    assert run([0.01] * 100, steps=1.5) == pytest.approx(LEAST / 2)


def test_what_runs_away_is_held_at_once_and_never_altogether():
    assert run([2.0] * 3, steps=1, share=0.0) == pytest.approx(0.875)
    assert run([2.0] * 30, steps=1, share=0.0) == pytest.approx(MOST)
    assert run([float("nan")], steps=1, share=0.0) == 0.5


def test_the_share_settles_where_drift_is_sound():
    """A federation whose drift is 2 x what is let through settles at a share of 1 - sound / 2."""
    share = torch.tensor(FIRST_SHARE, dtype=torch.float64)
    for _ in range(200):
        share = next_share(share, 2 * (1 - share), 1)
    assert share.item() == pytest.approx(1 - SOUND / 2)


def test_drift_is_that_of_the_layer_that_moves_most():
    before = [Running(torch.zeros(3), torch.full((3,), 4.0), eps=0.0), Running(torch.ones(2), torch.ones(2))]
    after = [torch.full((3,), 0.1), torch.ones(2)]
    assert drift(before, after, 0.1).item() == pytest.approx(0.5)


@pytest.mark.parametrize("steps", [1, 5])
def test_next_gradient_undoes_the_momentum_of_the_merge(steps):
    sent = {"bn": Running(torch.zeros(2), torch.ones(2))}
    mean = torch.full((2,), 2 * SOUND)
    clients = [{"bn": Moments(50, mean + d, torch.ones(2))} for d in (-1, 1)]
    merged = fbn.merge(sent, clients, steps=steps).statistics
    assert fbn.next_gradient(0.8, sent, merged, steps=steps) == pytest.approx(0.9, abs=1e-4)


def test_next_gradient_of_a_model_without_layers():
    assert fbn.next_gradient(0.7, {}, {}) == 0.7
