"""Reads and checks the folders of finished runs. It never imports what they name.

The summary of a result has a digest of each of its files, and one of itself with the run's name. Folders from
versions without digests are read without them; all other checks apply.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ..simulation.ring import Ring
from ..storage.files import DamagedError, read_bytes, regular
from ..storage.values import parse, shown
from . import checks
from .config import Run, name_of, read_config

SEALED = ("metrics.jsonl", "model.safetensors", "holdings.json", "environment.json")
_MARKS = ("config.json", "summary.json", "metrics.jsonl")  # a folder with one of these is a run's
_ODD = (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError, OverflowError)


class Result(NamedTuple):
    """What a finished run's folder holds."""

    path: Path
    config: Run | Ring
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    environment: list[dict[str, Any]]
    holdings: dict[str, Any] | None
    source: str | None = None  # the hash of the model's source, where the model is the user's own

    @property
    def name(self) -> str:
        """The run's name, as `config.digest` gives it."""
        return self.path.name


class LeftOut(NamedTuple):
    """A run that is not among the results."""

    place: str
    why: str
    kind: Literal["damaged", "unfinished", "copy"]

    @classmethod
    def damaged(cls, place: str, error: DamagedError) -> "LeftOut":
        """A damaged run, with the reader's message without the path."""
        return cls(place, f"damaged: {str(error).removeprefix(place).lstrip('/:, ')}", "damaged")


def read_results(root: Path) -> tuple[list[Result], list[LeftOut]]:
    """All finished runs below `root`, and those that are left out.

    Unfinished and damaged runs are left out, and so are copies: there is one result for each configuration.
    """
    found: dict[str, Result] = {}
    left_out = []
    for path in _folders(Path(root), left_out):
        if not os.path.lexists(path / "summary.json"):
            left_out.append(LeftOut(str(path), _UNFINISHED, "unfinished"))
            continue
        try:
            result = read_result(path)
        except DamagedError as error:
            left_out.append(LeftOut.damaged(str(path), error))
            continue
        first = found.setdefault(result.name, result)
        if first is not result:
            left_out.append(LeftOut(str(path), f"the same configuration as {first.path}", "copy"))
    return list(found.values()), left_out


class Unfinished(NamedTuple):
    """The part of an unfinished run that exists so far."""

    path: Path
    config: Run | Ring
    metrics: list[dict[str, Any]]


def read_unfinished(root: Path) -> list[Unfinished]:
    """The runs below `root` that have begun and are not finished: configurations, and curves so far.

    Unreadable ones are named by `read_results`.
    """
    found = []
    for path in _folders(Path(root), []):
        if os.path.lexists(path / "summary.json"):
            continue
        try:
            config, source = read_config_file(path / "config.json")
            check_name(path, config, source)
            file = path / "metrics.jsonl"
            content = read_bytes(file) if os.path.lexists(file) else b""
            whole = content[: content.rfind(b"\n") + 1]  # the last row may be half written
            rows = checks.parse_rows(whole, file)
            checks.check_rows(rows, config, file, complete=False)
        except DamagedError:
            continue
        found.append(Unfinished(path, config, rows))
    return found


_UNFINISHED = "not finished: run the same command again to continue it"


def read_result(path: Path) -> Result:
    """What a finished run's folder holds; a `DamagedError` names the file and the field that is wrong."""
    config, source = read_config_file(path / "config.json")
    check_name(path, config, source)
    summary, metrics = _json(path / "summary.json"), path / "metrics.jsonl"
    rows = checks.parse_rows(read_bytes(metrics), metrics)
    checks.check_rows(rows, config, metrics)
    checks.check_summary(summary, rows, config, path / "summary.json")
    environment, holdings = _json(path / "environment.json"), None
    checks.check_environment(environment, path / "environment.json")
    if isinstance(config, Run):
        holdings = _json(path / "holdings.json")
        checks.check_holdings(holdings, config, path / "holdings.json")
    _check_seal(path, summary)
    _check_weights(path / "model.safetensors", config)
    return Result(path, config, rows, summary, environment, holdings, source)


def read_config_file(file: Path) -> tuple[Run | Ring, str | None]:
    """The configuration in a file, and the hash of its model's source, if it holds one."""
    content = _json(file)
    try:
        return read_config(content)
    except (ValueError, TypeError, OverflowError) as error:
        raise DamagedError(f"{file}: {error}") from None


def check_name(path: Path, config: Run | Ring, source: str | None) -> None:
    """A folder's name is the digest of its configuration.

    With a user's own model the name also depends on the model's source. If config.json does not have it
    (older versions did not store it), the name cannot be checked. The same holds for an unknown scheme or
    dataset of which nothing was recorded.
    """
    wanted = name_of(config, source)
    unsaid = source is None and isinstance(config, Run) and ":" in (config.model or "")
    unsaid = unsaid or (isinstance(config, Run) and any(part.source is None for part in config.own))
    if path.name != wanted and not unsaid:
        raise DamagedError(f"{path / 'config.json'}: it is the configuration of {wanted}, not of {path.name}")


def seal(path: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """The summary with digests of all files of a result, and of itself with the run's name."""
    files = {name: _file_digest(path / name) for name in SEALED if (path / name).exists()}
    whole = summary | {"files": files}
    return whole | {"digest": json_digest({"name": path.name, **whole})}


def json_digest(content: dict[str, Any]) -> str:
    """A hash of an object, whatever the order of its fields."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _check_seal(path: Path, summary: dict[str, Any]) -> None:
    """Check that every file is the one that was written, if the result has digests."""
    file = path / "summary.json"
    files, digest = summary.get("files"), summary.get("digest")
    if files is None and digest is None:
        return
    rest = {name: value for name, value in summary.items() if name != "digest"}
    if not isinstance(files, dict) or not set(SEALED[:2]) <= files.keys() <= set(SEALED):
        raise DamagedError(f"{file}: files is {shown(files)}; it must be the files' digests")
    if digest != json_digest({"name": path.name, **rest}):
        raise DamagedError(f"{file}: its content has changed (the digest does not match)")
    for name, wanted in files.items():
        if _file_digest(path / name) != wanted:
            raise DamagedError(f"{path / name}: its content has changed (the digest does not match)")


def _check_weights(file: Path, config: Run | Ring) -> None:
    regular(file)
    try:
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            shape = (config.clients, config.points) if isinstance(config, Ring) else ()
            for name in _POINTS if shape else ():
                wanted = [*shape, 2] if name != "labels" else [*shape]
                if name not in names or opened.get_slice(name).get_shape() != wanted:
                    raise DamagedError(f"{file}: {name} is not there, or not of shape {wanted}")
                tensor = opened.get_tensor(name)
                if tensor.dtype != (torch.int64 if name == "labels" else torch.float32):
                    raise DamagedError(f"{file}: {name} is of type {tensor.dtype}")
                if not tensor.isfinite().all():
                    raise DamagedError(f"{file}: {name} is not finite")
    except DamagedError:
        raise
    except _ODD as error:
        raise DamagedError(f"{file}: {' '.join(str(error).split())[:200]}") from None


_POINTS = ("points", "labels", "normalised", "centralised")  # as the first release wrote them


def _file_digest(file: Path) -> str:
    regular(file)
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _json(file: Path) -> Any:
    return parse(read_bytes(file), file)


def _folders(root: Path, left_out: list[LeftOut]) -> Iterable[Path]:
    """Every folder below (and with) `root` that is a run's; what cannot be listed is left out by name."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # gone, or not there yet
            left_out.append(LeftOut(str(error.filename), f"damaged: {error.strerror}", "damaged"))

    found = [Path(folder) for folder, _, files in os.walk(root, onerror=refuse) if {*_MARKS} & {*files}]
    return sorted(found)
