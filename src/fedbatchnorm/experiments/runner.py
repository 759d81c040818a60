"""Runs configurations one after another, each in its folder: finished ones are skipped, others continue."""

import contextlib
import functools
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..data import datasets, partition
from ..simulation import models
from ..simulation.recipe import learning_rate, stream, torch_seed
from ..simulation.ring import Ring, normalize_ring
from ..simulation.simulator import Engine, Simulation
from ..storage.files import BusyError, DamagedError, read_bytes
from ..storage.values import parse
from . import checks
from .config import Run, describe
from .environment import commit, environment
from .folder import RunFolder


class Stopped(Exception):  # noqa: N818 (not an error)
    """The user asked to stop; everything up to the last round is saved. `signal` is how, if by a signal."""

    signal: int | None = None


class Watcher:
    """Receives events of runs, for progress bars and logs; this one ignores them.

    All events between `begin` and `end` are about the same run. For a callback of your own, override the
    methods that you need.

    Example:
        >>> class Printer(Watcher):
        ...     def end(self, config, summary):
        ...         print(config.scheme, summary["round"])
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as out:
        ...     _ = run_all([Run(rounds=2)], Path(out), Options(watcher=Printer()))
        fbn 2
    """

    def begin(self, config: Run | Ring, step: int) -> None:
        """A run starts, or continues after `step` rounds."""

    def advance(self, rounds: int, metrics: dict[str, Any] | None) -> None:
        """So many rounds are done; metrics if there was an evaluation."""

    def end(self, config: Run | Ring, summary: dict[str, Any] | None) -> None:
        """The run has ended: its summary, or None if it was stopped or failed."""

    def skip(self, config: Run | Ring) -> None:
        """A run was finished before."""

    def leave(self, config: Run | Ring) -> None:
        """Another process is at a run."""

    def stopping(self) -> None:
        """The user asked to stop; the current round is finished first."""


class Watchers(Watcher):
    """Several watchers that receive the same events, in order."""

    def __init__(self, watchers: Iterable[Watcher]):
        self._all = tuple(watchers)

    def begin(self, config: Run | Ring, step: int) -> None:
        """As of a `Watcher`."""
        for watcher in self._all:
            watcher.begin(config, step)

    def advance(self, rounds: int, metrics: dict[str, Any] | None) -> None:
        """As of a `Watcher`."""
        for watcher in self._all:
            watcher.advance(rounds, metrics)

    def end(self, config: Run | Ring, summary: dict[str, Any] | None) -> None:
        """As of a `Watcher`."""
        for watcher in self._all:
            watcher.end(config, summary)

    def skip(self, config: Run | Ring) -> None:
        """As of a `Watcher`."""
        for watcher in self._all:
            watcher.skip(config)

    def leave(self, config: Run | Ring) -> None:
        """As of a `Watcher`."""
        for watcher in self._all:
            watcher.leave(config)

    def stopping(self) -> None:
        """As of a `Watcher`."""
        for watcher in self._all:
            watcher.stopping()


class Options(NamedTuple):
    """How to run, which does not change the result."""

    device: torch.device = torch.device("cpu")
    data_dir: Path | None = None
    checkpoint_seconds: float = 30.0
    watcher: Watcher = Watcher()
    stop: Callable[[], bool] = lambda: False
    signals: bool = False  # Ctrl-C, SIGTERM and SIGHUP stop after the current round
    engine: Engine = "auto"
    share: bool = False  # leave runs that another process is at, in place of an error
    known: frozenset[str] = frozenset()  # digests of runs whose results are kept elsewhere


def run_all(configs: Iterable[Run | Ring], root: Path, options: Options | None = None) -> list[Path]:
    """Run all configurations that are not finished; returns the folders. Raises `Stopped` if the user asked
    to stop.

    Several processes may share the work: with `options.share` a run that another process is working on is
    skipped, and tried again at the end, in case that process has died.
    """
    options = options or Options()
    configs = list(configs)
    left = [config for config in configs if not _run_one(config, root, options, last=not options.share)]
    for config in left:
        if not _run_one(config, root, options, last=False):
            options.watcher.leave(config)
    return [RunFolder(root, config).path for config in configs]


def _run_one(config: Run | Ring, root: Path, options: Options, last: bool) -> bool:
    """Run a configuration unless it is finished; False if another process works on it (an error if `last`).

    A damaged result is renamed, and the run is repeated.
    """
    folder = RunFolder(root, config)
    if folder.path.name in options.known or folder.finished():
        options.watcher.skip(config)
        return True
    if not last and folder.busy():  # before anything is set up for nothing
        return False
    # Set up before there is a folder: what cannot start leaves none.
    work = _ring(config) if isinstance(config, Ring) else _training(config, options)
    commit()  # asks git once: a child of a process that is killed would keep holding the folder's lock
    try:
        with folder.open():
            if folder.finished():  # by another process, in the meantime
                options.watcher.skip(config)
            else:
                damage = folder.damage()
                if damage is not None:
                    warnings.warn(f"a damaged run is run again ({damage})", stacklevel=2)
                    folder.set_aside()
                work(folder, options)
    except BusyError:
        if last:
            raise
        return False
    return True


def federation(
    config: Run, device: torch.device, data_dir: Path | None, engine: Engine = "auto"
) -> tuple[Simulation, dict[str, Any]]:
    """The simulation of a configuration before its first round, and who holds how much of each class."""
    data = _load(config.used("dataset"), data_dir)
    if config.batch is not None and config.batch > len(data.train.y):
        raise ValueError(
            f"batch is {config.batch}; {config.dataset} has {len(data.train.y)} training samples in all"
        )
    labels = data.train.y.numpy()
    rng = stream(config.seed, "partition")
    parts = partition.split(config.used("partition"), labels, config.honest(), config.heterogeneity()[1], rng)
    held = partition.holdings(labels, parts, len(data.classes))
    shape, weights = tuple(data.train.x.shape[1:]), torch_seed(config.seed, "weights")
    model = models.build(config.used("model"), shape, len(data.classes), weights)
    simulation = Simulation(model, data, parts, config, device=device, engine=engine)
    return simulation, {"classes": data.classes, "samples": held.tolist()}


@contextlib.contextmanager
def _listening(options: Options) -> Iterator[list[int]]:
    """Collect signals while rounds are running: the first stops after the round, a second one immediately."""
    asked: list[int] = []
    if not options.signals or threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number, frame):
        if asked and number != hang_up:  # a terminal that goes may say so twice
            raise KeyboardInterrupt
        asked.append(number)
        options.watcher.stopping()

    hang_up = getattr(signal, "SIGHUP", None)
    heard = [signal.SIGINT, signal.SIGTERM]
    if hang_up is not None and signal.getsignal(hang_up) != signal.SIG_IGN:  # as under nohup
        heard.append(hang_up)
    before = {s: signal.signal(s, ask) for s in heard}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _training(config: Run, options: Options) -> Callable[[RunFolder, Options], None]:
    """Load and set up a run; returns the function that trains it."""
    simulation, held = federation(config, options.device, options.data_dir, options.engine)

    def work(folder: RunFolder, options: Options) -> None:
        folder.write_json("holdings.json", held)
        with _listening(options) as asked:
            _train(config, simulation, folder, options, asked)
            if asked:
                _stop(f"stopped after {describe(config)}", asked)

    return work


@contextlib.contextmanager
def _watched(config: Run | Ring, watcher: Watcher, step: int) -> Iterator[dict[str, Any]]:
    """Make sure that every `begin` is followed by `end`; the run's summary goes into what this yields."""
    summary: dict[str, Any] = {}
    watcher.begin(config, step)
    try:
        yield summary
    finally:
        watcher.end(config, summary or None)


def _train(
    config: Run, simulation: Simulation, folder: RunFolder, options: Options, asked: list[int]
) -> None:
    """Train to the end, starting from the last checkpoint if there is one."""
    loss = torch.zeros((), device=options.device)  # of the rounds since the last evaluation
    before = _restore(simulation, folder, loss)
    _note_environment(folder, options.device, simulation.step)
    start = saved_at = time.monotonic()
    rounds = simulation.recipe.rounds
    with _watched(config, options.watcher, simulation.step) as summary:
        while simulation.step < rounds:
            loss += simulation.round()
            metrics = None
            if simulation.step % config.evaluate_every == 0 or simulation.step == rounds:  # pyrefly: ignore
                metrics = _evaluate(simulation, config, loss) | {"seconds": before + time.monotonic() - start}
                folder.append(metrics)
                loss.zero_()
            options.watcher.advance(1, metrics)
            now = time.monotonic()
            stop = bool(options.stop() or asked) and simulation.step < rounds
            if stop or now - saved_at > options.checkpoint_seconds:
                state = simulation.state() | {"loss": loss}
                folder.save_checkpoint(state, simulation.step, before + now - start)
                saved_at = now
            if stop:
                _stop(f"stopped at round {simulation.step} of {rounds} ({describe(config)})", asked)
        summary |= _summary(folder) | {"engine": simulation.engine}
        folder.finish(simulation.model.state_dict(), summary)


def _restore(simulation: Simulation, folder: RunFolder, loss: torch.Tensor) -> float:
    """Continue from the last checkpoint, if there is one; returns the seconds spent so far."""
    saved = folder.restore()
    if saved is None:
        return 0.0
    try:
        loss.copy_(saved.tensors.pop("loss"))
        simulation.load_state(saved.tensors, saved.step)
    except (KeyError, ValueError, RuntimeError) as error:
        raise DamagedError(
            f"{folder.path}: its checkpoint does not fit ({error}): delete the folder to start over"
        ) from None
    return saved.seconds


def _stop(message: str, asked: list[int]) -> None:
    stopped = Stopped(message)
    stopped.signal = asked[0] if asked else None
    raise stopped


def _evaluate(simulation: Simulation, config: Run, loss: torch.Tensor) -> dict[str, Any]:
    found, step = simulation.evaluate(), simulation.step
    assert config.evaluate_every is not None
    since = (step - 1) % config.evaluate_every + 1
    own = simulation.evaluate_clients()
    more = {} if own is None else {"client_accuracy": own.accuracy, "client_loss": own.loss}
    return more | {
        "round": step,
        "accuracy": found.accuracy,
        "loss": found.loss,
        "train_loss": loss.item() / since,
        "learning_rate": learning_rate(config, step - 1),
    }


def _summary(folder: RunFolder) -> dict[str, Any]:
    rows = folder.rows()
    last = rows[-1]
    best = max(row["accuracy"] for row in rows)
    kept = ("accuracy", "loss", "round", "seconds", "client_accuracy")
    return {key: last[key] for key in kept if key in last} | {"best_accuracy": best}


_IN_FILES = {"normalized": "normalised", "centralized": "centralised"}  # as the first release wrote them


def _ring(config: Ring) -> Callable[[RunFolder, Options], None]:
    """All rounds at once: it takes a fraction of a second, so there is nothing to resume."""

    def work(folder: RunFolder, options: Options) -> None:
        folder.restore()
        _note_environment(folder, torch.device("cpu"), 0)
        with _watched(config, options.watcher, 0) as summary:
            result = normalize_ring(config)
            for i, distance in enumerate(result.distance.tolist()):
                folder.append({"round": i + 1, "distance": distance})
            options.watcher.advance(config.rounds, None)
            tensors = {_IN_FILES.get(name, name): tensor for name, tensor in result._asdict().items()}
            summary |= {"distance": result.distance.mean().item()}
            folder.finish(tensors, summary)

    return work


def _note_environment(folder: RunFolder, device: torch.device, step: int) -> None:
    """Add this session to the run's environment, since a run may be resumed on another machine."""
    path = folder.path / "environment.json"
    sessions = []
    if os.path.lexists(path) and step:
        try:
            sessions = parse(read_bytes(path), path)
            checks.check_environment(sessions, path)
        except DamagedError as error:  # no result depends on it
            warnings.warn(f"the record of the run's earlier sessions is lost ({error})", stacklevel=2)
            sessions = []
            path.replace(path.with_name("environment.json.damaged"))
    folder.write_json("environment.json", [*sessions, {"from_round": step, **environment(device)}])


def _load(name: str | datasets.Dataset, data_dir: Path | None) -> datasets.Dataset:
    return _load_once(name, data_dir) if isinstance(name, str) else name


@functools.cache
def _load_once(name: str, data_dir: Path | None) -> datasets.Dataset:
    """Loaded once for all runs of a process."""
    return datasets.load(name, data_dir, progress=sys.stderr.isatty())
