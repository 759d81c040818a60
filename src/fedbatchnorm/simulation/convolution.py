"""3 x 3 convolutions of many clients, each with weights of its own, as one operator.

The clients' images lie one after another in the batch. On a CUDA GPU Triton's kernels (`conv_kernels`) take
all clients at once; elsewhere, and for what the kernels do not take, it is a loop over the clients.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..norm.reduce import over_channels


@torch.library.custom_op("fedbatchnorm::client_conv", mutates_args=())
def client_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each client's images with its weights: 3 x 3, stride 1, padding 1.

    Args:
        x: (clients * batch, C, h, w), best in channels_last memory.
        weight: (clients, O, C, 3, 3), of x's type; best with C last in memory.
        bias: (clients, O) or None, of any type.

    Returns:
        (clients * batch, O, h, w) in channels_last memory.

    Example:
        >>> x, weight = torch.ones(2, 1, 1, 1), torch.tensor([3.0, 5.0]).view(2, 1, 1, 1, 1)
        >>> client_conv(x, F.pad(weight, (1, 1, 1, 1)), None).flatten().tolist()
        [3.0, 5.0]
    """
    y = _images(x, weight.shape[1])
    if _kernels_take(x, weight):
        from . import conv_kernels  # Triton comes with torch for CUDA alone

        conv_kernels.forward(_last(x), weight, y)
        return y if bias is None else y.add_(over_channels(bias.to(y.dtype), y))
    for i, (part, place) in enumerate(zip(x.chunk(len(weight)), y.chunk(len(weight)), strict=True)):
        place.copy_(F.conv2d(part, weight[i], None if bias is None else bias[i].to(x.dtype), padding=1))
    return y


@torch.library.custom_op("fedbatchnorm::client_conv_input", mutates_args=())
def _input_gradient(g: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x, (clients * batch, C, h, w), in channels_last memory."""
    dx = _images(g, weight.shape[2])
    if _kernels_take(g, weight):
        from . import conv_kernels

        conv_kernels.input_gradient(_last(g), weight, dx)
        return dx
    for w, part, place in zip(weight, g.chunk(len(weight)), dx.chunk(len(weight)), strict=True):
        place.copy_(torch.nn.grad.conv2d_input(place.shape, w, part, padding=1))
    return dx


@torch.library.custom_op("fedbatchnorm::client_conv_weight", mutates_args=())
def _weight_gradient(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weights, (clients, O, C, 3, 3) with C last in memory."""
    dw = _weights(weight)
    if _kernels_take(x, weight):
        from . import conv_kernels

        conv_kernels.weight_gradient(_last(g), _last(x), dw.movedim(2, -1))
        return dw
    for place, part, its in zip(dw, x.chunk(len(weight)), g.chunk(len(weight)), strict=True):
        place.copy_(torch.nn.grad.conv2d_weight(part, place.shape, its, padding=1))
    return dw


@client_conv.register_fake
def _(x, weight, bias):
    return _images(x, weight.shape[1])


@_input_gradient.register_fake
def _(g, weight):
    return _images(g, weight.shape[2])


@_weight_gradient.register_fake
def _(g, x, weight):
    return _weights(weight)


def _keep_for_backward(ctx, inputs, output) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.of_bias = None if bias is None else bias.dtype


def _gradients(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    dx = _input_gradient(g, weight) if wanted[0] else None
    dw = _weight_gradient(g, x, weight) if wanted[1] else None
    if ctx.of_bias is None or not wanted[2]:
        return dx, dw, None
    return dx, dw, g.unflatten(0, (len(weight), -1)).sum((1, 3, 4), dtype=ctx.of_bias)


client_conv.register_autograd(_gradients, setup_context=_keep_for_backward)


def fits_kernels(inside: int, outside: int) -> bool:
    """Whether the kernels take a convolution of so many channels: they go by blocks of at least 16."""
    return inside % 16 == 0 and outside % 16 == 0


def _kernels_take(x: Tensor, weight: Tensor) -> bool:
    fast = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32)
    return x.is_cuda and fast and x.numel() > 0 and fits_kernels(weight.shape[2], weight.shape[1])


def _images(x: Tensor, channels: int) -> Tensor:
    """Images of x's number, size and type, with other channels."""
    shape = (x.shape[0], channels, *x.shape[2:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _weights(weight: Tensor) -> Tensor:
    """As the weights, with the channels of the input last in memory."""
    clients, outside, inside, height, width = weight.shape
    return weight.new_empty((clients, outside, height, width, inside)).movedim(-1, 2)


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
