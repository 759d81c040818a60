"""Many finished runs in one text file that can be committed: a line for each, without weights.

A line holds the configuration, the summary, where it ran, the curves, and a digest of all that (lines from
before there was one have none). Files end in `.runs.jsonl`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..storage import files
from ..storage.files import DamagedError, read_bytes, write_bytes
from ..storage.values import parse, shown
from . import checks
from .config import Run, name_of, read_config, to_json
from .results import LeftOut, Result, json_digest, read_results

Gathered = tuple[list[Result], list[LeftOut]]
SUFFIX = ".runs.jsonl"
_CURVES = ("accuracy", "loss", "train_loss")
_FACTS = ("config", "summary", "environment", "round")
_SEAL = ("files", "digest")  # of a folder: a line has a digest of its own
_DIGITS = 6


def write_archive(file: Path, results: Iterable[Result]) -> tuple[int, int]:
    """Add training runs to a file, sorted; returns how many it holds, and how many are new.

    A run that is already in the file stays as it is. Several processes may add to the same file; they wait
    for each other.
    """
    if not file.name.endswith(SUFFIX):
        raise ValueError(f"{file}: a file of runs must end in {SUFFIX}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(file.with_name(f".{file.name}.lock"), wait=True, keep=False):
        files.sweep(file.parent, file.name)
        texts = _texts(file) if file.exists() else []
        lines = {_parse(file, i, text).name: text for i, text in enumerate(texts, 1)}
        before = len(lines)
        for result in results:
            if isinstance(result.config, Run) and result.name not in lines:
                lines[result.name] = json.dumps(_line(result)).encode()
        write_bytes(file, b"".join(text + b"\n" for text in sorted(lines.values(), key=_order)))
    return len(lines), len(lines) - before


def read_archive(file: Path) -> list[Result]:
    """The runs in a file; an error names the line if one is invalid."""
    return [_parse(file, number, text) for number, text in enumerate(_texts(file), 1)]


def gather(*places: Path) -> Gathered:
    """All finished runs in folders and files of runs, one for each configuration, and those that are left
    out."""
    found: dict[str, Result] = {}
    left_out: list[LeftOut] = []
    for place in filter(Path.exists, places):
        files_of_runs = sorted(place.rglob(f"*{SUFFIX}")) if place.is_dir() else [place]
        results, reasons = read_results(place) if place.is_dir() else ([], [])
        left_out += reasons
        for file in files_of_runs:
            more, reasons = _sorted_out(file)
            results, left_out = [*results, *more], [*left_out, *reasons]
        for result in results:
            found.setdefault(result.name, result)
    return list(found.values()), left_out


def nothing_in(place: Path, left_out: list[LeftOut]) -> str:
    """The message if there is no finished run."""
    start = f": start one with `fedbatchnorm run --out {place}`" if place.is_dir() else ""
    return f"{place} holds no finished run{start}" + "".join(f"\n  {o.place}: {o.why}" for o in left_out[:5])


def _sorted_out(file: Path) -> Gathered:
    """The runs in a file, and its damaged lines."""
    found, left_out = [], []
    try:
        texts = _texts(file)
    except DamagedError as error:
        return [], [LeftOut.damaged(str(file), error)]
    for number, text in enumerate(texts, 1):
        try:
            found.append(_parse(file, number, text))
        except DamagedError as error:
            left_out.append(LeftOut.damaged(f"{file}, line {number}", error))
    return found, left_out


def _texts(file: Path) -> list[bytes]:
    return read_bytes(file).splitlines()


def _line(result: Result) -> dict[str, Any]:
    """What is stored of a run."""
    curves = {name: [_short(row.get(name)) for row in result.metrics] for name in _CURVES}
    line = {
        "config": to_json(result.config, result.source),
        "summary": {key: _short(value) for key, value in result.summary.items() if key not in _SEAL},
        "environment": result.environment,
        "round": [row["round"] for row in result.metrics],
        **curves,
    }
    return line | {"digest": json_digest(line)}


def _order(text: bytes) -> str:
    return json.dumps(json.loads(text)["config"], sort_keys=True)


def _parse(file: Path, number: int, text: bytes) -> Result:
    """The run in a line; an error names the file, the line and the field."""
    where = f"{file}, line {number}"
    line = parse(text, where)
    if not isinstance(line, dict) or not {*_FACTS, *_CURVES} <= line.keys():
        raise DamagedError(f"{where}: not a run: it must have config, summary, environment, and the curves")
    unknown = sorted(line.keys() - {*_FACTS, *_CURVES, "digest"})
    if unknown:
        raise DamagedError(f"{where}: unknown fields: {', '.join(map(shown, unknown[:5]))}")
    if "digest" in line and line["digest"] != json_digest({k: v for k, v in line.items() if k != "digest"}):
        raise DamagedError(f"{where}: its content has changed (the digest does not match)")
    try:
        config, source = read_config(line["config"])
    except (ValueError, TypeError, OverflowError) as error:
        raise DamagedError(f"{where}: {error}") from None
    columns = {name: line[name] for name in ("round", *_CURVES)}
    for name, values in columns.items():
        if not isinstance(values, list) or len(values) != len(columns["round"]):
            raise DamagedError(f"{where}: {name} is not a list as long as the rounds")
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if not isinstance(config, Run):
        raise DamagedError(f"{where}: not a training run; those on the ring stay in folders")
    checks.check_rows(rows, config, where)
    checks.check_summary(line["summary"], rows, config, where)
    checks.check_environment(line["environment"], f"{where}, environment")
    path = Path(name_of(config, source))
    return Result(path, config, rows, line["summary"], line["environment"], None, source)


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
