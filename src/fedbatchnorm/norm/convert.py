"""Turn every BatchNorm of a model into a federated one, and back.

A layer is converted by changing its class in place. It stays the very same object, so parameters,
buffers, hooks, mode, names, sharing and every reference the user holds are kept by construction.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim.swa_utils import AveragedModel

from .gradient import Limit, check_limit, check_share, share_by_layer
from .layers import _STATE, FederatedBatchNorm, federated_class, layer_problem

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel)
_WRAPPER_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, FederatedBatchNorm.forward)


class ConversionError(ValueError):
    """A model has layers that cannot be federated; the message names each and says what to do."""


class Finding(NamedTuple):
    """One BatchNorm of a model: what it is, what `convert` would make of it, or why it refuses."""

    layer: str
    type: str
    becomes: str | None
    problem: str | None = None


def convert(model: nn.Module, *, gradient: float | None = None, limit: Limit = None) -> nn.Module:
    """Make every BatchNorm of `model` a FederatedBatchNorm, in place, and return the model.

    Layers that are federated already stay as they are, but for `gradient` and `limit` if given. If any layer
    is refused, a `ConversionError` names all of them and nothing has been changed.

    Args:
        model: whatever you train.
        gradient: the share of BatchNorm's gradient in the backward pass, which holds the scale of the weights
            under ordinary SGD and many local steps; 0 is the paper's federated BatchNorm, 0.7 if not given.
            The forward pass does not depend on it. See docs/training.md.
        limit: the largest standard deviation L of a normalized batch, before weight and bias, and its mean at
            most 2 (L - 1); a batch beyond that is normalized by statistics closer to its own, which keeps
            large learning rates from diverging. "auto" is 1 + 2.5 (1 - gradient), a good value under local
            epochs; no limit, as in the paper, if not given.

    Example:
        >>> model = convert(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
        >>> type(model[1]).__name__
        'FederatedBatchNorm1d'
    """
    share, limit = None if gradient is None else check_share(gradient), check_limit(limit)
    refused = [f"  {f.layer or '(the model)'}: {f.problem}" for f in inspect(model) if f.problem]
    if refused:
        raise ConversionError("\n".join(["cannot convert; nothing was changed:", *refused]))
    layers = [layer for _, layer in _batch_norms(model)]
    if not layers:
        warnings.warn("the model has no BatchNorm layer: nothing to convert", stacklevel=2)
    for layer in layers:
        if not isinstance(layer, FederatedBatchNorm):
            layer.__class__ = federated_class(type(layer))  # pyrefly: ignore
            FederatedBatchNorm.start_round(layer)  # pyrefly: ignore
        if share is not None:
            layer.gradient = share  # pyrefly: ignore
        if limit is not None:
            layer.limit = limit  # pyrefly: ignore
    return model


def set_gradient(
    model: nn.Module,
    gradient: float,
    *,
    limit: Limit = None,
    between: Mapping[str, float] | None = None,
) -> None:
    """Set the share of BatchNorm's gradient that the layers of a converted model take from here on.

    Args:
        model: a converted model.
        gradient: from 0 (the paper's federated BatchNorm) to 1; what a compiled model has compiled is
            compiled again when it changes.
        limit: how wide and how far away a batch may come out, as for `convert`; left as it is if not given.
        between: layer -> the part of its variance that lies between clients, as `merge` returns it: a layer
            where that is small takes more than `gradient` (`share_by_layer`), and one that is not in it takes
            `gradient`. If not given, all take `gradient`.

    Example:
        >>> model = convert(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
        >>> set_gradient(model, 0.5)
        >>> model[1].gradient
        0.5
        >>> set_gradient(model, 0.5, between={"1": 0.004})
        >>> round(model[1].gradient, 6)
        0.88
    """
    share, limit = check_share(gradient), check_limit(limit)
    layers = federated_layers(model)
    for name, part in (between or {}).items():
        if name not in layers:
            raise ValueError(f"between: the model has no federated layer {name!r}")
        if isinstance(part, bool) or not isinstance(part, int | float) or not 0 <= part <= 1:
            raise ValueError(f"between: {part!r} for layer {name!r}; it must be a number from 0 to 1")
    parts = torch.tensor([(between or {}).get(name, 1.0) for name in layers], dtype=torch.float64)
    for layer, own in zip(layers.values(), share_by_layer(share, parts).tolist(), strict=True):
        layer.gradient = own
        layer.limit = layer.limit if limit is None else limit


def revert(model: nn.Module) -> nn.Module:
    """Make every FederatedBatchNorm of `model` the BatchNorm it was, in place, and return the model.

    Moments that were not collected are dropped; the running statistics stay.

    Example:
        >>> type(revert(convert(nn.BatchNorm1d(3)))).__name__
        'BatchNorm1d'
    """
    for _, layer in _batch_norms(model):
        if isinstance(layer, FederatedBatchNorm):
            for name in _STATE:
                delattr(layer, name)
            for name in ("gradient", "limit"):
                layer.__dict__.pop(name, None)
            layer.__class__ = layer.plain  # pyrefly: ignore
    return model


def inspect(model: nn.Module) -> list[Finding]:
    """List every BatchNorm of `model` with what `convert` would do to it; nothing is changed.

    Example:
        >>> inspect(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(3, track_running_stats=False)))[0]
        Finding(layer='0', type='BatchNorm1d', becomes='FederatedBatchNorm1d', problem=None)
    """
    findings = []
    for name, layer in _batch_norms(model):
        kind, problem = type(layer).__name__, conversion_problem(layer)
        becomes = None
        if not problem:
            becomes = kind if isinstance(layer, FederatedBatchNorm) else federated_class(type(layer)).__name__
        findings.append(Finding(name, kind, becomes, problem))
    return findings


def federated_layers(model: nn.Module) -> dict[str, FederatedBatchNorm]:
    """Layer name -> layer; an error names a BatchNorm that has not been converted."""
    layers = {}
    for name, layer in _batch_norms(model):
        if not isinstance(layer, FederatedBatchNorm):
            raise ValueError(f"layer {name!r} is a plain {type(layer).__name__}: call convert(model) first")
        if name in layers:
            raise ValueError(f"two layers are called {name!r} once the names of wrappers are left out")
        layers[name] = layer
    return layers


def conversion_problem(layer: nn.Module) -> str | None:
    """Why a BatchNorm cannot be federated, and what to do; None if it can."""
    if isinstance(layer, torch.jit.ScriptModule):
        return "it is scripted and cannot be changed; convert the model before torch.jit"
    assert isinstance(layer, _BatchNorm)
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():  # pyrefly: ignore
        return "it is lazy and has no channels yet; run the model once on a sample, then convert"
    own = "forward" in layer.__dict__ or type(layer).forward not in _FORWARDS
    if own:
        return (
            f"{type(layer).__name__} has its own forward, which would be lost; "
            "use torch's BatchNorm and put what it does into a module around it"
        )
    return layer_problem(layer)


def _batch_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every BatchNorm once, under its first name and without the names of wrappers."""
    seen: set[int] = set()

    def walk(module: nn.Module, path: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        scripted = isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in module.original_name
        if isinstance(module, _BatchNorm) or scripted:
            yield ".".join(path), module
        for name, child in module.named_children():
            wrapper = name in _WRAPPER_NAMES or (name == "module" and isinstance(module, _WRAPPERS))
            yield from walk(child, path if wrapper else (*path, name))

    yield from walk(model, ())
