"""Federated BatchNorm under Flower's SecAgg+, where the server sees only the sum over all clients.

SecAgg+ belongs to Flower's earlier API: the server's strategy is wrapped in `SecAggBatchNorm`, and a client's
`fit` calls `load` first and returns `masked`. Statistics travel as sums (`to_sums`), which SecAgg+ adds up
with the parameters.

    strategy = SecAggBatchNorm(FedAvg(...), model, example, secure)       # server_app.py
    load(model, parameters); ...; return masked(model, config, n), n, {}  # client_app.py
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from logging import INFO, WARNING, getLogger
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..aggregation.statistics import Aggregator, MergeResult, merge
from ..norm.calibrate import calibrating
from ..norm.convert import federated_layers
from ..norm.exchange import collect, load_statistics, statistics
from ..norm.messages import Sums, from_sums, to_sums
from ..norm.moments import Running
from ..norm.reduce import statistics_dtype
from .arrays import parameters_of, statistic_names, unwrapped
from .extras import needs

try:
    from flwr.common import FitIns, FitRes, Parameters, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server.client_manager import ClientManager
    from flwr.server.strategy import (
        Bulyan,
        FedAvg,
        FedAvgM,
        FedMedian,
        FedOpt,
        FedTrimmedAvg,
        Krum,
        QFedAvg,
        Strategy,
    )
    from flwr.server.workflow import SecAggPlusWorkflow
except ImportError as error:
    raise needs("Flower", "flower", error) from error

log = getLogger("flwr").log
_CONFIG = "fedbatchnorm"  # the entry of a round's configuration that clients read
_ROOM = 64.0  # sums of z and z^2 are sent divided by this: SecAgg+ cuts off what is out of its range
_NOT_A_SUM = (Bulyan, FedMedian, FedTrimmedAvg, Krum, QFedAvg)


def load(model: nn.Module, parameters: Sequence[np.ndarray]) -> None:
    """Load what the server sent, parameters and statistics, into a converted model."""
    model = unwrapped(model)
    names = list(model.state_dict())
    if len(parameters) != len(names):
        raise ValueError(f"{len(parameters)} arrays were sent; the model has {len(names)}")
    state = {name: torch.from_numpy(np.array(a)) for name, a in zip(names, parameters, strict=True)}
    model.load_state_dict(state)
    load_statistics(model, statistics(model))  # a new round: nothing has been seen yet


def masked(model: nn.Module, config: dict[str, Any], examples: int) -> list[np.ndarray]:
    """What `fit` returns, to be masked and added up: parameters, then each layer's sums per example.

    SecAgg+ clips values to its range. A parameter out of range is an error, and the client is not in the sum.
    If a layer's sums are out of range, they are scaled down together: the layer keeps its mean and variance
    but has less weight in this round.

    Args:
        model: the converted model after local training.
        config: as `fit` received it.
        examples: the number of examples that `fit` returns, SecAgg+'s weight.
    """
    if _CONFIG not in config:
        raise ValueError(
            "the round's configuration is not of SecAggBatchNorm: wrap the server's strategy in it"
        )
    if not examples >= 1:
        raise ValueError(f"examples is {examples}; it must be at least 1")
    model, told = unwrapped(model), json.loads(config[_CONFIG])
    limit = told["range"] * told["max_weight"] / examples
    arrays = []
    for name, tensor in parameters_of(model).items():
        arrays.append(np.atleast_1d(tensor.double().numpy()))  # not to overflow as it is rounded
        largest = float(np.abs(arrays[-1]).max(initial=0.0))
        if not largest <= limit:
            raise ValueError(
                f"parameter {name} reaches {largest:g}, and SecAgg+ cuts off what is beyond {limit:g}"
            )
    for layer, sums in to_sums(collect(model), statistics(model)).items():
        share = 1 / (examples * told["values"][layer])
        sent = [np.array([sums.count]) * share, *(s.numpy() * share / _ROOM for s in (sums.z, sums.zz))]
        largest = max(float(np.abs(a).max()) for a in sent)
        if not np.isfinite(largest):
            raise ValueError(f"layer {layer!r}: the statistics are not finite")
        if largest > limit:
            log(WARNING, "layer %s: statistics far from the shared ones: the layer gets less weight", layer)
            sent = [a * (limit / largest) for a in sent]
        arrays += sent
    return arrays


class SecAggBatchNorm(Strategy):
    """A strategy of Flower's earlier API for the parameters, and federated BatchNorm for the statistics."""

    def __init__(
        self,
        strategy: FedAvg,
        model: nn.Module,
        example: Tensor,
        secure: SecAggPlusWorkflow,
        *,
        steps: int = 1,
        quorum: int = 1,
        aggregator: Aggregator | None = None,
    ):
        """Wrap a strategy.

        Args:
            strategy: what aggregates the parameters: FedAvg, FedAvgM, FedProx, FedAdam or similar. A strategy
                that needs more than a sum, such as Krum, is refused.
            model: the converted model; its weights and statistics are those of the first round.
            example: an example input of the model, with any batch size. It shows how many values of an
                example each layer sees.
            secure: the workflow that this strategy runs in, for its range and its rounding.
            steps: local steps a round.
            quorum: with fewer clients in the sum the round changes nothing.
            aggregator: a robust rule is refused: it needs each client's own statistics.
        """
        if aggregator is not None:
            raise ValueError(
                f"{aggregator} needs each client's own statistics, and under SecAgg+ the server sees only "
                "their sum: choose a robust rule (with FederatedBatchNormStrategy) or secure aggregation"
            )
        if not isinstance(strategy, FedAvg) or isinstance(strategy, _NOT_A_SUM):
            raise ValueError(
                f"{type(strategy).__name__} does not work under SecAgg+, where the server sees only a sum: "
                "it must be FedAvg, FedAvgM, FedProx, FedAdam or the like, of flwr.server.strategy"
            )
        for name, value in (("steps", steps), ("quorum", quorum)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, at least 1")
        model = unwrapped(model)
        self.strategy, self._secure, self._steps, self._quorum = strategy, secure, steps, quorum
        self.shared = statistics(model)
        self.result: MergeResult | None = None
        """Of the last round: the merge's outcome, None if it changed nothing. `shared` are the statistics."""
        self._state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        self._names, self._statistics = list(parameters_of(model)), statistic_names(model)
        self._values = values_per_example(model, example)
        told = {"values": self._values, "range": secure.clipping_range, "max_weight": secure.max_weight}
        self._told = json.dumps({k: v if isinstance(v, dict) else float(v) for k, v in told.items()})
        first = [self._state[name].numpy() for name in self._names]
        if isinstance(strategy, FedOpt):  # servers that take steps from where they are
            strategy.current_weights = first
        elif isinstance(strategy, FedAvgM):
            strategy.initial_parameters = ndarrays_to_parameters(first)

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """The model's own weights and statistics."""
        return self._whole()

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[Any, FitIns]]:
        """The wrapped strategy's clients, with the settings for their sums."""
        chosen = self.strategy.configure_fit(server_round, self._whole(), client_manager)
        return [(proxy, FitIns(ins.parameters, {**ins.config, _CONFIG: self._told})) for proxy, ins in chosen]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, FitRes]], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """The statistics from the sum, and the parameters as the wrapped strategy does."""
        self.result = None
        if len(results) < self._quorum:
            return self._nothing(server_round, f"{len(results)} clients are in the sum")
        weight = sum(res.num_examples for _, res in results)
        arrays = parameters_to_ndarrays(results[0][1].parameters)  # the average, the same in all of them
        cut = len(self._names)
        if len(arrays) != cut + 3 * len(self.shared):
            return self._nothing(server_round, f"{len(arrays)} arrays are in the sum")
        rows = zip(self.shared, *(arrays[cut + i :: 3] for i in range(3)), strict=True)
        noise = self._noise(len(results), weight)
        total = {layer: self._sums(layer, average, weight, noise) for layer, *average in rows}
        result = merge(self.shared, {"sum": from_sums(total, self._sent())}, steps=self._steps)
        verdict = result.verdicts["sum"]
        if not verdict.used and verdict.reason != "empty":
            return self._nothing(server_round, f"the sum cannot be used: {verdict.reason} ({verdict.detail})")
        for _, res in results:
            res.parameters = ndarrays_to_parameters(
                [self._like(name, array) for name, array in zip(self._names, arrays, strict=False)]
            )
        after, metrics = self.strategy.aggregate_fit(server_round, results, failures)
        found = [] if after is None else parameters_to_ndarrays(after)
        if after is None or not all(np.isfinite(array).all() for array in found):
            return self._nothing(server_round, "the strategy returned no parameters that can be used")
        self.result, self.shared = result, result.statistics
        for name, array in zip(self._names, found, strict=True):
            self._state[name] = torch.from_numpy(self._like(name, array))
        log(INFO, "round %s: statistics of %s clients merged", server_round, len(results))
        return self._whole(), metrics

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> Any:
        """As the wrapped strategy does."""
        return self.strategy.configure_evaluate(server_round, parameters, client_manager)

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
        """As the wrapped strategy does."""
        return self.strategy.aggregate_evaluate(server_round, results, failures)

    def evaluate(self, server_round: int, parameters: Parameters) -> Any:
        """As the wrapped strategy does, with parameters and statistics, to be given to `load`."""
        return self.strategy.evaluate(server_round, parameters)

    def _nothing(self, server_round: int, why: str) -> tuple[None, dict[str, Any]]:
        log(WARNING, "round %s: %s: nothing changes", server_round, why)
        return None, {}

    def _whole(self) -> Parameters:
        """Weights and statistics, in the order of the model's state_dict."""
        for layer, running in self.shared.items():
            for mean, var, tracked in self._statistics[layer]:
                self._state[mean].copy_(running.mean)
                self._state[var].copy_(running.var)
                self._state[tracked].fill_(running.tracked)
        return ndarrays_to_parameters([tensor.numpy() for tensor in self._state.values()])

    def _sent(self) -> dict[str, Running]:
        """The statistics as clients received them, in the model's own precision."""
        found = {}
        for layer, running in self.shared.items():
            mean, var = (self._state[name] for name in self._statistics[layer][0][:2])
            exact = statistics_dtype(mean)
            found[layer] = running._replace(mean=mean.to(exact), var=var.to(exact))
        return found

    def _like(self, name: str, array: np.ndarray) -> np.ndarray:
        """An average in the shape and the type of the parameter."""
        wanted = self._state[name].numpy()
        return np.asarray(array, dtype=wanted.dtype).reshape(wanted.shape)

    def _noise(self, clients: int, weight: int) -> float:
        """By how much SecAgg+'s rounding can move an average: a step of each client, over their weight."""
        step = 2 * self._secure.clipping_range / self._secure.quantization_range
        return clients * step / (weight / self._secure.max_weight)

    def _sums(self, layer: str, average: Sequence[np.ndarray], weight: int, noise: float) -> Sums:
        """The sum over clients from SecAgg+'s average; its rounding may not make a variance negative."""
        share = max(0.0, float(average[0][0]))
        count = round(share * weight * self._values[layer])
        if share <= noise or not count:
            return Sums(0.0, *(torch.zeros_like(self.shared[layer].mean, dtype=torch.float64) for _ in "12"))
        z, zz = (torch.from_numpy(np.array(a, dtype=np.float64)) * (_ROOM / share) for a in average[1:])
        spread = zz - z.square()
        # What rounding can do to z^2's mean, and to z's twice over, through the sums and through the count.
        could = noise / share * (_ROOM + zz.abs() + 2 * z.abs() * (_ROOM + z.abs()))
        zz = torch.where((spread < 0) & (spread > -could), z.square(), zz)
        return Sums(float(count), count * z, count * zz)


def values_per_example(model: nn.Module, example: Tensor) -> dict[str, float]:
    """How many values per channel each layer sees of one example, by a trial run of a copy."""
    trial = copy.deepcopy(model).train()
    layers = federated_layers(trial)
    for layer in layers.values():
        layer.start_round()
    with torch.no_grad(), calibrating(trial):
        trial(example)
    found = {name: int(layer.seen()[0].count) / len(example) for name, layer in layers.items()}
    unseen = [name for name, values in found.items() if not values]
    if unseen:
        raise ValueError(f"the example does not reach layer {unseen[0]!r}")
    return found
