"""The server's step: clients' moments in, the next shared statistics out."""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..norm.exchange import check_running
from ..norm.messages import Update
from ..norm.moments import (
    Moments,
    Running,
    accumulator_dtype,
    combine,
    round_momentum,
    tracked_steps,
    update_running,
)
from .defenses import Defense
from .verdicts import CHECKS, Verdict, judge

Aggregator = Callable[[Tensor], Any]  # (n, d) float64 -> (d,)


class Notice(NamedTuple):
    """Something about one layer that the server's operator should know; never an error."""

    layer: str
    reason: Literal["empty", "below_quorum", "insufficient_count", "constant", "robust_collapse"]
    detail: str


class MergeResult(NamedTuple):
    """The outcome of a round: the next statistics, a verdict for each client, and notices."""

    statistics: dict[str, Running]
    verdicts: dict[Hashable, Verdict]
    updated: bool
    notices: tuple[Notice, ...] = ()


def merge(
    shared: Mapping[str, Running],
    updates: Sequence[Mapping[str, Moments]] | Mapping[Hashable, Mapping[str, Moments]],
    *,
    momentum: float | None = None,
    steps: float = 1,
    aggregator: Aggregator | None = None,
    quorum: int = 1,
    max_count: float | Mapping[str, float] | None = None,
    nonnegative: Collection[str] = (),
    checks: Collection[str] = CHECKS,
) -> MergeResult:
    """Merge the clients' moments into the next shared statistics (Algorithm 2, lines 9 and 10).

    Without an aggregator this is BatchNorm's own update on the union of all batches, exact for
    unequal counts, in float64, and independent of the order of clients to the last bit. With one,
    it is the robust form: see `robust_update`.

    Args:
        shared: {layer name: Running}, the statistics that the clients trained with; not changed.
        updates: a list, or client id -> update. Anything may be in it: bad updates get a verdict.
        momentum: overrides every layer's own; 1 takes the round's statistics as they are.
        steps: local steps that the clients took in the round (the count-weighted mean if they
            differ); the round then weighs 1 - (1 - momentum)^steps.
        aggregator: None, or (n, d) -> (d,) for rows of equal weight. A `defense` against f liars takes who
            is left out by a verdict for one of them (not who has merely seen nothing), and needs more than
            twice as many clients as it still expects to lie; with fewer the statistics stay as they were.
        quorum: with fewer usable clients the statistics stay as they were.
        max_count: the most values per channel an honest client can see, a number or by layer.
        nonnegative: layers whose input is never below 0, such as those after a ReLU: a client that
            reports a negative mean there is left out.
        checks: which verdicts are reached; all that there are, unless some are to be off.

    Returns:
        MergeResult(statistics, verdicts by client, updated, notices).

    Example:
        >>> shared = {"bn": Running(torch.zeros(1), torch.ones(1))}
        >>> clients = [{"bn": Moments(1, torch.tensor([u]), torch.zeros(1))} for u in (4.0, 8.0)]
        >>> after = merge(shared, clients).statistics["bn"]
        >>> round(after.mean.item(), 6), round(after.var.item(), 6)
        (0.6, 1.7)
    """
    clients = _clients(updates)
    _check_arguments(shared, momentum, steps, quorum)
    verdicts = judge(shared, clients, max_count, nonnegative, checks)
    used = [client for client, verdict in verdicts.items() if verdict.used]
    caught = [v for v in verdicts.values() if not v.used and v.reason != "empty"]  # seeing nothing is no lie
    aggregator, least = _for_the_rest(aggregator, len(caught))
    notices: list[Notice] = []
    rows: dict[str, tuple[Hashable, ...]] = {}
    for name in shared:
        present = tuple(client for client in used if int(clients[client][name].count) > 0)
        if len(present) >= max(quorum, least):
            rows[name] = present
        elif not present:
            notices.append(Notice(name, "empty", "no client has seen a value: the statistics stay"))
        else:
            detail = f"{len(present)} of the required {max(quorum, least)} clients: the statistics stay"
            notices.append(Notice(name, "below_quorum", detail))
    stacked = {name: _stack(clients, name, present) for name, present in rows.items()}
    unions = {name: combine(moments) for name, moments in stacked.items()}
    exact = {
        name: update_running(_on_cpu(shared[name]), union, steps=steps, momentum=momentum)
        for name, union in unions.items()
    }
    notices += _degenerate(unions)
    after = exact
    if aggregator is not None:
        after = {}
        for group in _groups(rows):
            after |= _robust_group({n: shared[n] for n in group}, stacked, momentum, steps, aggregator)
        notices += _collapsed(after, exact)
    statistics = {
        name: _like(after[name], running) if name in after else running for name, running in shared.items()
    }
    return MergeResult(statistics, verdicts, bool(rows), tuple(notices))


def robust_update(
    means: Tensor, variances: Tensor, *, beta: Tensor, total: Tensor, aggregator: Aggregator
) -> tuple[Tensor, Tensor]:
    """Aggregate clients' running rows so that no few of them decide the result.

    m' = A(m_i);  v' = A(v_i) + N / ((N - 1) beta) A((m_i - m')^2). All three go through A: with a
    plain mean on the third, one liar would control the variance. With A the mean and equal counts
    this is Algorithm 2, lines 9 and 10.

    Args:
        means: (n, d), rows m_i = (1 - beta) m + beta u_i.
        variances: (n, d), rows v_i = (1 - beta) v + beta N/(N-1) s_i^2.
        beta: (d,), the round's momentum.
        total: (d,), N, the number of values that all clients saw; at least 2.
        aggregator: (n, d) -> (d,).

    Returns:
        (m', v'), each (d,).
    """
    mean = aggregator(means)
    between = aggregator((means - mean).square())
    return mean, aggregator(variances) + total / ((total - 1) * beta) * between


class Rows(NamedTuple):
    """What a robust server works on: the clients' running rows (n, d), layers side by side, and (d,) each
    the round's momentum, the number of values behind the variances, and the least variance allowed."""

    means: Tensor
    variances: Tensor
    beta: Tensor
    total: Tensor
    floor: Tensor


def running_rows(
    running: Sequence[Running], seen: Sequence[Moments], beta: Sequence[float], total: Sequence[float]
) -> Rows:
    """m_i = (1 - beta) m + beta u_i and v_i = (1 - beta) v + beta N/(N-1) s_i^2, all layers concatenated.

    Args:
        running: each layer's statistics before the round.
        seen: each layer's moments, (n, c).
        beta: each layer's momentum for the round.
        total: each layer's N; a single value counts as two, since one has no variance.
    """
    exact = accumulator_dtype(running[0].mean)
    m, v = (torch.cat([getattr(r, k).to(exact) for r in running]) for k in ("mean", "var"))
    means, variances = (torch.cat([getattr(s, k).to(exact) for s in seen], dim=1) for k in ("mean", "var"))
    b, n, floor = (
        torch.cat([torch.full_like(r.mean, x, dtype=exact) for r, x in zip(running, xs, strict=True)])
        for xs in (beta, [max(2.0, t) for t in total], [r.eps for r in running])
    )
    return Rows((1 - b) * m + b * means, (1 - b) * v + b * n / (n - 1) * variances, b, n, floor)


def split_layers(running: Sequence[Running], mean: Tensor, var: Tensor, steps: float = 1) -> list[Running]:
    """The next statistics of each layer, from those of all layers side by side."""
    sizes = [len(r.mean) for r in running]
    parts = zip(running, mean.split(sizes), var.split(sizes), strict=True)
    return [r._replace(mean=m, var=v, tracked=r.tracked + tracked_steps(steps)) for r, m, v in parts]


def _for_the_rest(aggregator: Aggregator | None, caught: int) -> tuple[Aggregator | None, int]:
    """The rule for clients that got past the verdicts, and how many of them it needs.

    Who was caught is one of the f liars that a `defense` expects, and so the rest hold that many fewer.
    """
    if not isinstance(aggregator, Defense):
        return aggregator, 1
    left = aggregator.against(max(0, aggregator.f - caught))
    return left, 2 * left.f + 1


def _robust_group(shared, stacked, momentum, steps, aggregator) -> dict[str, Running]:
    """The robust step for layers that the same clients have seen, concatenated into one row each."""
    running = [_on_cpu(r) for r in shared.values()]
    beta = [round_momentum(r.momentum if momentum is None else momentum, r.tracked, steps) for r in running]
    total = [float(stacked[name].count.sum()) for name in shared]
    rows = running_rows(running, [stacked[name] for name in shared], beta, total)
    aggregate = partial(_aggregate, aggregator)
    mean, var = robust_update(
        rows.means, rows.variances, beta=rows.beta, total=rows.total, aggregator=aggregate
    )
    after = split_layers(running, mean, torch.maximum(var, rows.floor), steps)
    # A single value has no variance: there the old one stays.
    return {
        name: new if n > 1 else new._replace(var=old.var)
        for name, old, new, n in zip(shared, running, after, total, strict=True)
    }


def _aggregate(aggregator: Aggregator, rows: Tensor) -> Tensor:
    result = aggregator(rows.clone())
    if result is None:
        raise ValueError("aggregator: returned None in place of a result; the statistics are unchanged")
    result = torch.as_tensor(result, dtype=torch.float64)
    if result.shape != rows.shape[1:]:
        raise ValueError(
            f"aggregator: returned shape {tuple(result.shape)} for rows of shape {tuple(rows.shape)}, "
            f"expected {tuple(rows.shape[1:])}"
        )
    if not bool((result.abs() <= torch.finfo(torch.float32).max).all()):
        raise ValueError("aggregator: returned a value that is not finite; the statistics are unchanged")
    return result


def _degenerate(unions: Mapping[str, Moments]) -> list[Notice]:
    notices = []
    for name, union in unions.items():
        constant = int((union.var == 0).sum())
        if int(union.count) == 1:
            notices.append(Notice(name, "insufficient_count", "a single value: the variance stays"))
        elif constant:
            detail = f"{constant} of {len(union.var)} channels had the same value everywhere"
            notices.append(Notice(name, "constant", detail))
    return notices


def _collapsed(robust: Mapping[str, Running], exact: Mapping[str, Running]) -> list[Notice]:
    notices = []
    for name, running in robust.items():
        ratio = running.var.double() / exact[name].var.double().clamp(min=running.eps)
        outside = int(((ratio < 0.01) | (ratio > 100)).sum())
        if outside:
            detail = f"{outside} of {len(ratio)} channels: variance far from that of the plain merge"
            notices.append(Notice(name, "robust_collapse", detail))
    return notices


def _groups(rows: Mapping[str, tuple]) -> list[list[str]]:
    groups: dict[tuple, list[str]] = {}
    for name, present in rows.items():
        groups.setdefault(present, []).append(name)
    return list(groups.values())


def _stack(clients: Mapping, name: str, present: Sequence[Hashable]) -> Moments:
    moments = [clients[client][name] for client in present]
    return Moments(
        torch.tensor([int(m.count) for m in moments]),
        torch.stack([m.mean.detach().double().cpu() for m in moments]),
        torch.stack([m.var.detach().double().cpu() for m in moments]),
    )


def _on_cpu(running: Running) -> Running:
    return running._replace(mean=running.mean.double().cpu(), var=running.var.double().cpu())


def _like(new: Running, old: Running) -> Running:
    return new._replace(mean=new.mean.to(old.mean), var=new.var.to(old.var))


def _clients(updates) -> dict[Hashable, Any]:
    single = (
        isinstance(updates, Mapping) and updates and all(isinstance(m, Moments) for m in updates.values())
    )
    if isinstance(updates, Update) or single:
        raise ValueError("updates: this is one update; give a list of them, or client id -> update")
    if isinstance(updates, Mapping):
        return dict(updates)
    if not isinstance(updates, Iterable):
        raise ValueError(f"updates: expected a list or client id -> update, got {type(updates).__name__}")
    return dict(enumerate(updates))


def _check_arguments(shared, momentum, steps, quorum) -> None:
    for name, running in shared.items():
        check_running(name, running)
    if momentum is not None and not 0 < momentum <= 1:
        raise ValueError(f"momentum is {momentum}; it must be in (0, 1], or None for each layer's own")
    if not (steps > 0 and math.isfinite(steps)):
        raise ValueError(f"steps is {steps}; it must be a positive number")
    if not (isinstance(quorum, int) and quorum >= 1):
        raise ValueError(f"quorum is {quorum!r}; it must be a whole number of clients, at least 1")
