"""Runs of FedAvg: their settings and names, and the same bits however often they are interrupted."""

import contextlib
import dataclasses
import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from fedbatchnorm.experiments.config import Run, describe, digest, from_json, to_json
from fedbatchnorm.experiments.folder import RunFolder
from fedbatchnorm.experiments.runner import Options, Watcher, run_all
from fedbatchnorm.simulation.recipe import LATER, Recipe

# Runs that keep something from one round to the next, each in its own way.
KEPT = {
    "kept momentum": {"scheme": "fixbn", "local_state": "keep", "cohort": 3, "local_steps": 2, "switch": 40},
    "kept adam, server's adam": {
        "scheme": "fbn",
        "local_state": "keep",
        "optimizer": "adam",
        "lr": 1e-3,
        "server": "adam",
        "server_lr": 0.01,
        "cohort": 4,
        "local_steps": 2,
    },
    "own layers, server's momentum": {
        "scheme": "fedbn",
        "server": "momentum",
        "local_state": "keep",
        "cohort": 3,
        "local_steps": 2,
        "schedule": "cosine",
    },
    "own statistics, calibrated": {
        "scheme": "silobn",
        "cohort": 2,
        "local_epochs": 1,
        "batch": 60,
        "calibrate": True,
    },
    "own mixtures": {"scheme": "hbn", "cohort": 3, "local_steps": 2, "augment": True, "clip": 1.0},
}
# As many rounds as it takes to be killed in the middle of them.
LONG = {"dataset": "digits", "algorithm": "fedavg", "clients": 6, "rounds": 200, "evaluate_every": 10}
CODE = """
import json, sys, torch
from fedbatchnorm.experiments.config import from_json
from fedbatchnorm.experiments.runner import Options, run_all

torch.set_num_threads(1)
torch.manual_seed(int(sys.argv[4]))
configs = [from_json({"kind": "training"} | content) for content in json.loads(sys.argv[2])]
run_all(configs, sys.argv[1], Options(checkpoint_seconds=float(sys.argv[3])))
"""


def outcome(root, config):
    """Metrics without times, and the weights' bytes."""
    path = RunFolder(root, config).path
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("seconds", None)
    return rows, (path / "model.safetensors").read_bytes()


class Crash(Watcher):
    def __init__(self, after):
        self.left = after

    def advance(self, rounds, metrics):
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError


@pytest.mark.slow
def test_sigkill_at_random_points_changes_nothing(tmp_path):
    settings = [LONG | more for more in KEPT.values()]
    configs = [Run(**fields) for fields in settings]
    command = [sys.executable, "-c", CODE]
    subprocess.run([*command, tmp_path / "whole", json.dumps(settings), "1000", "0"], check=True)
    rng, killed = random.Random(0), 0
    for config in configs:
        folder = RunFolder(tmp_path / "killed", config)
        for _ in range(2):
            before = folder.metrics_file.stat().st_size if folder.metrics_file.exists() else 0
            arguments = [tmp_path / "killed", json.dumps(settings), "0.02", str(killed)]
            process = subprocess.Popen([*command, *arguments])
            while process.poll() is None:  # wait until it has done something new, then for a moment more
                if folder.metrics_file.exists() and folder.metrics_file.stat().st_size > before:
                    time.sleep(rng.random() * 0.2)
                    process.kill()
                    process.wait()
                time.sleep(0.005)
            killed += process.returncode == -signal.SIGKILL
    assert killed >= 2 * len(configs) - 2
    assert not RunFolder(tmp_path / "killed", configs[-1]).finished()
    subprocess.run([*command, tmp_path / "killed", json.dumps(settings), "0.02", "99"], check=True)
    for config in configs:
        assert outcome(tmp_path / "killed", config) == outcome(tmp_path / "whole", config), describe(config)
        path = RunFolder(tmp_path / "killed", config).path
        sessions = json.loads((path / "environment.json").read_text())
        assert sessions[-1]["from_round"] > 0, describe(config)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("model", ["mlp", "cnn16"])
def test_a_crash_at_any_round_changes_nothing(tmp_path, kept, model):
    short = LONG | KEPT[kept] | {"rounds": 17, "evaluate_every": 4, "batch": 6, "model": model, "switch": 8}
    config = Run(**short | ({"local_epochs": None, "local_steps": 2} if model == "cnn16" else {}))
    run_all([config], tmp_path / "whole")
    rng = random.Random(kept)
    for i in range(3):
        torch.manual_seed(i)  # whatever state the process is in
        options = Options(checkpoint_seconds=0, watcher=Crash(rng.randint(2, 7)))
        with contextlib.suppress(ZeroDivisionError):
            run_all([config], tmp_path / "broken", options)
    assert not RunFolder(tmp_path / "broken", config).finished()
    run_all([config], tmp_path / "broken")
    assert outcome(tmp_path / "broken", config) == outcome(tmp_path / "whole", config)


def test_a_run_with_dropout_and_fedtan_s_first_step_is_resumed_to_the_same_bits(tmp_path):
    fields = {"scheme": "fedtan", "model": "cnn", "batch": 4, "rounds": 5, "evaluate_every": 2, "cohort": 3}
    config = Run(**LONG | fields | {"local_steps": 2})
    torch.manual_seed(0)
    run_all([config], tmp_path / "whole")
    torch.manual_seed(1)
    with pytest.raises(ZeroDivisionError):
        run_all([config], tmp_path / "broken", Options(checkpoint_seconds=0, watcher=Crash(3)))
    run_all([config], tmp_path / "broken")
    assert outcome(tmp_path / "broken", config) == outcome(tmp_path / "whole", config)


@pytest.mark.parametrize("scheme", ["fedbn", "silobn", "hbn", "fbn"])
def test_metrics_tell_of_the_clients_own_models_where_they_have_some(tmp_path, scheme):
    config = Run(**LONG | {"scheme": scheme, "rounds": 4, "evaluate_every": 2, "local_steps": 1})
    (path,) = run_all([config], tmp_path)
    rows, _ = outcome(tmp_path, config)
    summary = json.loads((path / "summary.json").read_text())
    own = scheme in ("fedbn", "silobn")
    assert [{"client_accuracy", "client_loss"} <= row.keys() for row in rows] == [own, own]
    assert summary.get("client_accuracy") == (rows[-1]["client_accuracy"] if own else None)


def test_what_is_usual_depends_on_the_algorithm():
    names = ("lr", "momentum", "momentum_kind", "local_state", "schedule", "weighting", "local_epochs")
    found = {a: [getattr(Recipe(algorithm=a), name) for name in names] for a in ("dsgd", "fedavg")}
    assert found["dsgd"] == [0.1, 0.99, "dampened", "keep", "step", "equal", None]
    assert found["fedavg"] == [0.05, 0.9, "ordinary", "reset", "constant", "size", 1]
    assert Recipe(algorithm="fedavg", local_steps=3).local_epochs is None
    assert Recipe(algorithm="fedavg", lr=1, momentum=0).lr == 1.0
    assert Recipe().algorithm == Run().algorithm == "dsgd"
    assert (Run(dataset="cifar10", algorithm="fedavg").rounds, Run(algorithm="fedavg").rounds) == (300, 30)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("local_steps", 2),
        ("local_epochs", 1),
        ("cohort", 9),
        ("optimizer", "adam"),
        ("prox", 0.1),
        ("server", "momentum"),
        ("server_lr", 0.5),
        ("server_momentum", 0.5),
        ("local_state", "reset"),
    ],
)
def test_what_only_fedavg_can_do_is_refused_for_distributed_sgd(field, value):
    message = "under dsgd clients keep" if field == "local_state" else f"{field} is for algorithm fedavg"
    for kind in (Recipe, Run):
        assert getattr(kind(algorithm="fedavg", **{field: value}), field) == value
        with pytest.raises(ValueError, match=message):
            kind(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheme": "centralized"}, "scheme 'centralized' is for algorithm dsgd, not for fedavg"),
        ({"local_steps": 2, "local_epochs": 2}, "local_steps and local_epochs are both given"),
        ({"cohort": 11}, "cohort is 11 of 10 clients; it must be at most all"),
        ({"cohort": 0}, "cohort is 0; it must be at least 1"),
        ({"schedule": "linear"}, "schedule is 'linear'; it must be one of constant, step, cosine, exponent"),
        ({"optimizer": "lion"}, "optimizer is 'lion'; it must be one of sgd, adam"),
        ({"server": "median"}, "server is 'median'; it must be one of mean, momentum, adam"),
        ({"algorithm": "fedsgd"}, "algorithm is 'fedsgd'; it must be one of dsgd, fedavg"),
        ({"momentum_kind": "heavy"}, "momentum_kind is 'heavy'; it must be one of ordinary, dampened"),
        ({"local_state": "share"}, "local_state is 'share'; it must be one of reset, keep"),
        ({"local_steps": 0}, "local_steps is 0; it must be at least 1"),
        ({"local_epochs": 1.5}, "local_epochs is 1.5; it must be at least 1"),
        ({"clip": 0.0}, "clip is 0.0; it must be positive"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; it must be at least 0"),
        ({"prox": -1.0}, "prox is -1.0; it must be at least 0"),
        ({"decay": 1.1}, "decay is 1.1; it must be above 0 and at most 1"),
        ({"server_lr": 0.0}, "server_lr is 0.0; it must be positive"),
        ({"server_momentum": 1.0}, "server_momentum is 1.0; it must be at least 0 and below 1"),
        ({"calibrate": 1}, "calibrate is 1; it must be true or false"),
        ({"augment": "yes"}, "augment is 'yes'; it must be true or false"),
        ({"groups": 0}, "groups is 0; it must be at least 1"),
    ],
)
def test_an_impossible_setting_of_fedavg_is_named(fields, message):
    for kind in (Recipe, Run):
        with pytest.raises(ValueError, match=message):
            kind(**{"algorithm": "fedavg"} | fields)


@pytest.mark.parametrize("scheme", ["hbn", "fedbn", "silobn", "fedtan"])
def test_schemes_of_fedavg_alone_are_refused_for_distributed_sgd(scheme):
    assert Recipe(scheme=scheme, algorithm="fedavg").scheme == scheme
    with pytest.raises(ValueError, match=f"scheme '{scheme}' is for algorithm fedavg, not for dsgd"):
        Recipe(scheme=scheme)


PLAIN = {  # what every new field is where nothing else is asked for
    "local_steps": None,
    "cohort": None,
    "optimizer": "sgd",
    "clip": None,
    "weight_decay": 0.0,
    "prox": 0.0,
    "decay": 0.998,
    "server": "mean",
    "server_lr": 1.0,
    "server_momentum": 0.9,
    "calibrate": False,
    "augment": False,
    "groups": 2,
    "gradient": 0.0,
    "limit": None,
    "blend": 0.5,
    "recalibrate": False,
}
USUAL = {
    "dsgd": {
        "algorithm": "dsgd",
        "lr": 0.1,
        "momentum": 0.99,
        "momentum_kind": "dampened",
        "local_state": "keep",
        "schedule": "step",
        "weighting": "equal",
        "local_epochs": None,
    },
    "fedavg": {
        "algorithm": "fedavg",
        "lr": 0.05,
        "momentum": 0.9,
        "momentum_kind": "ordinary",
        "local_state": "reset",
        "schedule": "constant",
        "weighting": "size",
        "local_epochs": 1,
    },
}


@pytest.mark.parametrize("algorithm", ["dsgd", "fedavg"])
def test_a_field_given_as_it_usually_is_does_not_change_the_name(algorithm):
    given = PLAIN | USUAL[algorithm]
    assert {*LATER} <= given.keys()
    base = Run(algorithm=algorithm)
    for field, value in given.items():
        assert digest(Run(**{"algorithm": algorithm, field: value})) == digest(base), field
    assert digest(Run(**given)) == digest(base)
    assert (digest(base) == "957eec1d364e3a48") == (algorithm == "dsgd")


def test_new_fields_change_the_name_of_a_run_of_distributed_sgd_where_they_are_not_as_usual():
    changes = {
        "momentum_kind": "ordinary",
        "clip": 1.0,
        "weight_decay": 0.1,
        "schedule": "cosine",
        "calibrate": True,
        "augment": True,
    }
    names = {digest(Run(**{field: value})) for field, value in changes.items()}
    names |= {digest(Run(schedule="exponential", decay=decay)) for decay in (0.9, 0.998)}
    names |= {digest(Run(scheme="groupnorm", groups=groups)) for groups in (2, 4)}
    assert len(names | {digest(Run())}) == len(changes) + 2 + 2 + 1


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (
            {},
            {
                "lr": 0.1,
                "momentum": 0.5,
                "weighting": "equal",
                "local_steps": 1,
                "local_epochs": 2,
                "cohort": 3,
                "optimizer": "adam",
                "momentum_kind": "dampened",
                "local_state": "keep",
                "clip": 1.0,
                "weight_decay": 0.1,
                "prox": 0.1,
                "schedule": "step",
                "server": "adam",
                "server_lr": 0.5,
                "calibrate": True,
                "augment": True,
            },
        ),
        ({"schedule": "exponential"}, {"decay": 0.9}),
        ({"server": "momentum"}, {"server_momentum": 0.5}),
        ({"scheme": "groupnorm"}, {"groups": 4}),
        ({"byzantine": 3, "attack": "sf"}, {"cohort": 9, "targets": "all", "defense": "median"}),
    ],
)
def test_every_field_that_changes_a_run_of_fedavg_changes_its_name(base, changes):
    base = {"algorithm": "fedavg"} | base
    names = {digest(Run(**base | {field: value})) for field, value in changes.items()}
    assert len(names | {digest(Run(**base))}) == len(changes) + 1


@pytest.mark.parametrize("kept", KEPT)
def test_a_run_of_fedavg_survives_json_and_keeps_its_name(kept):
    config = Run(**LONG | KEPT[kept])
    again = from_json(json.loads(json.dumps(to_json(config))))
    assert again == config
    assert digest(again) == digest(config)


def test_a_configuration_from_before_fedavg_is_one_of_distributed_sgd():
    old = {k: v for k, v in to_json(Run()).items() if k not in LATER}
    assert from_json(old) == Run()


def test_a_changed_copy_of_a_run_takes_other_local_work_and_liars():
    run = Run(algorithm="fedavg")
    assert dataclasses.replace(run, local_epochs=3).local_epochs == 3
    steps = dataclasses.replace(run, local_epochs=None, local_steps=3)
    assert (steps.local_steps, steps.local_epochs) == (3, None)
    lied = dataclasses.replace(run, byzantine=1, attack="sf", weighting=None)
    assert lied.weighting == "equal"
