"""A model's parameters and statistics as flat vectors, so that many clients' are the rows of one matrix."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .fold import FoldedNorm

_ALIGNED = 16  # numbers: a GPU reads several at once where they lie at multiples of it


class Packing:
    """Where each parameter that is trained, and each layer's statistics, lie in flat vectors.

    For a GPU weights of convolutions lie channels_last, and every parameter starts, and the vector ends, at a
    multiple of 16. The numbers between them are zero padding.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, FoldedNorm], for_gpu: bool):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self._shapes = [tuple(p.shape) for _, p in named]
        self._channels_last = for_gpu
        aligned = _ALIGNED if for_gpu else 1
        self._lengths = [-(-p.numel() // aligned) * aligned for _, p in named]
        self.size = sum(self._lengths)
        self.channels = [layer.num_features for layer in layers.values()]
        self._layers = list(layers)
        # Where in a flat vector each value lies, in the order of the parameters.
        device = named[0][1].device if named else None
        places = self.views(torch.arange(self.size, device=device))
        self.order = torch.cat([place.flatten() for place in places])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of flat vectors (..., d), in its shape (..., *shape)."""
        found = []
        for part, shape in zip(flat.split(self._lengths, -1), self._shapes, strict=True):
            lead, part = flat.shape[:-1], part[..., : torch.Size(shape).numel()]
            if self._channels_last and len(shape) == 4:
                o, i, h, w = shape
                found.append(part.view(*lead, o, h, w, i).movedim(-1, -3))
            else:
                found.append(part.view((*lead, *shape)))
        return found

    def fill(self, flat: Tensor, values: Sequence[Tensor | None]) -> None:
        """Write each parameter's values (..., *shape), None for zeros, into flat vectors (..., d).

        It is one concatenation: a copy for each parameter would be some twenty small kernels on a GPU.
        """
        lead, parts, zero = flat.shape[:-1], [], flat.new_zeros(())
        for value, shape, length in zip(values, self._shapes, self._lengths, strict=True):
            size = 0 if value is None else torch.Size(shape).numel()
            if value is not None:
                turned = self._channels_last and len(shape) == 4
                parts.append((value.movedim(-3, -1) if turned else value).reshape(*lead, size))
            if size < length:
                parts.append(zero.expand(*lead, length - size))
        torch.cat(parts, -1, out=flat)

    def adopt(self, model: nn.Module, weights: Tensor, statistics: Tensor) -> list[nn.Parameter]:
        """Have a model's parameters and statistics live in flat vectors (d,) and (2, C), which take over
        their values; returns the parameters."""
        parameters = dict(model.named_parameters())
        trained = [parameters[name] for name in self.names]
        with torch.no_grad():
            for p, view in zip(trained, self.views(weights), strict=True):
                view.copy_(p)
                p.data = view
            parts = zip(self._layers, *(s.split(self.channels) for s in statistics), strict=True)
            for name, mean, var in parts:
                layer = model.get_submodule(name)
                for key, view in (("running_mean", mean), ("running_var", var)):
                    view.copy_(layer._buffers[key])  # pyrefly: ignore
                    layer._buffers[key] = view
        return trained

    def places(self, kinds: Sequence[str]) -> Tensor:
        """Where in a flat vector (d,) the layers' parameters of these kinds lie: weight, bias, ..."""
        wanted = {f"{layer}.{kind}" if layer else kind for layer in self._layers for kind in kinds}
        mask = torch.zeros(self.size, dtype=torch.bool)
        for name, view in zip(self.names, self.views(mask), strict=True):
            view.fill_(name in wanted)
        return mask.nonzero().flatten()
