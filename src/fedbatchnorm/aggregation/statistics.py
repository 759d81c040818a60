"""The server's step: clients' moments in, the next shared statistics out."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..norm.exchange import check_running
from ..norm.messages import Update
from ..norm.moments import Moments, Running, combine, update_running
from .cohort import check_population, of_population, round_steps
from .cohort import cohort_factor as cohort_factor
from .defenses import Defense
from .robust import Aggregator, on_cpu, robust_group
from .robust import Rows as Rows
from .robust import robust_update as robust_update
from .robust import running_rows as running_rows
from .robust import split_layers as split_layers
from .verdicts import CHECKS, Verdict, judge


class Notice(NamedTuple):
    """Something about one layer that the server's operator should know; never an error."""

    layer: str
    reason: Literal[
        "empty", "below_quorum", "insufficient_count", "constant", "robust_collapse", "cohort_of_one"
    ]
    detail: str


class MergeResult(NamedTuple):
    """The outcome of a round: the next statistics, a verdict for each client, notices, and the steps it was
    taken to have."""

    statistics: dict[str, Running]
    verdicts: dict[Hashable, Verdict]
    updated: bool
    notices: tuple[Notice, ...] = ()
    steps: float = 1


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
        updates: a list, or client id -> update. Anything may be in it: bad updates get a verdict.
        momentum: overrides every layer's own; 1 takes the round's statistics as they are.
        steps: local steps that the clients took in the round, k; the round then weighs 1 - (1 - momentum)^k.
            Given as client -> steps, k is the count-weighted mean of those used, or their median under an
            aggregator.
        population: how many clients there are, n, where those of a round are drawn from more. The variance
            between M of n clients is too small by (M - 1)/M n/(n - 1) in expectation, and is corrected
            for that, also for unequal counts: see `cohort_factor`. None, or n = M, is no correction.
        aggregator: None, or (n, d) -> (d,) for rows of equal weight. A `defense` against f liars takes who
            is left out by a verdict for one of them (not who has merely seen nothing), and needs more than
            twice as many clients as it still expects to lie; with fewer the statistics stay as they were.
        quorum: with fewer usable clients the statistics stay as they were.
        max_count: the most values per channel an honest client can see, a number or by layer.
        nonnegative: layers whose input is never below 0, such as those after a ReLU: a client that
            reports a negative mean there is left out.
        checks: which verdicts are reached; all that there are, unless some are to be off.

    Returns:
        MergeResult(statistics, verdicts by client, updated, notices, steps).

    Example:
        >>> shared = {"bn": Running(torch.zeros(1), torch.ones(1))}
        >>> clients = [{"bn": Moments(1, torch.tensor([u]), torch.zeros(1))} for u in (4.0, 8.0)]
        >>> after = merge(shared, clients).statistics["bn"]
        >>> round(after.mean.item(), 6), round(after.var.item(), 6)
        (0.6, 1.7)
    """
    clients = _clients(updates)
    _check_arguments(shared, momentum, quorum)
    check_population(population, len(clients))
    verdicts = judge(shared, clients, max_count, nonnegative, checks)
    used = [client for client, verdict in verdicts.items() if verdict.used]
    caught = [v for v in verdicts.values() if not v.used and v.reason != "empty"]  # seeing nothing is no lie
    seen = {c: sum(int(clients[c][name].count) for name in shared) for c in used}
    steps = round_steps(steps, clients, seen, aggregator is not None)
    aggregator, least = _for_the_rest(aggregator, len(caught))
    rows, notices = _present(shared, clients, used, max(quorum, least))
    stacked = {name: _stack(clients, name, present) for name, present in rows.items()}
    unions = {name: combine(moments) for name, moments in stacked.items()}
    # A layer that only some of the round's clients have is taken to be that rare among all of them.
    of_layer = {name: len(r) * (population or len(used)) / len(used) for name, r in rows.items()}
    notices += [_alone(name, population) for name, r in rows.items() if len(r) == 1 < of_layer[name]]
    exact = {
        name: update_running(
            on_cpu(shared[name]),
            of_population(stacked[name], union, of_layer[name]),
            steps=steps,
            momentum=momentum,
        )
        for name, union in unions.items()
    }
    notices += _degenerate(unions)
    after = exact
    if aggregator is not None:
        after = {}
        for group in _groups(rows):
            of_all = of_layer[group[0]]
            after |= robust_group({n: shared[n] for n in group}, stacked, momentum, steps, aggregator, of_all)
        notices += _collapsed(after, exact)
    statistics = {
        name: _like(after[name], running) if name in after else running for name, running in shared.items()
    }
    return MergeResult(statistics, verdicts, bool(rows), tuple(notices), steps)


def _present(shared, clients, used, least) -> tuple[dict[str, tuple[Hashable, ...]], list[Notice]]:
    """Who has seen something in each layer that at least so many have, and notices of the other layers."""
    rows, notices = {}, []
    for name in shared:
        present = tuple(client for client in used if int(clients[client][name].count) > 0)
        if len(present) >= least:
            rows[name] = present
        elif not present:
            notices.append(Notice(name, "empty", "no client has seen a value: the statistics stay"))
        else:
            detail = f"{len(present)} of the required {least} clients: the statistics stay"
            notices.append(Notice(name, "below_quorum", detail))
    return rows, notices


def _for_the_rest(aggregator: Aggregator | None, caught: int) -> tuple[Aggregator | None, int]:
    """The rule for clients that got past the verdicts, and how many of them it needs.

    Who was caught is one of the f liars that a `defense` expects, and so the rest hold that many fewer.
    """
    if not isinstance(aggregator, Defense):
        return aggregator, 1
    left = aggregator.against(max(0, aggregator.f - caught))
    return left, 2 * left.f + 1


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


def _alone(name: str, population: int | None) -> Notice:
    detail = f"one client of {population}: how far the others are cannot be known, nothing is corrected"
    return Notice(name, "cohort_of_one", detail)


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


def _check_arguments(shared, momentum, quorum) -> None:
    for name, running in shared.items():
        check_running(name, running)
    if momentum is not None and not 0 < momentum <= 1:
        raise ValueError(f"momentum is {momentum}; it must be in (0, 1], or None for each layer's own")
    if not (isinstance(quorum, int) and quorum >= 1):
        raise ValueError(f"quorum is {quorum!r}; it must be a whole number of clients, at least 1")
