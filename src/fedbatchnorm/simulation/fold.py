"""BatchNorm layers for a pass that holds the batches of several clients, one after another.

In distributed SGD all clients of a round share the same parameters, so the client axis exists inside the
normalization layers only. Folded into the batch, one forward and one backward compute the round for all.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..norm.classes import only_normalizes
from ..norm.convert import conversion_problem
from ..norm.fused import relu_normalize
from ..norm.moments import Moments, Running
from .normalizers import with_shared
from .schemes import Phase, Scheme, Setting

_MOST_FUSED = 65535  # clients in a pass: what one axis of a GPU's grid holds


class FoldedNorm(_BatchNorm):
    """What every BatchNorm of a simulated model becomes; its state is BatchNorm's own.

    In training it normalizes as the round's phase says, and stores what each client measured. In evaluation
    it is BatchNorm.
    """

    plain: type[_BatchNorm]
    phase: Phase
    clients: int
    seen: list[Moments | None]
    keep: Tensor | None = None  # which samples of a batch count, where it is filled up
    learned: tuple[str, ...] = ()  # parameters that the scheme has added
    settings: Mapping[str, Setting]  # what the phase's way to normalize takes from the recipe
    fused = False  # whether compiled passes normalize and measure as one operator

    def forward(self, input: Tensor) -> Tensor:
        """Normalize; in training, each client's part of the batch as the phase says."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        clients, running = 1 if self.phase.union else self.clients, self.running()
        possible = input.dim() in (2, 4) and clients <= _MOST_FUSED and self.keep is None
        more: dict[str, Any] = {name: self.settings[name] for name in self.phase.settings if self.settings}
        fused = self.fused and self.phase.normalize is with_shared and possible and more.get("limit") is None
        if fused and torch.compiler.is_compiling():
            constants = running.mean, running.var, self.weight, self.bias
            alone = {"eps": self.eps, "clients": clients, "before": False, "after": False}
            y, *seen = relu_normalize(
                input, None, *constants, **alone, share=_as_tensor(more.get("gradient"))
            )
            moments = Moments(input.numel() // input.shape[1] // clients, *seen)
        else:
            more |= {name: getattr(self, name) for name in self.phase.learned}
            if self.keep is not None:
                more["keep"] = self.keep
            y, moments = self.phase.normalize(
                input, running, clients=clients, weight=self.weight, bias=self.bias, **more
            )
        self.seen.append(moments)
        return y

    def running(self) -> Running:
        """The shared statistics. Their momentum is a number, so the count of updates is not needed."""
        assert self.running_mean is not None
        assert self.running_var is not None
        return Running(self.running_mean, self.running_var, 0, self.momentum, self.eps)

    def start(self, phase: Phase, settings: Mapping[str, Setting] | None = None) -> None:
        """Begin a round, or a step of it."""
        self.phase, self.seen, self.keep, self.settings = phase, [], None, settings or {}

    def rows(self, name: str, passes: int, wanted: bool | None = None) -> Moments | None:
        """What every client measured in a round of `passes` passes, (n, c); None if nothing was.

        Args:
            name: the layer's, for an error.
            passes: how many passes there were.
            wanted: whether the rows are needed; by default, whether the phase shares anything.
        """
        seen = [moments for moments in self.seen if moments is not None]
        if len(self.seen) > passes:
            raise ValueError(
                f"layer {name!r} ran {len(self.seen) // passes} times in one pass; "
                "the simulator needs a BatchNorm of its own for each place"
            )
        self.seen = []
        wanted = self.phase.share is not None if wanted is None else wanted
        if not wanted or not seen:
            return None
        if len(seen) == 1:
            return seen[0]
        return Moments(seen[0].count, torch.cat([m.mean for m in seen]), torch.cat([m.var for m in seen]))


def _as_tensor(share: Setting) -> Tensor | None:
    """The gradient's share, which an algorithm keeps on the device; None where there is none."""
    return share if isinstance(share, Tensor) else None


def load_all(layers: dict[str, FoldedNorm], after: dict[str, Running]) -> None:
    """Take over the statistics that the server has made, in a few operations for all layers."""
    changed = [layers[name] for name in after]
    with torch.no_grad():
        for name in ("mean", "var"):
            now: list[Tensor] = [getattr(layer, f"running_{name}") for layer in changed]
            torch._foreach_copy_(now, [getattr(running, name) for running in after.values()])
        counters: list[Tensor] = [layer.num_batches_tracked for layer in changed]  # pyrefly: ignore
        torch._foreach_add_(counters, 1)


def fold(
    model: nn.Module, beta: float, scheme: Scheme | None = None, groups: int = 2
) -> dict[str, FoldedNorm]:
    """Make every BatchNorm of `model` a FoldedNorm, or what the scheme replaces it by; in place.

    Args:
        model: any model.
        beta: the momentum of the running statistics.
        scheme: may replace layers, or add parameters to them.
        groups: for a scheme that needs to know.

    Returns:
        The layers that are FoldedNorm now, by name.
    """
    layers: dict[str, FoldedNorm] = {}
    unfold(model)
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, _BatchNorm):
            continue
        layer.momentum = beta
        problem = conversion_problem(layer)
        if not problem and not only_normalizes(type(layer)):
            problem = f"{type(layer).__name__} does more than normalize, which a simulation would leave out"
        if problem:
            raise ValueError(f"layer {name!r}: {problem}")
        if scheme is not None and scheme.replace is not None:
            try:
                _replace(model, layer, scheme.replace(layer, groups))
            except ValueError as error:
                raise ValueError(f"layer {name!r}: {error}") from None
            continue
        layer.__class__ = _folded_class(type(layer))  # pyrefly: ignore
        layers[name] = layer  # pyrefly: ignore
        if scheme is not None and scheme.before.learned:
            layer.learned = scheme.before.learned  # pyrefly: ignore
            for added in scheme.before.learned:
                layer.register_parameter(added, nn.Parameter(torch.zeros_like(layer.running_mean)))  # pyrefly: ignore
    return layers


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module by another, wherever it is used."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def unfold(model: nn.Module) -> nn.Module:
    """Make every FoldedNorm of `model` the BatchNorm it was, in place, and return the model."""
    for layer in model.modules():
        if isinstance(layer, FoldedNorm):
            for added in layer.learned:
                del layer._parameters[added]
            for name in ("phase", "clients", "seen", "fused", "keep", "learned", "settings"):
                layer.__dict__.pop(name, None)
            layer.__class__ = type(layer).plain  # pyrefly: ignore
    return model


@functools.cache
def _folded_class(plain: type[_BatchNorm]) -> type[FoldedNorm]:
    members = {"plain": plain, "__module__": plain.__module__}
    return type(f"Folded{plain.__name__}", (FoldedNorm, plain), members)
