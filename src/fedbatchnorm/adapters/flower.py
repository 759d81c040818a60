"""Federated BatchNorm on Flower: a wrapper for any strategy, and helpers for the client.

The server sends parameters and statistics separately, so that the wrapped strategy sees parameters only.
Clients reply with parameters and with what their layers have seen. The `Session` decides what to do with
them.

    strategy = FederatedBatchNormStrategy(FedAvg(), model=model)      # server_app.py
    load(model, message); ...; return reply(model, message, metrics)  # client_app.py, @app.train()
    return calibrate(model, message, batches)                         # client_app.py, @app.train("calibrate")
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from logging import INFO, getLogger
from typing import Any, Literal, Unpack

from .divergence import DivergedError, NothingTrainedError
from .events import Event
from .extras import needs
from .flower_client import calibrate, load, reply, statistics_mod
from .flower_numpy import numpy_client_app
from .flower_records import (
    GRADIENT,
    STATISTICS,
    Views,
    beside,
    contents_of,
    record_of,
    replies_of,
    usual_names,
)
from .session import OfSession, Session
from .settings import Options, check_population

try:
    from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result, Strategy
except ImportError as error:
    raise needs("Flower", "flower", error) from error

__all__ = [
    "STATISTICS",
    "DivergedError",
    "Event",
    "FederatedBatchNormStrategy",
    "NothingTrainedError",
    "calibrate",
    "load",
    "numpy_client_app",
    "reply",
    "statistics_mod",
]
CALIBRATE = "train.calibrate"  # the type of the messages of round 0
log = getLogger("flwr").log


class FederatedBatchNormStrategy(OfSession, Strategy):
    """Any Flower strategy for the parameters, and federated BatchNorm for the statistics.

    Replies that are malformed, of another round, repeated, or fail a verdict are left out of both, with the
    node's id and the reason in the log, before the wrapped strategy sees them. If the wrapped strategy drops
    a client by itself (as Krum does), its statistics still count.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        population: int | Literal["grid"] | None = "grid",
        **options: Unpack[Options],
    ):
        """Wrap a strategy.

        Args:
            strategy: what aggregates the parameters: FedAvg, FedAdam, Krum, ...
            population: how many clients there are, if a round has only some of them: the spread between them
                is corrected to that between all. "grid" is the number of connected nodes, if the strategy
                asks fewer than all of them; None is no correction.
            options: model, aggregator, quorum, checkpoint, ...: see `adapters.settings.Options`.
        """
        check_population(population, "grid")
        for key in ("arrayrecord_key", "configrecord_key"):
            taken = _attribute(strategy, key)
            if taken in (STATISTICS, GRADIENT):
                raise ValueError(f"the strategy's {key} is {taken!r}, which is taken: choose another")
        self.strategy, self._population = strategy, population
        self.session = Session(
            remembers=strategy,
            weight=lambda: _attribute(strategy, "weighted_by_key") or "num-examples",
            log=getLogger("flwr"),
            called="node",
            to_calibrate='Clients need a function @app.train("calibrate")',
            **options,
        )
        self._done = 0
        self._sent: list[Metadata] = []

    def summary(self) -> None:
        """Log the settings of the strategies."""
        given = self.session.settings
        log(INFO, "\t├──> Federated BatchNorm: %s", given.aggregator or "exact merge")
        log(INFO, "\t│\t├── Quorum: %s", given.quorum)
        log(INFO, "\t│\t└── Share of BatchNorm's gradient: %s", self.session.share)
        self.strategy.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all rounds, or the rest after a checkpoint; see `flwr.serverapp.strategy.Strategy.start`."""
        arrays = self.session.start(Views(initial_arrays), num_rounds)
        done = self._done = self.session.done
        if self.session.wants_calibration():
            arrays = self._calibrated(grid, train_config, timeout)
        initial_arrays = record_of(arrays, initial_arrays)
        result = super().start(
            grid,
            initial_arrays,
            max(0, num_rounds - done),
            timeout,
            train_config,
            evaluate_config,
            evaluate_fn and (lambda step, arrays: evaluate_fn(step + done, arrays)),
        )
        self.session.end(max(done, num_rounds))
        _renumber(result, done)
        if not result.arrays:  # no round has changed anything
            result.arrays = initial_arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages, with statistics and the gradient's share in separate records."""
        request = self.session.begin(server_round + self._done, dict(Views(arrays)))
        parameters = ArrayRecord({name: arrays[name] for name in request.parameters})
        number = server_round + self._done
        messages = list(self.strategy.configure_train(number, parameters, config, grid))
        _add(messages, beside(request))
        asked = self._sends(messages)
        self.session.ask(asked, self._population_of(len(asked), grid))
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages, with the statistics in a separate record."""
        request = self.session.request(dict(Views(arrays)))
        parameters = ArrayRecord({name: arrays[name] for name in request.parameters})
        number = server_round + self._done
        messages = list(self.strategy.configure_evaluate(number, parameters, config, grid))
        _add(messages, {STATISTICS: beside(request)[STATISTICS]})
        self.session.ask(self._sends(messages))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the statistics, and let the wrapped strategy aggregate the parameters of the same replies."""
        number, replies = server_round + self._done, _in_order(replies)
        try:
            taken = self.session.take(number, replies_of(replies, sent=self._sent))
        except DivergedError as error:
            error.arrays = record_of(error.arrays)
            raise
        arrays, metrics = None, None
        if taken.used is not None:
            answers = _answers(replies)
            used, names = [answers[node] for node in taken.used], usual_names(answers.values())
            for message in used:
                message.content = contents_of(message, taken, self.session.parameters, *names)
            failures = [message for message in replies if message.has_error()]
            arrays, metrics = self.strategy.aggregate_train(number, failures + used)
            if arrays is None:
                self.session.refused(number)
        whole = self.session.finish(number, None if arrays is None else dict(Views(arrays)))
        return (None if whole is None else record_of(whole, arrays)), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy does, from the replies whose metrics are usable."""
        number, replies = server_round + self._done, _in_order(replies)
        taken = self.session.evaluated(number, replies_of(replies, False, self._sent))
        answers = _answers(replies)
        used, (_, name) = [answers[node] for node in taken.used or ()], usual_names(answers.values())
        for message in used:
            message.content = contents_of(message, taken, (), "", name)
        failures = [message for message in replies if message.has_error()]
        return self.strategy.aggregate_evaluate(number, failures + used)

    def initialize_parameters(self, client_manager: object) -> None:
        """Called by workflows of Flower's earlier API, which are not supported: always an error."""
        raise TypeError(
            "FederatedBatchNormStrategy does not go through workflows such as SecAggPlusWorkflow: with "
            "secure aggregation use fedbatchnorm.adapters.secagg.SecAggBatchNorm, which takes no robust rule"
        )

    def _calibrated(self, grid: Grid, config: ConfigRecord | None, timeout: float) -> Mapping[str, Any]:
        """Round 0, with as many nodes as train in a round.

        The wrapped strategy is not called, because it may count its rounds; its settings are read.
        """
        strategy, request = self.strategy, self.session.request()
        fraction = _attribute(strategy, "fraction_train", 1.0)
        least = _attribute(strategy, "min_train_nodes", 1)
        if fraction == 0:
            return self.session.arrays
        nodes = _wait_for(grid, max(least, _attribute(strategy, "min_available_nodes", 1)))
        size = min(len(nodes), max(int(len(nodes) * fraction), least))
        chosen = random.Random(0).sample(nodes, size)  # noqa: S311
        content = {
            _attribute(strategy, "arrayrecord_key", "arrays"): record_of(request.parameters),
            _attribute(strategy, "configrecord_key", "config"): ConfigRecord(
                dict(config or {}) | {"server-round": 0}
            ),
            STATISTICS: record_of(request.statistics),
        }
        messages = [Message(RecordDict(dict(content)), node, CALIBRATE) for node in chosen]
        asked = self._sends(messages)
        replies = replies_of(grid.send_and_receive(messages, timeout=timeout), False, self._sent)
        return self.session.calibrated(replies, asked, self._population_of(size, grid))

    def _sends(self, messages: Iterable[Message]) -> list[Hashable]:
        """To whom; kept without the contents, until the answers come."""
        self._sent = [message.metadata for message in messages]
        return [metadata.dst_node_id for metadata in self._sent]

    def _population_of(self, asked: int, grid: Grid) -> int | None:
        """How many clients those of a round represent; those that drop out do not count."""
        if not isinstance(self._population, str):
            return self._population
        nodes = len(list(grid.get_node_ids()))
        return nodes if asked < nodes else None


def _attribute(strategy: object, name: str, default: Any = None) -> Any:
    """Of the strategy, or of one that is wrapped in it."""
    while strategy is not None:
        if hasattr(strategy, name):
            return getattr(strategy, name)
        strategy = getattr(strategy, "strategy", None)
    return default


def _add(messages: Iterable[Message], records: Mapping[str, Any]) -> None:
    for message in messages:  # which may share their content
        message.content.update(records)


def _in_order(replies: Iterable[Message]) -> list[Message]:
    """By node, not in the order of arrival, because rounded sums depend on the order."""
    return sorted(replies, key=lambda message: message.metadata.src_node_id)


def _answers(replies: Iterable[Message]) -> dict[Hashable, Message]:
    return {message.metadata.src_node_id: message for message in replies if not message.has_error()}


def _wait_for(grid: Grid, least: int) -> list[int]:
    """The ids of the connected nodes, as soon as there are enough of them."""
    while len(nodes := sorted(grid.get_node_ids())) < least:
        log(INFO, "Waiting for nodes to connect: %s connected (minimum required: %s).", len(nodes), least)
        time.sleep(1)
    return nodes


def _renumber(result: object, done: int) -> None:
    """Number a result's rounds from the start of the whole run, not of this part of it."""
    for name, value in vars(result).items():
        if done and isinstance(value, dict):
            setattr(result, name, {step + done: metrics for step, metrics in value.items()})
