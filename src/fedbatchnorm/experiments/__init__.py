"""The API for researchers: describe runs, sweep over them, read results as tables, add schemes of your own.

Each name below is loaded when it is first used, so that only its own dependencies are needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..simulation.normalizers import with_blend, with_frozen, with_own_batch, with_shared
    from ..simulation.ring import Ring
    from ..simulation.schemes import Phase
    from ..simulation.sharing import average, merge_exactly
    from .callbacks import MLflow, TensorBoard, WandB
    from .config import Run
    from .grids import grid
    from .images import image_folder
    from .parts import Part, attack, dataset, model, partition, rule, scheme
    from .results import Result
    from .runner import Watcher
    from .sweeps import sweep
    from .table import Results, read

_HOMES = {
    "..simulation.normalizers": ("with_blend", "with_frozen", "with_own_batch", "with_shared"),
    "..simulation.ring": ("Ring",),
    "..simulation.schemes": ("Phase",),
    "..simulation.sharing": ("average", "merge_exactly"),
    ".callbacks": ("MLflow", "TensorBoard", "WandB"),
    ".config": ("Run",),
    ".grids": ("grid",),
    ".images": ("image_folder",),
    ".parts": ("Part", "attack", "dataset", "model", "partition", "rule", "scheme"),
    ".results": ("Result",),
    ".runner": ("Watcher",),
    ".sweeps": ("sweep",),
    ".table": ("Results", "read"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "MLflow",
    "Part",
    "Phase",
    "Result",
    "Results",
    "Ring",
    "Run",
    "TensorBoard",
    "WandB",
    "Watcher",
    "attack",
    "average",
    "dataset",
    "grid",
    "image_folder",
    "merge_exactly",
    "model",
    "partition",
    "read",
    "rule",
    "scheme",
    "sweep",
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
