"""The calibrated start: one pass with plain BatchNorm in which every layer measures its input."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convert import federated_layers
from .layers import FederatedBatchNorm
from .moments import Running, with_constants
from .reduce import statistics_dtype


@contextmanager
def calibrating(model: nn.Module) -> Iterator[nn.Module]:
    """Inside this context, layers in training mode normalize by their own batch and measure it.

    y = (x - u) / sqrt(s^2 + eps) * weight + bias, with u and s^2 of this batch alone. The shared statistics
    of a new model are mean 0 and variance 1, whatever the data. With them, only one layer in a round would
    get correct statistics, and the layers that follow would be far off. If each layer normalizes by its own
    batch, the next layer's input is about what it will be later, so one pass is enough. Clients make this
    pass and `collect`; the server merges with `momentum=1.0`. Running statistics do not change, and layers in
    evaluation mode do nothing new. Afterwards the model is as before, except for what was measured. A batch
    with one value per channel is normalized to 0.

    Args:
        model: a converted model. It may be compiled (then it is compiled once more) or distributed.

    Example:
        >>> import fedbatchnorm as fbn
        >>> model = fbn.convert(nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)))
        >>> with torch.no_grad(), fbn.calibrating(model):
        ...     y = model(torch.tensor([[4.0], [8.0]]))
        >>> shared = fbn.merge(fbn.statistics(model), [fbn.collect(model)], momentum=1.0).statistics
        >>> [round(running.mean.item(), 3) for running in shared.values()]
        [6.0, 0.0]
    """
    layers = federated_layers(model)
    inside = [name for name, layer in layers.items() if isinstance(layer, _Calibrating)]
    if inside:
        raise RuntimeError(f"layer {inside[0]!r} is calibrating already: one `with` at a time")
    try:
        for layer in layers.values():
            layer.__class__ = _calibrating_class(type(layer))  # pyrefly: ignore
        yield model
    finally:
        for layer in layers.values():
            if isinstance(layer, _Calibrating):  # not one that was reverted inside
                layer.__class__ = layer.outside  # pyrefly: ignore


class _Calibrating(FederatedBatchNorm):
    """The class of a layer inside `calibrating`. As in `convert`, the object stays and its class changes."""

    outside: type[FederatedBatchNorm]

    def forward(self, input: Tensor) -> Tensor:
        """Measure as usual, and normalize by the batch."""
        if not self.training or self._averaging:
            return super().forward(input)
        with torch.no_grad():
            super().forward(input)  # for its checks and what it measures; not for what it returns
        return by_batch(input, self.weight, self.bias, self.eps)


def by_batch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - u) / sqrt(s^2 + eps) * weight + bias, with u and s^2 of the batch; 0 for a single value.

    Args:
        x: (batch, c, ...).
        weight: (c,) or None.
        bias: (c,) or None.
        eps: what is added to the variance.

    Example:
        >>> by_batch(torch.tensor([[4.0], [8.0]]), None, None, 1e-9).flatten()
        tensor([-1.,  1.])
    """
    if x.numel() > x.shape[1]:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    # torch refuses a single value, which is its own mean: what is left is 0, and the bias.
    zero = torch.zeros(2, x.shape[1], dtype=statistics_dtype(x), device=x.device)
    return with_constants(x * 0, Running(zero[0], zero[1], eps=eps), weight, bias)


@functools.cache
def _calibrating_class(outside: type[FederatedBatchNorm]) -> type[FederatedBatchNorm]:
    # Behind what the layer's class has of its own, and before what all federated layers share.
    members = {"outside": outside, "__module__": outside.__module__}
    return type(outside.__name__, (outside, _Calibrating), members)
