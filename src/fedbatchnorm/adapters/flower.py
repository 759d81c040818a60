"""Federated BatchNorm on Flower: a wrapper for any strategy, and two helpers for the client.

The server sends parameters and statistics apart, so that the wrapped strategy sees parameters alone; clients
answer with parameters and with what their layers have seen; the wrapper merges that with `merge`.

    strategy = FederatedBatchNormStrategy(FedAvg(), model=model)     # server_app.py
    load(model, message); ...; return reply(model, message, metrics)  # client_app.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from logging import INFO, WARNING, getLogger
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from ..aggregation.statistics import Aggregator, MergeResult, merge
from ..aggregation.verdicts import Verdict
from ..norm.convert import federated_layers
from ..norm.exchange import collect, load_statistics, statistics
from ..norm.moments import Moments, Running, settings_problem
from ..norm.wire import to_bytes
from .checkpoint import read_checkpoint, write_checkpoint
from .replies import MOST_STEPS, STATISTICS, Examined, examine

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result, Strategy
except ImportError as error:
    raise ImportError(f"this needs Flower ({error}): pip install 'fedbatchnorm[flower]'") from error

log = getLogger("flwr").log
_FIELDS = ("running_mean", "running_var", "num_batches_tracked")


def load(model: nn.Module, message: Message) -> None:
    """Load the server's parameters and statistics into a client's converted model.

    Args:
        model: what `convert` returned.
        message: as the client app received it, for training or for evaluation.
    """
    records = message.content.array_records
    if STATISTICS not in records:
        raise ValueError(
            f"the message has no record {STATISTICS!r}: wrap the server's strategy in "
            "FederatedBatchNormStrategy"
        )
    state: dict[str, torch.Tensor] = {}
    for record in records.values():
        state |= record.to_torch_state_dict()
    model.load_state_dict(state)
    load_statistics(model, statistics(model))  # a new round: nothing has been seen yet


def reply(
    model: nn.Module,
    message: Message,
    metrics: Mapping[str, int | float | list[int] | list[float]],
    *,
    steps: int = 1,
    arrays: str = "arrays",
) -> Message:
    """A client's answer: parameters, what its layers have seen since `load`, and metrics.

    Args:
        model: the converted model, after local training.
        message: what is answered.
        metrics: with the strategy's weight among them, which is `num-examples` unless it was set otherwise.
        steps: optimiser steps since `load`.
        arrays: the name of the record of parameters.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is {steps!r}; it must be a whole number, at least 1")
    kept = {name for layer in federated_layers(model) for name in _names(layer)}
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items() if name not in kept}
    update = np.frombuffer(to_bytes(collect(model)), dtype=np.uint8)
    seen = {"update": Array(update), "steps": Array(np.array(steps))}
    content: dict[str, Any] = {
        arrays: ArrayRecord(_without_integers(state)),
        STATISTICS: ArrayRecord(seen),
        "metrics": MetricRecord(dict(metrics)),
    }
    return Message(content=RecordDict(content), reply_to=message)


class FederatedBatchNormStrategy(Strategy):
    """Any Flower strategy for the parameters, and federated BatchNorm for the statistics.

    Replies that are malformed, of another round, repeated, or fail a verdict are left out of both, with the
    node's id and the reason in the log, before the wrapped strategy sees them. What the wrapped strategy
    drops by itself (Krum, say) stays in the statistics.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        model: nn.Module | None = None,
        momentum: float | None = 0.1,
        eps: float = 1e-5,
        aggregator: Aggregator | None = None,
        quorum: int = 1,
        max_count: float | Mapping[str, float] | None = None,
        nonnegative: Collection[str] = (),
        steps: int | None = None,
        checkpoint: Path | str | None = None,
    ):
        """Wrap a strategy.

        Args:
            strategy: what aggregates the parameters: FedAvg, FedAdam, Krum, ...
            model: the converted model, for its layers' momentum and eps.
            momentum: of all layers, where no model is given.
            eps: of all layers, where no model is given.
            aggregator: None is exact; a rule such as `defense("nnm+median", f=2)` withstands liars.
            quorum: with fewer usable replies the round changes nothing.
            max_count: the most values per channel that an honest client can see, a number or by layer.
            nonnegative: layers that follow a ReLU: a negative mean there is a lie.
            steps: local steps a round; what clients report if not given.
            checkpoint: a file to save to after every round, and to go on from if it is there.
        """
        problem = settings_problem(momentum, eps)
        if problem:
            raise ValueError(problem)
        if steps is not None and not 1 <= steps <= MOST_STEPS:
            raise ValueError(f"steps is {steps}; it must be from 1 to {MOST_STEPS}")
        self.strategy = strategy
        self._settings = (
            {} if model is None else {k: (r.momentum, r.eps) for k, r in statistics(model).items()}
        )
        self._usual = (momentum, eps)
        self._rules = {
            "aggregator": aggregator,
            "quorum": quorum,
            "max_count": max_count,
            "nonnegative": nonnegative,
        }
        self._steps = steps
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._done = 0
        self._order: list[str] = []
        self._fixed: dict[str, Array] = {}
        self._sent: dict[str, Array] = {}
        self.shared: dict[str, Running] = {}
        self.result: MergeResult | None = None
        self.left_out: dict[Hashable, Verdict] = {}
        """The statistics as they are; of the last round the merge's outcome, and who was left out and why."""

    def summary(self) -> None:
        """Log what the strategies are set to."""
        log(INFO, "\t├──> Federated BatchNorm: %s", self._rules["aggregator"] or "exact merge")
        log(INFO, "\t│\t└── Quorum: %s", self._rules["quorum"])
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
        """Run all rounds, or those that a checkpoint leaves; see `flwr.serverapp.strategy.Strategy.start`."""
        self._done = 0
        if self._checkpoint is not None and self._checkpoint.exists():
            arrays, self._done = read_checkpoint(self._checkpoint, self.strategy, initial_arrays)
            initial_arrays = ArrayRecord({name: Array(value) for name, value in arrays.items()})
            log(INFO, "going on after round %s, from %s", self._done, self._checkpoint)
        done = self._done
        result = super().start(
            grid,
            initial_arrays,
            max(0, num_rounds - done),
            timeout,
            train_config,
            evaluate_config,
            evaluate_fn and (lambda step, arrays: evaluate_fn(step + done, arrays)),
        )
        if done:
            for name, value in vars(result).items():
                if isinstance(value, dict):
                    setattr(result, name, {step + done: metrics for step, metrics in value.items()})
            if not result.arrays:
                result.arrays = initial_arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages, with the statistics in a record of their own."""
        return self._configure(self.strategy.configure_train, server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages, with the statistics in a record of their own."""
        return self._configure(self.strategy.configure_evaluate, server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the statistics, and let the wrapped strategy aggregate the parameters of the same replies."""
        server_round += self._done
        answers, failures = [], []
        for message in sorted(replies, key=lambda m: m.metadata.src_node_id):  # not as they happen to arrive
            (failures if message.has_error() else answers).append(message)
        used = self._used(server_round, answers)
        if used is None:
            return None, None
        arrays, metrics = self.strategy.aggregate_train(server_round, failures + used)
        if arrays is None:
            log(WARNING, "round %s: the strategy returned no parameters; the statistics stay", server_round)
            return None, metrics
        if self.result is not None:
            self.shared = self.result.statistics
        whole = self._join(arrays)
        if self._checkpoint is not None:
            write_checkpoint(self._checkpoint, self.strategy, whole, server_round)
        return whole, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy does."""
        return self.strategy.aggregate_evaluate(server_round + self._done, replies)

    def initialize_parameters(self, client_manager: object) -> None:
        """Called by workflows of Flower's earlier API, which this strategy is not of: always an error."""
        raise TypeError(
            "FederatedBatchNormStrategy does not go through workflows such as SecAggPlusWorkflow: with "
            "secure aggregation use fedbatchnorm.adapters.secagg.SecAggBatchNorm, which takes no robust rule"
        )

    def _configure(
        self, configure: Callable[..., Iterable[Message]], server_round: int, arrays: ArrayRecord, *rest: Any
    ) -> Iterable[Message]:
        self._split(arrays)
        messages = list(configure(server_round + self._done, ArrayRecord(dict(self._sent)), *rest))
        record = ArrayRecord(self._statistics() | self._fixed)
        for message in messages:
            if STATISTICS not in message.content:  # messages may share their content
                message.content[STATISTICS] = record
        return messages

    def _split(self, arrays: ArrayRecord) -> None:
        """Tell parameters, statistics, and what is not averaged (whole numbers) apart."""
        self._order = list(arrays)
        layers = [
            name.removesuffix(f".{_FIELDS[0]}").removesuffix(_FIELDS[0])
            for name in arrays
            if name.endswith(_FIELDS[0])
        ]
        shared, statistical = {}, set()
        for layer in layers:
            names = _names(layer)
            if all(name in arrays for name in names):
                mean, var, tracked = (arrays[name].numpy() for name in names)
                momentum, eps = self._settings.get(layer, self._usual)
                shared[layer] = Running(
                    torch.from_numpy(mean.copy()), torch.from_numpy(var.copy()), int(tracked), momentum, eps
                )
                statistical |= {*names}
        unknown = sorted(self._settings.keys() - shared.keys())
        if unknown:
            raise ValueError(f"the arrays have no statistics for layer {unknown[0]!r} of the model")
        self.shared = shared
        rest = {name: array for name, array in arrays.items() if name not in statistical}
        self._fixed = {name: array for name, array in rest.items() if not _is_float(array)}
        self._sent = {name: array for name, array in rest.items() if name not in self._fixed}

    def _statistics(self) -> dict[str, Array]:
        """The statistics under the names of a state_dict; the counter is whole, and the server's own."""
        found = {}
        for layer, running in self.shared.items():
            values = running.mean.numpy(), running.var.numpy(), np.array(running.tracked, dtype=np.int64)
            found |= {name: Array(value) for name, value in zip(_names(layer), values, strict=True)}
        return found

    def _join(self, arrays: ArrayRecord) -> ArrayRecord:
        """Parameters, statistics and the rest as one record, in the order and with the types of the first."""
        whole = dict(arrays) | self._statistics() | self._fixed
        for name, sent in self._sent.items():
            value = whole[name].numpy()
            if str(value.dtype) != sent.dtype:
                whole[name] = Array(value.astype(sent.dtype))
        return ArrayRecord({name: whole[name] for name in self._order})

    def _used(self, server_round: int, answers: list[Message]) -> list[Message] | None:
        """The replies that both sides use, without their statistics; None if the round changes nothing."""
        weight = getattr(self.strategy, "weighted_by_key", "num-examples")
        found = examine(answers, self._sent, weight, has_statistics=bool(self.shared))
        verdicts = dict(found.left_out)
        self.result = None
        if self.shared and found.updates:
            self.result = merge(self.shared, found.updates, steps=self._round_steps(found), **self._rules)
            verdicts |= {node: v for node, v in self.result.verdicts.items() if not v.used}
            for notice in self.result.notices:
                log(INFO, "round %s: layer %s: %s (%s)", server_round, *notice)
        self.left_out = verdicts
        for node, verdict in verdicts.items():
            where = f" in layer {verdict.layer}" if verdict.layer else ""
            text = f"{verdict.reason}{where} ({verdict.detail})"
            log(WARNING, "round %s: node %s left out: %s", server_round, node, text)
        good = [message for message in answers if message.metadata.src_node_id not in verdicts]
        if len(good) < self._rules["quorum"] or (self.result is not None and not self.result.updated):
            log(WARNING, "round %s: %s usable replies: nothing changes", server_round, len(good))
            return None
        for message in good:
            content = {name: record for name, record in message.content.items() if name != STATISTICS}
            message.content = RecordDict(content)
        return good

    def _round_steps(self, found: Examined) -> float:
        """Local steps of the round: the server's number, else the mean of the clients' own weighted by what
        they saw, or their median where some may lie."""
        if self._steps is not None:
            return self._steps
        if self._rules["aggregator"] is not None:
            return float(median(found.steps.values()))
        seen = {node: sum(_count(m) for m in update.values()) for node, update in found.updates.items()}
        total = sum(seen.values())
        return sum(found.steps[node] * seen[node] for node in seen) / total if total else 1.0


def _count(moments: Moments) -> int:
    """How much a layer saw, as far as can be believed before the verdicts."""
    return min(max(int(moments.count), 0), 2**40)


def _names(layer: str) -> list[str]:
    """A layer's statistics in a state_dict; the model itself may be the layer."""
    return [f"{layer}.{field}" if layer else field for field in _FIELDS]


def _is_float(array: Array) -> bool:
    return np.issubdtype(np.dtype(array.dtype), np.floating)


def _without_integers(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
