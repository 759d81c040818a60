"""Runs over a grid in one call, with their results as tables."""

import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..simulation.simulator import Engine
from .config import Run
from .environment import choose_device
from .folder import RunFolder
from .grids import grid
from .progress import Progress
from .results import read_result
from .runner import Options, Stopped, Watcher, Watchers, run_all
from .table import Results

_PAUSE = 0.5  # seconds between looks at runs that other processes are at


def sweep(
    runs: Iterable[Run] = (),
    *,
    out: str | Path = "runs",
    data_dir: str | Path | None = None,
    device: str = "auto",
    engine: Engine = "auto",
    checkpoint_seconds: float = 30.0,
    progress: bool = True,
    callbacks: Iterable[Watcher] = (),
    **settings: Any,
) -> Results:
    """Run every combination of settings, each in a folder of its own, and return the results.

    Finished runs are skipped. Ctrl-C saves after the current round, and the same call continues there.
    Several processes may make the same call with the same `out`: they share the work, and each returns all
    results.

    Args:
        runs: runs instead of settings, such as the sum of two grids.
        out: folder of the runs; one folder for each, named after the hash of its settings.
        data_dir: folder with the files of CIFAR-10, MNIST, Fashion-MNIST.
        device: auto, cpu, cuda, cuda:1, mps.
        engine: see `Simulation`.
        checkpoint_seconds: seconds between checkpoints.
        progress: whether to show a bar in terminals and notebooks.
        callbacks: callbacks that receive all events, such as `TensorBoard()`.
        settings: fields of a `Run`, each a value or a list of values: names, or objects of your own.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as out:
        ...     results = sweep(scheme=["fbn", "naive"], gamma=[0.0, 0.1], rounds=2, out=out, progress=False)
        >>> len(results), sorted(set(results.to_pandas().scheme))
        (4, ['fbn', 'naive'])
    """
    configs = list(runs)
    if configs and settings:
        raise ValueError(f"runs are given, and {next(iter(settings))}, too: give one or the other")
    configs = configs or grid(**settings)
    root, show = Path(out), Progress(len(configs), progress)
    options = Options(
        choose_device(device),
        None if data_dir is None else Path(data_dir),
        checkpoint_seconds,
        Watchers((show, *callbacks)),
        signals=True,
        engine=engine,
        share=True,
    )
    with show:
        try:
            _run_and_wait(configs, root, options, show)
        except Stopped as stopped:
            if stopped.signal in (None, signal.SIGINT):
                raise KeyboardInterrupt(f"{stopped}; the same call continues there") from None
            raise SystemExit(128 + (stopped.signal or 0)) from None
    return Results(read_result(RunFolder(root, config).path) for config in configs)


def _run_and_wait(configs: list[Run], root: Path, options: Options, show: Progress) -> None:
    """Run what no other process is working on, and then what others have left, until everything is done."""
    show.expect(configs)
    while configs:
        run_all(configs, root, options)
        configs = show.take_left()
        if configs:
            show.wait(len(configs))
            time.sleep(_PAUSE)
            show.expect(configs)
