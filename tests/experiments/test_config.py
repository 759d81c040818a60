"""Configurations: checked at construction, and their names."""

import dataclasses
import json
from pathlib import Path

import pytest

from fedbatchnorm.experiments import catalogue
from fedbatchnorm.experiments.config import Run, describe, digest, from_json, name_of, read_config, to_json
from fedbatchnorm.simulation.ring import Ring
from fedbatchnorm.simulation.schemes import PAPER

ROOT = Path(__file__).parents[2]


def test_a_dataset_s_usual_settings_are_the_paper_s_and_the_demo_s():
    paper, small = Run(dataset="cifar10"), Run(dataset="digits")
    assert (paper.model, paper.batch, paper.rounds, paper.evaluate_every) == ("cnn", 50, 3000, 100)
    assert (paper.clients, paper.lr, paper.momentum, paper.beta) == (10, 0.1, 0.99, 0.1)
    assert (small.model, small.batch, small.rounds) == ("mlp", 10, 300)
    assert Run(dataset="cifar10", rounds=7).rounds == 7


CHANGES = {
    "scheme": "naive",
    "clients": 9,
    "batch": 9,
    "rounds": 9,
    "lr": 0.2,
    "momentum": 0.9,
    "beta": 0.2,
    "weighting": "size",
    "precision": "float32",
    "seed": 1,
    "dataset": "gaussian_ring",
    "model": "cnn",
    "partition": "iid",
    "gamma": 0.5,
    "evaluate_every": 7,
}
FEDAVG = {
    "local_epochs": 2,
    "cohort": 3,
    "optimizer": "adam",
    "momentum_kind": "dampened",
    "local_state": "keep",
    "clip": 1.0,
    "weight_decay": 0.1,
    "prox": 0.1,
    "schedule": "cosine",
    "server": "momentum",
    "server_lr": 0.5,
    "calibrate": True,
    "augment": True,
    "gradient": 0.5,
    "limit": 2.0,
    "recalibrate": True,
}
USED = {  # only where something else asks for it
    "decay": {"schedule": "exponential", "decay": 0.9},
    "groups": {"scheme": "groupnorm", "groups": 4},
    "blend": {"scheme": "fbn_blend", "blend": 0.2},
    "server_momentum": {"server": "momentum", "server_momentum": 0.5},
}


def test_every_field_that_changes_a_result_changes_the_name():
    base = Run()
    names = {digest(dataclasses.replace(base, **{field: value})) for field, value in CHANGES.items()}
    fedavg = Run(algorithm="fedavg")
    names |= {digest(dataclasses.replace(fedavg, **{field: value})) for field, value in FEDAVG.items()}
    names |= {digest(fedavg), digest(Run(algorithm="fedavg", local_steps=3))}
    names |= {digest(Run(algorithm="fedavg", **settings)) for settings in USED.values()}
    assert len(names) == len(CHANGES) + len(FEDAVG) + len(USED) + 2
    assert digest(base) not in names
    tried = CHANGES.keys() | FEDAVG.keys() | USED.keys() | {"algorithm", "local_steps"}
    assert {f.name for f in dataclasses.fields(Run)} - tried == {
        "alpha",
        "attack",
        "byzantine",
        "defense",
        "own",
        "switch",
        "targets",
    }
    dirichlet = Run(partition="dirichlet")
    assert digest(dirichlet) != digest(dataclasses.replace(dirichlet, alpha=1.0))
    assert digest(Run(scheme="fixbn")) != digest(Run(scheme="fixbn", switch=3))
    assert digest(Ring()) != digest(Ring(gamma=0.1))


def test_what_a_run_does_not_use_does_not_change_its_name():
    assert digest(Run(gamma=0)) == digest(Run(gamma=0.0, alpha=7.0, switch=3))
    assert digest(Run(partition="iid", gamma=0.3)) == digest(Run(partition="iid"))
    assert digest(Run(scheme="fixbn")) == digest(Run(scheme="fixbn", switch=150))
    assert digest(Run(groups=4, decay=0.5)) == digest(Run())
    fedavg = {"algorithm": "fedavg", "clients": 7}
    assert digest(Run(**fedavg, cohort=7, server_momentum=0.5)) == digest(Run(**fedavg))
    for unused in (
        {"optimizer": "adam", "momentum": 0.5, "momentum_kind": "dampened"},
        {"momentum": 0.0, "momentum_kind": "dampened", "local_state": "keep"},
        {"scheme": "groupnorm", "beta": 0.5, "calibrate": True, "recalibrate": True},
        {"scheme": "hbn", "beta": 0.5},
        {"scheme": "naive", "gradient": "auto", "limit": 2.0, "blend": 0.1},
    ):
        used = {name: unused[name] for name in ("optimizer", "scheme") if name in unused}
        used |= {"momentum": 0.0} if unused.get("momentum") == 0 else {}
        assert digest(Run(**fedavg, **unused)) == digest(Run(**fedavg, **used))


def test_names_stay_the_same_from_version_to_version():
    assert digest(Run()) == "957eec1d364e3a48"
    assert digest(Ring()) == "5208cf0895267ab4"


def test_names_of_all_committed_runs_stay_the_same():
    """Every run in results/ when this was written, before configurations were checked by pydantic."""
    now = set()
    for file in sorted((ROOT / "results").rglob("*.runs.jsonl")):
        configs = (json.loads(line)["config"] for line in file.read_text().splitlines())
        now |= {name_of(*read_config(config)) for config in configs}
    for file in sorted((ROOT / "results").rglob("config.json")):
        now.add(name_of(*read_config(json.loads(file.read_text()))))
        assert file.parent.name in now
    before = (Path(__file__).parent / "names.txt").read_text().split()
    assert len(before) > 250
    assert not set(before) - now


@pytest.mark.parametrize(
    "config", [Run(), Run(partition="iid", switch=4), Ring(scheme="naive", gamma=1)], ids=describe
)
def test_a_configuration_survives_json(config):
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"kind": "training", "color": 1}, "unknown fields in a configuration: 'color'"),
        ({"kind": "other"}, "its kind must be one of training, ring"),
        ([], "not a configuration"),
        ({"kind": "training", "rounds": "300"}, "rounds is '300'"),
        ({"kind": "training", "rounds": True}, "rounds is True"),
        ({"kind": "training", "clients": None}, "clients is None"),
        ({"kind": "ring", "scheme": "<script>"}, "scheme is '<script>'"),
    ],
)
def test_a_bad_configuration_file_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        from_json(content)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scheme", "fbm"),
        ("dataset", "kmnist"),
        ("partition", "gama"),
        ("model", "resnet"),
        ("clients", 0),
        ("batch", 0),
        ("rounds", -1),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("momentum", 1.0),
        ("beta", 0.0),
        ("gamma", 1.5),
        ("alpha", 0.0),
        ("switch", -1),
        ("weighting", "unequal"),
        ("precision", "float16"),
        ("seed", -1),
        ("evaluate_every", 0),
    ],
)
def test_an_impossible_value_is_named_at_construction(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}; it must be"):
        Run(**{field: value})


def test_the_catalogue_has_the_paper_s_settings():
    runs = catalogue.FIGURES["fig3"].runs("full", 3)
    assert len(runs) == 6 * 4 * 3
    assert {r.dataset for r in runs} == {"cifar10"}
    assert {r.gamma for r in runs} == {1.0, 0.5, 0.3, 0.1, 0.01, 0.0}
    assert {r.scheme for r in runs} == set(PAPER)
    assert {(r.clients, r.batch, r.rounds, r.model) for r in runs} == {(10, 50, 3000, "cnn")}
    dirichlet = catalogue.FIGURES["fig5"].runs("full", 3)
    assert {r.alpha for r in dirichlet if r.partition == "dirichlet"} == {10.0, 1.0, 0.5, 0.1}
    shared = {digest(r) for r in runs} & {digest(r) for r in dirichlet}
    assert len(shared) == 4 * 3  # figure 5's last panel is figure 3's


@pytest.mark.parametrize("name", catalogue.FIGURES)
@pytest.mark.parametrize("scale", ["full", "small"])
def test_every_figure_at_every_scale_is_a_list_of_different_runs(name, scale):
    runs = catalogue.FIGURES[name].runs(scale, 2)
    assert len(catalogue.unique(runs)) == len(runs) > 0


def test_the_byzantine_figures_are_the_paper_s():
    main = catalogue.FIGURES["fig4"].runs("full", 3)
    assert {r.gamma for r in main} == {0.01, 0.0}
    assert {(r.byzantine, r.attack, r.defense) for r in main} == {
        (0, "none", "none"),
        (3, "sf", "none"),
        (3, "sf", "nnm+median"),
    }
    assert {r.targets_struck() for r in main if r.byzantine} == {("means",)}
    seen = {}
    for number in range(6, 12):
        runs = [r for r in catalogue.FIGURES[f"fig{number}"].runs("full", 1) if r.defense != "none"]
        assert {r.gamma for r in runs} == {0.5, 0.1, 0.01, 0.0}
        seen[number] = {(r.attack, r.defense) for r in runs}
    assert seen == {
        6: {("sf", "nnm+median")},
        7: {("sf", "nnm+trimmed_mean")},
        8: {("foe", "nnm+median")},
        9: {("foe", "nnm+trimmed_mean")},
        10: {("alie", "nnm+median")},
        11: {("alie", "nnm+trimmed_mean")},
    }
    for number, rule in ((12, "nnm+median"), (13, "nnm+trimmed_mean")):
        runs = [r for r in catalogue.FIGURES[f"fig{number}"].runs("full", 1) if r.defense != "none"]
        assert {(r.attack, r.defense, r.alpha) for r in runs} == {
            (attack, rule, alpha) for attack in ("sf", "foe", "alie") for alpha in (0.1, 1.0)
        }
