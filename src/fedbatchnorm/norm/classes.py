"""The federated class for a BatchNorm class, and how it combines with the class's own forward.

In the method resolution order, a class without a forward of its own comes after FederatedBatchNorm. So does a
registered class, and what was registered is then applied after our forward. A class whose forward calls
super's exactly once comes before it, so that its super is ours.
"""

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .layers import (
    _STATE,
    FederatedBatchNorm,
    FederatedBatchNorm1d,
    FederatedBatchNorm2d,
    FederatedBatchNorm3d,
    FederatedSyncBatchNorm,
)
from .registry import After, Entry, entry_for
from .source import reads_as_one_call

_CLASSES: dict[type, type[FederatedBatchNorm]] = {
    c.plain: c
    for c in (FederatedBatchNorm1d, FederatedBatchNorm2d, FederatedBatchNorm3d, FederatedSyncBatchNorm)
}
_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


# What a federated layer has and a plain one must not have.
_OURS = sorted(
    {*vars(FederatedBatchNorm), *_STATE, "plain", "_fbn_after", "outside"} - set(dir(nn.BatchNorm2d))
)


class _Followed(FederatedBatchNorm):
    """A layer whose class does something after normalizing."""

    _fbn_after: After

    def forward(self, input: Tensor) -> Tensor:
        """In training our forward and what follows it; otherwise the class's own forward, which does both."""
        y = super().forward(input)
        return self._fbn_after(self, y) if self.training and not self._averaging else y


def federated_class(plain: type[_BatchNorm]) -> type[FederatedBatchNorm]:
    """The federated class for a BatchNorm class; a user's subclass keeps its own methods."""
    if plain in _CLASSES:
        return _CLASSES[plain]
    problem = own_forward_problem(plain)
    if problem:
        raise ValueError(problem)
    base = _base(plain)
    return _make(plain, base, entry_for(base))


@functools.cache
def _make(plain: type[_BatchNorm], base: type[_BatchNorm], entry: Entry | None) -> type[FederatedBatchNorm]:
    members: dict[str, Any] = {
        "plain": plain,
        "__module__": plain.__module__,
        "__reduce_ex__": _reduce_subclass,
    }
    if _outermost(plain) is not base:  # its forward calls super's
        bases = (plain, _federated_base(base))
    elif entry is None or entry.after is None:
        bases = (FederatedBatchNorm, plain)
    else:
        bases = (_Followed, plain)
        members["_fbn_after"] = staticmethod(entry.after)
    return type(f"Federated{plain.__name__}", bases, members)


def own_forward_problem(plain: type[_BatchNorm]) -> str | None:
    """Why a class's own forward cannot be combined with ours, and what to do; None if it can."""
    base = _base(plain)
    for kind in plain.__mro__[: plain.__mro__.index(base)]:
        entry = entry_for(kind)
        if "forward" in vars(kind) and not (entry and entry.calls_super):
            doubt = reads_as_one_call(kind)
            if doubt:
                return f"{kind.__name__} has its own forward, and {doubt}. {_advice(plain)}"
    return None


def name_problem(layer: _BatchNorm) -> str | None:
    """Why a plain layer's own attributes would conflict with ours, or None."""
    taken = next((name for name in _OURS if hasattr(layer, name)), None)
    return (
        f"it has an attribute {taken!r}, which a federated layer needs; rename it, or skip the layer"
        if taken
        else None
    )


def only_normalizes(plain: type[_BatchNorm]) -> bool:
    """Whether a class does what torch's does, so that its forward can be left out."""
    entry = entry_for(_base(plain))
    return _outermost(plain) is _base(plain) and (entry is None or entry.after is None)


def has_own_forward(layer: FederatedBatchNorm) -> bool:
    """Whether a user wrote a federated class with a forward of its own, which no plain class has."""
    kind = vars(type(layer)).get("outside", type(layer))  # inside `calibrating`
    own = kind.forward is not FederatedBatchNorm.forward and "plain" not in vars(kind)
    return own or not hasattr(kind, "plain")


def _base(plain: type[_BatchNorm]) -> type[_BatchNorm]:
    """The class whose forward ours replaces: torch's, or a registered one."""
    for kind in plain.__mro__:
        entry = entry_for(kind)
        known = entry is not None and not entry.calls_super
        if known or kind in _CLASSES or kind is _BatchNorm or vars(kind).get("forward") in _FORWARDS:
            return kind  # pyrefly: ignore
    raise AssertionError(f"{plain} is no BatchNorm")


def _outermost(plain: type[_BatchNorm]) -> type:
    """The class whose forward is called; a torch class that inherits its own counts as having one."""
    base = _base(plain)
    return next(kind for kind in plain.__mro__ if "forward" in vars(kind) or kind is base)


def _federated_base(base: type[_BatchNorm]) -> type[FederatedBatchNorm]:
    return FederatedBatchNorm if base is _BatchNorm else federated_class(base)


def _advice(plain: type[_BatchNorm]) -> str:
    return (
        "Either register what it does after normalizing and convert again,\n"
        f"      fbn.register({plain.__name__}, lambda layer, y: ...)  # no function if it does nothing\n"
        "      fbn.convert(model)\n"
        "    or leave such layers as they are with fbn.convert(model, skip=[...])"
    )


def _reduce_subclass(self, protocol):
    """Pickle a layer whose class was made at run time, by naming the class that it was made from."""
    return _restore_subclass, (self.plain,), self.__dict__


def _restore_subclass(plain):
    return federated_class(plain).__new__(federated_class(plain))
