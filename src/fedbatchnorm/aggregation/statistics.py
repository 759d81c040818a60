"""The server's step: clients' moments in, the next shared statistics out."""

import math
import numbers
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..norm.exchange import check_statistics
from ..norm.flat import of_layers
from ..norm.messages import Update
from ..norm.moments import Moments, Running, round_momentum, shown, tracked_steps
from .cohort import check_population, round_steps
from .cohort import cohort_factor as cohort_factor
from .defenses import Defense, OwnDefense
from .robust import Aggregator
from .robust import Rows as Rows
from .robust import robust_update as robust_update
from .robust import running_rows as running_rows
from .robust import split_layers as split_layers
from .table import Table, Union, exact_step, next_statistics, of_population, part_between, robust_steps, union
from .verdicts import CHECKS, Verdict, read_all

_LEAST_MOMENTUM = 1e-150  # the robust rule squares what is multiplied by it


class Notice(NamedTuple):
    """Something about a layer that the operator of the server should know; not an error."""

    layer: str
    reason: Literal[
        "empty", "below_quorum", "insufficient_count", "constant", "robust_collapse", "cohort_of_one"
    ]
    detail: str


class MergeResult(NamedTuple):
    """The outcome of a round.

    Attributes:
        statistics: {layer name: Running}, the next shared statistics.
        verdicts: client -> Verdict.
        updated: whether the statistics changed.
        notices: what the operator should know about single layers.
        steps: the number of local steps that the round counts as.
        between: {layer name: the part of its variance that lies between clients}, from 0 (their means are the
            same) to 1. A layer is left out if that cannot be known (one client of a larger population). Under
            a robust rule all are, since a Byzantine client could make the number anything.
    """

    statistics: dict[str, Running]
    verdicts: dict[Hashable, Verdict]
    updated: bool
    notices: tuple[Notice, ...] = ()
    steps: float = 1
    between: Mapping[str, float] = MappingProxyType({})


def merge(
    shared: Mapping[str, Running],
    updates: Sequence[Mapping[str, Moments]] | Mapping[Hashable, Mapping[str, Moments]],
    *,
    momentum: float | None = None,
    steps: float | Mapping[Hashable, float] = 1,
    population: int | None = None,
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
        updates: a list, or client id -> update. Updates may contain anything: unusable ones get a verdict.
        momentum: overrides every layer's own; 1 replaces the statistics by those of the round.
        steps: local steps that the clients took in the round, k. The round then has the weight 1 - (1 -
            momentum)^k. Given as client -> steps, k is the count-weighted mean of those used, or their median
            under an aggregator.
        population: how many clients there are, n, where those of a round are drawn from more. The variance
            between M of n clients is too small by (M - 1)/M n/(n - 1) in expectation, and is corrected
            for that, also for unequal counts: see `cohort_factor`. None, or n = M, is no correction.
        aggregator: None, or (n, d) -> (d,) for rows of equal weight. For a `defense` against f Byzantine
            clients, those left out by a verdict count among the f (but not those that have merely seen
            nothing). It needs more than twice as many clients as the number that it still expects to be
            Byzantine; with fewer the statistics stay as they were.
        quorum: with fewer usable clients the statistics stay as they were.
        max_count: the most values per channel an honest client can see, a number or by layer.
        nonnegative: layers whose input is never below 0, such as those after a ReLU: a client that
            reports a negative mean there is left out.
        checks: which checks are made; all by default.

    Returns:
        MergeResult(statistics, verdicts by client, updated, notices, steps, between).

    Example:
        >>> shared = {"bn": Running(torch.zeros(1), torch.ones(1))}
        >>> clients = [{"bn": Moments(1, torch.tensor([u]), torch.zeros(1))} for u in (4.0, 8.0)]
        >>> after = merge(shared, clients).statistics["bn"]
        >>> round(after.mean.item(), 6), round(after.var.item(), 6)
        (0.6, 1.7)
    """
    clients = _clients(updates)
    _check_arguments(shared, momentum, quorum, aggregator)
    check_population(population, len(clients))
    verdicts, rows = read_all(shared, clients, max_count, nonnegative, checks)
    used = [client for client, verdict in verdicts.items() if verdict.used]
    caught = [v for v in verdicts.values() if not v.used and v.reason != "empty"]  # no fault
    with torch.no_grad():
        table = Table.of(shared, rows)
        seen = dict(zip(used, (int(math.fsum(row)) for row in table.counts.tolist()), strict=True))
        steps = round_steps(steps, clients, seen, aggregator is not None)
        beta = _momenta(shared, momentum, steps, aggregator is not None)
        aggregator, least = _for_the_rest(aggregator, len(caught))
        cohorts = (table.counts > 0).sum(0).tolist()
        merged, notices = _present(shared, cohorts, max(quorum, least))
        if not any(merged):
            return MergeResult(dict(shared), verdicts, False, tuple(notices), steps)
        # A layer that only some of the round's clients have is taken to be that rare among all of them.
        of_layer = [there * (population or len(used)) / len(used) for there in cohorts]
        layers = list(zip(shared, merged, cohorts, of_layer, strict=True))
        notices += [_alone(name, population) for name, taken, m, n in layers if taken and m == 1 < n]
        together = union(table)
        notices += _degenerate(shared, merged, table, together)
        together, whole = of_population(table, together, cohorts, of_layer), together
        between: dict[str, float] = {}
        if aggregator is None:
            parts = zip(layers, part_between(table, together).tolist(), strict=True)
            between = {name: part for (name, taken, m, n), part in parts if taken and not m == 1 < n}
        mean, var = exact_step(table, together, beta)
        if aggregator is not None:
            exact = var
            mean, var = robust_steps(table, shared, whole.total, beta, of_layer, merged, aggregator)
            notices += _collapsed(shared, merged, table, var, exact)
        statistics = next_statistics(shared, merged, mean, var, steps)
    return MergeResult(statistics, verdicts, True, tuple(notices), steps, between)


def _present(
    shared: Mapping[str, Running], cohorts: Sequence[int], least: int
) -> tuple[list[bool], list[Notice]]:
    """Which layers at least so many clients have seen, and notices of the other layers."""
    notices = []
    for name, there in zip(shared, cohorts, strict=True):
        if not there:
            notices.append(Notice(name, "empty", "no client has seen a value: the statistics stay"))
        elif there < least:
            detail = f"{there} of the required {least} clients: the statistics stay"
            notices.append(Notice(name, "below_quorum", detail))
    return [there >= max(least, 1) for there in cohorts], notices


def _momenta(
    shared: Mapping[str, Running], momentum: float | None, steps: float, robust: bool
) -> list[float]:
    """Each layer's weight of the round."""
    found = []
    for name, running in shared.items():
        if running.tracked + tracked_steps(steps) >= 2**63:
            raise ValueError(f"steps is {steps}: the counter of layer {name!r} has no room for it")
        own = running.momentum if momentum is None else momentum
        found.append(float(round_momentum(own, running.tracked, steps)))
        if robust and found[-1] < _LEAST_MOMENTUM:
            raise ValueError(
                f"momentum is {own} in layer {name!r}: too small for a robust rule, give {_LEAST_MOMENTUM} "
                "or more"
            )
    return found


def _for_the_rest(aggregator: Aggregator | None, caught: int) -> tuple[Aggregator | None, int]:
    """The rule for clients that passed the checks, and how many of them it needs.

    A client left out by a verdict is one of the f that a `defense` expects, so it then expects that many
    fewer.
    """
    if not isinstance(aggregator, Defense | OwnDefense):
        return aggregator, 1
    left = aggregator.against(max(0, aggregator.f - caught))
    return left, 2 * left.f + 1


def _degenerate(
    shared: Mapping[str, Running], merged: Sequence[bool], table: Table, together: Union
) -> list[Notice]:
    notices = []
    constant = of_layers(together.var == 0, table.sizes).tolist()
    for name, taken, total, same, channels in zip(
        shared, merged, together.total, constant, table.sizes.tolist(), strict=True
    ):
        if taken and total == 1:
            notices.append(Notice(name, "insufficient_count", "a single value: the variance stays"))
        elif taken and same:
            detail = f"{same} of {channels} channels had the same value everywhere"
            notices.append(Notice(name, "constant", detail))
    return notices


def _alone(name: str, population: int | None) -> Notice:
    detail = f"one client of {population}: how far the others are cannot be known, nothing is corrected"
    return Notice(name, "cohort_of_one", detail)


def _collapsed(
    shared: Mapping[str, Running], merged: Sequence[bool], table: Table, robust: Tensor, exact: Tensor
) -> list[Notice]:
    ratio = robust / torch.maximum(exact, table.spread([running.eps for running in shared.values()]))
    outside = of_layers((ratio < 0.01) | (ratio > 100), table.sizes).tolist()
    return [
        Notice(
            name,
            "robust_collapse",
            f"{far} of {channels} channels: variance far from that of the plain merge",
        )
        for name, taken, far, channels in zip(shared, merged, outside, table.sizes.tolist(), strict=True)
        if taken and far
    ]


def _clients(updates) -> dict[Hashable, Any]:
    single = (
        isinstance(updates, Mapping) and updates and all(isinstance(m, Moments) for m in updates.values())
    )
    if isinstance(updates, Update) or single:
        raise ValueError("updates: this is one update; give a list of them, or client id -> update")
    if not isinstance(updates, Iterable) or isinstance(updates, Tensor):
        raise ValueError(f"updates: expected a list or client id -> update, got {type(updates).__name__}")
    try:
        return dict(updates) if isinstance(updates, Mapping) else dict(enumerate(updates))
    except Exception as error:  # of an iterator of the caller's
        raise ValueError(f"updates: it cannot be read: {type(error).__name__}: {error}") from error


def _check_arguments(shared, momentum, quorum, aggregator) -> None:
    if not isinstance(shared, Mapping) or not all(isinstance(name, str) for name in shared):
        raise ValueError(f"shared: expected layer name -> Running, got {shown(shared)}")
    check_statistics(shared)
    number = isinstance(momentum, numbers.Real) and not isinstance(momentum, bool)
    if momentum is not None and not (number and 0 < momentum <= 1):  # pyrefly: ignore
        raise ValueError(f"momentum is {shown(momentum)}; it must be in (0, 1], or None for each layer's own")
    if not (isinstance(quorum, int) and quorum >= 1):
        raise ValueError(f"quorum is {shown(quorum)}; it must be a whole number of clients, at least 1")
    if not (aggregator is None or callable(aggregator)):
        raise ValueError(f"aggregator is {shown(aggregator)}; it must be None, or a function of rows (n, d)")
