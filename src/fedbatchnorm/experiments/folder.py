"""A run's folder: configuration, metrics, checkpoints, and the result.

A checkpoint has the name of its run, and the length of the metrics at that time with their digest; when a run
continues from it, the metrics are cut back. A result is protected by digests: see `results`.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..simulation.ring import Ring
from ..storage import files
from ..storage.files import BusyError, DamagedError, write_bytes
from . import checks
from .config import Run, digest, source_of, to_json
from .results import Result as Result  # where it was before
from .results import check_name, read_config_file, read_result, seal
from .results import read_results as read_results

_RESULT = ("summary.json", "model.safetensors", "metrics.jsonl", "environment.json", "holdings.json")


class Checkpoint(NamedTuple):
    """Tensors, the rounds done, the length of the metrics file, and the seconds spent so far."""

    tensors: dict[str, Tensor]
    step: int
    metrics_bytes: int
    seconds: float


class RunFolder:
    """The folder of one configuration below `root`."""

    def __init__(self, root: Path, config: Run | Ring):
        self.config = config
        self.path = Path(root) / digest(config)
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = [self.path / "checkpoint.safetensors", self.path / "checkpoint.old.safetensors"]
        self._lock: files.Lock | None = None
        self._trusting = True  # a checkpoint that does not say which run it is of

    def finished(self) -> bool:
        """Whether the run is complete and its result undamaged."""
        return os.path.lexists(self.path / "summary.json") and self.damage() is None

    def damage(self) -> str | None:
        """What is wrong with the result, or None."""
        if os.path.lexists(self.path / "summary.json"):
            try:
                read_result(self.path)
            except DamagedError as error:
                return str(error)
        return None

    def busy(self) -> bool:
        """Whether another process is working on it."""
        return files.is_locked(self.path / "lock")

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Make the folder and keep other processes out of it for a while."""
        self.path.mkdir(parents=True, exist_ok=True)
        with files.locked(self.path / "lock") as self._lock:
            try:
                files.sweep(self.path)
                if not os.path.lexists(self.path / "summary.json"):
                    self._own_config()
                yield
            finally:
                self._lock = None

    def set_aside(self) -> None:
        """Rename the files of a damaged result, so that the run can be repeated."""
        self._check_lock()
        for name in _RESULT:
            if os.path.lexists(self.path / name):
                (self.path / name).replace(self.path / f"{name}.damaged")
        self._own_config()

    def write_json(self, name: str, content: Any) -> None:
        """Write a file of the folder."""
        text = json.dumps(content, indent=1) + "\n"
        write_bytes(self.path / name, text.encode(), before=self._check_lock)

    def append(self, row: dict[str, Any]) -> None:
        """Add a line to the metrics. Values that are not finite become null, because JSON has no others."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._check_lock()
        files.append(self.metrics_file, json.dumps(clean) + "\n")

    def rows(self, complete: bool = True) -> list[dict[str, Any]]:
        """The metrics so far, checked."""
        rows = checks.parse_rows(files.read_bytes(self.metrics_file), self.metrics_file)
        checks.check_rows(rows, self.config, self.metrics_file, complete)
        return rows

    def save_checkpoint(self, tensors: dict[str, Tensor], step: int, seconds: float) -> None:
        """Save everything that the rest of the run depends on; the previous checkpoint is kept, too."""
        metrics = files.read_bytes(self.metrics_file) if self.metrics_file.exists() else b""
        files.sync(self.metrics_file)
        facts = {"run": self.path.name, "step": str(step), "seconds": repr(seconds)}
        facts |= {"metrics_bytes": str(len(metrics)), "metrics_digest": _hash(metrics)}
        tensors = _plain(tensors)
        content = save(tensors, facts | {"digest": _digest(tensors, facts)})
        newest, older = self.checkpoints
        self._check_lock()
        if os.path.lexists(newest):
            newest.replace(older)
        write_bytes(newest, content, before=self._check_lock)

    def restore(self) -> Checkpoint | None:
        """The newest valid checkpoint of this run, with the metrics cut back to it; None to start over."""
        metrics = files.read_bytes(self.metrics_file) if os.path.lexists(self.metrics_file) else b""
        for path in self.checkpoints:
            checkpoint = self._read_checkpoint(path, metrics)
            if checkpoint is not None:
                files.cut(self.metrics_file, checkpoint.metrics_bytes)
                return checkpoint
        files.cut(self.metrics_file, 0)
        return None

    def finish(self, tensors: dict[str, Tensor], summary: dict[str, Any]) -> None:
        """Write the weights, then the summary, which makes the run complete; drop the checkpoints."""
        write_bytes(self.path / "model.safetensors", save(_plain(tensors)), before=self._check_lock)
        files.sync(self.metrics_file)
        self.write_json("summary.json", seal(self.path, summary))
        for path in self.checkpoints:
            path.unlink(missing_ok=True)

    def _own_config(self) -> None:
        """Make sure that config.json is this run's; rename it if it is another's."""
        file = self.path / "config.json"
        self._trusting = True
        if os.path.lexists(file):
            try:
                config, source = read_config_file(file)
                check_name(self.path, config, source)
                return
            except DamagedError:
                self._trusting = False
                file.replace(file.with_name("config.json.damaged"))
        self.write_json("config.json", to_json(self.config, source_of(self.config)))

    def _check_lock(self) -> None:
        """An error if the folder was removed or recreated: another process may own it now."""
        if self._lock is not None and files.fcntl is not None and not self._lock.holds():
            raise BusyError(
                f"{self.path} was removed or recreated while this run worked on it: it is left as it is now"
            )

    def _read_checkpoint(self, path: Path, metrics: bytes) -> Checkpoint | None:
        """A checkpoint, or None if it is missing, damaged, of another run, or does not fit the metrics."""
        try:
            files.regular(path)
            with safe_open(path, "pt") as file:
                facts = dict(file.metadata() or {})
                # Copies: what is mapped from a file changes with it, after its digest was right.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            if facts.pop("digest") != _digest(tensors, facts):
                return None
            length, step = int(facts["metrics_bytes"]), int(facts["step"])
            found = Checkpoint(tensors, step, length, float(facts["seconds"]))
            # Those from before they said it can only be taken at their word.
            if facts.get("run", self.path.name if self._trusting else None) != self.path.name:
                return None
            kept = metrics[: max(length, 0)]
            if len(kept) != length or facts.get("metrics_digest", _hash(kept)) != _hash(kept):
                return None
            rows = checks.parse_rows(kept, self.metrics_file)
            checks.check_rows(rows, self.config, self.metrics_file, complete=False)
            possible = 0 < step <= (self.config.rounds or 0) and 0 <= found.seconds < math.inf
            return found if possible and (not rows or rows[-1]["round"] <= step) else None
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OverflowError):
            return None


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that share no memory, because tied weights and other layouts cannot be written."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _digest(tensors: dict[str, Tensor], facts: dict[str, str]) -> str:
    """A hash of a whole checkpoint; it includes types and shapes only if it includes the run."""
    content = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        kind = f" {tensors[name].dtype} {tuple(tensors[name].shape)} " if "run" in facts else ""
        content.update(f"{name}{kind}".encode())
        content.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
