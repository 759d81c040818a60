"""Dashboards that show runs while they train: TensorBoard, Weights & Biases, MLflow. None is required.

Each is a `Watcher`: pass them as `sweep(callbacks=[...])`. A run that is resumed continues its old entry.
Runs that were already finished are not sent.
"""

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..simulation.ring import Ring
from .config import Run, describe, digest, to_json
from .runner import Watcher


class TensorBoard(Watcher):
    """Curves of each run in a folder below `folder`, for `tensorboard --logdir FOLDER`.

    Example:
        >>> import tempfile
        >>> from fedbatchnorm.experiments import sweep
        >>> with tempfile.TemporaryDirectory() as out:
        ...     curves = TensorBoard(f"{out}/tensorboard")
        ...     results = sweep(scheme="fbn", rounds=2, out=out, callbacks=[curves], progress=False)
    """

    def __init__(self, folder: str | Path = "tensorboard"):
        self._make = _needed("torch.utils.tensorboard", "TensorBoard", "tensorboard").SummaryWriter
        self._folder, self._writer = Path(folder), None
        self._writer: Any

    def begin(self, config: Run | Ring, step: int) -> None:
        """Open the run's folder; what it holds after `step` is done again, and hidden."""
        place = self._folder / f"{config.scheme}-{digest(config)}"
        self._writer = self._make(str(place), purge_step=step + 1 if step else None)
        if not step:
            self._writer.add_text("settings", f"```\n{json.dumps(to_json(config), indent=1)}\n```")

    def advance(self, rounds: int, metrics: dict[str, Any] | None) -> None:
        """Add a point to every curve."""
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, metrics["round"])  # pyrefly: ignore

    def end(self, config: Run | Ring, summary: dict[str, Any] | None) -> None:
        """Close the files."""
        self._writer.close()


class WandB(Watcher):
    """Each run as a run of Weights & Biases; its id is the name of the run's folder.

    Args:
        project: of Weights & Biases.
        init: more arguments for `wandb.init`, such as {"mode": "offline", "entity": "us"}.

    Example:
        sweep(scheme=["fbn", "naive"], out="runs", callbacks=[WandB("my-project")])
    """

    def __init__(self, project: str = "fedbatchnorm", init: Mapping[str, Any] | None = None):
        self._wandb = _needed("wandb", "WandB", "wandb")
        self._settings = {"project": project, **(init or {})}
        self._run: Any = None

    def begin(self, config: Run | Ring, step: int) -> None:
        """Start the run, or continue the one of this id."""
        who = {"id": digest(config), "name": describe(config), "resume": "allow"}
        self._run = self._wandb.init(config=to_json(config), **who, **self._settings)

    def advance(self, rounds: int, metrics: dict[str, Any] | None) -> None:
        """Send an evaluation."""
        if metrics is not None:
            self._run.log(_numbers(metrics), step=metrics["round"])

    def end(self, config: Run | Ring, summary: dict[str, Any] | None) -> None:
        """Send the summary, and finish; a run that was stopped counts as failed until it is continued."""
        if summary is not None:
            self._run.summary.update(_numbers(summary))
        self._run.finish(exit_code=0 if summary is not None else 1)


class MLflow(Watcher):
    """Each run as a run of MLflow, found again by the tag `fedbatchnorm.run`.

    Args:
        experiment: of MLflow.
        tracking_uri: where MLflow keeps runs; its own setting if not given.

    Example:
        sweep(scheme=["fbn", "naive"], out="runs", callbacks=[MLflow("normalization")])
    """

    def __init__(self, experiment: str = "fedbatchnorm", tracking_uri: str | None = None):
        self._mlflow = _needed("mlflow", "MLflow", "mlflow")
        if tracking_uri is not None:
            self._mlflow.set_tracking_uri(tracking_uri)
        self._experiment = self._mlflow.set_experiment(experiment).experiment_id

    def begin(self, config: Run | Ring, step: int) -> None:
        """Start the run, or continue the one of this tag."""
        name = digest(config)
        wanted = f"tags.`fedbatchnorm.run` = '{name}'"
        found = self._mlflow.search_runs([self._experiment], wanted, max_results=1, output_format="list")
        if found:
            self._mlflow.start_run(run_id=found[0].info.run_id)
            return
        self._mlflow.start_run(run_name=describe(config), tags={"fedbatchnorm.run": name})
        self._mlflow.log_params({key: value for key, value in to_json(config).items() if value is not None})

    def advance(self, rounds: int, metrics: dict[str, Any] | None) -> None:
        """Send an evaluation."""
        if metrics is not None:
            self._mlflow.log_metrics(_numbers(metrics), step=metrics["round"])

    def end(self, config: Run | Ring, summary: dict[str, Any] | None) -> None:
        """Send the summary, and finish; a run that was stopped counts as killed until it is continued."""
        if summary is not None:
            final = {f"final_{name}": value for name, value in _numbers(summary).items()}
            self._mlflow.log_metrics(final)
        self._mlflow.end_run("FINISHED" if summary is not None else "KILLED")


def _needed(module: str, who: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{who} needs {package} ({error}): pip install {package}") from None


def _numbers(metrics: dict[str, Any] | None) -> dict[str, float]:
    """The finite numbers, without the round."""
    found = {name: value for name, value in (metrics or {}).items() if name != "round"}
    return {k: v for k, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}
