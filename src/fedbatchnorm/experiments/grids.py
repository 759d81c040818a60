"""Grids: settings given as lists are varied, and every combination is a run."""

import difflib
import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor

from ..data.partition import PARTITIONS
from ..simulation.recipe import ADVERSARY
from ..simulation.schemes import SCHEMES
from .config import Run, digest
from .parts import SCHEME_SETTINGS, Part, scheme_uses

FIELDS = tuple(field.name for field in fields(Run) if field.name != "own")
# Field -> the field that decides whether it makes a difference, and with which value it does.
_ASKED_FOR = {
    "gamma": ("partition", "gamma"),
    "alpha": ("partition", "dirichlet"),
    "decay": ("schedule", "exponential"),
    "server_momentum": ("server", "momentum or adam"),
    "momentum": ("optimizer", "sgd"),
    "momentum_kind": ("momentum", "above 0"),
    "local_state": ("momentum", "above 0"),
    **dict.fromkeys(ADVERSARY, ("byzantine", "above 0")),
}


def grid(**settings: Any) -> list[Run]:
    """The runs of every combination of settings, each once; seeds vary slowest, so that all cells fill
    evenly.

    Args:
        settings: fields of a `Run`, each a value or a list of values. A setting without effect does not
            multiply a run: GroupNorm appears once even if `gradient` is varied.

    Example:
        >>> [(r.scheme, r.gamma, r.seed) for r in grid(scheme=["fbn", "naive"], gamma=0.1, seed=range(2))]
        [('fbn', 0.1, 0), ('naive', 0.1, 0), ('fbn', 0.1, 1), ('naive', 0.1, 1)]
    """
    axes = {name: _values(name, value) for name, value in settings.items()}
    outer = sorted(axes, key=lambda name: name != "seed")
    combinations = itertools.product(*(axes[name] for name in outer))
    runs = [Run(**dict(zip(outer, values, strict=True))) for values in combinations]
    check_used(settings, runs)
    return list({digest(run): run for run in runs}.values())


def check_used(given: Collection[str], runs: Collection[Run]) -> None:
    """An error if a given setting has no effect on any of the runs."""
    for name in given:
        if runs and all(name in run.unused() for run in runs):
            raise ValueError(f"{name} is given, but {_why_unused(name, runs)}")


def _why_unused(name: str, runs: Collection[Run]) -> str:
    if name in SCHEME_SETTINGS:
        schemes = list(dict.fromkeys(run.scheme for run in runs))
        takers = [s for s, row in SCHEMES.items() if name in scheme_uses(row, s)]
        many = len(schemes) > 1
        here = f"scheme{'s' if many else ''} {', '.join(schemes)} {'do' if many else 'does'} not use it"
        return f"{here}; of the package's schemes {', '.join(takers)} would"
    what, wanted = _ASKED_FOR[name]
    have = ", ".join(dict.fromkeys(str(getattr(run, what)) for run in runs))
    return f"{what} is {have}, which does not use it; it is for {what} {wanted}"


def _values(name: str, value: Any) -> list[Any]:
    """The values of a setting."""
    if name not in FIELDS:
        close = difflib.get_close_matches(name, FIELDS, 1)
        raise ValueError(f"a run has no {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    if name == "dataset" and isinstance(value, tuple) and any(hasattr(v, "shape") for v in value):
        raise ValueError(
            "dataset is a pair of tensors without a name: give experiments.dataset(name, (x, y))"
        )
    one = isinstance(value, str | Mapping | Part | Tensor) or callable(value) or hasattr(value, "_fields")
    if one or not isinstance(value, Iterable):
        return [_plain(value)]
    values = [_plain(v) for v in value]
    if not values:
        raise ValueError(f"{name} is an empty list; give one value at least")
    return values


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def levels() -> list[str]:
    """The names of the package's measures of heterogeneity."""
    return [row.parameter for row in PARTITIONS.values() if row.parameter is not None]
