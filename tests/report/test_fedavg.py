"""Runs of FedAvg in a report: beside their own kind, with their baselines and the clients' own models."""

import pytest

from fedbatchnorm.experiments.archive import gather
from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.runner import run_all
from fedbatchnorm.report.claims import judge_comparison
from fedbatchnorm.report.groups import comparisons, figures_of, final_table, siege_table, sieges
from fedbatchnorm.report.liars import judge_siege
from fedbatchnorm.simulation.schemes import SCHEMES

SHORT = {"algorithm": "fedavg", "local_steps": 2, "rounds": 3, "gamma": 0.5, "evaluate_every": 3}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    struck = SHORT | {"byzantine": 3, "attack": "sf"}
    configs = [Run(**SHORT, scheme=scheme) for scheme in ("fbn", "fedbn")]
    configs += [Run(**struck), Run(**struck, defense="nnm+median"), Run(rounds=3, gamma=0.5)]
    run_all(configs, root)
    return gather(root)[0]


def test_fedavg_and_distributed_sgd_are_not_compared_with_each_other(results):
    titles = {group.title(): group for group in comparisons(results)}
    assert len(titles) == 2
    title, group = next(pair for pair in titles.items() if "fedavg" in pair[0])
    assert "fedavg, all clients x 2 steps" in title
    assert group.figure() == "Accuracy"
    assert judge_comparison(group) == []


def test_clients_with_models_of_their_own_have_a_column(results):
    group = next(g for g in comparisons(results) if g.example.algorithm == "fedavg")
    header, rows = final_table(group)
    assert header == ["gamma", "FBN", "FedBN", "FedBN, own models"]
    own = next(r.summary["client_accuracy"] for r in results if r.config.scheme == "fedbn")
    assert rows[0][-1] == f"{100 * own:.1f}"


def test_an_attack_stands_beside_its_baseline_and_is_no_figure_of_the_paper(results):
    (siege,) = sieges(results)
    _, rows = siege_table(siege)
    assert [row[0] for row in rows] == ["FBN, no attack", "FBN, no defense", "FBN, nnm+median"]
    assert figures_of(siege) == ""
    assert judge_siege(siege) == []


def test_every_scheme_has_a_title_that_labels_can_hold():
    """Labels are read back: a comma in a title would end it."""
    assert not [scheme.title for scheme in SCHEMES.values() if "," in scheme.title]
