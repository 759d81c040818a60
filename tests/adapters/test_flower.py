"""Federated BatchNorm on Flower, in one process: exact, whatever the strategy, whoever misbehaves."""

import copy
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
)
from safetensors.numpy import load_file
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import (
    STATISTICS,
    FederatedBatchNormStrategy,
    load,
    reply,
    statistics_mod,
)
from fedbatchnorm.adapters.local import LocalGrid

sys.path.insert(0, str(Path(__file__).parent))
from flower_clients import (
    arrays,
    batch,
    change,
    client_app,
    cnn,
    metrics,
    parameters,
    renamed,
    run,
    run_for_nothing,
    steps,
    with_config,
    without,
)


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


def clipped(strategy):
    return DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1.0, 4)


STRATEGIES = {
    "FedAvg": FedAvg,
    "FedAvgM": lambda: FedAvgM(server_learning_rate=0.7, server_momentum=0.9),
    "FedAdam": lambda: FedAdam(eta=0.1),
    "FedYogi": lambda: FedYogi(eta=0.1),
    "FedProx": lambda: FedProx(proximal_mu=0.1),
    "FedMedian": FedMedian,
    "FedTrimmedAvg": FedTrimmedAvg,
    "Krum": lambda: Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2),
    "Bulyan": Bulyan,
    "FedAdagrad": lambda: FedAdagrad(eta=0.1),
    "QFedAvg": lambda: QFedAvg(client_learning_rate=0.02, train_loss_key="loss"),
    "clipped": lambda: clipped(FedAvg(fraction_evaluate=0.0)),
    "clipped FedAdam": lambda: clipped(FedAdam(eta=0.1, fraction_evaluate=0.0)),
}


LONG = ("FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedProx", "FedMedian", "FedTrimmedAvg", "Krum")


@pytest.mark.parametrize("name", STRATEGIES)
def test_statistics_stay_sound_under_any_strategy(name):
    """30 rounds: variances positive and finite, the counter whole, types as they were."""
    rounds = {"QFedAvg": 3, "Bulyan": 3}.get(name, 30 if name in LONG else 8)
    strategy, result = run(client_app(lr=0.02), rounds=rounds, strategy=STRATEGIES[name]())
    state = result.arrays.to_torch_state_dict()
    for layer in ("2", "5"):
        assert state[f"{layer}.running_var"].isfinite().all()
        assert (state[f"{layer}.running_var"] > 0).all()
        assert state[f"{layer}.num_batches_tracked"].item() == rounds
        assert state[f"{layer}.num_batches_tracked"].dtype == torch.int64
    assert strategy.left_out == {}
    assert all(value.dtype == torch.float32 for key, value in state.items() if "tracked" not in key)


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
    "metrics in another record": (lambda a: renamed(a, "metrics", "other"), "schema"),
    "a list for a number": (lambda a: metrics(a, loss=[1.0, 2.0]), "schema"),
    "a weight that is not a number": (
        lambda a: metrics(a, **{"num-examples": float("nan")}),
        "count_out_of_range",
    ),
    "a huge weight": (lambda a: metrics(a, **{"num-examples": 1e308}), "count_out_of_range"),
    "a weight beyond what is allowed": (lambda a: metrics(a, **{"num-examples": 7}), "count_out_of_range"),
    "steps as text": (lambda a: steps(a, np.array("7")), "schema"),
}


SAME = {
    "parameters in another order": lambda a: arrays(a, lambda r: dict(reversed(r.items()))),
    "parameters in another record": lambda a: renamed(a, "arrays", "other"),
    "a configuration under their name": lambda a: with_config(renamed(a, "arrays", "other")),
}


@pytest.mark.parametrize("name", ["FedAvg", "FedAvgM", "Krum", "clipped"])
@pytest.mark.parametrize("what", SAME)
def test_the_form_of_a_reply_does_not_matter_to_any_strategy(what, name):
    other = lambda node, answer: SAME[what](answer) if node == 2 else answer  # noqa: E731
    found, wanted = (
        run(client_app(spoil=spoil), nodes=5, rounds=1, strategy=STRATEGIES[name]())[1]
        for spoil in (other, None)
    )
    for key, array in found.arrays.items():
        np.testing.assert_array_equal(array.numpy(), wanted.arrays[key].numpy(), err_msg=key)


@pytest.mark.parametrize("what", SPOILT)
def test_a_bad_reply_is_left_out_of_both_and_the_round_goes_on(what, caplog):
    spoil, reason = SPOILT[what]
    bad = lambda node, answer: spoil(answer) if node == 2 else answer  # noqa: E731
    with caplog.at_level(logging.WARNING, logger="flwr"):
        logging.getLogger("flwr").propagate = True
        strategy, result = run(client_app(spoil=bad), rounds=2, max_count=36 * 6, max_examples=6)
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


def test_below_the_quorum_nothing_changes():
    bad = lambda node, answer: change(answer, var=torch.full((4,), -1.0)) if node else answer  # noqa: E731
    strategy, why = run_for_nothing(client_app(spoil=bad), quorum=2)
    assert torch.equal(strategy.shared["2"].mean, torch.zeros(4))
    assert "nothing was trained: in 1 rounds" in why
    assert "round 1: node 2 left out: impossible_moments" in why


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
    grid = LocalGrid(None, 2)
    content = strategy.configure_train(1, ArrayRecord(net.state_dict()), ConfigRecord(), grid)[0].content
    down = sum(record.count_bytes() for record in content.array_records.values())
    own = ArrayRecord(net.state_dict()).count_bytes()
    asked = Message(RecordDict({"arrays": ArrayRecord()}), 1, "train")
    answer = reply(net, asked, {"num-examples": 1}).content
    up = answer["arrays"].count_bytes() + answer[STATISTICS].count_bytes()
    assert down <= 1.01 * own
    assert up <= 1.01 * own


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 2.0}, "momentum is 2.0"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"quorum": 0}, "quorum is 0"),
        ({"population": 0}, "population is 0"),
        ({"population": "all"}, "population is 'all'"),
        ({"on_divergence": "panic"}, "on_divergence is 'panic'"),
        ({"max_examples": 0}, "max_examples is 0"),
        ({"model": fbn.convert(cnn()), "nonnegative": ["nope"]}, "nonnegative is"),
        ({"model": fbn.convert(cnn()), "max_count": -1}, "max_count is -1"),
        ({"strategy": FedAvg(arrayrecord_key="statistics")}, "arrayrecord_key is 'statistics'"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        FederatedBatchNormStrategy(**{"strategy": FedAvg()} | settings)


def test_a_client_is_told_what_is_missing(caplog):
    model = fbn.convert(cnn())
    plain = Message(RecordDict({"arrays": ArrayRecord(cnn().state_dict())}), 1, "train")
    logging.getLogger("flwr").propagate = True
    load(model, plain)
    assert "wrap the server's strategy in FederatedBatchNormStrategy" in caplog.text
    with pytest.raises(ValueError, match="steps is -1"):
        reply(model, plain, {}, steps=-1)


def test_who_is_left_out_does_not_decide_how_much_a_round_weighs():
    """A bad client that claims a million steps; the result is that of the others alone, bit for bit."""

    def spoil(node, answer):
        if node != 1:
            return answer
        answer.content[STATISTICS]["steps"] = Array(np.array(10**6))
        return change(answer, mean=torch.full((4,), torch.nan))

    for options in ({}, {"aggregator": fbn.defense("median", 1)}):
        found, _ = run(client_app(spoil=spoil), rounds=2, **options)
        fails = lambda node, answer: answer if node != 1 else 1 / 0  # noqa: E731
        wanted, _ = run(client_app(spoil=fails), rounds=2, **options)
        for layer, running in wanted.shared.items():
            assert found.shared[layer].tracked == running.tracked == 2
            assert torch.equal(found.shared[layer].mean, running.mean)


def test_steps_are_weighted_by_what_clients_saw_or_their_median_or_the_server_s():
    def spoil(node, answer):
        answer.content[STATISTICS]["steps"] = Array(np.array((1, 1, 5, 9)[node]))
        return answer

    size = lambda node: (2, 2, 2, 10)[node]  # noqa: E731
    for options, wanted in (
        ({}, (2 + 2 + 10 + 90) / 16),
        ({"aggregator": fbn.defense("median", 1)}, 3),
        ({"steps": 2}, 2),
    ):
        strategy, _ = run(client_app(size, spoil=spoil), rounds=1, **options)
        assert strategy.shared["2"].tracked == round(wanted)
        one, _ = run(client_app(size), rounds=1, **options | {"steps": 1})
        ratio = strategy.shared["2"].mean / one.shared["2"].mean
        torch.testing.assert_close(ratio, torch.full((4,), (1 - 0.9**wanted) / 0.1), rtol=1e-4, atol=0)


def test_a_weight_of_another_name_is_found_inside_wrappers():
    """`weighted_by_key` of what is wrapped in a wrapper for privacy."""

    def spoil(node, answer):
        metrics = dict(answer.content["metrics"])
        answer.content["metrics"] = MetricRecord({"w": 1 + 2 * node, "loss": metrics["loss"]})
        return answer

    inner = lambda: FedAvg(weighted_by_key="w", fraction_evaluate=0.0)  # noqa: E731
    strategy, result = run(client_app(spoil=spoil), rounds=2, strategy=clipped(inner()))
    assert strategy.left_out == {}
    assert result.arrays["2.num_batches_tracked"].numpy() == 2
    strategy, _ = run_for_nothing(client_app(spoil=spoil), strategy=FedAvg(fraction_evaluate=0.0))
    assert {v.reason for v in strategy.left_out.values()} == {"count_out_of_range"}


@pytest.mark.filterwarnings("ignore:not converted.*:UserWarning")  # and averaged with the parameters
def test_layers_used_twice_and_layers_that_only_look_like_batch_norm():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.BatchNorm2d(1)
            self.again = self.first
            self.other = nn.InstanceNorm2d(1, affine=True, track_running_stats=True)
            self.last = nn.Linear(64, 3)

        def forward(self, x):
            return self.last(self.other(self.again(self.first(x))).flatten(1))

    strategy, result = run(client_app(make=Net), make=Net, rounds=3)
    assert strategy.left_out == {}
    assert list(strategy.shared) == ["first"]
    arrays = result.arrays.to_torch_state_dict()
    assert torch.equal(arrays["first.running_mean"], arrays["again.running_mean"])
    assert arrays["first.num_batches_tracked"] == arrays["again.num_batches_tracked"] == 3
    assert not torch.equal(arrays["other.running_mean"], torch.zeros(1))
    assert list(arrays) == list(Net().state_dict())


def test_frozen_layers_stay_and_parameters_learn():
    class Net(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
            return self

    strategy, result = run(client_app(make=lambda: Net(*cnn())), rounds=2)
    assert strategy.left_out == {}
    assert torch.equal(strategy.shared["2"].mean, torch.zeros(4))
    assert not np.array_equal(result.arrays["6.bias"].numpy(), cnn().state_dict()["6.bias"].numpy())


def test_statistics_of_half_precision_are_kept_in_full():
    """On the wire and at the server; 60 rounds of a momentum that half precision cannot follow."""

    def make():
        return nn.Sequential(nn.BatchNorm1d(2, momentum=0.01)).half()

    app = ClientApp()

    @app.train()
    def train(message, context):
        model = fbn.convert(make())
        load(model, message)
        model.train()(torch.full((8, 2), 300.0).half() + torch.arange(8).half()[:, None])
        return reply(model, message, {"num-examples": 8})

    strategy, result = run(app, nodes=2, rounds=60, make=make, strategy=FedAvg(fraction_evaluate=0.0))
    assert strategy.left_out == {}
    wanted = 303.5 * (1 - 0.99**60)
    torch.testing.assert_close(strategy.shared["0"].mean, torch.full((2,), wanted), rtol=1e-4, atol=0)
    make().load_state_dict(result.arrays.to_torch_state_dict())


def test_a_compiled_model_answers_as_the_model_in_it():
    model = fbn.convert(cnn())
    grid = LocalGrid(None, 1)
    strategy = FederatedBatchNormStrategy(FedAvg(min_available_nodes=1, min_train_nodes=1), model=model)
    [message] = strategy.configure_train(1, ArrayRecord(cnn().state_dict()), ConfigRecord(), grid)
    wrapped = torch.compile(fbn.convert(cnn()), backend="eager")
    load(wrapped, message)
    wrapped.train()(batch(0, 0, 6)[0])
    answer = reply(wrapped, message, {"num-examples": 6})
    assert list(answer.content["arrays"]) == list(message.content["arrays"])
    assert "2" in fbn.from_bytes(answer.content[STATISTICS]["update"].numpy().tobytes()).layers


PRIVATE = {
    "fixed": (
        lambda: DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.0, 0.01, 4),
        fixedclipping_mod,
    ),
    "adaptive": (
        lambda: DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), 0.1, 4),
        adaptiveclipping_mod,
    ),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", PRIVATE)
def test_clipping_at_the_client_sees_parameters_alone(kind, reverse):
    """Also where arrays come in another order than the model's own; and evaluation goes on."""
    make, mod = PRIVATE[kind]
    state = cnn().state_dict()
    state = dict(reversed(state.items())) if reverse else state

    def private(rounds, mods, strategy):
        app, plain = ClientApp(), client_app(lr=1.0)
        app.train(mods=mods)(lambda message, context: plain(message, context))
        app.evaluate()(lambda message, context: plain(message, context))
        wrapped = FederatedBatchNormStrategy(strategy, model=fbn.convert(cnn()))
        return wrapped, wrapped.start(LocalGrid(app, 4), ArrayRecord(state), num_rounds=rounds)

    strategy, result = private(3, [statistics_mod, mod], make())
    assert strategy.left_out == {}
    assert result.arrays["2.num_batches_tracked"].numpy() == 3
    assert result.evaluate_metrics_clientapp[3]["ok"] == 1
    free, _ = private(1, [], FedAvg())
    clipped_once, _ = private(1, [statistics_mod, mod], make())
    assert torch.equal(clipped_once.shared["2"].mean, free.shared["2"].mean)
    if kind == "fixed":
        moved = [result.arrays[k].numpy() - v.numpy() for k, v in state.items() if "bias" in k]
        assert max(np.abs(m).max() for m in moved) <= 0.03 + 1e-6


def test_an_average_over_all_steps_counts_whole_steps():
    """momentum None, clients with 1 and 2 steps: round r saw the value r, and all rounds weigh the same."""
    shared = {"bn": fbn.Running(torch.zeros(1), torch.ones(1), momentum=None)}
    for r in range(1, 21):
        seen = [{"bn": fbn.Moments(4, torch.full((1,), float(r)), torch.ones(1))}]
        shared = fbn.merge(shared, seen, steps=1.5).statistics
    assert shared["bn"].mean.item() == pytest.approx(10.5)


def test_evaluation_sends_statistics_and_leaves_bad_metrics_out(caplog):
    app, spoilt = (
        ClientApp(),
        {0: {"num-examples": -3, "ok": 1.0}, 1: {"other": 1}, 2: {"num-examples": [1], "ok": 1.0}},
    )
    plain = client_app()
    app.train()(lambda message, context: plain(message, context))

    @app.evaluate()
    def evaluate(message, context):
        model = fbn.convert(cnn())
        load(model, message)
        assert not torch.equal(fbn.statistics(model)["2"].mean, torch.zeros(4))
        metrics = spoilt.get(context.node_config["partition-id"], {"num-examples": 200, "ok": 1.0})
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, logger="flwr"):
        _, result = run(app, nodes=6, rounds=1, max_examples=6)  # of training
    assert result.evaluate_metrics_clientapp[1]["ok"] == 1.0
    for node, reason in ((1, "count_out_of_range"), (2, "schema"), (3, "schema")):
        assert f"round 1: node {node} left out: {reason}" in caplog.text


def test_a_failure_is_logged_with_its_reason_and_the_first_arrays_come_back(caplog):
    def fail(node, answer):
        raise RuntimeError("no data at this client")

    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, logger="flwr"):
        run_for_nothing(client_app(spoil=fail))
    assert "node 2 failed: RuntimeError('no data at this client')" in caplog.text


def test_parameters_that_come_out_not_finite_change_nothing(tmp_path):
    class Broken(FedAvg):
        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            if server_round == 2:
                arrays["0.bias"] = Array(np.full(4, np.inf, np.float32))
            return arrays, metrics

    file = tmp_path / "server.safetensors"
    strategy, result = run(client_app(), rounds=2, strategy=Broken(), checkpoint=file)
    assert strategy.shared["2"].tracked == 1
    _, first = run(client_app(), rounds=1)
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(result.arrays[name].numpy(), array.numpy(), err_msg=name)
    _, again = run(client_app(), rounds=2, strategy=Broken(), checkpoint=file)
    np.testing.assert_array_equal(again.arrays["0.bias"].numpy(), result.arrays["0.bias"].numpy())


def test_a_node_that_answers_twice_is_left_out():
    class Twice(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            answers = list(super().send_and_receive(messages))
            return answers + copy.deepcopy([a for a in answers if a.metadata.src_node_id == 3])

    strategy = FederatedBatchNormStrategy(FedAvg(fraction_evaluate=0.0), model=fbn.convert(cnn()))
    strategy.start(Twice(client_app(), 4), ArrayRecord(cnn().state_dict()), num_rounds=1)
    assert {node: v.reason for node, v in strategy.left_out.items()} == {3: "duplicate"}


def test_statistics_stay_if_the_strategy_returns_nothing(tmp_path):
    class Nothing(FedAvg):
        def aggregate_train(self, server_round, replies):
            return None, None

    file = tmp_path / "server.safetensors"
    run_for_nothing(client_app(), rounds=2, strategy=Nothing(), checkpoint=file)
    saved = load_file(file)
    assert saved["arrays/2.num_batches_tracked"] == 0
    np.testing.assert_array_equal(saved["arrays/2.running_mean"], np.zeros(4))


@pytest.mark.filterwarnings("ignore:the model has no BatchNorm layer")
def test_the_quorum_holds_for_a_model_without_statistics():
    def flat():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    bad = lambda node, answer: metrics(answer, **{"num-examples": -1}) if node else answer  # noqa: E731
    run_for_nothing(client_app(make=flat, spoil=bad), make=flat, quorum=2)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_a_strategy_forgets_a_round_that_came_out_not_finite():
    """FedYogi's moments, after a client that sends what overflows when it is squared."""

    def spoil(node, answer):
        spoilt[node] = spoilt.get(node, 0) + 1
        if node or spoilt[node] > 2:
            return answer
        return parameters(answer, "0.bias", np.full(4, 1e25, np.float32))

    spoilt = {}
    strategy, result = run(client_app(spoil=spoil), rounds=5, strategy=FedYogi(eta=0.1))
    assert strategy.shared["2"].tracked == 3
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())
    assert np.isfinite(strategy.strategy.v_t["0.bias"]).all()


def test_clients_that_saw_nothing_do_not_weaken_a_defense():
    """Nine clients, two of them liars, two in evaluation mode: f stays 2."""
    shared = {"bn": fbn.Running(torch.zeros(3), torch.ones(3))}
    honest = [{"bn": fbn.Moments(10, 0.1 * i * torch.ones(3), torch.ones(3))} for i in range(5)]
    liars = [{"bn": fbn.Moments(10, torch.full((3,), 1000.0), torch.ones(3))}] * 2
    nothing = [{"bn": fbn.Moments(0, torch.zeros(3), torch.zeros(3))}] * 2
    for rule in ("trimmed_mean", "nnm+median"):
        alone, beside = (
            fbn.merge(shared, clients, aggregator=fbn.defense(rule, 2)).statistics["bn"]
            for clients in (honest + liars, honest + liars + nothing)
        )
        assert torch.equal(alone.mean, beside.mean)
        assert beside.mean.abs().max() < 1
