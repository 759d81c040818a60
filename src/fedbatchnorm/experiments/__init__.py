"""What researchers use: describe runs, sweep over them, read results as tables, bring schemes of their own.

Each name below is loaded when it is used, so that a part of this room needs no more than that part does.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..simulation.normalizers import with_blend, with_frozen, with_own_batch, with_shared
    from ..simulation.ring import Ring
    from ..simulation.schemes import Phase
    from ..simulation.sharing import average, merge_exactly
    from .config import Run
    from .parts import Part, attack, dataset, model, partition, rule, scheme

_HOMES = {
    "..simulation.normalizers": ("with_blend", "with_frozen", "with_own_batch", "with_shared"),
    "..simulation.ring": ("Ring",),
    "..simulation.schemes": ("Phase",),
    "..simulation.sharing": ("average", "merge_exactly"),
    ".config": ("Run",),
    ".parts": ("Part", "attack", "dataset", "model", "partition", "rule", "scheme"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Part",
    "Phase",
    "Ring",
    "Run",
    "attack",
    "average",
    "dataset",
    "merge_exactly",
    "model",
    "partition",
    "rule",
    "scheme",
    "with_blend",
    "with_frozen",
    "with_own_batch",
    "with_shared",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
