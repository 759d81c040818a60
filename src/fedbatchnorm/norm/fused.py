"""Bias, ReLU, normalizing with constants, ReLU, and measuring, as one operator: one pass over memory.

Federated BatchNorm normalizes with shared running statistics, which are constants. So the first output can be
written before the whole batch has been read, and the neighboring operations can be done in the same pass:

    u = z + shift;  x = relu(u) or u;  y = (x - mean) * rstd * weight + bias;  out = relu(y) or y

and the mean and biased variance of x per client and channel are measured as the values go by. The backward
pass computes u, x and y again from z; with a share of BatchNorm's gradient (`gradient`) it first goes over
the batch for two sums, as BatchNorm does. On a CUDA GPU the kernels are Triton's (`kernels`); elsewhere the
operator is the same formula, step by step.
"""

import torch
from torch import Tensor

from .gradient import held
from .reduce import mean_and_variance, over_channels, statistics_dtype


def relu_normalize(
    z: Tensor, shift: Tensor | None, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None,
    *, eps: float, clients: int, before: bool, after: bool, share: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Add a bias, apply a ReLU, normalize with constants, apply a ReLU, and measure: in one pass.

    Gradients flow to z, shift, weight and bias; not to mean and var, nor through what was measured.

    Args:
        z: (clients * batch, c, h, w), best in channels_last memory, or (clients * batch, c); the clients'
            samples lie one after another.
        shift: (c,) or None; the bias of the convolution before. Of this and the other vectors each client may
            have its own, (clients, c).
        mean: (c,), the shared running mean.
        var: (c,), the shared running variance.
        weight: (c,) or None.
        bias: (c,) or None.
        eps: added to var.
        clients: how many clients share `z`.
        before: whether a ReLU comes before normalizing; its output is what is measured.
        after: whether a ReLU comes after.
        share: of BatchNorm's gradient, a number from 0 to 1 on the same device; None is 0.

    Returns:
        The output in z's type and in channels_last memory, and the mean and biased variance of each
        client's normalization input, (clients, c), in float32 or better.

    Example:
        >>> z = torch.tensor([[-2.0], [3.0], [5.0], [5.0]])
        >>> settings = {"eps": 0.0, "clients": 2, "before": True, "after": False}
        >>> y, u, s = relu_normalize(z, None, torch.ones(1), torch.full((1,), 4.0), None, None, **settings)
        >>> y.flatten().tolist(), u.flatten().tolist(), s.flatten().tolist()
        ([-0.5, 1.0, 2.0, 2.0], [1.5, 5.0], [2.25, 0.0])
    """
    return operator(z, shift, mean, var, weight, bias, eps, clients, before, after, share)


@torch.library.custom_op("fedbatchnorm::relu_normalize", mutates_args=())
def operator(
    z: Tensor, shift: Tensor | None, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None,
    eps: float, clients: int, before: bool, after: bool, share: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`relu_normalize` as torch's operator, which compiled code sees as one node."""
    outputs = _empty_outputs(z, clients)
    if z.numel() == 0:
        return outputs[0], outputs[1].zero_(), outputs[2].zero_()
    z, vectors = _channels_last(z), _readable(shift, mean, var, weight, bias)
    if z.device.type == "cuda":
        from . import kernels  # Triton comes with torch for CUDA alone

        kernels.forward(z, vectors, outputs, eps=eps, clients=clients, before=before, after=after)
        return outputs
    _, x, _, y = _steps(z, vectors, eps, before)
    outputs[0].copy_(y.relu() if after else y)
    for place, value in zip(outputs[1:], mean_and_variance(x, clients), strict=True):
        place.copy_(value)
    return outputs


@torch.library.custom_op("fedbatchnorm::relu_normalize_backward", mutates_args=())
def _operator_backward(
    gradient: Tensor, z: Tensor, shift: Tensor | None, mean: Tensor, var: Tensor, weight: Tensor | None,
    bias: Tensor | None, seen_mean: Tensor | None, seen_var: Tensor | None, share: Tensor | None,
    eps: float, before: bool, after: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of z, and those of shift, weight and bias as the rows of (3, c).

    Where clients have vectors of their own, the rows are those of (clients, 3, c). `seen_mean` and
    `seen_var`, (clients, c), are what the forward pass measured, where there is a `share`.
    """
    outputs = _empty_gradients(z, shift, mean, var, weight, bias)
    if z.numel() == 0:
        return outputs[0], outputs[1].zero_()
    gradient, z, vectors = (
        _channels_last(gradient),
        _channels_last(z),
        _readable(shift, mean, var, weight, bias),
    )
    if z.device.type == "cuda":
        from . import kernels

        seen = (seen_mean, seen_var, share) if share is not None else None
        kernels.backward(gradient, z, vectors, seen, outputs, eps=eps, before=before, after=after)  # pyrefly: ignore
        return outputs
    u, x, normalized, y = _steps(z, vectors, eps, before)
    g = gradient.to(y.dtype)
    g = g.masked_fill(y <= 0, 0) if after else g
    factor = (var.to(y.dtype) + eps).rsqrt()
    dz = g * over_channels(factor if weight is None else factor * weight, z)
    if seen_mean is not None and seen_var is not None and share is not None:
        dz = held(dz, x, seen_mean, seen_var, None, eps, share)
    dz = dz.masked_fill(u <= 0, 0) if before else dz
    outputs[0].copy_(dz)
    outputs[1].copy_(torch.stack([_sums(t, outputs[1]) for t in (dz, g * normalized, g)], -2))
    return outputs


def _sums(values: Tensor, like: Tensor) -> Tensor:
    """Over all rows, (c,), for sums like (3, c); over each client's, (clients, c), for (clients, 3, c)."""
    if like.dim() == 2:
        return values.sum([0, *range(2, values.dim())])
    return values.unflatten(0, (len(like), -1)).sum([1, *range(3, values.dim() + 1)])


Vectors = list[Tensor | None]  # shift, mean, var, weight, bias


def _steps(z: Tensor, vectors: Vectors, eps: float, before: bool) -> tuple[Tensor, ...]:
    """u, x, x normalized, y: each line of the formula, in float32 or better."""
    z = z.to(statistics_dtype(z))
    shift, mean, var, weight, bias = (None if v is None else over_channels(v.to(z.dtype), z) for v in vectors)
    u = z if shift is None else z + shift
    x = u.relu() if before else u
    normalized = (x - mean) * (var + eps).rsqrt()  # pyrefly: ignore
    y = normalized if weight is None else normalized * weight
    return u, x, normalized, y if bias is None else y + bias


@operator.register_fake
def _(z, shift, mean, var, weight, bias, eps, clients, before, after, share):
    return _empty_outputs(z, clients)


@_operator_backward.register_fake
def _(gradient, z, shift, mean, var, weight, bias, seen_mean, seen_var, share, eps, before, after):
    return _empty_gradients(z, shift, mean, var, weight, bias)


def _keep_for_backward(ctx, inputs, output) -> None:
    *tensors, eps, _clients, before, after, share = inputs
    ctx.save_for_backward(*tensors, *((None, None) if share is None else output[1:]), share)
    ctx.settings = eps, before, after
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    z, shift, mean, var, weight, bias, *seen = ctx.saved_tensors
    out, sums = _operator_backward(gradient, z, shift, mean, var, weight, bias, *seen, *ctx.settings)
    for_shift, for_weight, for_bias = (
        None if t is None else (s if s.dim() == t.dim() else s.sum(0)).to(t.dtype)
        for s, t in zip(sums.unbind(-2), (shift, weight, bias), strict=True)
    )
    return out, for_shift, None, None, for_weight, for_bias, None, None, None, None, None


operator.register_autograd(_gradients, setup_context=_keep_for_backward)


def _empty_outputs(z: Tensor, clients: int) -> tuple[Tensor, Tensor, Tensor]:
    if z.dim() not in (2, 4):
        raise ValueError(f"input must be (batch, channels) or (batch, channels, h, w), got {tuple(z.shape)}")
    if clients < 1 or z.shape[0] % clients:
        raise ValueError(f"a batch of {z.shape[0]} does not split into {clients} equal clients")
    seen = (clients, z.shape[1])
    dtype = statistics_dtype(z)
    return _empty(z), z.new_empty(seen, dtype=dtype), z.new_empty(seen, dtype=dtype)


def _empty_gradients(z: Tensor, *vectors: Tensor | None) -> tuple[Tensor, Tensor]:
    clients = [len(v) for v in vectors if v is not None and v.dim() == 2][:1]
    return _empty(z), z.new_empty((*clients, 3, z.shape[1]), dtype=statistics_dtype(z))


def _empty(z: Tensor) -> Tensor:
    """An empty tensor like z, in the layout of the output."""
    return torch.empty(z.shape, dtype=z.dtype, device=z.device, memory_format=_layout(z))


def _channels_last(z: Tensor) -> Tensor:
    return z.contiguous(memory_format=_layout(z))


def _layout(z: Tensor) -> torch.memory_format:
    return torch.channels_last if z.dim() == 4 else torch.contiguous_format


def _readable(
    shift: Tensor | None, mean: Tensor | None, var: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> Vectors:
    """Vectors as the kernels read them; clients share all parameters or none, and so for statistics."""
    shift, weight, bias = _alike(shift, weight, bias)
    return [shift, *_alike(mean, var), weight, bias]


def _alike(*vectors: Tensor | None) -> Vectors:
    """All (clients, c) if one is, equally far apart: rows of one matrix stay where they are."""
    clients = max((len(v) for v in vectors if v is not None and v.dim() == 2), default=0)
    alike = [v.expand(clients, -1) if clients and v is not None else v for v in vectors]
    strides = {v.stride() for v in alike if v is not None}
    if len(strides) == 1 and next(iter(strides))[-1] == 1:
        return alike
    return [v if v is None else v.contiguous() for v in alike]
