"""A run's folder: configuration, metrics as they come, checkpoints, and the result.

Files are written under a temporary name, synced and renamed, so that a crash leaves the old or the new
one. A checkpoint says how long the metrics were when it was taken; going on from it cuts them back.
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
from .config import Run, digest, from_json, to_json

try:
    import fcntl
except ImportError:  # not on Windows: there, two processes on one folder are the user's to avoid
    fcntl = None


class BusyError(RuntimeError):
    """Another process is at work on this run."""


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

    def finished(self) -> bool:
        """Whether the run is complete: the summary is written last."""
        return (self.path / "summary.json").is_file()

    def busy(self) -> bool:
        """Whether another process is at it right now."""
        if fcntl is None or not (self.path / "lock").is_file():
            return False
        with (self.path / "lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Make the folder and keep other processes out of it for a while."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            if fcntl is not None:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise BusyError(f"another process is at work on {self.path}") from None
            if not (self.path / "config.json").is_file():
                write_json(self.path / "config.json", to_json(self.config))
            yield

    def append(self, row: dict[str, Any]) -> None:
        """Add a line to the metrics. What is not finite becomes null, which JSON can say."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean) + "\n")

    def save_checkpoint(self, tensors: dict[str, Tensor], step: int, seconds: float) -> None:
        """Keep all that the rest of the run depends on; the checkpoint before stays as the second."""
        length = 0
        if self.metrics_file.exists():
            with self.metrics_file.open("rb") as file:
                os.fsync(file.fileno())
                length = file.seek(0, os.SEEK_END)
        facts = {"step": str(step), "metrics_bytes": str(length), "seconds": repr(seconds)}
        tensors = _plain(tensors)
        content = save(tensors, facts | {"digest": _digest(tensors, facts)})
        newest, older = self.checkpoints
        if newest.exists():
            newest.replace(older)
        write_bytes(newest, content)

    def restore(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, with the metrics cut back to it; None to start anew."""
        for path in self.checkpoints:
            checkpoint = _read_checkpoint(path)
            length = self.metrics_file.stat().st_size if self.metrics_file.exists() else 0
            if checkpoint is not None and checkpoint.metrics_bytes <= length:
                self._cut_metrics(checkpoint.metrics_bytes)
                return checkpoint
        self._cut_metrics(0)
        return None

    def finish(self, tensors: dict[str, Tensor], summary: dict[str, Any]) -> None:
        """Write the weights, then the summary, which makes the run complete; drop the checkpoints."""
        write_bytes(self.path / "model.safetensors", save(_plain(tensors)))
        write_json(self.path / "summary.json", summary)
        for path in self.checkpoints:
            path.unlink(missing_ok=True)

    def _cut_metrics(self, length: int) -> None:
        if self.metrics_file.exists():
            with self.metrics_file.open("r+b") as file:
                file.truncate(length)


class Result(NamedTuple):
    """What a finished run's folder holds."""

    path: Path
    config: Run | Ring
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    environment: list[dict[str, Any]]
    holdings: dict[str, Any] | None


def read_results(root: Path) -> tuple[list[Result], list[tuple[str, str]]]:
    """All finished runs below `root`, and (folder, why) for those that are left out.

    Left out are runs that are not finished or not readable, and copies: one result for a configuration.
    """
    found: dict[Run | Ring, Result] = {}
    left_out = []
    for path in sorted(p.parent for p in Path(root).rglob("config.json")):
        try:
            if not (path / "summary.json").is_file():
                left_out.append((path.name, "not finished: run the same command again to go on"))
                continue
            result = _read_result(path)
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            SafetensorError,
        ) as error:
            left_out.append((path.name, f"unreadable: {type(error).__name__}: {error}"))
            continue
        first = found.setdefault(result.config, result)
        if first is not result:
            left_out.append((str(path), f"the same configuration as {first.path}"))
    return list(found.values()), left_out


def _read_result(path: Path) -> Result:
    """What a folder holds; some error if anything in it is not what it should be."""
    config = from_json(_read_json(path / "config.json"))
    text = (path / "metrics.jsonl").read_text(encoding="utf-8")
    metrics = [json.loads(line) for line in text.splitlines()]
    summary, environment = _read_json(path / "summary.json"), _read_json(path / "environment.json")
    measure = "distance" if isinstance(config, Ring) else "accuracy"
    for row in metrics:
        row["round"] + row[measure]
    float(summary[measure])
    environment[-1].get("device")
    holdings = None
    if isinstance(config, Ring):
        with safe_open(path / "model.safetensors", "pt") as file:
            for name in ("points", "labels", "normalised", "centralised"):
                file.get_slice(name)
    else:
        float(summary["best_accuracy"])
        holdings = _read_json(path / "holdings.json")
        if {len(row) for row in holdings["samples"]} != {len(holdings["classes"])}:
            raise ValueError("holdings.json: not a count for each class")
    return Result(path, config, metrics, summary, environment, holdings)


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a crash leaves the old file or the new one."""
    write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, each in memory of its own: tied weights and other layouts cannot be written."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _read_checkpoint(path: Path) -> Checkpoint | None:
    """A checkpoint, or None if it is missing, torn or altered."""
    try:
        with safe_open(path, "pt") as file:
            facts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts.pop("digest") != _digest(tensors, facts):
            return None
        return Checkpoint(tensors, int(facts["step"]), int(facts["metrics_bytes"]), float(facts["seconds"]))
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def _digest(tensors: dict[str, Tensor], facts: dict[str, str]) -> str:
    content = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        content.update(name.encode())
        content.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()
