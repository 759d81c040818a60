"""Federated BatchNorm on Flower, in one process: exact, whatever the strategy, whoever misbehaves."""

import copy
import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
)
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import STATISTICS, FederatedBatchNormStrategy, load, reply
from fedbatchnorm.adapters.local import LocalGrid


def cnn():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 8)]
    return nn.Sequential(*layers, nn.BatchNorm1d(8, momentum=0.3), nn.Linear(8, 3))


def batch(node, step, size):
    generator = torch.Generator().manual_seed(1000 * node + step)
    x = torch.randn(size, 1, 8, 8, generator=generator) * (1 + node) + node
    return x, torch.full((size,), node % 3)


def client_app(size=lambda node: 6, steps=1, lr=0.05, seen=None, spoil=None, make=cnn):
    """Clients that train `steps` steps on their own batches; `spoil` changes what some send."""
    app = ClientApp()
    rounds = {}

    @app.train()
    def train(message, context):
        node = context.node_config["partition-id"]
        model = fbn.convert(make())
        load(model, message)
        model.train()
        hooks = []
        if seen is not None:
            for name, layer in model.named_modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    into = seen.setdefault(name, [])
                    hooks.append(
                        layer.register_forward_pre_hook(lambda m, x, into=into: into.append(x[0].detach()))
                    )
        optimiser = torch.optim.SGD(model.parameters(), lr=lr)
        for _ in range(steps):
            at = rounds[node] = rounds.get(node, -1) + 1
            x, y = batch(node, at, size(node))
            optimiser.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimiser.step()
        answer = reply(model, message, {"num-examples": size(node), "loss": loss.item()}, steps=steps)
        return spoil(node, answer) if spoil else answer

    @app.evaluate()
    def evaluate(message, context):
        model = fbn.convert(make())
        load(model, message)
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "ok": 1})}), reply_to=message)

    return app


def run(app, nodes=4, rounds=3, strategy=None, make=cnn, **options):
    strategy = FederatedBatchNormStrategy(strategy or FedAvg(), model=fbn.convert(make()), **options)
    result = strategy.start(LocalGrid(app, nodes), ArrayRecord(make().state_dict()), num_rounds=rounds)
    return strategy, result


@pytest.mark.parametrize("size", [lambda node: 6, lambda node: 3 + 4 * node], ids=["equal", "unequal"])
def test_statistics_are_those_of_batch_norm_fed_with_what_all_clients_saw(size):
    seen = {}
    strategy, result = run(client_app(size, seen=seen), rounds=20)
    for name, momentum in (("2", 0.1), ("5", 0.3)):
        channels = seen[name][0].shape[1]
        plain = (nn.BatchNorm2d if name == "2" else nn.BatchNorm1d)(channels, momentum=momentum).double()
        for step in range(20):
            plain(torch.cat([x.double() for x in seen[name][4 * step : 4 * step + 4]]))
        for field in ("running_mean", "running_var"):
            ours = torch.from_numpy(result.arrays[f"{name}.{field}"].numpy()).double()
            torch.testing.assert_close(ours, getattr(plain, field), rtol=1e-6, atol=1e-6)
        counter = result.arrays[f"{name}.num_batches_tracked"]
        assert (counter.dtype, int(counter.numpy())) == ("int64", 20)
    fbn.convert(cnn()).load_state_dict(result.arrays.to_torch_state_dict())
    assert list(result.arrays) == list(cnn().state_dict())
    assert strategy.left_out == {}


def test_several_local_steps_weigh_as_one_update_on_all_that_the_round_saw():
    seen = {}
    _, result = run(client_app(steps=3, seen=seen), rounds=1)
    union = torch.cat([x.double() for x in seen["2"]])
    beta = 1 - 0.9**3
    mean, var = (
        union.mean((0, 2, 3)),
        union.var((0, 2, 3)) if False else union.transpose(0, 1).flatten(1).var(1),
    )
    found = {k: torch.from_numpy(result.arrays[f"2.running_{k}"].numpy()).double() for k in ("mean", "var")}
    torch.testing.assert_close(found["mean"], beta * mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["var"], (1 - beta) + beta * var, rtol=1e-6, atol=1e-6)
    assert int(result.arrays["2.num_batches_tracked"].numpy()) == 3


STRATEGIES = {
    "FedAvg": FedAvg,
    "FedAvgM": lambda: FedAvgM(server_learning_rate=0.7, server_momentum=0.9),
    "FedAdam": lambda: FedAdam(eta=0.1),
    "FedYogi": lambda: FedYogi(eta=0.1),
    "FedProx": lambda: FedProx(proximal_mu=0.1),
    "FedMedian": FedMedian,
    "FedTrimmedAvg": FedTrimmedAvg,
    "Krum": lambda: Krum(num_malicious_nodes=1),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_statistics_stay_sound_under_any_strategy(name):
    """30 rounds: variances positive and finite, the counter whole, types as they were."""
    strategy, result = run(client_app(lr=0.02), rounds=30, strategy=STRATEGIES[name]())
    state = result.arrays.to_torch_state_dict()
    for layer in ("2", "5"):
        assert state[f"{layer}.running_var"].isfinite().all()
        assert (state[f"{layer}.running_var"] > 0).all()
        assert state[f"{layer}.num_batches_tracked"].item() == 30
        assert state[f"{layer}.num_batches_tracked"].dtype == torch.int64
    assert strategy.left_out == {}
    assert all(value.dtype == torch.float32 for key, value in state.items() if "tracked" not in key)


def change(answer, **fields):
    """The answer with an update in which some of the first layer's moments are changed."""
    update = fbn.from_bytes(answer.content[STATISTICS]["update"].numpy().tobytes())
    layers = dict(update.layers) | {"2": update["2"]._replace(**fields)}
    changed = fbn.Update(layers, update.round, update.skipped, update.id)
    answer.content[STATISTICS]["update"] = Array(np.frombuffer(fbn.to_bytes(changed), dtype=np.uint8))
    return answer


def parameters(answer, name, value):
    answer.content["arrays"][name] = Array(value)
    return answer


def without(answer, record):
    del answer.content[record]
    return answer


SPOILT = {
    "a mean that is not a number": (lambda a: change(a, mean=torch.full((4,), torch.nan)), "non_finite"),
    "a negative variance": (lambda a: change(a, var=torch.full((4,), -1.0)), "impossible_moments"),
    "another shape": (lambda a: change(a, mean=torch.zeros(5)), "schema"),
    "a huge count": (lambda a: change(a, count=10**6), "count_out_of_range"),
    "parameters of another shape": (lambda a: parameters(a, "0.bias", np.zeros(3, np.float32)), "schema"),
    "parameters of another type": (lambda a: parameters(a, "0.bias", np.zeros(4, np.float64)), "schema"),
    "a parameter that is not a number": (
        lambda a: parameters(a, "0.bias", np.full(4, np.nan, np.float32)),
        "non_finite",
    ),
    "one parameter too many": (lambda a: parameters(a, "more", np.zeros(4, np.float32)), "schema"),
    "no statistics": (lambda a: without(a, STATISTICS), "schema"),
    "no metrics": (lambda a: without(a, "metrics"), "schema"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_bad_reply_is_left_out_of_both_and_the_round_goes_on(what, caplog):
    spoil, reason = SPOILT[what]
    bad = lambda node, answer: spoil(answer) if node == 2 else answer  # noqa: E731
    with caplog.at_level(logging.WARNING, logger="flwr"):
        logging.getLogger("flwr").propagate = True
        strategy, result = run(client_app(spoil=bad), rounds=2, max_count=36 * 6)
    assert {node: v.reason for node, v in strategy.left_out.items()} == {3: reason}
    assert f"round 2: node 3 left out: {reason}" in caplog.text
    skip = client_app()
    without_it = FederatedBatchNormStrategy(FedAvg(), model=fbn.convert(cnn()))
    grid = LocalGrid(skip, 4)
    del grid._contexts[3]
    want = without_it.start(grid, ArrayRecord(cnn().state_dict()), num_rounds=2)
    for name, array in result.arrays.items():
        np.testing.assert_array_equal(array.numpy(), want.arrays[name].numpy(), err_msg=name)


def test_rubbish_in_any_record_is_left_out():
    def rubbish(node, answer):
        if node == 0:
            answer.content[STATISTICS] = ArrayRecord({"update": Array(np.arange(7, dtype=np.uint8))})
        if node == 1:
            answer.content[STATISTICS]["steps"] = Array(np.array(10**9))
        if node == 2:
            answer.content["metrics"] = MetricRecord({"num-examples": -5, "loss": 1.0})
        return answer

    strategy, _ = run(client_app(spoil=rubbish), nodes=6, rounds=1)
    reasons = {node: v.reason for node, v in strategy.left_out.items()}
    assert reasons == {1: "schema", 2: "count_out_of_range", 3: "count_out_of_range"}


def test_replayed_replies_are_stale_or_duplicates():
    kept = {}

    def replay(node, answer):
        if node == 0 and 0 in kept:
            answer.content = copy.deepcopy(kept[0])
        kept.setdefault(node, copy.deepcopy(answer.content))
        return answer

    strategy, _ = run(client_app(spoil=replay), rounds=2)
    assert {node: v.reason for node, v in strategy.left_out.items()} == {1: "stale_round"}


def test_a_client_that_fails_is_left_to_flower():
    def fail(node, answer):
        if node == 1:
            raise RuntimeError("no more memory")
        return answer

    strategy, result = run(client_app(spoil=fail), rounds=2)
    assert strategy.left_out == {}
    assert result.arrays["2.num_batches_tracked"].numpy() == 2


def test_below_the_quorum_nothing_changes(caplog):
    bad = lambda node, answer: change(answer, var=torch.full((4,), -1.0)) if node else answer  # noqa: E731
    strategy, result = run(client_app(spoil=bad), rounds=1, quorum=2)
    assert not result.arrays
    assert torch.equal(strategy.shared["2"].mean, torch.zeros(4))


def test_liars_do_not_get_through_a_robust_rule():
    lie = lambda node, answer: change(answer, mean=torch.full((4,), 1e6)) if node == 4 else answer  # noqa: E731
    honest, _ = run(client_app(), nodes=5)
    robust, _ = run(client_app(spoil=lie), nodes=5, aggregator=fbn.defense("nnm+median", f=1))
    plain, _ = run(client_app(spoil=lie), nodes=5)
    away = {
        k: (s.shared["2"].mean - honest.shared["2"].mean).abs().max().item()
        for k, s in (("robust", robust), ("plain", plain))
    }
    assert away["robust"] < 2 < 1e4 < away["plain"]


@pytest.mark.parametrize("name", ["FedAvg", "FedAvgM", "FedAdam", "FedYogi"])
def test_a_server_that_was_stopped_goes_on_to_the_same_result(name, tmp_path):
    make = STRATEGIES[name]
    _, whole = run(client_app(lr=0.02), rounds=6, strategy=make())
    app, file = client_app(lr=0.02), tmp_path / "server.safetensors"
    run(app, rounds=4, strategy=make(), checkpoint=file)
    _, result = run(app, rounds=6, strategy=make(), checkpoint=file)
    assert set(result.train_metrics_clientapp) == {5, 6}
    for key, array in whole.arrays.items():
        np.testing.assert_array_equal(array.numpy(), result.arrays[key].numpy(), err_msg=key)
    _, again = run(app, rounds=6, strategy=make(), checkpoint=file)  # there is nothing left to do
    np.testing.assert_array_equal(again.arrays["0.bias"].numpy(), whole.arrays["0.bias"].numpy())


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    file = tmp_path / "server.safetensors"
    run(client_app(), rounds=1, checkpoint=file)
    with pytest.raises(ValueError, match="of a run with FedAvg, not FedMedian"):
        run(client_app(), rounds=2, strategy=FedMedian(), checkpoint=file)
    small = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3))  # noqa: E731
    with pytest.raises(ValueError, match="of another model"):
        run(client_app(make=small), rounds=2, make=small, checkpoint=file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="no checkpoint, or a damaged one"):
        run(client_app(), rounds=2, checkpoint=file)


@pytest.mark.filterwarnings("ignore:the model has no BatchNorm layer")
def test_a_model_without_batch_norm_and_one_that_is_nothing_else():
    def flat():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    strategy, result = run(client_app(make=flat), make=flat, rounds=2)
    assert strategy.shared == {}
    assert list(result.arrays) == ["1.weight", "1.bias"]
    model = fbn.convert(nn.BatchNorm2d(1))
    strategy = FederatedBatchNormStrategy(FedAvg(), model=model)
    grid = LocalGrid(lambda message, context: answer(message, context), 3)

    def answer(message, context):
        client = fbn.convert(nn.BatchNorm2d(1))
        load(client, message)
        client(batch(context.node_config["partition-id"], 0, 5)[0])
        return reply(client, message, {"num-examples": 5})

    messages = strategy.configure_train(1, ArrayRecord(nn.BatchNorm2d(1).state_dict()), ConfigRecord(), grid)
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert list(arrays) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    plain = nn.BatchNorm2d(1).double()
    plain(torch.cat([batch(node, 0, 5)[0] for node in range(3)]).double())
    np.testing.assert_allclose(arrays["running_var"].numpy(), plain.running_var.numpy(), rtol=1e-6)


def test_whole_numbers_other_than_counters_stay_the_server_s():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("places", torch.arange(3))
            self.body = cnn()

        def forward(self, x):
            return self.body(x)

    _, result = run(client_app(make=Net), make=Net, rounds=2)
    assert result.arrays["places"].dtype == "int64"
    assert result.arrays["places"].numpy().tolist() == [0, 1, 2]


@pytest.mark.parametrize("model", ["cnn", "resnet18"])
def test_traffic_is_next_to_that_of_fedavg(model):
    from fedbatchnorm.simulation import models

    net = models.build(model, (3, 32, 32), 10, seed=0)
    strategy = FederatedBatchNormStrategy(FedAvg(), model=fbn.convert(net))
    strategy._split(ArrayRecord(net.state_dict()))
    down = ArrayRecord(dict(strategy._sent)).count_bytes() + ArrayRecord(strategy._statistics()).count_bytes()
    own = ArrayRecord(net.state_dict()).count_bytes()
    asked = Message(RecordDict({"arrays": ArrayRecord()}), 1, "train")
    answer = reply(net, asked, {"num-examples": 1}).content
    up = answer["arrays"].count_bytes() + answer[STATISTICS].count_bytes()
    assert down <= 1.01 * own
    assert up <= 1.01 * own


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"momentum": 2.0}, "momentum is 2.0"), ({"eps": 0.0}, "eps is 0.0"), ({"steps": 0}, "steps is 0")],
)
def test_settings_that_cannot_be_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        FederatedBatchNormStrategy(FedAvg(), **settings)


def test_a_client_is_told_what_is_missing():
    model = fbn.convert(cnn())
    plain = Message(RecordDict({"arrays": ArrayRecord(cnn().state_dict())}), 1, "train")
    with pytest.raises(ValueError, match="wrap the server's strategy in FederatedBatchNormStrategy"):
        load(model, plain)
    with pytest.raises(ValueError, match="steps is 0"):
        reply(model, plain, {}, steps=0)
