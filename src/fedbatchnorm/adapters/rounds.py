"""Steps of a server's round: the merge of what clients saw, in training and in the calibration before it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from logging import WARNING
from typing import Any

from ..aggregation.statistics import MergeResult, merge
from ..aggregation.verdicts import Verdict
from ..norm.moments import Running
from .events import Teller
from .replies import Examined, Reply, read_calibrations


def is_fresh(shared: Mapping[str, Running]) -> bool:
    """Whether statistics are those of new layers: mean 0, variance 1, nothing tracked."""
    return all(
        r.tracked == 0 and not bool(r.mean.any()) and bool((r.var == 1).all()) for r in shared.values()
    )


def merged(
    tell: Teller, number: int, shared: Mapping[str, Running], found: Examined, rules: Mapping[str, Any]
) -> tuple[MergeResult, dict[Hashable, Verdict], set[Hashable]]:
    """The merge of what clients saw, verdicts on those left out, and the clients that have seen nothing.

    Args:
        tell: for notices.
        number: the round's.
        shared: the statistics that were sent.
        found: the replies.
        rules: what `merge` is called with.
    """
    result = merge(shared, found.updates, **_of_all(rules, len(found.updates)))
    bad = {client: v for client, v in result.verdicts.items() if not v.used}
    seen_nothing = {client for client, v in bad.items() if v.reason == "empty"}
    _tell_notices(tell, number, result)
    return result, {client: v for client, v in bad.items() if client not in seen_nothing}, seen_nothing


def calibrated(
    tell: Teller, shared: Mapping[str, Running], replies: list[Reply], asked: int, rules: Mapping[str, Any]
) -> tuple[dict[str, Running] | None, dict[Hashable, Verdict]]:
    """The statistics that all layers start with, or None if too few clients can calibrate; and who was left
    out.

    Args:
        tell: for the result.
        shared: the statistics that were sent.
        replies: what came back, failures among it.
        asked: how many clients were.
        rules: what `merge` is called with in every round.
    """
    failed = [reply for reply in replies if reply.failure]
    updates, left_out = read_calibrations([reply for reply in replies if not reply.failure])
    result = merge(shared, updates, momentum=1.0, **_of_all(rules, len(updates)))
    left_out |= {client: verdict for client, verdict in result.verdicts.items() if not verdict.used}
    tell.left_out(0, left_out)
    used = len(replies) - len(failed) - len(left_out)
    # A layer that its quorum has not seen keeps mean 0 and variance 1, as if there had been no calibration.
    if not result.updated:
        why = f"; the first of {len(failed)} failures: {failed[0].failure}" if failed else ""
        text = f"the calibration was skipped, {used} of {asked} {tell.called}s answered with statistics: "
        text += f"training starts from mean 0 and variance 1. {tell.to_calibrate}{why}"
        tell(0, "calibrated", text, WARNING, values={"asked": asked, "used": used})
        return None, left_out
    text = f"statistics calibrated by {used} of {asked} {tell.called}s"
    tell(0, "calibrated", text, values={"asked": asked, "used": used})
    _tell_notices(tell, 0, result)
    return result.statistics, left_out


def _of_all(rules: Mapping[str, Any], answered: int) -> dict[str, Any]:
    """Rules with a population not smaller than the number of replies: clients may have joined since."""
    of = rules["population"]
    return {**rules, "population": None if of is None else max(of, answered)}


def _tell_notices(tell: Teller, number: int, result: MergeResult) -> None:
    for layer, reason, detail in result.notices:
        tell(number, "notice", f"layer {layer}: {reason} ({detail})", layer=layer, reason=reason)
