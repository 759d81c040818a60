"""Runs configurations one after another, each in its folder: finished ones are skipped, others go on."""

import contextlib
import functools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..data import datasets, partition
from ..simulation import models
from ..simulation.recipe import learning_rate, stream, torch_seed
from ..simulation.ring import Ring, normalise_ring
from ..simulation.simulator import Simulation
from .config import Run, describe
from .environment import environment
from .folder import RunFolder, write_json


class Stopped(Exception):  # noqa: N818 (not an error)
    """The user asked to stop; everything up to the last round is saved."""


class Watcher:
    """Told what happens, for progress bars and logs; this one says nothing."""

    def begin(self, config: Run | Ring, step: int) -> None:
        """A run starts, or goes on after `step` rounds."""

    def advance(self, rounds: int, metrics: dict[str, Any] | None) -> None:
        """So many rounds are done; metrics if there was an evaluation."""

    def skip(self, config: Run | Ring) -> None:
        """A run was finished before."""


class Options(NamedTuple):
    """How to run, which does not change the result."""

    device: torch.device = torch.device("cpu")
    data_dir: Path | None = None
    checkpoint_seconds: float = 30.0
    watcher: Watcher = Watcher()
    stop: Callable[[], bool] = lambda: False


def run_all(configs: Iterable[Run | Ring], root: Path, options: Options | None = None) -> list[Path]:
    """Run what is not finished yet; returns the folders. `Stopped` if the user asked to stop."""
    options = options or Options()
    folders = []
    for config in configs:
        folder = RunFolder(root, config)
        folders.append(folder.path)
        if folder.finished():
            options.watcher.skip(config)
            continue
        if isinstance(config, Ring):
            with folder.open():
                _ring(config, folder, options)
        else:
            simulation, held = federation(
                config, options.device, options.data_dir
            )  # before there is a folder
            with folder.open():
                write_json(folder.path / "holdings.json", held)
                _train(config, simulation, folder, options)
        if options.stop():
            raise Stopped(f"stopped after {describe(config)}")
    return folders


def federation(config: Run, device: torch.device, data_dir: Path | None) -> tuple[Simulation, dict[str, Any]]:
    """The simulation of a configuration before its first round, and who holds how much of each class."""
    data = _load(config.dataset, data_dir)
    labels = data.train.y.numpy()
    rng = stream(config.seed, "partition")
    parts = partition.split(config.partition, labels, config.clients, config.heterogeneity()[1], rng)
    held = partition.holdings(labels, parts, len(data.classes))
    assert config.model is not None
    shape, weights = tuple(data.train.x.shape[1:]), torch_seed(config.seed, "weights")
    model = models.build(config.model, shape, len(data.classes), weights)
    simulation = Simulation(model, data, parts, config, device=device)
    return simulation, {"classes": data.classes, "samples": held.tolist()}


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end the run after the current round; a second Ctrl-C ends it at once."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def ask(number, frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _train(config: Run, simulation: Simulation, folder: RunFolder, options: Options) -> None:
    """Train to the end, from the last checkpoint if there is one."""
    loss = torch.zeros((), device=options.device)  # of the rounds since the last evaluation
    before = 0.0
    saved = folder.restore()
    if saved is not None:
        loss.copy_(saved.tensors.pop("loss"))
        simulation.load_state(saved.tensors, saved.step)
        before = saved.seconds
    _note_environment(folder, options.device, simulation.step)
    options.watcher.begin(config, simulation.step)
    start = saved_at = time.monotonic()
    rounds = simulation.recipe.rounds
    while simulation.step < rounds:
        loss += simulation.round()
        metrics = None
        if simulation.step % config.evaluate_every == 0 or simulation.step == rounds:  # pyrefly: ignore
            metrics = _evaluate(simulation, config, loss) | {"seconds": before + time.monotonic() - start}
            folder.append(metrics)
            loss.zero_()
        options.watcher.advance(1, metrics)
        now = time.monotonic()
        stop = options.stop() and simulation.step < rounds
        if stop or now - saved_at > options.checkpoint_seconds:
            folder.save_checkpoint(simulation.state() | {"loss": loss}, simulation.step, before + now - start)
            saved_at = now
        if stop:
            raise Stopped(f"stopped at round {simulation.step} of {rounds} ({describe(config)})")
    folder.finish(simulation.model.state_dict(), _summary(folder))


def _evaluate(simulation: Simulation, config: Run, loss: torch.Tensor) -> dict[str, Any]:
    found, step = simulation.evaluate(), simulation.step
    assert config.evaluate_every is not None
    since = (step - 1) % config.evaluate_every + 1
    return {
        "round": step,
        "accuracy": found.accuracy,
        "loss": found.loss,
        "train_loss": loss.item() / since,
        "learning_rate": learning_rate(config, step - 1),
    }


def _summary(folder: RunFolder) -> dict[str, Any]:
    rows = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    last = rows[-1]
    best = max(row["accuracy"] for row in rows)
    return {key: last[key] for key in ("accuracy", "loss", "round", "seconds")} | {"best_accuracy": best}


def _ring(config: Ring, folder: RunFolder, options: Options) -> None:
    """All rounds in one go: it takes a fraction of a second, so there is nothing to resume."""
    folder.restore()
    _note_environment(folder, torch.device("cpu"), 0)
    options.watcher.begin(config, 0)
    result = normalise_ring(config)
    for i, distance in enumerate(result.distance.tolist()):
        folder.append({"round": i + 1, "distance": distance})
    options.watcher.advance(config.rounds, None)
    tensors = {k: v.contiguous() for k, v in result._asdict().items()}
    folder.finish(tensors, {"distance": result.distance.mean().item()})


def _note_environment(folder: RunFolder, device: torch.device, step: int) -> None:
    """Add this session to the run's: one that is resumed may go on elsewhere."""
    path = folder.path / "environment.json"
    sessions = json.loads(path.read_text()) if path.exists() and step else []
    write_json(path, [*sessions, {"from_round": step, **environment(device)}])


@functools.cache
def _load(name: str, data_dir: Path | None) -> datasets.Dataset:
    """Loaded once for all runs of a process."""
    return datasets.load(name, data_dir, progress=sys.stderr.isatty())
