"""A server's state after a round, as one safetensors file: what it sends, and its strategy's state."""

import contextlib
import hashlib
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
from .arrays import as_numpy
from .memory import arrays_of, changed_since, check_memory, kinds, restore

_ARRAYS, _STRATEGY, _FORMAT = "arrays/", "strategy/", "2"


class Saved(NamedTuple):
    """What a checkpoint holds: arrays by name, the rounds done, the share of BatchNorm's gradient, and the
    part of each layer's variance between clients; no share in files from before there was one, and where it
    is not the server's to change."""

    arrays: dict[str, np.ndarray]
    done: int
    gradient: float | None
    between: dict[str, float]


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
        strategy: its state is saved, too: see `memory`.
        arrays: the whole model, by name.
        done: the rounds that are finished.
        first: the strategy's `plain_state` before the first round; what has changed since is saved.
        gradient: the next round's share of BatchNorm's gradient, if that is not a setting.
        between: the part of the variance between clients, by layer.
    """
    tensors = {f"{_ARRAYS}{name}": as_numpy(array, name) for name, array in arrays.items()}
    tensors |= {f"{_STRATEGY}{key}": value for key, value in arrays_of(strategy).items()}
    tensors = {name: np.array(value, order="C") for name, value in tensors.items()}
    facts = {"format": _FORMAT, "done": str(done), "strategy": kinds(strategy)}
    facts["plain"] = json.dumps(changed_since(first, strategy))
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
    """Read what was saved, and restore the strategy's state.

    None if there is no file. If the file is damaged, the one before it is used. An error says what is wrong
    if there is none, or if the file was made with another model or strategy.
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
        raise DamagedError(f"{path} is no checkpoint, or a damaged one: delete it to start over ({why})")
    arrays = {k.removeprefix(_ARRAYS): v for k, v in tensors.items() if k.startswith(_ARRAYS)}
    wanted = {name: as_numpy(array, name) for name, array in like.items()}
    shapes = {name: array.shape for name, array in wanted.items()}
    if {name: value.shape for name, value in arrays.items()} != shapes:
        raise DamagedError(f"{file} is of another model: delete it to start over")
    for name, array in wanted.items():
        old, new = arrays[name].dtype, array.dtype
        exact = [np.promote_types(kind, np.float32) for kind in (old, new)]
        if old.kind != new.kind or exact[0] != exact[1]:
            raise DamagedError(f"{file} is of a model with {name} in {old}, not {new}")
    if facts["strategy"] != kinds(strategy):
        other = f"{facts['strategy']}, not {kinds(strategy)}"
        raise DamagedError(f"{file} is of a run with {other}: delete it to start over")
    if problems:
        path.replace(path.with_name(path.name + ".damaged"))
    saved = {k.removeprefix(_STRATEGY): v for k, v in tensors.items() if k.startswith(_STRATEGY)} | plain
    for key, value in saved.items():
        check_memory(strategy, key, value, f"{file}: {key}")
    try:
        restore(strategy, saved)
    except Exception as error:  # of whatever the strategy makes of a state
        raise DamagedError(f"{file}: the strategy refuses its saved state: {error!r}") from error
    share = float(facts["gradient"]) if "gradient" in facts else None
    between = check_between(json.loads(facts.get("between", "{}")))
    return Saved({name: arrays[name] for name in like}, int(facts["done"]), share, between)


def _read(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, Any]]:
    """The tensors, the facts, and the strategy's state besides arrays; an error for anything invalid."""
    regular(file)
    with safe_open(file, "numpy") as opened:
        facts = dict(opened.metadata() or {})
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if facts.get("format") != _FORMAT:
        raise DamagedError(
            f"format {facts.get('format')}, and this version of fedbatchnorm reads {_FORMAT}: finish that "
            "run with the version that began it"
        )
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
