"""Steps of a server's round on Flower that need nothing of the strategy but what they are given."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from logging import INFO, getLogger
from typing import Any

import numpy as np

from ..aggregation.statistics import MergeResult, merge
from ..aggregation.verdicts import Verdict
from ..norm.moments import Running
from .replies import Examined

log = getLogger("flwr").log


def merged(
    server_round: int, shared: Mapping[str, Running], found: Examined, rules: Mapping[str, Any]
) -> tuple[MergeResult, dict[Hashable, Verdict], set[Hashable]]:
    """The merge of what clients saw, verdicts on those who are left out, and who has merely seen nothing.

    Args:
        server_round: its number, for the log.
        shared: the statistics that were sent.
        found: the replies.
        rules: what `merge` is called with.
    """
    of = rules["population"]
    if of is not None:
        rules = {**rules, "population": max(of, len(found.updates))}  # some may have joined since
    result = merge(shared, found.updates, **rules)
    bad = {node: v for node, v in result.verdicts.items() if not v.used}
    seen_nothing = {node for node, v in bad.items() if v.reason == "empty"}
    for notice in result.notices:
        log(INFO, "round %s: layer %s: %s (%s)", server_round, *notice)
    return result, {node: v for node, v in bad.items() if node not in seen_nothing}, seen_nothing


def renumber(result: object, done: int) -> None:
    """Count a result's rounds from the first of the whole run, not of this part of it."""
    for name, value in vars(result).items():
        if done and isinstance(value, dict):
            setattr(result, name, {step + done: metrics for step, metrics in value.items()})


def finite(arrays: Iterable[np.ndarray]) -> bool:
    """Whether all numbers of all arrays are."""
    return all(bool(np.isfinite(array).all()) for array in arrays)
