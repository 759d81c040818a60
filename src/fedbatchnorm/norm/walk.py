"""The BatchNorm-like layers of a model: by name, those to skip, and how messages list many of them."""

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

Skip = str | Iterable[str] | Callable[[str, nn.Module], bool]

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel)
KINDS = (_BatchNorm, torch.jit.ScriptModule)
_WRAPPER_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_STATISTIC = re.compile(r"(running|moving)_|num_batches_tracked$")
_SKIPPED = "_fedbatchnorm_skipped"  # an attribute of the layer, so that copies and pickles have it too
_NAMED = 3  # layers that a message names before it counts the rest


def is_batch_norm(module: nn.Module) -> bool:
    """Whether it is torch's BatchNorm or a subclass, also if it is scripted."""
    if not isinstance(module, KINDS):
        return False
    return isinstance(module, _BatchNorm) or "BatchNorm" in module.original_name  # pyrefly: ignore


def normalizers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every BatchNorm, and everything else that keeps running statistics of its own."""
    for name, module in modules(model):
        if is_batch_norm(module) or running_statistics(module):
            yield name, module


def running_statistics(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's own buffers that look like running statistics.

    Example:
        >>> running_statistics(nn.InstanceNorm1d(3, track_running_stats=True))
        ('running_mean', 'running_var', 'num_batches_tracked')
        >>> running_statistics(nn.InstanceNorm1d(3))
        ()
    """
    return tuple(name for name, _ in module.named_buffers(recurse=False) if _STATISTIC.match(name))


def is_frozen(module: nn.Module) -> bool:
    """Whether a module's statistics are constants, as in a FrozenBatchNorm: its weight is a buffer, too."""
    buffers = dict(module.named_buffers(recurse=False))
    return "weight" in buffers and not any(True for _ in module.parameters(recurse=False))


def is_skipped(module: nn.Module) -> bool:
    """Whether `convert` was asked to leave this layer as it is."""
    return bool(module.__dict__.get(_SKIPPED))


def mark_skipped(module: nn.Module, skipped: bool) -> None:
    """Remember, or forget, that a layer stays as it is."""
    if skipped:
        setattr(module, _SKIPPED, True)
    else:
        module.__dict__.pop(_SKIPPED, None)


def to_skip(found: dict[str, nn.Module], skip: Skip) -> set[str]:
    """The names that `skip` selects; an error says which name or pattern selects none.

    Args:
        found: layers by name.
        skip: names, shell patterns, or a function of a name and a layer.

    Example:
        >>> sorted(to_skip({"bn1": nn.BatchNorm1d(2), "head.bn": nn.BatchNorm1d(2)}, "head.*"))
        ['head.bn']
    """
    if callable(skip):
        return {name for name, layer in found.items() if skip(name, layer)}
    names: set[str] = set()
    for pattern in [skip] if isinstance(skip, str) else list(skip):
        if not isinstance(pattern, str):
            raise ValueError(f"skip has {pattern!r}; give names and patterns, or a function (name, layer)")
        meant = {name for name in found if name == pattern or fnmatch.fnmatchcase(name, pattern)}
        if not meant:
            near = difflib.get_close_matches(pattern, found, n=_NAMED, cutoff=0.3) or list(found)[:_NAMED]
            hint = f"near it are {', '.join(map(repr, near))}" if near else "the model has none"
            raise ValueError(f"skip: no BatchNorm is called {pattern!r} or matches it as a pattern; {hint}")
        names |= meant
    return names


def grouped(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """One line for each type and cause instead of one for each layer.

    Args:
        rows: (layer name, type, cause).

    Example:
        >>> grouped([(f"bn{i}", "Odd", "it is odd") for i in range(5)])
        ['5 x Odd: bn0, bn1, bn2, ... and 2 more: it is odd']
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, kind, cause in rows:
        groups.setdefault((kind, cause), []).append(name or "(the model)")
    lines = []
    for (kind, cause), names in groups.items():
        more = f", ... and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        lines.append(f"{len(names)} x {kind}: {', '.join(names[:_NAMED])}{more}: {cause}")
    return lines


def modules(model: nn.Module, kinds: type | tuple[type, ...] = nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module of these kinds once, under its first name and without the names of wrappers.

    Each round of a client walks through its model twice, so this is a list and not nested generators.
    """
    seen: set[nn.Module] = {model}
    found: list[tuple[str, nn.Module]] = [("", model)] if isinstance(model, kinds) else []

    def walk(module: nn.Module, place: str, prefix: str) -> None:
        wraps = isinstance(module, _WRAPPERS)
        for name, child in module._modules.items():
            if child is None or child in seen:
                continue
            seen.add(child)
            wanted, further = isinstance(child, kinds), child._modules
            if not (wanted or further):
                continue
            wrapper = name in _WRAPPER_NAMES or (wraps and name == "module")
            inside = place if wrapper else prefix + name
            if wanted:
                found.append((inside, child))
            if further:
                walk(child, inside, prefix if wrapper else inside + ".")

    walk(model, "", "")
    return found
