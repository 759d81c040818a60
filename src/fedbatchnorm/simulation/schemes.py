"""The ways to use BatchNorm in a federation, as rows of one table.

A scheme is a choice of what a client normalises with in training, and of what is shared after a round.
Everything else (the simulator, the experiments, the figures, the tests) runs over the table `SCHEMES`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..aggregation.statistics import robust_update, split_layers
from ..norm.moments import (
    Moments,
    Running,
    accumulator_dtype,
    normalise,
    update_running,
    with_constants,
)
from ..norm.reduce import in_transform, statistics_dtype

Normalise = Callable[..., tuple[Tensor, Moments | None]]
Share = Callable[[Running, Moments], Running]
MergeRows = Callable[..., tuple[Tensor, Tensor]]


class Phase(NamedTuple):
    """What happens in each round of a stretch of training.

    normalise: (x, running, clients=, weight=, bias=) -> (y, Moments (clients, c), or None).
    share: (running, Moments (n, c)) -> the next running statistics; None leaves them as they are.
    merge_rows: the same from rows that clients may lie about, through the server's rule:
        (means (n, d), variances (n, d), beta=, total=, aggregator=) -> (mean (d,), variance (d,)).
    pooled: variances are corrected for the number of values of all clients, not of one.
    union: the clients' batches count as one batch.
    """

    normalise: Normalise
    share: Share | None
    merge_rows: MergeRows | None = None
    pooled: bool = True
    union: bool = False


class Scheme(NamedTuple):
    """A row of the table: a title, a line of explanation, and a phase before and after the switch step."""

    title: str
    summary: str
    before: Phase
    after: Phase

    def phase(self, step: int, switch: int) -> Phase:
        """The phase that a round belongs to; most schemes have only one."""
        return self.before if step < switch else self.after


def with_own_batch(
    x: Tensor,
    running: Running,
    *,
    clients: int = 1,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """Normalise each client's batch by its own mean and variance, as BatchNorm does (Algorithm 1).

    The gradient flows through both. All clients at once are one BatchNorm with n c channels.

    Args:
        x: (clients * batch, c, ...), the clients' batches one after another.
        running: only its eps and type are used.
        clients: how many clients share `x`.
        weight: (c,) or None.
        bias: (c,) or None.

    Returns:
        The normalised input, and Moments of shape (clients, c).

    Example:
        >>> x = torch.tensor([[1.0], [3.0], [50.0], [70.0]])
        >>> y, seen = with_own_batch(x, Running(torch.zeros(1), torch.ones(1)), clients=2)
        >>> y.flatten().round().tolist(), seen.var.flatten().tolist()
        ([-1.0, 1.0, -1.0, 1.0], [1.0, 100.0])
    """
    if torch.compiler.is_compiling() or (in_transform() and clients == 1):  # no buffer to write to there
        return _own_batch_written_out(x, running.eps, clients, weight, bias)
    channels = x.shape[1]
    mean, unbiased = (running.mean.new_zeros(clients * channels) for _ in range(2))
    if clients > 1:
        x = x.unflatten(0, (clients, -1)).movedim(0, 1).flatten(1, 2)
        weight, bias = (None if p is None else p.repeat(clients) for p in (weight, bias))
    # A running update with momentum 1 leaves the batch's own mean and unbiased variance.
    y = F.batch_norm(x, mean, unbiased, weight, bias, training=True, momentum=1.0, eps=running.eps)
    count = x.numel() // x.shape[1]
    if clients > 1:
        y = y.unflatten(1, (clients, channels)).movedim(1, 0).flatten(0, 1)
    var = unbiased * ((count - 1) / count)
    return y, Moments(count, mean.view(clients, channels), var.view(clients, channels))


def _own_batch_written_out(
    x: Tensor, eps: float, clients: int, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Moments]:
    """`with_own_batch` in operations that fuse with their neighbours and map over clients."""
    parts = x.unflatten(0, (clients, -1))
    dims = [1, *range(3, parts.dim())]
    var, mean = torch.var_mean(parts.to(statistics_dtype(x)), dims, correction=0, keepdim=True)
    y = (parts - mean) * (var + eps).rsqrt()
    for factor, combine_with in ((weight, torch.mul), (bias, torch.add)):
        y = y if factor is None else combine_with(y, factor.view(-1, *[1] * (x.dim() - 2)))
    seen = (t.detach().reshape(clients, -1) for t in (mean, var))
    return y.to(x.dtype).flatten(0, 1), Moments(x.numel() // mean.numel(), *seen)


def with_frozen(
    x: Tensor,
    running: Running,
    *,
    clients: int = 1,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Normalise with the running statistics as they are, and measure nothing."""
    return with_constants(x, running, weight, bias), None


def merge_exactly(running: Running, seen: Moments) -> Running:
    """The total-variance merge: BatchNorm's update on the union of all batches (Algorithm 2).

    Here all clients have seen equally many values, and so within + between are plain means over clients.
    """
    means, variances = (t.to(accumulator_dtype(t)) for t in (seen.mean, seen.var))
    between, mean = torch.var_mean(means, 0, correction=0)
    return update_running(running, Moments(len(means) * seen.count, mean, variances.mean(0) + between))


def average(running: Running, seen: Moments) -> Running:
    """Average the clients' running statistics: the variance between clients is lost.

    mean_i((1 - beta) m + beta u_i) = (1 - beta) m + beta mean_i(u_i), and so for the variances.
    """
    mean, var = (t.to(accumulator_dtype(t)).mean(0) for t in (seen.mean, seen.var))
    return update_running(running, Moments(seen.count, mean, var))


def average_rows(
    means: Tensor, variances: Tensor, *, beta: Tensor, total: Tensor, aggregator: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Running statistics through the server's rule, each on its own: `average`, with the mean replaced."""
    return aggregator(means), aggregator(variances)


def share_side_by_side(
    phase: Phase, layers: Mapping[str, tuple[Running, Moments]], call: Callable[..., Any]
) -> dict[str, Running]:
    """Each layer's next statistics; layers that saw equally many values take one set of operations.

    Args:
        phase: how the scheme shares.
        layers: layer name -> statistics before the round, and the clients' moments (n, c).
        call: (function, *arguments) -> its result; may compile the function.
    """
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, (running, seen) in layers.items():
        alike.setdefault((seen.count, running.momentum, running.mean.dtype, seen.mean.dtype), []).append(name)
    after: dict[str, Running] = {}
    for names in alike.values():
        running, seen = zip(*(layers[name] for name in names), strict=True)
        new = split_layers(running, *call(_next_values, phase.share, running, seen))
        after |= zip(names, new, strict=True)
    return after


def _next_values(share: Share, running: Sequence[Running], seen: Sequence[Moments]) -> tuple[Tensor, Tensor]:
    """The next means and variances of layers that saw equally many values, side by side."""
    m, v, means, variances = (
        torch.cat([getattr(x, field) for x in rows], dim=-1)
        for rows in (running, seen)
        for field in ("mean", "var")
    )
    new = share(running[0]._replace(mean=m, var=v), seen[0]._replace(mean=means, var=variances))
    return new.mean, new.var


_NAIVE = Phase(with_own_batch, average, average_rows, pooled=False)
_UNION = Phase(with_own_batch, merge_exactly, union=True)
_FBN = Phase(normalise, merge_exactly, robust_update)

SCHEMES: dict[str, Scheme] = {
    "centralized": Scheme("Centralised", "BatchNorm on the union of all batches", _UNION, _UNION),
    "fbn": Scheme("FBN", "shared statistics as constants; total-variance merge", _FBN, _FBN),
    "fixbn": Scheme("FixBN", "naive, then frozen from the switch step on", _NAIVE, Phase(with_frozen, None)),
    "naive": Scheme("Naive BN", "each client's own batch; running statistics averaged", _NAIVE, _NAIVE),
}
