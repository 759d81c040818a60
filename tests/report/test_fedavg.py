"""Runs of FedAvg in a report: beside their own kind, with their baselines and the clients' own models."""

import pytest

from fedbatchnorm.experiments.archive import gather
from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.runner import run_all
from fedbatchnorm.report.entries import entry_of
from fedbatchnorm.report.groups import attacked, comparisons, setting
from fedbatchnorm.report.tables import final_table

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
    groups = comparisons(results)
    assert len(groups) == 2
    (group,) = [group for group in groups if group.example.algorithm == "fedavg"]
    assert "fedavg, all clients x 2 steps" in setting(group)
    assert entry_of(group) is None


def test_clients_with_models_of_their_own_have_a_column(results):
    group = next(g for g in comparisons(results) if g.example.algorithm == "fedavg")
    table = final_table(group)
    assert table.header == ["gamma", "FBN", "FedBN", "FedBN, own models"]
    own = next(r.summary["client_accuracy"] for r in results if r.config.scheme == "fedbn")
    assert table.rows[0][-1] == f"{100 * own:.1f}"


def test_an_attack_stands_beside_its_baseline_and_is_no_figure_of_the_paper(results):
    (group,) = attacked(results)
    labels = [group.label(line) for line in group.lines()]
    assert labels == ["FBN, no attack", "FBN, no defense", "FBN, nnm+median"]
    assert entry_of(group) is None
