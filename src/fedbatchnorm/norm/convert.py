"""Turn every BatchNorm of a model into a federated one, and back.

A layer is converted by changing its class in place. It stays the very same object, so parameters,
buffers, hooks, mode, names, sharing and every reference the user holds are kept by construction.
"""

import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from .classes import federated_class, has_own_forward, name_problem, own_forward_problem
from .gradient import Limit, check_between, check_limit, check_share, share_by_layer
from .layers import _MARKS, _STATE, FederatedBatchNorm, layer_problem
from .walk import (
    KINDS,
    Skip,
    grouped,
    is_batch_norm,
    is_frozen,
    is_skipped,
    mark_skipped,
    modules,
    normalizers,
    running_statistics,
    to_skip,
)
from .watch import note


class ConversionError(ValueError):
    """A model has layers that cannot be federated; the message names each and says what to do."""


class Finding(NamedTuple):
    """One normalizer of a model: what it is, and what `convert` would do with it or why it would not.

    Attributes:
        layer: its name.
        type: the name of its class.
        becomes: the name of the class that `convert` would give it; None if it stays as it is.
        problem: why `convert` refuses the model; None if it does not.
        skipped: whether `convert` was asked to leave it as it is.
        note: anything else, such as why it stays as it is.
    """

    layer: str
    type: str
    becomes: str | None
    problem: str | None = None
    skipped: bool = False
    note: str | None = None


def convert(
    model: nn.Module, *, gradient: float | None = None, limit: Limit = None, skip: Skip | None = None
) -> nn.Module:
    """Make every BatchNorm of `model` a FederatedBatchNorm, in place, and return the model.

    Layers that are federated already stay as they are, but for `gradient` and `limit` if given. If any layer
    is refused, a `ConversionError` names all of them and nothing has been changed. A warning names modules
    that keep running statistics but are not BatchNorm, such as an InstanceNorm with `track_running_stats`:
    they stay as they are.

    Args:
        model: any model.
        gradient: the share of BatchNorm's gradient in the backward pass. It keeps the scale of the weights
            stable under ordinary SGD and many local steps. 0 is the paper's federated BatchNorm; the default
            is 0.7. The forward pass does not depend on it. See docs/training.md.
        limit: the largest standard deviation L that a normalized batch may have, before weight and bias; its
            mean may be at most 2 (L - 1) away from 0. A batch beyond that is normalized by statistics closer
            to its own, which keeps training with large learning rates from diverging. "auto" is 1 + 2.5 (1 -
            gradient), a good value with local epochs. By default there is no limit, as in the paper.
        skip: layers to leave as they are: names or shell patterns such as "head.*" (a list or one string), or
            a function of name and layer. Every call ignores these layers from then on; copies and pickles of
            the model remember this. If not given, layers that were skipped before stay skipped. If given, it
            replaces the earlier choice: `skip=()` converts every layer.

    Example:
        >>> model = convert(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
        >>> type(model[1]).__name__
        'FederatedBatchNorm1d'
    """
    share, limit = None if gradient is None else check_share(gradient), check_limit(limit)
    found = dict(normalizers(model))
    skipped = {n for n, m in found.items() if is_skipped(m)} if skip is None else to_skip(found, skip)
    findings = [_finding(name, module, name in skipped) for name, module in found.items()]
    refused = [(f.layer, f.type, f.problem) for f in findings if f.problem]
    if refused:
        raise ConversionError("\n  ".join(["cannot convert; nothing was changed:", *grouped(refused)]))
    for name, module in found.items():
        if name in skipped and isinstance(module, FederatedBatchNorm):
            _revert(module)
        mark_skipped(module, name in skipped)
    layers = [m for name, m in found.items() if is_batch_norm(m) and name not in skipped]
    new = [layer for layer in layers if not isinstance(layer, FederatedBatchNorm)]
    for layer in new:
        layer.__class__ = federated_class(type(layer))  # pyrefly: ignore
        FederatedBatchNorm.start_round(layer)  # pyrefly: ignore
    note(new)
    for layer in layers:
        if share is not None:
            layer.gradient = share  # pyrefly: ignore
        if limit is not None:
            layer.limit = limit  # pyrefly: ignore
    left = [f for f in findings if f.note and not f.skipped and not is_frozen(found[f.layer])]
    _warn(left if new or not layers else [], nothing=not layers and not skipped)
    return model


def set_gradient(
    model: nn.Module,
    gradient: float,
    *,
    limit: Limit = None,
    between: Mapping[str, float] | None = None,
) -> None:
    """Set the share of BatchNorm's gradient that the layers of a converted model use from now on.

    Args:
        model: a converted model.
        gradient: from 0 (the paper's federated BatchNorm) to 1. If it changes, a compiled model is compiled
            again.
        limit: the largest deviation of a normalized batch, as in `convert`; unchanged if not given.
        between: layer -> the part of its variance that lies between clients, as `merge` returns it. A layer
            for which it is small uses a share above `gradient` (`share_by_layer`); a layer that is not listed
            uses `gradient`. If not given, all layers use `gradient`.

    Example:
        >>> model = convert(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
        >>> set_gradient(model, 0.5)
        >>> model[1].gradient
        0.5
        >>> set_gradient(model, 0.5, between={"1": 0.004})
        >>> round(model[1].gradient, 6)
        0.8
    """
    share, limit = check_share(gradient), check_limit(limit)
    layers, known = federated_layers(model), check_between(between or {})
    for name in known.keys() - layers.keys():
        raise ValueError(f"between: the model has no federated layer {name!r}")
    parts = torch.tensor([known.get(name, 1.0) for name in layers], dtype=torch.float64)
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
    by_hand = []
    for name, layer in normalizers(model):
        mark_skipped(layer, False)
        if isinstance(layer, FederatedBatchNorm):
            if has_own_forward(layer):
                by_hand.append((name, type(layer).__name__, _BY_HAND))
            else:
                _revert(layer)
    if by_hand:
        warnings.warn("\n".join(grouped(by_hand)), stacklevel=2)
    return model


def inspect(model: nn.Module) -> list[Finding]:
    """List every BatchNorm of `model` with what `convert` would do to it; nothing is changed.

    Modules that keep running statistics but are not BatchNorm are listed, too; `convert` leaves them alone.

    Example:
        >>> layers = nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)
        >>> for finding in inspect(nn.Sequential(*layers)):
        ...     print(finding.layer, finding.type, finding.becomes)
        0 BatchNorm1d FederatedBatchNorm1d
        1 InstanceNorm1d None
    """
    return [_finding(name, module, is_skipped(module)) for name, module in normalizers(model)]


def federated_layers(model: nn.Module) -> dict[str, FederatedBatchNorm]:
    """Layer name -> layer, without skipped ones; an error names a BatchNorm that has not been converted."""
    layers: dict[str, FederatedBatchNorm] = {}
    for name, layer in modules(model, KINDS):
        federated = isinstance(layer, FederatedBatchNorm)
        if not (federated or is_batch_norm(layer)) or is_skipped(layer):
            continue
        if not federated:
            raise ValueError(f"layer {name!r} is a plain {type(layer).__name__}: {_how_to_convert(layer)}")
        if name in layers:
            raise ValueError(f"two layers are called {name!r} once the names of wrappers are left out")
        layers[name] = layer  # pyrefly: ignore
    return layers


def conversion_problem(layer: nn.Module) -> str | None:
    """Why a BatchNorm cannot be federated, and what to do; None if it can."""
    if isinstance(layer, torch.jit.ScriptModule):
        return "it is scripted and cannot be changed; convert the model before torch.jit"
    assert isinstance(layer, _BatchNorm)
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():  # pyrefly: ignore
        return "it is lazy and has no channels yet; run the model once on a sample, then convert"
    if "forward" in layer.__dict__:
        return "it has its own forward, put on this very layer, which would be lost; make it a class's"
    if isinstance(layer, FederatedBatchNorm):
        return layer_problem(layer)
    return own_forward_problem(type(layer)) or name_problem(layer) or layer_problem(layer)


_BY_HAND = "it was written as a federated class, with a forward of its own, and stays one"


def _finding(name: str, module: nn.Module, skipped: bool) -> Finding:
    """The finding for one normalizer, skipped or not."""
    kind = type(module).__name__
    if skipped:
        by_hand = isinstance(module, FederatedBatchNorm) and has_own_forward(module)
        return Finding(name, kind, None, _BY_HAND if by_hand else None, True, "skipped, as asked")
    if not is_batch_norm(module):
        statistics = ", ".join(running_statistics(module))
        frozen = "which are frozen" if is_frozen(module) else "which federated BatchNorm does not share"
        return Finding(name, kind, None, note=f"is no BatchNorm and keeps {statistics}, {frozen}")
    problem = conversion_problem(module)
    if problem:
        return Finding(name, kind, None, problem)
    if isinstance(module, FederatedBatchNorm):
        return Finding(name, kind, kind)
    return Finding(name, kind, federated_class(type(module)).__name__)  # pyrefly: ignore


def _warn(left: list[Finding], nothing: bool) -> None:
    """One warning for all modules that `convert` left as they were."""
    lines = ["the model has no BatchNorm layer: nothing to convert"] if nothing else []
    if left:
        lines += [
            "not converted (name them in `skip` if that is as it should be):",
            *grouped((f.layer, f.type, f.note or "") for f in left),
        ]
    if lines:
        warnings.warn("\n  ".join(lines), stacklevel=3)


def _revert(layer: FederatedBatchNorm) -> None:
    """Make one layer the BatchNorm it was."""
    for name in _STATE:
        delattr(layer, name)
    for name in ("gradient", "limit", *_MARKS):
        layer.__dict__.pop(name, None)
    layer.__class__ = layer.plain  # pyrefly: ignore


def _how_to_convert(layer: nn.Module) -> str:
    if isinstance(layer, nn.SyncBatchNorm):
        return (
            "call convert(model) first. If you did, convert_sync_batchnorm came after it and replaced the "
            "federated layers, with all that they had seen: call it before convert, or convert again now"
        )
    return "call convert(model) first, with it in `skip` if it is to stay as it is"
