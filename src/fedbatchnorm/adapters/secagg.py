"""Federated BatchNorm under Flower's SecAgg+, where the server sees the sum of all clients and nothing else.

SecAgg+ belongs to Flower's earlier API: the server's strategy is wrapped in `SecAggBatchNorm`, and a client's
`fit` calls `load` first and returns `masked`. Statistics travel as sums (`to_sums`), which SecAgg+ adds up
with the parameters.

    strategy = SecAggBatchNorm(FedAvg(...), model, example)           # server_app.py
    load(model, parameters); ...; return masked(model, config, n), n, {}  # client_app.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from logging import INFO, WARNING, getLogger
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..aggregation.statistics import Aggregator, MergeResult, merge
from ..norm.convert import federated_layers
from ..norm.exchange import collect, load_statistics, statistics
from ..norm.messages import Sums, from_sums, to_sums
from .arrays import parameters_of, statistic_names

try:
    from flwr.common import FitIns, FitRes, Parameters, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server.client_manager import ClientManager
    from flwr.server.strategy import Bulyan, FedMedian, FedTrimmedAvg, Krum, Strategy
except ImportError as error:
    raise ImportError(f"this needs Flower ({error}): pip install 'fedbatchnorm[flower]'") from error

log = getLogger("flwr").log
_CONFIG = "fedbatchnorm"  # the entry of a round's configuration that clients read
_ROOM = 64.0  # statistics are sent divided by this: SecAgg+ cuts off what is out of its range
_HAIR = 0.1  # a variance this far below zero, as part of the running one, is rounding; beyond it is not


def load(model: nn.Module, parameters: Sequence[np.ndarray]) -> None:
    """Load what the server sent, parameters and statistics, into a converted model."""
    names = list(model.state_dict())
    if len(parameters) != len(names):
        raise ValueError(f"{len(parameters)} arrays were sent; the model has {len(names)}")
    state = {name: torch.from_numpy(np.array(a)) for name, a in zip(names, parameters, strict=True)}
    model.load_state_dict(state)
    load_statistics(model, statistics(model))  # a new round: nothing has been seen yet


def masked(model: nn.Module, config: dict[str, Any], examples: int) -> list[np.ndarray]:
    """What `fit` returns, to be masked and added up: parameters, then each layer's sums per example.

    Args:
        model: the converted model after local training.
        config: as `fit` received it.
        examples: the number of examples that `fit` returns, SecAgg+'s weight.
    """
    if _CONFIG not in config:
        raise ValueError(
            "the round's configuration is not of SecAggBatchNorm: wrap the server's strategy in it"
        )
    told = json.loads(config[_CONFIG])
    arrays = [tensor.numpy() for tensor in parameters_of(model).values()]
    for layer, sums in to_sums(collect(model), statistics(model)).items():
        share = 1 / (examples * told["values"][layer] * _ROOM)
        sent = [np.array([sums.count]) * share, sums.z.numpy() * share, sums.zz.numpy() * share]
        largest = max(float(np.abs(a).max()) for a in sent)
        if not largest <= told["limit"]:
            raise ValueError(
                f"layer {layer!r}: {largest:g} is beyond SecAgg+'s clipping_range of {told['limit']:g}; "
                "this client's statistics would be cut off"
            )
        arrays += sent
    return arrays


class SecAggBatchNorm(Strategy):
    """A strategy of Flower's earlier API for the parameters, and federated BatchNorm for the statistics."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        example: Tensor,
        *,
        steps: int = 1,
        quorum: int = 1,
        clipping_range: float = 8.0,
        aggregator: Aggregator | None = None,
    ):
        """Wrap a strategy.

        Args:
            strategy: what aggregates the parameters. A robust one is refused: it would be given the same sum
                for every client.
            model: the converted model; its weights and statistics are those of the first round.
            example: an input of the model, a batch of any size: it tells how many values of an example each
                layer sees.
            steps: local steps a round.
            quorum: with fewer clients in the sum the round changes nothing.
            clipping_range: that of the SecAggPlusWorkflow.
            aggregator: a robust rule is refused: it needs each client's own statistics.
        """
        if aggregator is not None:
            raise ValueError(
                f"{aggregator} needs each client's own statistics, and under SecAgg+ the server sees only "
                "their sum: choose a robust rule (with FederatedBatchNormStrategy) or secure aggregation"
            )
        if not isinstance(strategy, Strategy) or isinstance(
            strategy, Bulyan | FedMedian | FedTrimmedAvg | Krum
        ):
            raise ValueError(
                f"{type(strategy).__name__} does not work under SecAgg+: it must be a strategy of "
                "flwr.server.strategy that averages, as the server sees only the sum of all clients"
            )
        self.strategy, self._steps, self._quorum = strategy, steps, quorum
        self.shared = statistics(model)
        self._state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        self._names, self._statistics = list(parameters_of(model)), statistic_names(model)
        told = {"values": values_per_example(model, example), "limit": clipping_range}
        self._told = json.dumps(told)
        self._values: dict[str, float] = told["values"]
        self.result: MergeResult | None = None
        """Of the last round: the merge's outcome. `shared` are the statistics as they are."""

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """The model's own weights and statistics."""
        return self._whole()

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[Any, FitIns]]:
        """The wrapped strategy's clients, told how to write their sums."""
        chosen = self.strategy.configure_fit(server_round, self._whole(), client_manager)
        return [(proxy, FitIns(ins.parameters, {**ins.config, _CONFIG: self._told})) for proxy, ins in chosen]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, FitRes]], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """The parameters as the wrapped strategy does, and the statistics from the sum."""
        if len(results) < max(1, self._quorum):
            log(WARNING, "round %s: %s clients in the sum: nothing changes", server_round, len(results))
            return None, {}
        weight = sum(res.num_examples for _, res in results)
        arrays = parameters_to_ndarrays(
            results[0][1].parameters
        )  # SecAgg+'s average, the same in all of them
        cut = len(self._names)
        if len(arrays) != cut + 3 * len(self.shared):
            log(WARNING, "round %s: %s arrays in the sum: nothing changes", server_round, len(arrays))
            return None, {}
        for _, res in results:
            res.parameters = ndarrays_to_parameters(arrays[:cut])
        after, metrics = self.strategy.aggregate_fit(server_round, results, failures)
        if after is None:
            return None, metrics
        total = {}
        for i, layer in enumerate(self.shared):
            total[layer] = self._sums(layer, arrays[cut + 3 * i : cut + 3 * i + 3], weight)
        self.result = merge(self.shared, {"sum": from_sums(total, self.shared)}, steps=self._steps)
        for node, verdict in self.result.verdicts.items():
            if not verdict.used:
                log(WARNING, "round %s: the %s is not used: %s", server_round, node, verdict)
        self.shared = self.result.statistics
        for name, array in zip(self._names, parameters_to_ndarrays(after), strict=True):
            self._state[name].copy_(torch.from_numpy(np.array(array)))
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

    def _whole(self) -> Parameters:
        """Weights and statistics, in the order of the model's state_dict."""
        for layer, running in self.shared.items():
            for mean, var, tracked in self._statistics[layer]:
                self._state[mean].copy_(running.mean)
                self._state[var].copy_(running.var)
                self._state[tracked].fill_(running.tracked)
        return ndarrays_to_parameters([tensor.numpy() for tensor in self._state.values()])

    def _sums(self, layer: str, average: list[np.ndarray], weight: int) -> Sums:
        """The sum over clients from SecAgg+'s average; its rounding may not make a variance negative."""
        whole = weight * self._values[layer] * _ROOM
        share = max(0.0, float(average[0][0]))
        count = round(share * whole)
        if not count:
            return Sums(0.0, *(torch.zeros_like(self.shared[layer].mean, dtype=torch.float64) for _ in "12"))
        z, zz = (torch.from_numpy(np.array(a, dtype=np.float64)) / share for a in average[1:])
        spread = zz - z.square()
        zz = torch.where((spread < 0) & (spread > -_HAIR), z.square(), zz)
        return Sums(float(count), count * z, count * zz)


def values_per_example(model: nn.Module, example: Tensor) -> dict[str, float]:
    """How many values per channel each layer sees of one example, by a trial run."""
    found: dict[str, float] = {}

    def look(layer: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            found[layer] = found.get(layer, 0.0) + x.numel() / x.shape[1] / len(example)

        return hook

    modules = dict(model.named_modules())
    hooks = [modules[name].register_forward_pre_hook(look(name)) for name in federated_layers(model)]
    was = model.training
    try:
        model.eval()
        with torch.no_grad():
            model(example)
    finally:
        model.train(was)
        for hook in hooks:
            hook.remove()
    unseen = [layer for layer in federated_layers(model) if not found.get(layer) or math.isnan(found[layer])]
    if unseen:
        raise ValueError(f"the example does not reach layer {unseen[0]!r}")
    return found
