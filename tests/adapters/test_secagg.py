"""Flower's SecAgg+ with federated BatchNorm: the server sees sums alone, and gets the exact statistics."""

import copy
import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedYogi,
    Krum,
    QFedAvg,
)
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import strategy as message_api
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import FederatedBatchNormStrategy
from fedbatchnorm.adapters.local import LocalGrid
from fedbatchnorm.adapters.secagg import SecAggBatchNorm, load, masked, values_per_example

SIZES = (10, 30, 20, 15)
SECURE = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=30)
EXAMPLE = torch.zeros(2, 1, 6, 6)


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


def run(strategy, rounds, seen=None, client=Client):
    """A SecAgg+ run of four clients in this process; `seen` gets every reply."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    app = ClientApp(
        client_fn=lambda context: client(context.node_config["partition-id"]).to_client(),
        mods=[secaggplus_mod],
    )

    def watched(message, context):
        answer = app(message, context)
        if seen is not None:
            seen.append(answer)
        return answer

    empty = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    context = LegacyContext(context=empty, config=ServerConfig(num_rounds=rounds), strategy=strategy)
    secure = strategy._secure if isinstance(strategy, SecAggBatchNorm) else SECURE
    DefaultWorkflow(fit_workflow=secure)(LocalGrid(watched, len(SIZES)), context)


def averaging(**options):
    return FedAvg(
        min_available_clients=4, fraction_evaluate=0.0, on_fit_config_fn=lambda r: {"round": r}, **options
    )


def test_the_sum_alone_gives_the_statistics_and_weights_of_an_exact_merge():
    strategy, replies = SecAggBatchNorm(averaging(), network(), EXAMPLE, SECURE), []
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

    class Lazy(nn.ModuleDict):
        def forward(self, x):
            return self["used"](x)

    lazy = fbn.convert(Lazy({"used": nn.BatchNorm1d(2), "not": nn.BatchNorm1d(2)}))
    with pytest.raises(ValueError, match="does not reach layer 'not'"):
        values_per_example(lazy, torch.zeros(3, 2))


def test_what_cannot_work_with_a_sum_is_refused():
    with pytest.raises(ValueError, match="needs each client's own statistics, and under SecAgg"):
        SecAggBatchNorm(averaging(), network(), EXAMPLE, SECURE, aggregator=fbn.defense("nnm+median", 1))
    private = DifferentialPrivacyServerSideFixedClipping(averaging(), 1.0, 1.0, 4)
    for robust in (Krum(), FedMedian(), QFedAvg(), private, message_api.FedAvg()):
        with pytest.raises(ValueError, match=f"{type(robust).__name__} does not work under SecAgg"):
            SecAggBatchNorm(robust, network(), EXAMPLE, SECURE)
    other_api = FederatedBatchNormStrategy(message_api.FedAvg(), aggregator=fbn.defense("nnm+median", 1))
    with pytest.raises(TypeError, match="SecAggBatchNorm"):
        run(other_api, 1)


def refused(model, match, examples=2):
    strategy = SecAggBatchNorm(averaging(), network(), EXAMPLE, SECURE)
    with pytest.raises(ValueError, match=match):
        masked(model, {"fedbatchnorm": strategy._told}, examples)


def test_what_secagg_would_cut_off_keeps_a_client_out_of_the_sum():
    for value in (500.0, float("nan"), float("inf")):
        model = network()
        with torch.no_grad():
            model[4].bias[0] = value
        refused(model, "parameter 4.bias reaches .*, and SecAgg. cuts off what is beyond 120")
    refused(network(), "examples is 0", examples=0)
    with pytest.raises(ValueError, match="not of SecAggBatchNorm"):
        masked(network(), {}, 2)


def test_statistics_far_from_the_first_ones_are_reached_all_the_same():
    """Inputs of mean 100 and spread 0.1, and Flower's own max_weight; no round is lost."""
    secure = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)

    def plain():
        return fbn.convert(nn.Sequential(nn.BatchNorm1d(3)))

    class Here(NumPyClient):
        def fit(self, parameters, config):
            model = plain()
            load(model, parameters)
            model.train()(
                100 + 0.1 * torch.randn(500, 3, generator=torch.Generator().manual_seed(config["round"]))
            )
            return masked(model, config, 500), 500, {}

    strategy = SecAggBatchNorm(averaging(), plain(), torch.zeros(2, 3), secure)
    run(strategy, 60, client=lambda number: Here())
    assert strategy.shared["0"].tracked == 60
    torch.testing.assert_close(strategy.shared["0"].mean, torch.full((3,), 100.0), rtol=5e-3, atol=0)
    assert (strategy.shared["0"].var > 0).all()
    assert (strategy.shared["0"].var < 1).all()


def test_rounding_does_not_make_a_variance_negative():
    """A channel that is constant: z^2 may come out a little below the square of z, and not much below."""
    strategy = SecAggBatchNorm(averaging(), network(), EXAMPLE, SECURE)
    noise = strategy._noise(4, 75)
    z = np.full(4, 3.0)
    for below, wanted in ((0.5 * noise, 0.0), (1000 * noise, -64 * 1000 * noise)):
        average = [np.ones(1), z / 64, z**2 / 64 - below]
        total = strategy._sums("1", average, 75, noise)
        assert total.count == 75 * 16
        spread = total.zz / total.count - (total.z / total.count).square()
        torch.testing.assert_close(
            spread, torch.full((4,), wanted, dtype=torch.float64), rtol=1e-6, atol=1e-12
        )


def test_a_sum_that_cannot_be_used_changes_nothing():
    strategy = SecAggBatchNorm(averaging(), network(), EXAMPLE, SECURE)
    before = {name: value.clone() for name, value in strategy._state.items()}
    arrays = [np.array(strategy._state[name].numpy()) + 1 for name in strategy._names]
    for channels in (4, 8):
        arrays += [np.ones(1), np.zeros(channels), np.full(channels, -1.0)]  # z^2 below zero
    results = [(None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), 10, {}))]
    assert strategy.aggregate_fit(1, results, []) == (None, {})
    assert strategy.result is None
    assert all(torch.equal(strategy._state[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", [FedAvgM, FedAdam, FedYogi, FedProx])
def test_strategies_that_take_steps_at_the_server(kind):
    """With parameters that do not change, they stay where they are, in shape and type, scalars too."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.norm = nn.BatchNorm1d(3)
            self.last = nn.Linear(3, 2).half()

        def forward(self, x):
            return self.last((self.scale * self.norm(x)).half())

    torch.manual_seed(0)
    first = fbn.convert(Net())

    class Still(NumPyClient):
        def fit(self, parameters, config):
            model = copy.deepcopy(first)
            load(model, parameters)
            model.train()(torch.randn(20, 3))
            return masked(model, config, 20), 20, {}

    options = {
        FedAvgM: {"server_momentum": 0.5},
        FedProx: {"proximal_mu": 0.1},
        FedAdam: {"initial_parameters": ndarrays_to_parameters([]), "eta": 1e-4, "tau": 1e-2},
        FedYogi: {"initial_parameters": ndarrays_to_parameters([]), "eta": 1e-4, "tau": 1e-2},
    }[kind]
    settings = {"min_available_clients": 4, "fraction_evaluate": 0.0}
    strategy = SecAggBatchNorm(kind(**settings, **options), first, torch.zeros(1, 3), SECURE)
    run(strategy, 3, client=lambda number: Still())
    assert strategy.shared["norm"].tracked == 3
    for name, value in first.state_dict().items():
        if "running" not in name and "tracked" not in name:
            torch.testing.assert_close(strategy._state[name], value, rtol=0, atol=2e-3)


def test_layers_that_see_nothing_keep_their_statistics():
    class Frozen(NumPyClient):
        def fit(self, parameters, config):
            model = network()
            load(model, parameters)
            model.eval()(batch(0, 1)[0])
            with torch.no_grad():
                model[4].bias += 0.25
            return masked(model, config, 10), 10, {}

    strategy = SecAggBatchNorm(averaging(), network(), EXAMPLE, SECURE)
    run(strategy, 1, client=lambda number: Frozen())
    assert strategy.shared["1"].tracked == 0
    torch.testing.assert_close(
        strategy._state["4.bias"], network()[4].bias.detach() + 0.25, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("steps", "3"), ("quorum", 0)])
def test_settings_that_cannot_be_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        SecAggBatchNorm(averaging(), network(), EXAMPLE, SECURE, **{name: value})


def test_below_the_quorum_nothing_changes():
    strategy = SecAggBatchNorm(averaging(), network(), EXAMPLE, SECURE, quorum=5)
    before = {name: value.clone() for name, value in strategy._state.items()}
    run(strategy, 1)
    assert all(torch.equal(strategy._state[name], value) for name, value in before.items())
