"""Grids: every combination once, and what makes no difference is refused."""

import numpy as np
import pytest
import torch

from fedbatchnorm.experiments import Run, grid, partition, scheme, with_own_batch
from fedbatchnorm.experiments.catalogue import FIGURES, PAPER_SCHEMES, demo, unique
from fedbatchnorm.experiments.config import digest
from fedbatchnorm.simulation.schemes import SCHEMES


def by_class(labels, clients, rng, shift=0):
    return np.array_split(np.argsort(labels, kind="stable"), clients)


def test_seeds_vary_last_and_every_combination_is_there_once():
    mine = scheme("mine", with_own_batch)
    runs = grid(scheme=["fbn", mine], gamma=np.array([0.0, 0.5]), seed=range(2), rounds=np.int64(3))
    found = [(run.seed, run.scheme, run.gamma, run.rounds) for run in runs]
    assert found == [(s, name, g, 3) for s in (0, 1) for name in ("fbn", "mine") for g in (0.0, 0.5)]
    assert all(type(run.rounds) is int for run in runs)
    assert runs[2].used("scheme") is mine.value


def test_what_makes_no_difference_to_a_run_does_not_multiply_it():
    runs = grid(
        scheme=["fbn", "groupnorm"], gradient=[0.0, 0.5, 1.0], partition=["iid", "gamma"], gamma=[0, 0.1]
    )
    assert len({digest(run) for run in runs}) == len(runs) == (3 + 1) * (1 + 2)


def test_partitions_with_parameters_are_values():
    split = partition("by_class", by_class)
    assert [r.heterogeneity() for r in grid(partition=[split(shift=1), split(shift=2), "gamma"])] == [
        ("shift", 1.0),
        ("shift", 2.0),
        ("gamma", 0.0),
    ]


WRONG = {
    "unknown": ({"gama": 0.1}, "a run has no 'gama'; did you mean 'gamma'?"),
    "own": ({"own": ()}, "a run has no 'own'"),
    "empty": ({"seed": []}, "seed is an empty list"),
    "one of them": ({"scheme": ["fbn", "fbm"]}, "scheme is 'fbm'; it must be one of"),
    "nameless": ({"dataset": (torch.zeros(4, 2), torch.zeros(4))}, "give experiments.dataset(name, (x, y))"),
    "gradient": ({"scheme": "groupnorm", "gradient": 0.5}, "but scheme groupnorm does not use it"),
    "groups": (
        {"scheme": ["fbn", "naive"], "groups": 4},
        "schemes fbn, naive do not use it; of the package's schemes groupnorm would",
    ),
    "alpha": ({"alpha": 0.1}, "alpha is given, but partition is gamma, which does not use it"),
    "gamma": ({"gamma": [0.1, 1], "partition": "iid"}, "partition is iid"),
    "decay": ({"decay": 0.9}, "schedule is step, which does not use it; it is for schedule exponential"),
    "targets": ({"targets": "means"}, "it is for byzantine above 0"),
    "momentum": ({"algorithm": "fedavg", "optimizer": "adam", "momentum": 0.5}, "optimizer is adam"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_with_a_grid_is_one_line(kind):
    settings, message = WRONG[kind]
    with pytest.raises(ValueError) as caught:
        grid(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_run_does_not_use_is_not_in_its_name():
    run = Run(scheme="groupnorm", partition="dirichlet")
    assert run.unused() >= {"gradient", "limit", "blend", "switch", "beta", "gamma", "decay", "attack"}
    assert not run.unused() & {"groups", "alpha", "scheme", "seed", "lr"}
    other = Run(
        scheme="groupnorm", partition="dirichlet", gradient=0.5, limit=2.0, gamma=0.7, decay=0.5, switch=3
    )
    assert digest(other) == digest(run)


def test_a_new_row_in_the_table_of_schemes_changes_nothing_that_was_measured(monkeypatch):
    before = [digest(run) for run in FIGURES["fig3"].runs("full", 1)]
    assert (len(before), len(demo(3))) == (24, 73)
    monkeypatch.setitem(SCHEMES, "seventh", SCHEMES["naive"])
    assert [digest(run) for run in FIGURES["fig3"].runs("full", 1)] == before
    assert len(demo(3)) == 73
    runs = unique(run for figure in FIGURES.values() for run in figure.runs("small", 1))
    assert {run.scheme for run in runs} == {*PAPER_SCHEMES}
