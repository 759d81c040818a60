"""Checks of the content of run files: types, ranges, and that the parts agree."""

import math
from typing import Any

from ..simulation.ring import Ring
from ..storage.files import DamagedError
from ..storage.values import number, parse, shown, text
from .config import Run

_LARGEST = 2**63  # whole numbers stay below it
Row = dict[str, Any]


def parse_rows(content: bytes, where: object) -> list[Row]:
    """The rows of a file of metrics, unchecked."""
    return [parse(line, f"{where}, line {i}") for i, line in enumerate(content.splitlines(), 1)]


def check_rows(rows: list[Any], config: Run | Ring, where: object, complete: bool = True) -> None:
    """Every row of the metrics: its round is the next that is evaluated, and its values are possible.

    Args:
        rows: as read.
        config: the configuration of the run.
        where: named in errors.
        complete: whether the run is finished.
    """
    rounds = _whole(config.rounds)
    every = 1 if isinstance(config, Ring) else _whole(config.evaluate_every)
    for i, row in enumerate(rows):
        line = f"{where}, row {i + 1}"
        if not isinstance(row, dict):
            raise DamagedError(f"{line}: not an object")
        wanted = min((i + 1) * every, rounds)
        if row.get("round") != wanted or type(row["round"]) is not int or i * every >= rounds:
            raise DamagedError(f"{line}: round is {shown(row.get('round'))}; it must be {wanted}")
        if isinstance(config, Ring):
            number(row, "distance", line, 0)
            continue
        number(row, "accuracy", line, 0, 1)
        number(row, "client_accuracy", line, 0, 1, needed=False)
        for name in ("loss", "train_loss", "client_loss", "learning_rate"):
            number(row, name, line, needed=False)
        number(row, "seconds", line, 0, needed=False)
    if complete and len(rows) != -(-rounds // every):
        raise DamagedError(f"{where}: {len(rows)} rows; a run of {rounds} rounds has {-(-rounds // every)}")


def check_summary(summary: Any, rows: list[Row], config: Run | Ring, where: object) -> None:
    """The summary is what the metrics say."""
    if not isinstance(summary, dict):
        raise DamagedError(f"{where}: not an object")
    if isinstance(config, Ring):
        found = number(summary, "distance", where, 0)
        mean = math.fsum(row["distance"] for row in rows) / len(rows)
        if not math.isclose(found, mean, rel_tol=1e-3, abs_tol=1e-6):
            raise DamagedError(f"{where}: distance is {found}; the metrics say {mean:.6g}")
        return
    best = max(row["accuracy"] for row in rows)
    wanted = {"accuracy": rows[-1]["accuracy"], "best_accuracy": best, "round": rows[-1]["round"]}
    for name in ("loss", "client_accuracy"):
        wanted |= {name: rows[-1][name]} if name in summary and name in rows[-1] else {}
    for name, value in wanted.items():
        found = summary.get(name)
        if type(found) is bool or found != value:
            raise DamagedError(f"{where}: {name} is {shown(found)}; the metrics say {value}")
    number(summary, "client_accuracy", where, 0, 1, needed=False)
    number(summary, "seconds", where, 0, needed=False)
    text(summary.get("engine", ""), f"{where}: engine")


def check_environment(sessions: Any, where: object) -> None:
    """One or more sessions, each an object of plain values."""
    if not isinstance(sessions, list) or not sessions:
        raise DamagedError(f"{where}: not a list of sessions")
    for i, session in enumerate(sessions, 1):
        if not isinstance(session, dict):
            raise DamagedError(f"{where}, session {i}: not an object")
        for name, value in session.items():
            place = f"{where}, session {i}: {shown(name)}"
            text(name, place)
            if isinstance(value, str):
                text(value, place)
            elif isinstance(value, list | dict):
                raise DamagedError(f"{place} is {shown(value)}; it must be a text or a number")
            elif value is not None and not isinstance(value, bool):
                number({"it": value}, "it", place)


def check_holdings(held: Any, config: Run, where: object) -> None:
    """A count for each class, for each client that holds data."""
    if not isinstance(held, dict) or not all(isinstance(held.get(k), list) for k in ("classes", "samples")):
        raise DamagedError(f"{where}: not classes and samples")
    classes, samples = held["classes"], held["samples"]
    for name in classes:
        text(name, f"{where}: a class's name")
    if not classes or len(samples) != config.honest():
        raise DamagedError(f"{where}: samples of {len(samples)} clients; {config.honest()} hold data")
    for i, row in enumerate(samples):
        if not isinstance(row, list) or len(row) != len(classes):
            raise DamagedError(f"{where}: client {i} has not a count for each class")
        for count in row:
            if type(count) is not int or not 0 <= count < _LARGEST:
                raise DamagedError(f"{where}: client {i} has {shown(count)} samples of a class")


def _whole(value: int | None) -> int:
    assert value is not None
    return value
