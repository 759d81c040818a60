"""Round 0 on Flower: before they train, clients measure with plain BatchNorm, and training starts from that.

The request is a message of its own type, `train.calibrate`, so that an app that knows nothing of it answers
with an error and has not trained for nothing.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Mapping
from logging import INFO, WARNING, getLogger
from typing import Any

from ..aggregation.statistics import merge
from ..aggregation.verdicts import Verdict
from ..norm.moments import Running
from .replies import CALIBRATE, STATISTICS, attribute, log_left_out, read_calibrations

try:
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy.strategy_utils import sample_nodes
except ImportError as error:
    raise ImportError(f"this needs Flower ({error}): pip install 'fedbatchnorm[flower]'") from error

log = getLogger("flwr").log


def is_fresh(shared: Mapping[str, Running]) -> bool:
    """Whether statistics are those of new layers: mean 0, variance 1, nothing tracked."""
    return all(
        r.tracked == 0 and not bool(r.mean.any()) and bool((r.var == 1).all()) for r in shared.values()
    )


def requests(
    strategy: object,
    parameters: ArrayRecord,
    statistics: ArrayRecord,
    config: ConfigRecord | None,
    grid: Grid,
) -> list[Message]:
    """Messages that ask for a calibration, to as many nodes as train in a round.

    The wrapped strategy is not asked, as it may count its rounds: what it was set to is read.
    """
    fraction = attribute(strategy, "fraction_train", 1.0)
    least = attribute(strategy, "min_train_nodes", 1)
    if fraction == 0:
        return []
    sample_nodes(grid, max(least, attribute(strategy, "min_available_nodes", 1)), 0)  # waits for them
    nodes = sorted(grid.get_node_ids())
    size = min(len(nodes), max(int(len(nodes) * fraction), least))
    chosen = random.Random(0).sample(nodes, size)  # noqa: S311
    content = {
        attribute(strategy, "arrayrecord_key", "arrays"): parameters,
        attribute(strategy, "configrecord_key", "config"): ConfigRecord(
            dict(config or {}) | {"server-round": 0}
        ),
        STATISTICS: statistics,
    }
    return [Message(RecordDict(dict(content)), node, CALIBRATE) for node in chosen]


def calibrated(
    shared: Mapping[str, Running], replies: Iterable[Message], rules: Mapping[str, Any]
) -> tuple[dict[str, Running] | None, dict[Hashable, Verdict]]:
    """The statistics that all layers start with, or None if too few clients can calibrate; who was left out.

    Args:
        shared: the statistics that were sent.
        replies: what came back, errors among it.
        rules: what `merge` is called with in every round.
    """
    replies = sorted(replies, key=lambda message: message.metadata.src_node_id)
    failed = [message for message in replies if message.has_error()]
    updates, left_out = read_calibrations([message for message in replies if not message.has_error()])
    if rules["population"] is not None:
        rules = {**rules, "population": max(rules["population"], len(updates))}
    result = merge(shared, updates, momentum=1.0, **rules)
    left_out |= {node: verdict for node, verdict in result.verdicts.items() if not verdict.used}
    log_left_out(0, left_out)
    used = len(replies) - len(failed) - len(left_out)
    # A layer that its quorum has not seen keeps mean 0 and variance 1, as if there had been no calibration.
    if not result.updated:
        why = f"; the first of {len(failed)} failures: {failed[0].error.reason}" if failed else ""
        log(
            WARNING,
            "round 0: the calibration was skipped, %s of %s nodes answered with statistics: training starts "
            'from mean 0 and variance 1. Clients need a function @app.train("calibrate")%s',
            used,
            len(replies),
            why,
        )
        return None, left_out
    log(INFO, "round 0: statistics calibrated by %s of %s nodes", used, len(replies))
    for notice in result.notices:
        log(INFO, "round 0: layer %s: %s (%s)", *notice)
    return result.statistics, left_out
