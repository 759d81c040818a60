"""BatchNorm classes that do more than normalize, and what they do afterwards. By name, so nothing is
imported.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

After = Callable[[Any, Tensor], Tensor]


class Entry(NamedTuple):
    """What is known of a class: what follows normalizing, or that its forward calls super's exactly once."""

    after: After | None = None
    calls_super: bool = False


def register(kind: type[_BatchNorm] | str, after: After | None = None) -> None:
    """Tell `convert` what a BatchNorm class with its own forward does after normalizing.

    In training a converted layer is then y = after(layer, normalized x); in evaluation the class's own
    forward runs as it is. Subclasses that do not define forward need no registration, nor does a class whose
    forward always calls `super().forward` exactly once. Register in every process, before you convert a model
    or load a pickled one. Registering again affects later conversions only.

    Args:
        kind: the class, or its module and name as a string, so that nothing is imported.
        after: called with the layer and the normalized values; returns what the class's forward would return.
            None if its forward only normalizes.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import fedbatchnorm as fbn
        >>> class BatchNormReLU(nn.BatchNorm1d):
        ...     def forward(self, x):
        ...         statistics = self.running_mean, self.running_var
        ...         return nn.functional.batch_norm(x, *statistics, training=self.training).relu()
        >>> fbn.register(BatchNormReLU, lambda layer, y: y.relu())
        >>> model = fbn.convert(nn.Sequential(BatchNormReLU(1)))
        >>> bool((model(torch.tensor([[-4.0], [4.0]])) >= 0).all())
        True
    """
    if isinstance(kind, str):
        if not all(part.isidentifier() or part == "<locals>" for part in kind.split(".")) or "." not in kind:
            raise ValueError(f"kind is {kind!r}; it must be a class or its full name, as in 'module.Class'")
        name = kind
    elif isinstance(kind, type) and issubclass(kind, _BatchNorm):
        name = full_name(kind)
    else:
        raise ValueError(f"kind is {kind!r}; it must be a subclass of torch's BatchNorm, or its full name")
    if name.startswith("torch.nn.modules.batchnorm."):
        raise ValueError(f"{name} only normalizes, and is converted as it is: nothing to register")
    if after is not None and not callable(after):
        raise ValueError(f"after is {after!r}; it must be a function (layer, y) -> y, or None")
    _ENTRIES[name] = Entry(after)


def entry_for(kind: type) -> Entry | None:
    """What is known about exactly this class."""
    return _ENTRIES.get(full_name(kind))


def full_name(kind: type) -> str:
    """Module and name, as `register` takes it.

    Example:
        >>> full_name(nn.BatchNorm2d)
        'torch.nn.modules.batchnorm.BatchNorm2d'
    """
    return f"{kind.__module__}.{kind.__qualname__}"


def _drop_and_act(layer: nn.Module, y: Tensor) -> Tensor:
    """What timm's layers do; the oldest versions have no dropout, and None instead of an activation."""
    for name in ("drop", "act"):
        module = getattr(layer, name, None)
        y = y if module is None else module(y)
    return y


_TIMM = ("timm.layers", "timm.models.layers")  # where timm has its layers since 0.8, and before
_CUT_AND_PASTE = Entry(_drop_and_act)
_ONLY_NORMALIZES = Entry()  # over several processes, which `collect(group=...)` does for us
_ENTRIES: dict[str, Entry] = {
    **{f"{room}.norm_act.BatchNormAct2d": _CUT_AND_PASTE for room in _TIMM},
    **{f"{room}.norm_act.SyncBatchNormAct": _CUT_AND_PASTE for room in _TIMM},
    **{f"{room}.split_batchnorm.SplitBatchNorm2d": Entry(calls_super=True) for room in _TIMM},
    "fastai.layers.BatchNorm1dFlat": Entry(calls_super=True),
    "detectron2.layers.batch_norm.NaiveSyncBatchNorm": _ONLY_NORMALIZES,
    "horovod.torch.sync_batch_norm.SyncBatchNorm": _ONLY_NORMALIZES,
    **{f"mmdet3d.models.layers.norm.NaiveSyncBatchNorm{d}d": _ONLY_NORMALIZES for d in (1, 2)},
    **{f"mmdet3d.ops.norm.NaiveSyncBatchNorm{d}d": _ONLY_NORMALIZES for d in (1, 2)},
    **{f"pytorchvideo.layers.batch_norm.NaiveSyncBatchNorm{d}d": _ONLY_NORMALIZES for d in (1, 2, 3)},
}
