"""A server's state after a round, as one safetensors file: what it sends, and what its strategy remembers."""

import contextlib
import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..norm.gradient import check_between
from ..storage.files import DamagedError, locked, regular, sweep, write_bytes
from ..storage.values import parse

_ARRAYS, _STRATEGY, _FORMAT = "arrays/", "strategy/", "2"
_KINDS = ("array", "number", "dict", "list", "value", "state")
_NOT_JSON = object()


class Saved(NamedTuple):
    """What a checkpoint holds: arrays by name, the rounds done, the share of BatchNorm's gradient, and the
    part of each layer's variance between clients; no share in files from before there was one, and where it
    is not the server's to change."""

    arrays: dict[str, np.ndarray]
    done: int
    gradient: float | None
    between: dict[str, float]


def plain_state(strategy: object, prefix: str = "") -> dict[str, Any]:
    """What a strategy remembers besides arrays, as far as JSON can hold it: attribute/kind/ -> value.

    Counters, rates and norms that change as it goes, and the `state_dict` of what has one, such as the
    accountant of a privacy budget; also of strategies that are wrapped in it.
    """
    found: dict[str, Any] = {}
    for name, value in vars(strategy).items():
        if name == "strategy" and hasattr(value, "__dict__"):
            found |= plain_state(value, f"{prefix}strategy/")
        elif callable(getattr(value, "state_dict", None)) and callable(
            getattr(value, "load_state_dict", None)
        ):
            found[f"{prefix}{name}/state/"] = value.state_dict()
        else:
            found[f"{prefix}{name}/value/"] = value
    copies = {key: _through_json(value) for key, value in found.items()}
    return {key: copy for key, copy in copies.items() if copy is not _NOT_JSON}


def write_checkpoint(
    path: Path,
    strategy: object,
    arrays: Mapping[str, Any],
    done: int,
    first: Mapping[str, Any],
    gradient: float | None = None,
    between: Mapping[str, float] | None = None,
) -> None:
    """Save after round `done`; the file before stays beside it, and a crash leaves one of the two.

    Args:
        path: the file.
        strategy: its attributes that are arrays, or dicts or lists of arrays, are saved too: the moments
            of FedAdam and the like, also of strategies wrapped in it.
        arrays: name -> something with `.numpy()`.
        done: the rounds that are finished.
        first: the strategy's `plain_state` before the first round; what has changed since is saved.
        gradient: the next round's share of BatchNorm's gradient, if that is not a setting.
        between: what goes with it, by layer.
    """
    tensors = {f"{_ARRAYS}{name}": array.numpy() for name, array in arrays.items()}
    tensors |= {f"{_STRATEGY}{key}": value for key, value in arrays_of(strategy).items()}
    tensors = {name: np.array(value, order="C") for name, value in tensors.items()}
    changed = {k: v for k, v in plain_state(strategy).items() if k not in first or first[k] != v}
    facts = {"format": _FORMAT, "done": str(done), "strategy": _kinds(strategy), "plain": json.dumps(changed)}
    if gradient is not None:
        facts["gradient"] = repr(gradient)  # which is exact
    if between:
        facts["between"] = json.dumps(dict(between))
    path.parent.mkdir(parents=True, exist_ok=True)
    content = save(tensors, facts | {"digest": _digest(tensors, facts)})

    def keep_previous() -> None:  # when all is written but the name
        with contextlib.suppress(FileNotFoundError):
            path.replace(_previous(path))

    with locked(path.with_name(f".{path.name}.lock"), wait=True, keep=False):
        sweep(path.parent, path.name)
        write_bytes(path, content, before=keep_previous)


def read_checkpoint(path: Path, strategy: object, like: Mapping[str, Any]) -> Saved | None:
    """What was saved; the strategy gets back what it remembered.

    None if there is no file. A damaged file is put aside for the one before it; an error says what does not
    fit if there is none, or if it was made with another model or strategy.
    """
    files = [file for file in (path, _previous(path)) if file.exists()]
    if not files:
        return None
    problems = []
    for file in files:
        try:
            tensors, facts, plain = _read(file)
            break
        except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
            problems.append(f"{file}: {str(error)[:200]}")
    else:
        why = "; ".join(problems)
        raise DamagedError(f"{path} is no checkpoint, or a damaged one: delete it to start anew ({why})")
    arrays = {k.removeprefix(_ARRAYS): v for k, v in tensors.items() if k.startswith(_ARRAYS)}
    shapes = {name: tuple(array.numpy().shape) for name, array in like.items()}
    if {name: value.shape for name, value in arrays.items()} != shapes:
        raise DamagedError(f"{file} is of another model: delete it to start anew")
    for name, array in like.items():
        kinds = arrays[name].dtype, array.numpy().dtype
        if kinds[0].kind != kinds[1].kind or np.promote_types(kinds[1], np.float32) != np.promote_types(
            kinds[0], np.float32
        ):
            raise DamagedError(f"{file} is of a model with {name} in {kinds[0]}, not {kinds[1]}")
    if facts["strategy"] != _kinds(strategy):
        other = f"{facts['strategy']}, not {_kinds(strategy)}"
        raise DamagedError(f"{file} is of a run with {other}: delete it to start anew")
    if problems:
        path.replace(path.with_name(path.name + ".damaged"))
    saved = {k.removeprefix(_STRATEGY): v for k, v in tensors.items() if k.startswith(_STRATEGY)} | plain
    for key, value in saved.items():
        _check_attribute(strategy, key, value, f"{file}: {key}")
    try:
        restore(strategy, saved)
    except Exception as error:  # of whatever the strategy makes of a state
        raise DamagedError(f"{file}: the strategy refuses what it remembered: {error!r}") from error
    share = float(facts["gradient"]) if "gradient" in facts else None
    between = check_between(json.loads(facts.get("between", "{}")))
    return Saved({name: arrays[name] for name in like}, int(facts["done"]), share, between)


def _check_attribute(strategy: object, key: str, value: Any, where: str) -> None:
    """What a file says of a strategy may be set: it is data, and takes the place of data alone."""
    name, _, rest = key.partition("/")
    kind = rest.partition("/")[0]
    if name == "strategy":
        inner = getattr(strategy, "strategy", None)
        if inner is None:
            raise DamagedError(f"{where} is of a strategy in {type(strategy).__name__}, which holds none")
        return _check_attribute(inner, rest, value, where)
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
    """Whether a value may follow the one that a strategy starts with."""
    if known is None or value is None:
        return True
    if kind != "value":
        return isinstance(known, np.ndarray | dict | list)
    return type(known) is type(value) or {type(known), type(value)} == {int, float}


def _read(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, Any]]:
    """The tensors, the facts, and what the strategy remembers besides arrays; an error for anything odd."""
    regular(file)
    with safe_open(file, "numpy") as opened:
        facts = dict(opened.metadata() or {})
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if facts.get("format") != _FORMAT:
        raise DamagedError(f"format {facts.get('format')}, expected {_FORMAT}")
    if facts.pop("digest") != _digest(tensors, facts):
        raise DamagedError("its contents are not those that were written")
    plain = parse(facts["plain"].encode(), "what the strategy remembers")
    if not isinstance(plain, dict) or "strategy" not in facts:
        raise DamagedError("it does not say what the strategy remembers")
    if not 0 <= int(facts["done"]) < 2**63 or not math.isfinite(float(facts.get("gradient", 0))):
        raise DamagedError(f"{facts['done'][:20]} rounds done, gradient {facts.get('gradient', '')[:20]}")
    check_between(parse(facts.get("between", "{}").encode(), "the parts between clients"))
    return tensors, facts, plain


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def _digest(tensors: Mapping[str, np.ndarray], facts: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()


def _kinds(strategy: object) -> str:
    """The strategy's class, and those of what is wrapped in it."""
    inner = getattr(strategy, "strategy", None)
    return type(strategy).__name__ + (f" of {_kinds(inner)}" if inner is not None else "")


def _through_json(value: Any) -> Any:
    """A copy that is equal, or `_NOT_JSON` where JSON cannot hold it."""
    try:
        copy = json.loads(json.dumps(value))
        return copy if copy == value else _NOT_JSON
    except (TypeError, ValueError):
        return _NOT_JSON


def arrays_of(strategy: object, prefix: str = "") -> dict[str, np.ndarray]:
    """attribute/kind/key -> array, for every attribute that is made of arrays."""
    found: dict[str, np.ndarray] = {}
    for name, value in vars(strategy).items():
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


def snapshot(strategy: object) -> dict[str, Any]:
    """What a strategy remembers, to be given to `restore`."""
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
        ordered = [values[key] for key in sorted(values)]
        if kind == "state":
            getattr(strategy, name).load_state_dict(ordered[0])
        elif kind == "number":
            setattr(strategy, name, ordered[0][()])
        else:
            setattr(strategy, name, {"list": ordered, "dict": values}.get(kind, ordered[0]))
    if inner:
        restore(strategy.strategy, inner)
