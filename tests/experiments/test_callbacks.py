"""TensorBoard for real; Weights & Biases and MLflow by small fakes that keep what they are told."""

import importlib
import sys
from types import SimpleNamespace

import pytest

from fedbatchnorm.experiments import MLflow, Run, TensorBoard, WandB
from fedbatchnorm.experiments.config import digest
from fedbatchnorm.experiments.runner import Options, Stopped, run_all

RUN = Run(rounds=6, evaluate_every=2, clients=2, batch=4)


def interrupted(callback, root):
    """A run that is stopped after round 3, and continued to the end."""
    answers = iter([False, False, True])
    with pytest.raises(Stopped):
        run_all([RUN], root, Options(watcher=callback, stop=lambda: next(answers)))
    (path,) = run_all([RUN], root, Options(watcher=callback))
    return path


def test_tensorboard_shows_every_evaluation_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = interrupted(TensorBoard(tmp_path / "tb"), tmp_path / "runs")
    (folder,) = (tmp_path / "tb").iterdir()
    assert folder.name == f"fbn-{path.name}"
    found = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in found.Scalars("accuracy")] == [2, 4, 6]
    assert {"loss", "train_loss", "learning_rate"} <= {*found.Tags()["scalars"]}
    assert "settings/text_summary" in found.Tags()["tensors"]


class FakeWandB:
    """As much of wandb as is used."""

    def __init__(self):
        self.calls = []

    def init(self, **given):
        self.calls.append(("init", given))
        return SimpleNamespace(
            log=lambda values, step: self.calls.append(("log", step, values)),
            summary=SimpleNamespace(update=lambda values: self.calls.append(("summary", values))),
            finish=lambda exit_code: self.calls.append(("finish", exit_code)),
        )


def test_weights_and_biases_is_told_of_runs_by_their_names(tmp_path, monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    interrupted(WandB("mine", {"mode": "offline"}), tmp_path)
    first, second = (call[1] for call in fake.calls if call[0] == "init")
    assert first == second
    assert (first["project"], first["mode"], first["id"], first["resume"]) == (
        "mine",
        "offline",
        digest(RUN),
        "allow",
    )
    assert first["config"]["scheme"] == "fbn"
    assert [call[1] for call in fake.calls if call[0] == "log"] == [2, 4, 6]
    assert [call[1] for call in fake.calls if call[0] == "finish"] == [1, 0]
    (summary,) = (call[1] for call in fake.calls if call[0] == "summary")
    assert 0 <= summary["best_accuracy"] <= 1


class FakeMLflow:
    """As much of MLflow as is used: runs by id, with tags."""

    def __init__(self):
        self.runs, self.active, self.uri = {}, None, None

    def set_tracking_uri(self, uri):
        self.uri = uri

    def set_experiment(self, name):
        return SimpleNamespace(experiment_id=f"id of {name}")

    def search_runs(self, experiments, wanted, max_results, output_format):
        assert (experiments, max_results, output_format) == (["id of mine"], 1, "list")
        tags = {
            f"tags.`{k}` = '{v}'": run for run, found in self.runs.items() for k, v in found["tags"].items()
        }
        return [SimpleNamespace(info=SimpleNamespace(run_id=tags[wanted]))] if wanted in tags else []

    def start_run(self, run_id=None, run_name=None, tags=None):
        assert self.active is None
        self.active = run_id or f"run {len(self.runs)}"
        self.runs.setdefault(self.active, {"tags": tags, "steps": [], "ends": []})

    def log_params(self, values):
        self.runs[self.active]["params"] = values

    def log_metrics(self, values, step=None):
        self.runs[self.active]["steps"].append(step)

    def end_run(self, status):
        self.runs[self.active]["ends"].append(status)
        self.active = None


def test_mlflow_continues_the_run_that_it_began(tmp_path, monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    interrupted(MLflow("mine", tracking_uri="file:x"), tmp_path)
    ((_, run),) = fake.runs.items()
    assert fake.uri == "file:x"
    assert run["tags"] == {"fedbatchnorm.run": digest(RUN)}
    assert run["params"]["scheme"] == "fbn"
    assert run["steps"] == [2, 4, 6, None]  # the last is the summary
    assert run["ends"] == ["KILLED", "FINISHED"]


@pytest.mark.parametrize(
    ("kind", "module", "package"),
    [
        (TensorBoard, "torch.utils.tensorboard", "tensorboard"),
        (WandB, "wandb", "wandb"),
        (MLflow, "mlflow", "mlflow"),
    ],
)
def test_what_is_not_installed_is_said(kind, module, package, monkeypatch):
    real = importlib.import_module

    def without(name, *more):
        if name == module:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(
        ImportError, match=rf"{kind.__name__} needs {package} \(No module.*: pip install {package}"
    ):
        kind()
