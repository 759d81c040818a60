"""A model whose parameters have a leading client axis: clients with weights of their own in one pass.

The clients' samples are concatenated, as in distributed SGD. Layers with parameters use each client's own on
its part of the batch; everything else (ReLU, pooling, dropout) does not change.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..norm.reduce import over_channels
from .convolution import client_conv, fits_kernels
from .device import Machine
from .federation import Federation
from .fold import FoldedNorm
from .linear import client_linear
from .normalizers import with_frozen, with_own_batch, with_shared
from .packing import Packing
from .schemes import Phase, Scheme

_TRIED = 2  # clients, and samples of each, in a trial
_TOLERANCE = 1e-6  # in float64
_SMALL = 2**17  # bytes of a batch's largest activation; above, a CPU is faster with one client after another


class StackedConv2d(nn.Conv2d):
    """3 x 3 convolutions with weight (clients, O, C, 3, 3) and bias (clients, O)."""

    in_bfloat16 = False  # whether to compute in bfloat16: autocast does not know the operator

    def forward(self, input: Tensor) -> Tensor:
        """(clients * batch, C, h, w) -> (clients * batch, O, h, w)."""
        if self.in_bfloat16:
            return client_conv(input.bfloat16(), self.weight.bfloat16(), self.bias)
        return client_conv(input, self.weight, self.bias)


class StackedLinear(nn.Linear):
    """Linear layers with weight (clients, O, I) and bias (clients, O)."""

    in_bfloat16 = False  # as above

    def forward(self, input: Tensor) -> Tensor:
        """(clients * batch, ..., I) -> (clients * batch, ..., O)."""
        rows = input.reshape(len(self.weight), -1, input.shape[-1])
        y = client_linear(rows.bfloat16() if self.in_bfloat16 else rows, self.weight)
        y = y if self.bias is None else y + self.bias[:, None].to(y.dtype)
        return y.view(*input.shape[:-1], -1)


class StackedGroupNorm(nn.GroupNorm):
    """GroupNorm with weight and bias (clients, c)."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each sample's groups of channels; weight and bias are its client's."""
        y = F.group_norm(input, self.num_groups, None, None, self.eps)
        for factor, combine in ((self.weight, torch.mul), (self.bias, torch.add)):
            y = y if factor is None else combine(y, over_channels(factor, input))
        return y


_STACKED: dict[type, type] = {
    nn.Conv2d: StackedConv2d,
    nn.Linear: StackedLinear,
    nn.GroupNorm: StackedGroupNorm,
}


def stacked(model: nn.Module, half: bool = False) -> nn.Module:
    """A copy whose layers expect parameters with a leading client axis, which `Packing.adopt` gives them.

    `half` is for a pass in bfloat16.
    """
    model = copy.deepcopy(model)
    for layer in model.modules():
        layer.__class__ = _STACKED.get(type(layer), type(layer))  # pyrefly: ignore
        if isinstance(layer, StackedConv2d | StackedLinear):
            layer.in_bfloat16 = half
    return model


def phase_can_be_stacked(phase: Phase, scheme: Scheme) -> bool:
    """Whether clients abreast can normalize as a phase says: with their own batch, or with what all share."""
    shared = phase.normalize in (with_shared, with_frozen) and "statistics" not in scheme.own
    fine = shared or phase.normalize is with_own_batch
    return fine and not phase.union and phase.survey is None and not phase.learned


def can_be_stacked(federation: Federation, machine: Machine, packing: Packing) -> bool:
    """Whether clients should and can train abreast; with abreast=True, an error says why they cannot."""
    scheme = federation.scheme
    phases = [p for p in (scheme.before, scheme.after) if phase_can_be_stacked(p, scheme)]
    if not machine.abreast or not phases:
        return False
    why = _problem(federation, packing, phases[0], fast=not machine.insists)
    if why and machine.insists:
        raise ValueError(f"clients cannot train abreast: {why}")
    return why is None


def _problem(federation: Federation, packing: Packing, phase: Phase, fast: bool) -> str | None:
    """Why a model's clients cannot train abreast, or None.

    Args:
        federation: the model, and samples to try it on.
        packing: the layout of its flat vectors.
        phase: what to normalize with in a trial.
        fast: whether what would be slow is in the way, too: large batches on a CPU, convolutions that have no
            kernel on a GPU.
    """
    model, on_cpu = federation.model, federation.device.type == "cpu"
    if fast and on_cpu and federation.recipe.batch * federation.largest > _SMALL:
        return "one client after another is faster here"
    if sorted(name for name, _ in model.named_parameters(remove_duplicate=False)) != sorted(packing.names):
        return "a parameter is not trained, or belongs to two layers"
    for name, layer in model.named_modules():
        if not any(p is not None for p in layer._parameters.values()):
            continue
        if type(layer) not in _STACKED and not isinstance(layer, FoldedNorm):
            return f"layer {name!r} is a {type(layer).__name__}"
        if isinstance(layer, nn.Conv2d) and not _is_plain(layer):
            return f"layer {name!r} is a convolution other than 3 x 3 with stride 1 and padding 1"
        if fast and not on_cpu and isinstance(layer, nn.Conv2d) and not _has_kernel(layer):
            return f"layer {name!r} has no kernel for {layer.in_channels} to {layer.out_channels} channels"
    return _trial(federation, packing, phase)


def _is_plain(layer: nn.Conv2d) -> bool:
    settings = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    plain = settings == ((3, 3), (1, 1), (1, 1), (1, 1))
    return plain and layer.groups == 1 and layer.padding_mode == "zeros"


def _has_kernel(layer: nn.Conv2d) -> bool:
    return layer.in_channels <= 4 or fits_kernels(layer.in_channels, layer.out_channels)


def _trial(federation: Federation, packing: Packing, phase: Phase) -> str | None:
    """Compare a stacked copy with the model in float64, because a forward pass may do anything with
    parameters and batches.
    """
    index = torch.arange(_TRIED * _TRIED, device=federation.device) % len(federation.data.train.x)
    x = federation.data.inputs(federation.data.train.x[index])
    d, channels = packing.size, sum(packing.channels)
    if x.device.type == "mps":
        return "the device has no float64"
    x = x.double()
    together = stacked(federation.model).double()
    alone = copy.deepcopy(federation.model).double()
    rows, one = x.new_zeros(_TRIED, d), x.new_zeros(d)
    packing.adopt(together, rows, x.new_zeros(2, channels))
    packing.adopt(alone, one, x.new_zeros(2, channels))
    rows *= torch.linspace(1.0, 1.5, d * _TRIED, dtype=x.dtype, device=x.device).view(_TRIED, d)
    try:
        with torch.no_grad():
            found = _scores(together, federation, phase, x, _TRIED)
            want = []
            for row, part in zip(rows, x.split(_TRIED), strict=True):
                one.copy_(row)
                want.append(_scores(alone, federation, phase, part, 1))
    except Exception as error:
        return f"the model failed with stacked parameters: {error}"
    close = torch.allclose(found, torch.cat(want), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
    return None if close else "the model does something with its parameters or with the batch as a whole"


def _scores(model: nn.Module, federation: Federation, phase: Phase, x: Tensor, clients: int) -> Tensor:
    """The model's output, without dropout, normalized as in training."""
    model.eval()
    for name in federation.layers:
        layer = model.get_submodule(name)
        layer.train()
        layer.start(phase, federation.recipe.settings())  # pyrefly: ignore
        layer.clients, layer.fused = clients, False  # pyrefly: ignore
    return model(x)
