"""Many finished runs in one text file, to keep and to commit: a line for each, without weights.

A line holds the configuration, the summary, where it ran, and the curves. Files end in `.runs.jsonl`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..simulation.ring import Ring
from .config import Run, digest, from_json, to_json
from .folder import Result, read_results, write_bytes

SUFFIX = ".runs.jsonl"
_CURVES = ("accuracy", "loss", "train_loss")
_DIGITS = 6


def write_archive(file: Path, results: Iterable[Result]) -> tuple[int, int]:
    """Add training runs to a file, in an order of their own; returns how many it holds, and how many are new.

    A run that the file holds already stays as it is.
    """
    if not file.name.endswith(SUFFIX):
        raise ValueError(f"{file}: a file of runs must end in {SUFFIX}")
    lines = {digest(r.config): _line(r) for r in read_archive(file)} if file.exists() else {}
    before = len(lines)
    for result in results:
        if isinstance(result.config, Run):
            lines.setdefault(digest(result.config), _line(result))
    ordered = sorted(lines.values(), key=lambda line: json.dumps(line["config"], sort_keys=True))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, "".join(json.dumps(line) + "\n" for line in ordered).encode())
    return len(lines), len(lines) - before


def read_archive(file: Path) -> list[Result]:
    """The runs in a file; an error that names the line if one is not what it should be."""
    found = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(_result(json.loads(text)))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"{file}, line {number}: {type(error).__name__}: {error}") from error
    return found


def gather(*places: Path) -> tuple[list[Result], list[tuple[str, str]]]:
    """All finished runs in folders and files of runs, one for each configuration, and (place, why) for those
    that are left out."""
    found: dict[Run | Ring, Result] = {}
    left_out: list[tuple[str, str]] = []
    for place in filter(Path.exists, places):
        files = sorted(place.rglob(f"*{SUFFIX}")) if place.is_dir() else [place]
        if place.is_dir():
            results, reasons = read_results(place)
            left_out += reasons
        else:
            results = []
        for result in [*results, *(r for file in files for r in read_archive(file))]:
            found.setdefault(result.config, result)
    return list(found.values()), left_out


def _line(result: Result) -> dict[str, Any]:
    """What is kept of a run."""
    curves = {name: [_short(row.get(name)) for row in result.metrics] for name in _CURVES}
    return {
        "config": to_json(result.config),
        "summary": {key: _short(value) for key, value in result.summary.items()},
        "environment": result.environment,
        "round": [row["round"] for row in result.metrics],
        **curves,
    }


def _result(line: dict[str, Any]) -> Result:
    config = from_json(line["config"])
    columns = {name: line[name] for name in ("round", *_CURVES)}
    metrics = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    float(line["summary"]["accuracy"])
    float(line["summary"]["best_accuracy"])
    line["environment"][-1].get("device")
    for row in metrics:
        row["round"] + row["accuracy"]
    return Result(Path(digest(config)), config, metrics, line["summary"], line["environment"], None)


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
