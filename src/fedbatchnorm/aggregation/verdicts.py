"""What a server can tell of a client's update for free: checks that no honest client fails."""

import math
import numbers
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..norm.messages import DTYPES, FORMAT, Update, version
from ..norm.moments import Moments, Running

Reason = Literal[
    "schema",
    "stale_round",
    "non_finite",
    "impossible_moments",
    "count_out_of_range",
    "duplicate",
    "empty",
]

# What can be switched off. Without the schema there is nothing to compute with, so that is not among them.
CHECKS = ("stale_round", "non_finite", "impossible_moments", "count_out_of_range", "duplicate")
_LARGEST_COUNT = 2**53  # beyond it a float64 no longer counts one by one


class Verdict(NamedTuple):
    """Whether a client's update was used and, if not, why: the reason, the layer and the detail."""

    used: bool
    reason: Reason | None = None
    layer: str | None = None
    detail: str = ""


USED = Verdict(True)


def judge(
    shared: Mapping[str, Running],
    updates: Mapping[Hashable, object],
    max_count: float | Mapping[str, float] | None = None,
    nonnegative: Collection[str] = (),
    checks: Collection[str] = CHECKS,
) -> dict[Hashable, Verdict]:
    """Give every client its verdict; the order of clients does not matter.

    A message that came twice is used once; two different messages under one id are both left out.

    Args:
        shared: the round's statistics.
        updates: client -> what it sent, whatever that is.
        max_count: the largest count an honest client can reach, for all layers or by layer.
        nonnegative: layers whose input is never below 0, such as one after a ReLU: nor is its mean.
        checks: which of `CHECKS` are made.

    Returns:
        client -> Verdict.
    """
    for what, names, known in (("nonnegative", nonnegative, shared), ("checks", checks, CHECKS)):
        unknown = [name for name in names if name not in known]
        if isinstance(names, str) or unknown:
            wanted = ", ".join(map(repr, known))
            raise ValueError(f"{what} is {names!r}; it must be a collection of some of {wanted}")
    rules = {name: _Rules(_limit(name, max_count), name in nonnegative) for name in shared}
    verdicts = {client: _judge_one(shared, update, rules, checks) for client, update in updates.items()}
    if "duplicate" not in checks:
        return verdicts
    by_id: dict[int, list[Hashable]] = {}
    for client, update in updates.items():
        if verdicts[client].used and isinstance(update, Update) and update.id is not None:
            by_id.setdefault(update.id, []).append(client)
    for first, *others in by_id.values():
        if all(_equal(updates[first], updates[other]) for other in others):
            left_out, detail = others, f"the same message as from client {first!r}"
        else:
            left_out, detail = [first, *others], "a different message has the same id"
        verdicts |= {client: Verdict(False, "duplicate", None, detail) for client in left_out}
    return verdicts


class _Rules(NamedTuple):
    """What a layer's moments are held against."""

    limit: float
    nonnegative: bool


def _judge_one(
    shared: Mapping[str, Running], update: object, rules: Mapping[str, _Rules], checks: Collection[str]
) -> Verdict:
    if not isinstance(update, Mapping):
        return Verdict(False, "schema", None, f"expected an update, got {type(update).__name__}")
    if isinstance(update, Update):
        if not isinstance(update.layers, Mapping) or not all(_whole(n) for n in (update.round, update.id)):
            return Verdict(False, "schema", None, "layers must be a mapping, round and id integers")
        if update.format != FORMAT:
            return Verdict(False, "schema", None, f"format {update.format!r}, expected {FORMAT}")
        stale = update.round is not None and update.round != version(shared)
        if stale and "stale_round" in checks:
            detail = f"round {update.round!r}, expected {version(shared)}"
            return Verdict(False, "stale_round", None, detail)
    missing, extra = set(shared) - set(update), set(update) - set(shared)
    if missing or extra:
        layer = min(missing or extra, key=str)
        detail = "this layer is missing" if missing else "the model has no such layer"
        return Verdict(False, "schema", str(layer), detail)
    for name, running in shared.items():
        for reason, detail in _problems(running, update[name], rules[name]):
            if reason == "schema" or reason in checks:
                return Verdict(False, reason, name, detail)
    if all(int(update[name].count) == 0 for name in shared):
        return Verdict(False, "empty", None, "it has seen no values in any layer")
    return USED


def _problems(running: Running, moments: object, rules: _Rules) -> Iterator[tuple[Reason, str]]:
    """What is wrong with a layer's moments, the worst first; after a problem of schema nothing more."""
    if not isinstance(moments, Moments):
        yield "schema", f"expected Moments(count, mean, var), got {type(moments).__name__}"
        return
    count, *fields = moments
    reason, detail = _judge_count(count, rules.limit)
    if reason == "schema":
        yield reason, detail
    for what, value in zip(("mean", "var"), fields, strict=True):
        if not isinstance(value, Tensor) or value.dtype not in DTYPES:
            yield "schema", f"{what} must be a floating-point tensor"
        elif value.layout != torch.strided or value.is_meta:
            yield "schema", f"{what} must be an ordinary tensor with values"
        elif value.shape != running.mean.shape:
            yield "schema", f"{what} has shape {tuple(value.shape)}, expected {tuple(running.mean.shape)}"
    mean, var = fields
    # What is finite here must stay finite when it is squared, summed and cast back.
    top = torch.finfo(running.mean.dtype).max / 8
    for what, value, bound in (("mean", mean, math.sqrt(top)), ("var", var, top)):
        if not bool(value.isfinite().all()):
            yield "non_finite", f"{what} has a value that is not finite"
        if bool((value.abs().double() > bound).any()):
            yield "non_finite", f"{what} is too large for {running.mean.dtype}"
    if bool((var < 0).any()):
        yield "impossible_moments", f"the variance is {float(var.min()):.3g}"
    if rules.nonnegative and bool((mean < 0).any()):
        yield "impossible_moments", f"the mean of what is never below 0 is {float(mean.min()):.3g}"
    if reason is not None:
        yield reason, detail
        if not _countable(count):  # then nothing can be computed with it, whatever is checked
            yield "schema", detail


def _judge_count(count: object, limit: float) -> tuple[Reason | None, str]:
    if isinstance(count, Tensor) and count.dim() == 0:
        count = count.item()
    if isinstance(count, float) and not math.isfinite(count):
        return "non_finite", f"count is {count}"
    if isinstance(count, bool) or not isinstance(count, numbers.Integral):
        return "schema", f"count is {count!r}, expected an integer"
    if not 0 <= int(count) <= limit:
        return "count_out_of_range", f"count is {count}, allowed are 0 to {limit:.0f}"
    return None, ""


def _countable(count: Any) -> bool:
    """Whether moments can be merged with this count at all: a number of values, of any size that adds up."""
    return math.isfinite(count) and 0 <= int(count) <= _LARGEST_COUNT


def _whole(number: object) -> bool:
    return number is None or (isinstance(number, int) and not isinstance(number, bool))


def _limit(name: str, max_count: float | Mapping[str, float] | None) -> float:
    if isinstance(max_count, Mapping):
        if name not in max_count:
            raise ValueError(f"max_count: layer {name!r} is missing; give one number, or one for each layer")
        max_count = max_count[name]
    if max_count is None:
        return _LARGEST_COUNT
    if not isinstance(max_count, numbers.Real) or not max_count > 0:
        raise ValueError(f"max_count is {max_count!r} for layer {name!r}; it must be positive")
    return min(max_count, _LARGEST_COUNT)


def _equal(one: Any, other: Any) -> bool:
    return all(
        int(one[name].count) == int(other[name].count)
        and torch.equal(one[name].mean, other[name].mean)
        and torch.equal(one[name].var, other[name].var)
        for name in one
    )
