"""A run is a function of its configuration: the same bits again, however often it is interrupted."""

import contextlib
import importlib
import json
import random
import signal
import subprocess
import sys
import time

import pytest

from fedbatchnorm.experiments.config import Run, digest
from fedbatchnorm.experiments.folder import RunFolder
from fedbatchnorm.experiments.results import read_results
from fedbatchnorm.experiments.runner import Options, Stopped, Watcher, run_all
from fedbatchnorm.simulation.ring import Ring
from fedbatchnorm.simulation.schemes import SCHEMES
from fedbatchnorm.storage.files import BusyError

DSGD = [name for name, scheme in SCHEMES.items() if "dsgd" in scheme.algorithms]
SHORT = {"rounds": 23, "evaluate_every": 5, "clients": 4}
CODE = """
import json, sys, torch
from fedbatchnorm.experiments.config import from_json
from fedbatchnorm.experiments.runner import Options, run_all

torch.set_num_threads(1)
run_all([from_json(json.loads(sys.argv[2]))], sys.argv[1], Options(checkpoint_seconds=float(sys.argv[3])))
"""


def outcome(root, config):
    """Metrics without times, and the weights' bytes."""
    path = RunFolder(root, config).path
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("seconds", None)
    return rows, (path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("scheme", DSGD)
def test_the_same_configuration_gives_the_same_bits_and_another_seed_does_not(tmp_path, scheme):
    config = Run(scheme=scheme, **SHORT)
    run_all([config], tmp_path / "a")
    run_all([config], tmp_path / "b")
    other = Run(scheme=scheme, seed=1, **SHORT)
    run_all([other], tmp_path / "a")
    assert outcome(tmp_path / "a", config) == outcome(tmp_path / "b", config)
    assert outcome(tmp_path / "a", config)[0] != outcome(tmp_path / "a", other)[0]


def test_a_folder_holds_what_it_should(tmp_path):
    config = Run(**SHORT)
    (path,) = run_all([config], tmp_path)
    assert path == tmp_path / digest(config)
    names = {"config.json", "environment.json", "holdings.json", "lock", "metrics.jsonl", "model.safetensors"}
    assert {p.name for p in path.iterdir()} == names | {"summary.json"}
    rows, _ = outcome(tmp_path, config)
    assert [row["round"] for row in rows] == [5, 10, 15, 20, 23]
    summary = json.loads((path / "summary.json").read_text())
    assert summary["accuracy"] == rows[-1]["accuracy"]
    assert summary["best_accuracy"] == max(row["accuracy"] for row in rows)
    (session,) = json.loads((path / "environment.json").read_text())
    assert {"torch", "numpy", "python", "device", "threads", "commit", "fedbatchnorm"} <= session.keys()
    held = json.loads((path / "holdings.json").read_text())
    assert sum(map(sum, held["samples"])) == 1433


def test_finished_runs_are_skipped(tmp_path):
    skipped = []

    class Record(Watcher):
        def skip(self, config):
            skipped.append(config)

        def begin(self, config, step):
            assert not skipped

    configs = [Run(**SHORT), Ring(rounds=3)]
    run_all(configs, tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    run_all(configs, tmp_path, Options(watcher=Record()))
    assert skipped == configs
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}


class Crash(Watcher):
    def __init__(self, after):
        self.left = after

    def advance(self, rounds, metrics):
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError


@pytest.mark.parametrize("scheme", DSGD)
@pytest.mark.parametrize("checkpoint_seconds", [0.0, 0.02, 1000.0])
def test_a_crash_at_any_round_changes_nothing(tmp_path, scheme, checkpoint_seconds):
    config = Run(scheme=scheme, model="cnn" if checkpoint_seconds == 0.02 else "mlp", batch=4, **SHORT)
    run_all([config], tmp_path / "whole")
    rng = random.Random(scheme)
    for _ in range(4):
        options = Options(checkpoint_seconds=checkpoint_seconds, watcher=Crash(rng.randint(2, 12)))
        with contextlib.suppress(ZeroDivisionError):
            run_all([config], tmp_path / "broken", options)
    run_all([config], tmp_path / "broken")
    assert outcome(tmp_path / "broken", config) == outcome(tmp_path / "whole", config)


@pytest.mark.slow
def test_sigkill_at_random_points_changes_nothing(tmp_path):
    config = Run(scheme="fbn", rounds=600, evaluate_every=20)
    arguments = [json.dumps({"kind": "training", "scheme": "fbn", "rounds": 600, "evaluate_every": 20})]
    command = [sys.executable, "-c", CODE]
    subprocess.run([*command, tmp_path / "whole", *arguments, "1000"], check=True)
    folder = RunFolder(tmp_path / "killed", config)
    rng, killed = random.Random(0), 0
    for _ in range(4):
        before = folder.metrics_file.stat().st_size if folder.metrics_file.exists() else 0
        process = subprocess.Popen([*command, tmp_path / "killed", *arguments, "0.02"])
        while process.poll() is None:  # wait until it has done something new, then let it run on for a moment
            if folder.metrics_file.exists() and folder.metrics_file.stat().st_size > before:
                time.sleep(rng.random() * 0.2)
                process.kill()
                process.wait()
            time.sleep(0.005)
        killed += process.returncode == -signal.SIGKILL
    assert killed >= 3
    assert not folder.finished()
    subprocess.run([*command, tmp_path / "killed", *arguments, "0.02"], check=True)
    assert outcome(tmp_path / "killed", config) == outcome(tmp_path / "whole", config)
    sessions = json.loads((folder.path / "environment.json").read_text())
    assert [s["from_round"] for s in sessions] == sorted(s["from_round"] for s in sessions)
    assert sessions[-1]["from_round"] > 0


def test_asked_to_stop_it_saves_and_goes_on_later(tmp_path):
    config = Run(**SHORT)
    run_all([config], tmp_path / "whole")
    answers = iter([False] * 7 + [True] * 10)
    with pytest.raises(Stopped, match="stopped at round 8 of 23"):
        run_all([config], tmp_path / "stopped", Options(stop=lambda: next(answers)))
    steps = []

    class Record(Watcher):
        def begin(self, config, step):
            steps.append(step)

    run_all([config], tmp_path / "stopped", Options(watcher=Record()))
    assert steps == [8]
    assert outcome(tmp_path / "stopped", config) == outcome(tmp_path / "whole", config)


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="cannot be imported"):
        run_all([Run(model="no_such_module:f")], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_ring_run_holds_its_points(tmp_path):
    from safetensors.torch import load_file

    (path,) = run_all([Ring(rounds=4)], tmp_path)
    rows, _ = outcome(tmp_path, Ring(rounds=4))
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert load_file(path / "model.safetensors")["normalised"].shape == (10, 30, 2)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's own; returns what writes it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text):
        sys.modules.pop("model_of_the_user", None)
        importlib.invalidate_caches()
        (tmp_path / "model_of_the_user.py").write_text("from torch import nn\nimport torch\n" + text)

    yield write
    sys.modules.pop("model_of_the_user", None)


TIED = """
def net():
    a, b = nn.Linear(64, 64), nn.Linear(64, 64)
    b.weight = a.weight
    return nn.Sequential(nn.Flatten(), a, nn.BatchNorm1d(64), b, nn.Linear(64, 10))
"""
CHANNELS_LAST = """
def net():
    conv = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    return conv.to(memory_format=torch.channels_last)
"""


@pytest.mark.parametrize("text", [TIED, CHANNELS_LAST], ids=["tied weights", "channels_last"])
def test_unusual_models_are_saved_and_resumed(tmp_path, own, text):
    own(text)
    config = Run(model="model_of_the_user:net", **SHORT)
    run_all([config], tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        run_all([config], tmp_path / "broken", Options(checkpoint_seconds=0, watcher=Crash(9)))
    run_all([config], tmp_path / "broken")
    assert outcome(tmp_path / "broken", config) == outcome(tmp_path / "whole", config)


def test_changed_code_of_a_model_is_another_run(tmp_path, own):
    own("def net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))")
    config = Run(model="model_of_the_user:net", **SHORT)
    (one,) = run_all([config], tmp_path / "runs")
    own("def net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 10))")
    (two,) = run_all([config], tmp_path / "runs")
    assert one != two
    assert (two / "summary.json").exists()


def test_a_run_that_another_process_finished_meanwhile_is_left_alone(tmp_path, monkeypatch):
    config = Run(**SHORT)
    real, calls = RunFolder.finished, []

    def finished_only_later(folder):
        calls.append(folder)
        return len(calls) > 1 and real(folder)

    run_all([config], tmp_path)
    before = outcome(tmp_path, config)
    monkeypatch.setattr(RunFolder, "finished", finished_only_later)
    run_all([config], tmp_path, Options(watcher=Crash(1)))
    assert outcome(tmp_path, config) == before


@pytest.mark.slow
def test_processes_share_the_work(tmp_path):
    """Three at once over nine runs: each run is done once, by somebody, and all are done in the end."""
    code = (
        "import sys, pathlib, json; from fedbatchnorm.experiments.config import Run;"
        "from fedbatchnorm.experiments.runner import run_all, Options, Watcher\n"
        "class Count(Watcher):\n"
        "    begun = 0\n"
        "    def begin(self, config, step): self.begun += 1\n"
        "watch = Count()\n"
        "runs = [Run(scheme='fbn', rounds=60, seed=s) for s in range(9)]\n"
        "run_all(runs, pathlib.Path(sys.argv[1]), Options(watcher=watch, share=True))\n"
        "print(watch.begun)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    begun = [int(worker.communicate(timeout=120)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert sum(begun) == 9
    assert len(read_results(tmp_path)[0]) == 9


def test_a_run_that_another_process_is_at_is_left_to_it_or_an_error(tmp_path):
    runs = [Run(scheme="fbn", rounds=3, seed=seed) for seed in range(2)]
    left = []

    class Note(Watcher):
        def leave(self, config):
            left.append(config)

    with RunFolder(tmp_path, runs[0]).open():
        run_all(runs, tmp_path, Options(watcher=Note(), share=True))
        with pytest.raises(BusyError, match="another process"):
            run_all(runs, tmp_path)
    assert left == [runs[0]]
    assert [r.config for r in read_results(tmp_path)[0]] == [runs[1]]
    run_all(runs, tmp_path, Options(share=True))
    assert len(read_results(tmp_path)[0]) == 2
