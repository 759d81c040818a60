"""Before a pass is compiled for a GPU: its graph, rewritten where the compiler takes more time than it needs.

The compiler fuses what is computed value by value, but it goes over an activation once more for every sum.
FBN's statistics, ReLU and bias, and all their gradients, need one pass each way (`norm.fused`). So that
operator takes over the ReLU before or after it, and the convolution's bias; where there is no ReLU, it
becomes the plain formula, which the compiler fuses with whatever else is there. Three more things are
written otherwise: a convolution of very few channels, pooling by twos, and flattening before a linear layer.
"""

import inspect
import operator as python
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from ..norm.fused import operator
from ..norm.gradient import Batch, hold, written_out
from ..norm.reduce import in_one_go, over_channels
from .convolution import client_conv

_RELU = {F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"}
_CONVOLUTION = {F.conv2d, torch.conv2d}
_OF_CLIENTS = {client_conv, client_conv._opoverload}
_LINEAR = {F.linear, torch._C._nn.linear}
_ASSIGNMENTS = {python.setitem} | {  # x[i] = y, x += y and their like
    getattr(python, f"i{name}")
    for name in [
        "add",
        "and",
        "concat",
        "floordiv",
        "lshift",
        "matmul",
        "mod",
        "mul",
        "or",
        "pow",
        "rshift",
        "sub",
        "truediv",
        "xor",
    ]
}
_BIAS = 2  # its place among a convolution's arguments
_POOLING = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_FROM_THE_FIRST = ((1, {}), (1, -1, {}))  # what flattens all but the batch
_REWRITTEN = "cuda"  # the kind of device that graphs are rewritten for


def fused_inductor(module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """A backend of torch.compile: torch's own, after the graph has been rewritten where that is faster."""
    from torch._inductor.compile_fx import compile_fx

    fused = take_over_neighbors(module.graph)
    if any(isinstance(x, Tensor) and x.device.type == _REWRITTEN for x in example_inputs):
        convolve_by_patches(module.graph)
        add_biases_apart(module.graph)
        flatten_as_it_lies(module.graph)
        if fused:  # else the compiler does better with torch's pooling
            pool_by_twos(module.graph)
    module.recompile()
    return compile_fx(module, example_inputs)  # pyrefly: ignore


def take_over_neighbors(graph: fx.Graph) -> int:
    """Give each normalization the ReLU beside it; returns how many took one over.

    Args:
        graph: as torch.compile's front end makes it; changed in place.
    """
    taken = 0
    for node in [n for n in graph.nodes if n.target in (operator, operator._opoverload)]:
        z, shift, *vectors, eps, clients, _, _, share = node.args
        outputs = [user for user in node.users if user.args[1:] == (0,)]
        following = list(outputs[0].users) if len(outputs) == 1 else []
        before = z.target in _RELU and list(z.users) == [node] and _may_go(graph, z, node)
        after = len(following) == 1 and following[0].target in _RELU
        if not (before or after):
            node.target, node.args = _step_by_step, (z, *vectors, eps, clients, share)
            continue
        taken += 1
        inner = z.all_input_nodes[0] if before else z
        has_bias = inner.target in _CONVOLUTION | _OF_CLIENTS and inner.args[_BIAS:]
        if has_bias and len(inner.users) == 1 and not _changes(graph, inner, node):
            shift = inner.args[_BIAS]
            inner.update_arg(_BIAS, None)
        node.args = (inner, shift, *vectors, eps, clients, before, after, share)
        if before:
            graph.erase_node(z)
        if after:
            following[0].replace_all_uses_with(outputs[0])
            graph.erase_node(following[0])
    return taken


def _may_go(graph: fx.Graph, relu: fx.Node, node: fx.Node) -> bool:
    """Whether `node` may read the input of the ReLU before it: nothing else uses or changes these."""
    inner = relu.all_input_nodes[0]
    unseen = inner.target in (_CONVOLUTION | _OF_CLIENTS | _LINEAR) and len(inner.users) == 1
    return (unseen or not _in_place(relu)) and not _changes(graph, relu, node)


def _changes(graph: fx.Graph, first: fx.Node, last: fx.Node) -> bool:
    """Whether anything is changed in place between two nodes."""
    nodes = list(graph.nodes)
    return any(map(_in_place, nodes[nodes.index(first) + 1 : nodes.index(last)]))


def _in_place(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = node.op.startswith("call") and name.endswith("_") and not name.endswith("__")
    return named or node.target in _ASSIGNMENTS or _is_told_to(node)


def _is_told_to(node: fx.Node) -> bool:
    """Whether a call has inplace=True, in whatever place that stands among the function's arguments."""
    try:
        given = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs)  # pyrefly: ignore
    except (TypeError, ValueError):  # a method, or a function of torch that has no such argument
        return bool(node.kwargs.get("inplace"))
    return bool(given.arguments.get("inplace"))


def _step_by_step(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    clients: int,
    share: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator computes, for the compiler to fuse."""
    seen = in_one_go(x.detach(), clients)
    if share is not None:
        x = hold(x, Batch(*seen, eps), share)
    return written_out(x, mean, var, weight, bias, eps), *seen


def convolve_by_patches(graph: fx.Graph) -> int:
    """Make the first convolution, of an image's few channels, a matrix product; returns how many there were.

    A library's kernels are made for many channels. The patches that the product needs, and that are kept for
    the backward pass, are no larger than the output; unless clients have weights of their own, for whom no
    library has anything.
    """
    made = 0
    for node in [n for n in graph.nodes if n.target in _CONVOLUTION | _OF_CLIENTS]:
        settings = ((1, 1), (1, 1), (1, 1), 1) if node.target in _OF_CLIENTS else ()
        if len(node.args) + len(settings) != 7:
            continue
        x, weight, bias, stride, padding, dilation, groups = (*node.args, *settings)
        image, kernel = _value(x), _value(weight)
        if image is None or kernel is None or image.requires_grad or isinstance(padding, str):
            continue
        *clients, outside, inside, height, width = kernel.shape
        small = image.dim() == 4 and inside <= 4 and (clients or inside * height * width <= outside)
        if small and groups == 1 and _pair(dilation) == (1, 1):
            node.target = _product_of_patches
            node.args = (x, weight, bias, _pair(stride), _pair(padding))
            made += 1
    return made


def _product_of_patches(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """A convolution, by way of (pixels, values of a patch) times (values of a patch, channels).

    The weights may be (clients, O, C, h, w), the bias (clients, O). Then there is a product for every image:
    a client's weights have their gradient by many programs.
    """
    channels, inside, height, width = weight.shape[-4:]
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    patches = x.unfold(2, height, stride[0]).unfold(3, width, stride[1]).permute(0, 2, 3, 4, 5, 1)
    filling = (0, -(inside * height * width) % 8)  # rows of a multiple of 8 values are aligned in memory
    turned = F.pad(weight.movedim(-3, -1).flatten(-3), filling).mT
    if weight.dim() == 4:
        y = F.pad(patches.flatten(3).flatten(0, 2), filling) @ turned
    else:
        each = len(x) // len(weight)
        turned = turned[:, None].expand(-1, each, -1, -1).flatten(0, 1)
        y = torch.bmm(F.pad(patches.flatten(3).flatten(1, 2), filling), turned)
    y = y.view(*patches.shape[:3], channels).permute(0, 3, 1, 2)
    return y if bias is None else _with_bias(y, bias)


def add_biases_apart(graph: fx.Graph) -> int:
    """Take biases out of clients' convolutions, so that the compiler fuses the sum; returns how many."""
    made = 0
    for node in [n for n in graph.nodes if n.target in _OF_CLIENTS and n.args[_BIAS] is not None]:
        bias = node.args[_BIAS]
        node.update_arg(_BIAS, None)
        with graph.inserting_after(node):
            added = graph.call_function(_with_bias, (node, bias))
        node.replace_all_uses_with(added, lambda user, added=added: user is not added)
        made += 1
    return made


def _with_bias(y: Tensor, bias: Tensor) -> Tensor:
    return y + over_channels(bias.to(y.dtype), y)


def flatten_as_it_lies(graph: fx.Graph) -> int:
    """Turn the weights of a linear layer, and not the activations, where channels lie last in memory.

    Returns how many layers there were. Flattened as the model says, an activation is written all over again.
    """
    made = 0
    for node in [n for n in graph.nodes if n.target in _LINEAR and n.args]:
        flat = node.args[0]
        if (
            flat.target not in ("flatten", torch.flatten)
            or (*flat.args[1:], flat.kwargs) not in _FROM_THE_FIRST
        ):
            continue
        image = _value(flat.args[0])
        if image is None or image.dim() != 4 or image.shape[2:].numel() == 1:
            continue
        turned = image.is_contiguous(memory_format=torch.channels_last)
        if turned and list(flat.users) == [node] and not _changes(graph, flat, node):
            node.target, node.args = _linear_of_image, (flat.args[0], *node.args[1:])
            graph.erase_node(flat)
            made += 1
    return made


def _linear_of_image(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer on a flattened image, both with channels last."""
    turned = weight.unflatten(1, x.shape[1:]).permute(0, 2, 3, 1).flatten(1)
    return F.linear(x.permute(0, 2, 3, 1).flatten(1), turned, bias)


def pool_by_twos(graph: fx.Graph) -> int:
    """Write max-pooling of 2 x 2 without overlap out; returns how many there were."""
    made = 0
    for node in [n for n in graph.nodes if n.target in (F.max_pool2d, torch.max_pool2d)]:
        given = dict(zip(_POOLING, node.args, strict=False)) | node.kwargs
        image, size = _value(given["input"]), given["kernel_size"]
        if image is None or image.dim() != 4 or image.shape[2] % 2 or image.shape[3] % 2:
            continue
        shape = [size, given.get("stride") or size, given.get("padding", 0), given.get("dilation", 1)]
        plain = not (given.get("ceil_mode") or given.get("return_indices"))
        if plain and [_pair(v) for v in shape] == [(2, 2), (2, 2), (0, 0), (1, 1)]:
            node.target, node.args, node.kwargs = _PoolByTwos.apply, (given["input"],), {}
            made += 1
    return made


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    """A setting for rows and for columns, which may be one for both."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * 2 if len(values) == 1 else values  # pyrefly: ignore


class _PoolByTwos(torch.autograd.Function):
    """The largest of each 2 x 2 values, and which of them it was: the first among equals, NaN above all."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        four = [x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        largest, place = four[0], torch.zeros_like(four[0], dtype=torch.uint8)
        for i, value in enumerate(four[1:], 1):
            larger = (value > largest) | value.isnan()
            largest, place = torch.where(larger, value, largest), torch.where(larger, i, place)
        ctx.save_for_backward(place)
        return largest

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        (place,) = ctx.saved_tensors
        corner = torch.arange(4, dtype=torch.uint8, device=place.device).view(2, 1, 2)  # a row, a column
        place, gradient = (t[:, :, :, None, :, None] for t in (place, gradients[0]))
        spread = torch.where(place == corner, gradient, 0)  # (n, c, h, 2, w, 2)
        return spread.flatten(4, 5).flatten(2, 3).contiguous(memory_format=torch.channels_last)


def _value(node: Any) -> FakeTensor | None:
    """What the front end knows of a node's value; None where it is mapped over clients."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, FakeTensor) else None
