"""Flower's SecAgg+ with federated BatchNorm: the server sees sums alone, and gets the exact statistics."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg, FedMedian, Krum
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import strategy as message_api
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import FederatedBatchNormStrategy
from fedbatchnorm.adapters.local import LocalGrid
from fedbatchnorm.adapters.secagg import SecAggBatchNorm, load, masked, values_per_example

SIZES = (10, 30, 20, 15)


def network():
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.BatchNorm1d(8),
    )
    return fbn.convert(nn.Sequential(*layers, nn.Linear(8, 3)))


def batch(client, server_round):
    generator = torch.Generator().manual_seed(100 * server_round + client)
    x = torch.randn(SIZES[client], 1, 6, 6, generator=generator) * (1 + client) + client
    return x, torch.randint(3, (SIZES[client],), generator=generator)


def train(model, client, server_round):
    model.train()
    x, y = batch(client, server_round)
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad


class Client(NumPyClient):
    def __init__(self, number):
        self.number = number

    def fit(self, parameters, config):
        model = network()
        load(model, parameters)
        train(model, self.number, config["round"])
        return masked(model, config, SIZES[self.number]), SIZES[self.number], {}


def run(strategy, rounds, seen=None):
    """A SecAgg+ run of four clients in this process; `seen` gets every reply."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    app = ClientApp(
        client_fn=lambda context: Client(context.node_config["partition-id"]).to_client(),
        mods=[secaggplus_mod],
    )

    def watched(message, context):
        answer = app(message, context)
        if seen is not None:
            seen.append(answer)
        return answer

    empty = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    context = LegacyContext(context=empty, config=ServerConfig(num_rounds=rounds), strategy=strategy)
    secure = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=30)
    DefaultWorkflow(fit_workflow=secure)(LocalGrid(watched, len(SIZES)), context)


def averaging(**options):
    return FedAvg(
        min_available_clients=4, fraction_evaluate=0.0, on_fit_config_fn=lambda r: {"round": r}, **options
    )


def test_the_sum_alone_gives_the_statistics_and_weights_of_an_exact_merge():
    strategy, replies = SecAggBatchNorm(averaging(), network(), torch.zeros(2, 1, 6, 6)), []
    run(strategy, 3, replies)
    model = network()
    for server_round in (1, 2, 3):
        clients = [copy.deepcopy(model) for _ in SIZES]
        for i, client in enumerate(clients):
            train(client, i, server_round)
        merged = fbn.merge(fbn.statistics(model), [fbn.collect(client) for client in clients])
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(
                    sum(n * dict(c.named_parameters())[name] for n, c in zip(SIZES, clients, strict=True))
                )
                p.div_(sum(SIZES))
        fbn.load_statistics(model, merged.statistics)
    for name, wanted in fbn.statistics(model).items():
        found = strategy.shared[name]
        assert found.tracked == wanted.tracked == 3
        torch.testing.assert_close(found.mean, wanted.mean, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(found.var, wanted.var, rtol=2e-3, atol=2e-3)
        assert wanted.mean.abs().max() > 0.05
        assert (wanted.var - 1).abs().max() > 0.1
    for name, p in model.named_parameters():
        torch.testing.assert_close(strategy._state[name], p.detach(), rtol=1e-3, atol=1e-4)
    assert not any(
        array for reply in replies for record in reply.content.array_records.values() for array in record
    )


def test_each_layer_counts_its_values():
    assert values_per_example(network(), torch.zeros(5, 1, 6, 6)) == {"1": 16.0, "5": 1.0}
    lazy = fbn.convert(nn.ModuleDict({"used": nn.BatchNorm1d(2), "not": nn.BatchNorm1d(2)}))
    lazy.forward = lambda x: lazy["used"](x)
    with pytest.raises(ValueError, match="does not reach layer 'not'"):
        values_per_example(lazy, torch.zeros(3, 2))


def test_what_cannot_work_with_a_sum_is_refused():
    example = torch.zeros(1, 1, 6, 6)
    with pytest.raises(ValueError, match="needs each client's own statistics, and under SecAgg"):
        SecAggBatchNorm(averaging(), network(), example, aggregator=fbn.defense("nnm+median", 1))
    for robust in (Krum(), FedMedian(), message_api.FedAvg()):
        with pytest.raises(ValueError, match=f"{type(robust).__name__} does not work under SecAgg"):
            SecAggBatchNorm(robust, network(), example)
    other_api = FederatedBatchNormStrategy(message_api.FedAvg(), aggregator=fbn.defense("nnm+median", 1))
    with pytest.raises(TypeError, match="SecAggBatchNorm"):
        run(other_api, 1)


def test_statistics_out_of_range_keep_a_client_out_of_the_sum():
    model = network()
    strategy = SecAggBatchNorm(averaging(), model, torch.zeros(1, 1, 6, 6))
    config = {"fedbatchnorm": strategy._told}
    model.train()(1e4 * torch.ones(2, 1, 6, 6))
    with pytest.raises(ValueError, match=r"layer '1': .* is beyond SecAgg.'s clipping_range of 8"):
        masked(model, config, 2)
    with pytest.raises(ValueError, match="not of SecAggBatchNorm"):
        masked(model, {}, 2)


def test_below_the_quorum_nothing_changes():
    strategy = SecAggBatchNorm(averaging(), network(), torch.zeros(1, 1, 6, 6), quorum=5)
    before = {name: value.clone() for name, value in strategy._state.items()}
    run(strategy, 1)
    assert all(torch.equal(strategy._state[name], value) for name, value in before.items())
