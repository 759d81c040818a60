"""A server's state after a round, as one safetensors file: what it sends, and what its strategy remembers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..experiments.folder import write_bytes

_ARRAYS, _STRATEGY, _FORMAT = "arrays/", "strategy/", "1"


def write_checkpoint(path: Path, strategy: object, arrays: Mapping[str, Any], done: int) -> None:
    """Save after round `done`; a crash leaves this file or the one before.

    Args:
        path: the file.
        strategy: its attributes that are arrays, or dicts or lists of arrays, are saved too: the moments
            of FedAdam and the like, also of strategies wrapped in it.
        arrays: name -> something with `.numpy()`.
        done: the rounds that are finished.
    """
    tensors = {f"{_ARRAYS}{name}": array.numpy() for name, array in arrays.items()}
    tensors |= {f"{_STRATEGY}{key}": value for key, value in _remembered(strategy).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"format": _FORMAT, "done": str(done), "strategy": type(strategy).__name__}
    write_bytes(path, save({k: np.array(v, order="C") for k, v in tensors.items()}, facts))


def read_checkpoint(
    path: Path, strategy: object, like: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], int]:
    """What was saved: arrays by name, and the rounds done; the strategy gets back what it remembered.

    An error says what does not fit if the file is damaged, or was made with another model or strategy.
    """
    try:
        with safe_open(path, "numpy") as file:
            facts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        done = int(facts["done"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is no checkpoint, or a damaged one: delete it to start anew ({error})"
        ) from error
    arrays = {k.removeprefix(_ARRAYS): v for k, v in tensors.items() if k.startswith(_ARRAYS)}
    shapes = {name: tuple(array.numpy().shape) for name, array in like.items()}
    if {name: value.shape for name, value in arrays.items()} != shapes:
        raise ValueError(f"{path} is of another model: delete it to start anew")
    if facts.get("strategy") != type(strategy).__name__:
        other = f"{facts.get('strategy')}, not {type(strategy).__name__}"
        raise ValueError(f"{path} is of a run with {other}: delete it to start anew")
    _remind(strategy, {k.removeprefix(_STRATEGY): v for k, v in tensors.items() if k.startswith(_STRATEGY)})
    return {name: arrays[name] for name in like}, done


def _remembered(strategy: object, prefix: str = "") -> dict[str, np.ndarray]:
    """attribute/kind/key -> array, for every attribute that is made of arrays."""
    found: dict[str, np.ndarray] = {}
    for name, value in vars(strategy).items():
        if isinstance(value, np.ndarray):
            found[f"{prefix}{name}/array/"] = value
        elif isinstance(value, dict) and value and all(isinstance(v, np.ndarray) for v in value.values()):
            found |= {f"{prefix}{name}/dict/{key}": v for key, v in value.items()}
        elif isinstance(value, list) and value and all(isinstance(v, np.ndarray) for v in value):
            found |= {f"{prefix}{name}/list/{i:06d}": v for i, v in enumerate(value)}
        elif name == "strategy" and hasattr(value, "__dict__"):
            found |= _remembered(value, f"{prefix}strategy/")
    return found


def _remind(strategy: Any, saved: Mapping[str, np.ndarray]) -> None:
    """Set the attributes that `_remembered` found."""
    made: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    inner: dict[str, np.ndarray] = {}
    for key, value in saved.items():
        name, kind, rest = key.split("/", 2)
        if name == "strategy":
            inner[key.removeprefix("strategy/")] = value
        else:
            made.setdefault((name, kind), {})[rest] = value
    for (name, kind), values in made.items():
        ordered = [values[key] for key in sorted(values)]
        setattr(strategy, name, {"array": ordered[0], "list": ordered, "dict": values}[kind])
    if inner:
        _remind(strategy.strategy, inner)
