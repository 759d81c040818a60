"""Checks of a client's update that cost little and that no honest client fails.

What a client sent is read only here: it becomes a row of numbers, or a verdict. Ordinary updates are read and
checked for all layers at once. Those that do not pass are checked layer by layer, to say what is wrong.
"""

import math
import numbers
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..norm.exchange import is_ordinary
from ..norm.flat import spread
from ..norm.messages import DTYPES, FORMAT, Update, version
from ..norm.moments import Moments, Running, shown

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
_ORDINARY = {
    (dtype, torch.strided, True) for dtype in DTYPES
}  # of a nested tensor, asking for its shape fails
_LARGEST_COUNT = 2**53  # beyond it a float64 no longer counts one by one


class Verdict(NamedTuple):
    """Whether a client's update was used and, if not, why: the reason, the layer and the detail."""

    used: bool
    reason: Reason | None = None
    layer: str | None = None
    detail: str = ""


USED = Verdict(True)


class Judged(NamedTuple):
    """Verdicts by client, and what the used ones sent: (n, L) counts, then (n, d) means and variances side by
    side, in float64; 0 in layers of which a client has seen nothing."""

    verdicts: dict[Hashable, Verdict]
    rows: Tensor


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
        updates: client -> what it sent, which may be anything.
        max_count: the largest count an honest client can reach, for all layers or by layer.
        nonnegative: layers whose input is never below 0, such as one after a ReLU: nor is its mean.
        checks: which of `CHECKS` are made.

    Returns:
        client -> Verdict.
    """
    return read_all(shared, updates, max_count, nonnegative, checks).verdicts


def read_all(
    shared: Mapping[str, Running],
    updates: Mapping[Hashable, object],
    max_count: float | Mapping[str, float] | None = None,
    nonnegative: Collection[str] = (),
    checks: Collection[str] = CHECKS,
) -> Judged:
    """`judge`, with the numbers of the clients that are used."""
    rules = _Rules.of(shared, max_count, nonnegative, checks)
    rows = torch.empty(len(updates), len(rules.sizes) + 2 * rules.channels, dtype=torch.float64)
    found = [_read(update, rules, row) for update, row in zip(updates.values(), rows, strict=True)]
    verdicts = dict(zip(updates, (verdict for verdict, _ in found), strict=True))
    if "duplicate" in checks:
        verdicts |= _duplicates(verdicts, [identity for _, identity in found], rows)
    used = [i for i, verdict in enumerate(verdicts.values()) if verdict.used]
    return Judged(verdicts, rows if len(used) == len(rows) else rows[used])


class _Rules(NamedTuple):
    """What updates are compared with, for all layers."""

    shared: Mapping[str, Running]
    checks: Collection[str]
    version: int
    sizes: Tensor
    channels: int
    shapes: list[torch.Size]
    limits: list[float]
    bounds: tuple[float, float]
    nonnegative: Collection[str]
    positive: Tensor | None

    @classmethod
    def of(cls, shared, max_count, nonnegative, checks) -> "_Rules":
        for what, names, known in (("nonnegative", nonnegative, shared), ("checks", checks, CHECKS)):
            wanted = ", ".join(map(repr, known))
            if isinstance(names, str) or not isinstance(names, Collection) or not _all_in(names, known):
                raise ValueError(f"{what} is {shown(names)}; it must be a collection of some of {wanted}")
        limits = [_limit(name, max_count) for name in shared]
        bounds = [_bounds(running) for running in shared.values()]
        shapes = [running.mean.shape for running in shared.values()]
        sizes = torch.tensor([shape[0] for shape in shapes], dtype=torch.int64)
        channels, positive = int(sizes.sum()), None
        if len(nonnegative):
            named = torch.tensor([name in nonnegative for name in shared])
            positive = spread(named, sizes, channels).nonzero().squeeze(1)
        least = min((mean for mean, _ in bounds), default=0.0), min((var for _, var in bounds), default=0.0)
        known = version(shared), sizes, channels, shapes, limits, least
        return cls(shared, checks, *known, nonnegative, positive)


def _read(update: Any, rules: _Rules, row: Tensor) -> tuple[Verdict, int | None]:
    """Read one client's update into its row: the verdict, and the message's id if it has one."""
    try:
        verdict, identity = _judge_envelope(update, rules)
        if verdict is not None:
            return verdict, None
        if _is_read(update, rules, row):
            return USED, identity
        layers = {name: update[name] for name in rules.shared}
    except Exception as error:  # an object of theirs may raise anything
        return Verdict(False, "schema", None, f"it cannot be read: {type(error).__name__}"), None
    return _read_any(layers, rules, row), identity


def _judge_envelope(update: Any, rules: _Rules) -> tuple[Verdict | None, int | None]:
    """What is wrong with an update before its layers are looked at, or None; and its id."""
    if not isinstance(update, Mapping):
        return Verdict(False, "schema", None, f"expected an update, got {type(update).__name__}"), None
    identity = None
    if isinstance(update, Update):
        identity = update.id
        if not isinstance(update.layers, Mapping) or not all(_whole(n) for n in (update.round, update.id)):
            return Verdict(False, "schema", None, "layers must be a mapping, round and id integers"), None
        if not _whole(update.format) or update.format != FORMAT:
            return Verdict(False, "schema", None, f"format {shown(update.format)}, expected {FORMAT}"), None
        stale = update.round is not None and update.round != rules.version
        if stale and "stale_round" in rules.checks:
            detail = f"round {shown(update.round)}, expected {rules.version}"
            return Verdict(False, "stale_round", None, detail), None
    if list(update) == list(rules.shared):
        return None, identity
    missing, extra = set(rules.shared) - set(update), set(update) - set(rules.shared)
    if missing or extra:
        layer = min(missing or extra, key=str)
        detail = "this layer is missing" if missing else "the model has no such layer"
        return Verdict(False, "schema", str(layer)[:200], detail), None
    return None, identity


def _is_read(update: Mapping[str, Moments], rules: _Rules, row: Tensor) -> bool:
    try:
        return _read_ordinary(update, rules, row)
    except Exception:  # then it is not ordinary; in which layer it is odd takes longer to say
        return False


def _read_ordinary(update: Mapping[str, Moments], rules: _Rules, row: Tensor) -> bool:
    """Read an ordinary update, all layers at once; False if in doubt."""
    layers = [update[name] for name in rules.shared]
    if set(map(type, layers)) != {Moments}:
        return False
    counts, means, variances = zip(*layers, strict=True)
    tensors = (*means, *variances)
    if set(map(type, counts)) != {int} or set(map(type, tensors)) != {Tensor}:
        return False
    if not all(0 <= count <= limit for count, limit in zip(counts, rules.limits, strict=True)):
        return False
    if not {(t.dtype, t.layout, t.is_cpu) for t in tensors} <= _ORDINARY:
        return False
    if [t.shape for t in means] != rules.shapes or [t.shape for t in variances] != rules.shapes:
        return False
    if not any(counts):
        return False
    with torch.no_grad():
        torch.cat(tensors, out=row[len(counts) :])
    row[: len(counts)] = torch.tensor(counts, dtype=torch.float64)
    mean, var = row[len(counts) :].view(2, -1)
    if not rules.channels:
        return True
    largest_mean, largest_var = rules.bounds
    (least, most), (narrowest, widest) = torch.stack(
        [torch.stack(mean.aminmax()), torch.stack(var.aminmax())]
    ).tolist()
    fine = -largest_mean <= least and most <= largest_mean and narrowest >= 0 and widest <= largest_var
    fine = fine and (rules.positive is None or bool((mean[rules.positive] >= 0).all()))
    _clear_unseen(row, rules)
    return fine


def _read_any(layers: Mapping[str, Any], rules: _Rules, row: Tensor) -> Verdict:
    """Read any other update, layer by layer: the verdict, with the first layer that is wrong."""
    counts, means, variances = [], [], []
    for (name, running), limit in zip(rules.shared.items(), rules.limits, strict=True):
        try:
            for reason, detail in _problems(running, layers[name], limit, name in rules.nonnegative):
                if reason == "schema" or reason in rules.checks:
                    return Verdict(False, reason, name, detail)
            count, mean, var = layers[name]
            counts.append(int(count))
            means.append(mean.detach().cpu().double())
            variances.append(var.detach().cpu().double())
        except Exception as error:
            return Verdict(False, "schema", name, f"it cannot be read: {type(error).__name__}")
    if not any(counts):
        return Verdict(False, "empty", None, "it has seen no values in any layer")
    row.copy_(torch.cat([torch.tensor(counts, dtype=torch.float64), *means, *variances]))
    _clear_unseen(row, rules)
    return USED


def _clear_unseen(row: Tensor, rules: _Rules) -> None:
    """If the client has seen nothing in a layer, ignore the values that it sent for it."""
    counts = row[: len(rules.sizes)]
    if not bool(counts.all()):
        unseen = spread(counts == 0, rules.sizes, rules.channels)
        row[len(counts) :].view(2, -1).masked_fill_(unseen, 0)


def _problems(
    running: Running, moments: Any, limit: float, nonnegative: bool
) -> Iterator[tuple[Reason, str]]:
    """What is wrong with a layer's moments, the worst first; after a problem of schema nothing more."""
    if not isinstance(moments, Moments):
        yield "schema", f"expected Moments(count, mean, var), got {type(moments).__name__}"
        return
    count, *fields = moments
    reason, detail = _judge_count(count, limit)
    if reason == "schema":
        yield reason, detail
    for what, value in zip(("mean", "var"), fields, strict=True):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            yield "schema", f"{what} must be a floating-point tensor"
        elif not is_ordinary(value):
            yield "schema", f"{what} must be an ordinary tensor with values"
        elif value.shape != running.mean.shape:
            yield "schema", f"{what} has shape {tuple(value.shape)}, expected {tuple(running.mean.shape)}"
    mean, var = (value.detach() for value in fields)
    for what, value, bound in zip(("mean", "var"), (mean, var), _bounds(running), strict=True):
        if not bool(value.isfinite().all()):
            yield "non_finite", f"{what} has a value that is not finite"
        if bool((value.abs().double() > bound).any()):
            yield "non_finite", f"{what} is too large for {running.mean.dtype}"
    if bool((var < 0).any()):
        yield "impossible_moments", f"the variance is {float(var.min()):.3g}"
    if nonnegative and bool((mean < 0).any()):
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
        return "schema", f"count is {shown(count)}, expected an integer"
    if not 0 <= int(count) <= limit:
        return "count_out_of_range", f"count is {shown(int(count))}, allowed are 0 to {limit:.0f}"
    return None, ""


def _countable(count: Any) -> bool:
    """Whether moments can be merged with this count: a number of values, small enough to be added up."""
    return 0 <= count <= _LARGEST_COUNT


def _bounds(running: Running) -> tuple[float, float]:
    """The largest mean and variance that stay finite when squared, summed and cast back."""
    top = torch.finfo(running.mean.dtype).max / 8
    return math.sqrt(top), top


def _duplicates(
    verdicts: Mapping[Hashable, Verdict], ids: list[int | None], rows: Tensor
) -> dict[Hashable, Verdict]:
    """Verdicts on messages that share their id with another one."""
    by_id: dict[int, list[tuple[Hashable, Tensor]]] = {}
    for (client, verdict), identity, row in zip(verdicts.items(), ids, rows, strict=True):
        if verdict.used and identity is not None:
            by_id.setdefault(identity, []).append((client, row))
    found = {}
    for (first, row), *others in by_id.values():
        left_out = [client for client, _ in others]
        if all(torch.equal(row, other) for _, other in others):
            detail = f"the same message as from client {first!r}"
        else:
            left_out, detail = [first, *left_out], "a different message has the same id"
        found |= {client: Verdict(False, "duplicate", None, detail) for client in left_out}
    return found


def _all_in(names: Collection, known: Collection) -> bool:
    try:
        return all(name in known for name in names)
    except (TypeError, ValueError):  # not hashable, or an array, and so not the name of anything
        return False


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
        raise ValueError(f"max_count is {shown(max_count)} for layer {name!r}; it must be positive")
    return min(max_count, _LARGEST_COUNT)
