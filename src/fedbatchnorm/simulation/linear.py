"""Linear layers of many clients, each with weights of its own, as one operator.

A client's batch is small and its weights are many, so such a product takes as long as the weights take to be
read. On a CUDA GPU Triton's kernels (`linear_kernels`) read them as they are, in float32 for a product in
bfloat16, too, and cut long sums into pieces that run side by side; elsewhere it is a batched product.
"""

import torch
from torch import Tensor

_MOST = 128  # samples of a client, at most, that the kernels take
_LONG = 512  # values of a sample, at least: shorter sums are quick in any way


@torch.library.custom_op("fedbatchnorm::client_linear", mutates_args=())
def client_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each client's samples by its weights: (clients, batch, I) -> (clients, batch, O), in x's type.

    Args:
        x: (clients, batch, I).
        weight: (clients, O, I), of any type.

    Example:
        >>> weight = torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 1, 3)
        >>> client_linear(torch.ones(2, 1, 3), weight).flatten().tolist()
        [3.0, 6.0]
    """
    if _kernels_take(x, weight):
        from . import linear_kernels  # Triton comes with torch for CUDA alone

        return linear_kernels.forward(x.contiguous(), weight)
    return torch.bmm(x, weight.mT.to(x.dtype))


@torch.library.custom_op("fedbatchnorm::client_linear_input", mutates_args=())
def _input_gradient(g: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x, (clients, batch, I), from g (clients, batch, O)."""
    if _kernels_take(g, weight):
        from . import linear_kernels

        return linear_kernels.input_gradient(g.contiguous(), weight)
    return torch.bmm(g, weight.to(g.dtype))


@torch.library.custom_op("fedbatchnorm::client_linear_weight", mutates_args=())
def _weight_gradient(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weights, (clients, O, I), in their type."""
    if _kernels_take(x, weight):
        from . import linear_kernels

        return linear_kernels.weight_gradient(g.contiguous(), x.contiguous(), weight.dtype)
    return torch.bmm(g.mT, x).to(weight.dtype)


@client_linear.register_fake
def _(x, weight):
    return x.new_empty(*x.shape[:2], weight.shape[1])


@_input_gradient.register_fake
def _(g, weight):
    return g.new_empty(*g.shape[:2], weight.shape[2])


@_weight_gradient.register_fake
def _(g, x, weight):
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


def _keep_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx = _input_gradient(g, weight) if ctx.needs_input_grad[0] else None
    return dx, _weight_gradient(g, x, weight) if ctx.needs_input_grad[1] else None


client_linear.register_autograd(_gradients, setup_context=_keep_for_backward)


def _kernels_take(x: Tensor, weight: Tensor) -> bool:
    fast = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32)
    _, outside, inside = weight.shape
    fits = 0 < x.shape[1] <= _MOST and inside >= _LONG and inside % 64 == 0 and outside % 16 == 0
    return bool(x.is_cuda and fast and fits and weight.dtype == torch.float32 and weight.stride(-1) == 1)
