"""A strategy's state: by its own `state_dict` and `load_state_dict`, or guessed from its attributes.

A strategy with these two methods decides what a checkpoint contains: numbers, strings, lists, dicts, arrays
and tensors, in any nesting. For others, everything that looks like a state is saved: attributes that are
arrays, or that JSON can hold and that change, and the `state_dict` of attributes that have one.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..storage.files import DamagedError
from .arrays import as_numpy

_KINDS = ("array", "number", "dict", "list", "value", "state")
_OWN = "/own/"  # in place of attribute/kind/: the strategy's own state_dict
_NOT_JSON = object()


def has_state(strategy: object) -> bool:
    """Whether a strategy saves its own state."""
    return all(callable(getattr(strategy, name, None)) for name in ("state_dict", "load_state_dict"))


def plain_state(strategy: object, prefix: str = "") -> dict[str, Any]:
    """A strategy's state besides arrays, as far as JSON can hold it: attribute/kind/ -> value.

    Its own `state_dict`, or counters, rates and norms that change as it goes, and the `state_dict` of what
    has one, such as the accountant of a privacy budget; also of strategies that are wrapped in it.
    """
    if has_state(strategy):
        return {prefix + _OWN: _pack(strategy.state_dict(), [])}  # pyrefly: ignore
    found: dict[str, Any] = {}
    for name, value in _attributes(strategy).items():
        if name == "strategy" and hasattr(value, "__dict__"):
            found |= plain_state(value, f"{prefix}strategy/")
        elif has_state(value):
            found[f"{prefix}{name}/state/"] = value.state_dict()
        else:
            found[f"{prefix}{name}/value/"] = value
    copies = {key: _through_json(value) for key, value in found.items()}
    return {key: copy for key, copy in copies.items() if copy is not _NOT_JSON}


def arrays_of(strategy: object, prefix: str = "") -> dict[str, np.ndarray]:
    """attribute/kind/key -> array, for every attribute that is made of arrays, or of its own state."""
    found: dict[str, np.ndarray] = {}
    if has_state(strategy):
        arrays: list[np.ndarray] = []
        _pack(strategy.state_dict(), arrays)  # pyrefly: ignore
        return {f"{prefix}{_OWN}{i}": array for i, array in enumerate(arrays)}
    for name, value in _attributes(strategy).items():
        if isinstance(value, np.ndarray):
            found[f"{prefix}{name}/array/"] = value
        elif isinstance(value, np.generic):
            found[f"{prefix}{name}/number/"] = np.array(value)
        elif isinstance(value, dict) and value and all(isinstance(v, np.ndarray) for v in value.values()):
            found |= {f"{prefix}{name}/dict/{key}": v for key, v in value.items()}
        elif isinstance(value, list) and value and all(isinstance(v, np.ndarray) for v in value):
            found |= {f"{prefix}{name}/list/{i:06d}": v for i, v in enumerate(value)}
        elif name == "strategy" and hasattr(value, "__dict__"):
            found |= arrays_of(value, f"{prefix}strategy/")
    return found


def changed_since(first: Mapping[str, Any], strategy: object) -> dict[str, Any]:
    """What has changed in a plain state since the start; settings may change between sessions."""
    now = plain_state(strategy)
    return {k: v for k, v in now.items() if k.endswith(_OWN) or k not in first or first[k] != v}


def snapshot(strategy: object) -> dict[str, Any]:
    """A strategy's state, for `restore`."""
    return {key: value.copy() for key, value in arrays_of(strategy).items()} | plain_state(strategy)


def restore(strategy: Any, saved: Mapping[str, Any]) -> None:
    """Set the attributes that `snapshot` found."""
    made: dict[tuple[str, str], dict[str, Any]] = {}
    inner: dict[str, Any] = {}
    for key, value in saved.items():
        name, kind, rest = key.split("/", 2)
        if name == "strategy":
            inner[key.removeprefix("strategy/")] = value
        else:
            made.setdefault((name, kind), {})[rest] = value
    for (name, kind), values in made.items():
        if kind == "own":
            strategy.load_state_dict(_unpack(values.pop(""), values))
            continue
        ordered = [values[key] for key in sorted(values)]
        if kind == "state":
            getattr(strategy, name).load_state_dict(ordered[0])
        elif kind == "number":
            setattr(strategy, name, ordered[0][()])
        else:
            setattr(strategy, name, {"list": ordered, "dict": values}.get(kind, ordered[0]))
    if inner:
        restore(strategy.strategy, inner)


def check_memory(strategy: object, key: str, value: Any, where: str) -> None:
    """Check that what a file would set in a strategy is plain data and replaces plain data only."""
    name, _, rest = key.partition("/")
    kind = rest.partition("/")[0]
    if name == "strategy":
        inner = getattr(strategy, "strategy", None)
        if inner is None:
            raise DamagedError(f"{where} is of a strategy in {type(strategy).__name__}, which holds none")
        return check_memory(inner, rest, value, where)
    if key.startswith(_OWN):
        if has_state(strategy) and (rest == "own/") != isinstance(value, np.ndarray):
            return None
        raise DamagedError(f"{where} is no state of a {type(strategy).__name__}, which has no state_dict")
    plain = kind in ("state", "value")
    if rest.count("/") < 1 or kind not in _KINDS or plain == isinstance(value, np.ndarray):
        raise DamagedError(f"{where} is not what a strategy remembers")
    own = inspect.getattr_static(type(strategy), name, None)
    known = vars(strategy).get(name)
    if name.startswith("__") or callable(own) or hasattr(own, "__get__") or callable(known):
        raise DamagedError(f"{where} is no data of a {type(strategy).__name__}")
    if kind == "state":
        if not callable(getattr(known, "load_state_dict", None)):
            raise DamagedError(f"{where} is no state of a {type(strategy).__name__}")
    elif kind == "number":
        if value.ndim:
            raise DamagedError(f"{where} is an array of shape {value.shape}, not a number")
    elif not _fits(known, value, kind):
        raise DamagedError(f"{where} is a {type(value).__name__} in place of a {type(known).__name__}")
    return None


def _fits(known: Any, value: Any, kind: str) -> bool:
    """Whether a value may replace the one that a strategy starts with."""
    if known is None or value is None:
        return True
    if kind != "value":
        return isinstance(known, np.ndarray | dict | list)
    return type(known) is type(value) or {type(known), type(value)} == {int, float}


def kinds(strategy: object) -> str:
    """The strategy's class, and those of what is wrapped in it."""
    if strategy is None:
        return "no strategy"
    inner = getattr(strategy, "strategy", None)
    return type(strategy).__name__ + (f" of {kinds(inner)}" if inner is not None else "")


def _attributes(strategy: object) -> dict[str, Any]:
    return {} if strategy is None else vars(strategy)


def _pack(value: Any, arrays: list[np.ndarray]) -> Any:
    """A state as JSON can hold it; arrays go into the list and are represented by their index."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {"dict": [[_pack(k, arrays), _pack(v, arrays)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_pack(v, arrays) for v in value]}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        arrays.append(as_numpy(value, "a tensor of the strategy's state_dict").copy())
        return {kind: len(arrays) - 1}
    raise TypeError(
        f"the strategy's state_dict has a {type(value).__name__}: a checkpoint holds numbers, texts, arrays "
        "and tensors, and lists and dicts of them"
    )


def _unpack(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(value, dict):
        return value
    [(kind, held)] = value.items()
    if kind in ("tensor", "array"):
        found = arrays[str(held)].copy()
        return torch.from_numpy(found) if kind == "tensor" else found
    if kind == "dict":
        return {_unpack(k, arrays): _unpack(v, arrays) for k, v in held}
    values = [_unpack(v, arrays) for v in held]
    return tuple(values) if kind == "tuple" else values


def _through_json(value: Any) -> Any:
    """A copy that is equal, or `_NOT_JSON` where JSON cannot hold it."""
    try:
        copy = json.loads(json.dumps(value))
        return copy if copy == value else _NOT_JSON
    except (TypeError, ValueError):
        return _NOT_JSON
