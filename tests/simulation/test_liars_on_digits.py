"""What the paper claims of liars, on digits: three seeds each, 3 of 10 clients lie, gamma 0."""

import functools

import pytest
import torch

from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.runner import federation

pytestmark = pytest.mark.slow
RULES = ("nnm+median", "nnm+trimmed_mean")


@functools.cache
def accuracy(**settings):
    """Mean final accuracy in percent over three seeds."""
    found = []
    for seed in range(3):
        simulation, _ = federation(Run(dataset="digits", seed=seed, **settings), torch.device("cpu"), None)
        while simulation.step < simulation.recipe.rounds:
            simulation.round()
        found.append(simulation.evaluate().accuracy)
    return 100 * sum(found) / 3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("attack", ["sf", "foe", "alie"])
def test_defended_statistics_are_as_good_as_undisturbed_ones(attack, rule):
    calm = accuracy(gamma=0.0)
    assert accuracy(gamma=0.0, byzantine=3, attack=attack, defense=rule) > calm - 2


@pytest.mark.parametrize("attack", ["opt_foe", "opt_alie"])
def test_so_they_are_under_attacks_that_know_the_rule_which_break_a_plain_mean(attack):
    settings = {"gamma": 0.0, "byzantine": 3, "attack": attack, "rounds": 90}  # each round tries many lies
    assert accuracy(**settings, defense="nnm+trimmed_mean") > accuracy(gamma=0.0, rounds=90) - 2
    assert accuracy(**settings) < 20


@pytest.mark.parametrize(("attack", "at_least"), [("sf", 1.0), ("foe", 3.0)])
def test_undefended_attacks_on_the_statistics_do_harm(attack, at_least):
    """On digits they cost points, not everything, as they do on CIFAR-10."""
    assert accuracy(gamma=0.0, byzantine=3, attack=attack) < accuracy(gamma=0.0) - at_least


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("target", ["means", "variances"])
def test_one_liar_with_1e6_on_one_coordinate(target, rule):
    settings = {"gamma": 0.0, "byzantine": 1, "attack": "spike", "targets": target, "rounds": 150}
    assert accuracy(**settings, defense=rule) > accuracy(gamma=0.0, rounds=150) - 2


def test_one_liar_with_1e6_on_one_coordinate_of_the_gradient():
    settings = {"gamma": 0.0, "byzantine": 1, "attack": "spike", "targets": "gradients", "rounds": 150}
    assert accuracy(**settings, defense="nnm+median") > accuracy(gamma=0.0, rounds=150) - 2
    assert accuracy(**settings) < 20


@pytest.mark.parametrize("rule", RULES)
def test_with_gradients_attacked_as_well_only_the_defended_run_learns(rule):
    """Fall of empires with factor 10 on means, variances and gradients: undefended, the server climbs."""
    settings = {"gamma": 0.5, "byzantine": 3, "attack": "foe:10", "targets": "all", "rounds": 150}
    calm = accuracy(gamma=0.5, rounds=150)
    assert accuracy(**settings, defense=rule) > calm - 5
    assert accuracy(**settings) < calm - 5
