"""Round 0, cohorts, and a model that diverges: what the wrapper does by default."""

import logging
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import (
    STATISTICS,
    DivergedError,
    FederatedBatchNormStrategy,
    calibrate,
    load,
    reply,
)
from fedbatchnorm.adapters.local import LocalGrid

sys.path.insert(0, str(Path(__file__).parent))
from flower_clients import batch, change, client_app, cnn, metrics, parameters, run


@pytest.fixture
def logged(caplog):
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO, logger="flwr")
    return caplog


def calibrating_app(size=lambda node: 6, spoil=None, asked=None, refuse=(), **options):
    """Clients that train as in the other tests, and know how to calibrate."""
    app, plain = ClientApp(), client_app(size, **options)
    app.train()(lambda message, context: plain(message, context))
    app.evaluate()(lambda message, context: plain(message, context))

    @app.train("calibrate")
    def measure(message, context):
        node = context.node_config["partition-id"]
        if node in refuse:
            raise RuntimeError("no data yet")
        if asked is not None:
            asked.append((node, message.content["config"]["server-round"]))
        answer = calibrate(fbn.convert(cnn()), message, [batch(node, 0, size(node))[0]])
        return spoil(node, answer) if spoil else answer

    return app


def calibrating_app_with(spoil):
    """Clients whose replies in training are spoilt, and whose calibration is not."""
    app, spoilt, good = ClientApp(), client_app(spoil=spoil), calibrating_app()
    app.train()(lambda message, context: spoilt(message, context))
    app.train("calibrate")(lambda message, context: good(message, context))
    return app


def initial(strategy, app, nodes=4, **options):
    """The statistics that the first round starts with."""
    found = []
    strategy.start(
        LocalGrid(app, nodes),
        ArrayRecord(cnn().state_dict()),
        num_rounds=0,
        evaluate_fn=lambda step, arrays: found.append(arrays.to_torch_state_dict()),
        **options,
    )
    return found[0]


def wrapped(strategy=None, **options):
    return FederatedBatchNormStrategy(strategy or FedAvg(), model=fbn.convert(cnn()), **options)


def plain_pass(nodes, size=lambda node: 6):
    """What the layers of plain models get at all clients, side by side: by layer."""
    found = {"2": [], "5": []}
    for node in nodes:
        model = cnn().train()
        for name in found:
            into = found[name]
            hook = lambda m, x, into=into: into.append(x[0].detach().double())  # noqa: E731
            model.get_submodule(name).register_forward_pre_hook(hook)
        model(batch(node, 0, size(node))[0])
    return {name: torch.cat([x.transpose(0, 1).flatten(1) for x in xs], 1) for name, xs in found.items()}


@pytest.mark.parametrize("size", [lambda node: 6, lambda node: 3 + 4 * node], ids=["equal", "unequal"])
def test_round_0_starts_every_layer_from_what_plain_batch_norm_sees(size, logged):
    asked = []
    state = initial(wrapped(), calibrating_app(size, asked=asked))
    assert sorted(asked) == [(node, 0) for node in range(4)]
    for name, x in plain_pass(range(4), size).items():
        torch.testing.assert_close(state[f"{name}.running_mean"].double(), x.mean(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[f"{name}.running_var"].double(), x.var(1), rtol=1e-5, atol=1e-5)
        assert state[f"{name}.num_batches_tracked"] == 1
    for name, value in cnn().named_parameters():
        assert torch.equal(state[name], value.detach())  # nothing was learned
    assert "round 0: statistics calibrated by 4 of 4 nodes" in logged.text


def test_training_continues_from_the_calibration():
    strategy, result = run(calibrating_app(), rounds=2)
    assert strategy.left_out == {}
    assert result.arrays["2.num_batches_tracked"].numpy() == 3
    off, _ = run(calibrating_app(), rounds=2, calibrate=False)
    assert off.shared["2"].tracked == 2
    assert not torch.equal(off.shared["2"].mean, strategy.shared["2"].mean)


def test_an_app_that_cannot_calibrate_has_not_trained_and_the_log_says_so(logged):
    rounds = []
    spoil = lambda node, answer: rounds.append(node) or answer  # noqa: E731
    strategy, _ = run(client_app(spoil=spoil), rounds=1)
    assert len(rounds) == 4  # in round 1 alone
    assert strategy.shared["2"].tracked == 1
    assert "the calibration was skipped, 0 of 4 nodes answered with statistics" in logged.text
    assert '@app.train("calibrate")' in logged.text
    assert "No train function registered with name 'calibrate'" in logged.text


def test_a_reply_of_training_is_not_taken_for_a_calibration(logged):
    """An app that answers every message by training."""
    plain = client_app()
    trains = lambda message, context: plain._registered_funcs["train.default"](message, context)  # noqa: E731
    state = initial(wrapped(), trains)
    assert torch.equal(state["2.running_mean"], torch.zeros(4))
    assert "round 0: node 2 left out: schema (the reply is no calibration)" in logged.text
    assert "the calibration was skipped" in logged.text


BAD = {
    "non_finite": lambda a: change(a, mean=torch.full((4,), torch.nan)),
    "count_out_of_range": lambda a: change(a, count=10**6),
    "impossible_moments": lambda a: change(a, var=torch.full((4,), -1.0)),
    "schema": lambda a: change(a, mean=torch.zeros(5)),
}


@pytest.mark.parametrize("reason", BAD)
def test_verdicts_hold_in_round_0(reason, logged):
    bad = lambda node, answer: BAD[reason](answer) if node == 2 else answer  # noqa: E731
    state = initial(wrapped(max_count=36 * 6), calibrating_app(spoil=bad))
    assert f"round 0: node 3 left out: {reason}" in logged.text
    x = plain_pass([0, 1, 3])["2"]
    torch.testing.assert_close(state["2.running_var"].double(), x.var(1), rtol=1e-5, atol=1e-5)


def test_below_the_quorum_training_starts_uncalibrated(logged):
    state = initial(wrapped(quorum=3), calibrating_app(refuse=(0, 1)))
    assert torch.equal(state["2.running_var"], torch.ones(4))
    assert "the calibration was skipped, 2 of 4 nodes" in logged.text
    assert "no data yet" in logged.text


def test_statistics_that_are_not_fresh_and_checkpoints_are_not_calibrated(tmp_path, logged):
    asked = []
    app = calibrating_app(asked=asked)
    model = cnn()
    model[2].running_mean += 1
    wrapped().start(LocalGrid(app, 4), ArrayRecord(model.state_dict()), num_rounds=1)
    assert asked == []
    assert "no calibration: there are no statistics, or not those of new layers" in logged.text
    file = tmp_path / "server.safetensors"
    run(app, rounds=1, checkpoint=file)
    assert len(asked) == 4
    run(app, rounds=2, checkpoint=file)
    assert len(asked) == 4


def test_round_0_leaves_the_strategy_alone_and_sends_its_configuration():
    asked = []

    class Counted(FedAvg):
        configured = 0

        def configure_train(self, *arguments):
            self.configured += 1
            return super().configure_train(*arguments)

    app = ClientApp()

    @app.train("calibrate")
    def measure(message, context):
        asked.append(dict(message.content["settings"]))
        return calibrate(fbn.convert(cnn()), message, [batch(0, 0, 6)[0]])

    inner = Counted(configrecord_key="settings", arrayrecord_key="weights")
    initial(wrapped(inner), app, train_config=ConfigRecord({"lr": 0.5}))
    assert asked == [{"lr": 0.5, "server-round": 0}] * 4
    assert inner.configured == 0


def test_a_robust_rule_holds_in_round_0():
    lie = lambda node, answer: change(answer, mean=torch.full((4,), 1e6)) if node == 4 else answer  # noqa: E731
    rule = {"aggregator": fbn.defense("nnm+median", f=1)}
    state = initial(wrapped(**rule), calibrating_app(spoil=lie), nodes=5)
    assert state["2.running_mean"].abs().max() < 100


@pytest.mark.filterwarnings("ignore:the model has no BatchNorm layer")
def test_a_model_without_statistics_has_no_round_0():
    flat = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3))  # noqa: E731
    asked = []
    _, result = run(calibrating_app(asked=asked, make=flat), make=flat, rounds=1)
    assert asked == []
    assert list(result.arrays) == ["1.weight", "1.bias"]


def moments_app(update_of):
    """Clients that report given moments, and learn nothing."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        model = fbn.convert(cnn())
        load(model, message)
        model.train()(batch(0, 0, 6)[0])
        answer = reply(model, message, {"num-examples": 1, "loss": 1.0})
        return change(answer, mean=torch.full((4,), float(update_of(context.node_config["partition-id"]))))

    return app


def test_cohorts_stand_for_all_nodes():
    """2 of 40 nodes a round, whose means are 0 and 10: the spread between clients is 25, not half of it."""
    spread = {}
    for population in ("grid", None, 40):
        inner = FedAvg(fraction_train=0.05, min_train_nodes=2, fraction_evaluate=0.0)
        strategy, found = wrapped(inner, population=population), []
        grid = LocalGrid(moments_app(lambda node: 10 * (node % 2)), 40)
        arrays = ArrayRecord(cnn().state_dict())
        random.seed(0)  # Flower draws the same cohorts each time
        for server_round in range(1, 61):
            messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
            before = strategy.shared["2"]
            strategy.aggregate_train(server_round, grid.send_and_receive(messages))
            found.append((strategy.result.statistics["2"].var - 0.9 * before.var).mean() / 0.1)
        spread[population] = float(torch.stack(found).mean())
    assert spread["grid"] == spread[40]
    assert spread["grid"] - spread[None] == pytest.approx(25 - 25 * 20 / 39, rel=0.2)


def test_who_drops_out_of_a_whole_federation_belongs_to_no_population():
    fails = lambda node, answer: answer if node != 1 else 1 / 0  # noqa: E731
    auto, off = (run(client_app(spoil=fails), rounds=1, population=p)[0] for p in ("grid", None))
    given, _ = run(client_app(spoil=fails), rounds=1, population=4)
    assert torch.equal(auto.shared["2"].var, off.shared["2"].var)
    assert (given.shared["2"].var > off.shared["2"].var).all()
    small, _ = run(client_app(), rounds=1, population=2)  # fewer than have answered: as if all of them
    everyone, _ = run(client_app(), rounds=1, population=None)
    assert torch.equal(small.shared["2"].var, everyone.shared["2"].var)


def spoiling(when, how, nodes=(0, 1, 2, 3)):
    """Answers of these nodes are spoilt in these rounds of training."""
    asked = {}

    def spoil(node, answer):
        asked[node] = asked.get(node, 0) + 1
        return how(answer) if node in nodes and asked[node] in when else answer

    return spoil


NAN = {
    "parameters": lambda a: parameters(a, "0.bias", np.full(4, np.nan, np.float32)),
    "statistics": lambda a: change(a, mean=torch.full((4,), torch.nan)),
    "loss": lambda a: metrics(a, loss=float("inf")),
}


@pytest.mark.parametrize("what", NAN)
def test_most_clients_that_fail_alike_are_a_model_that_diverged(what, tmp_path, logged):
    file = tmp_path / "server.safetensors"
    app = client_app(spoil=spoiling(range(4, 99), NAN[what], nodes=(0, 1, 2)))
    with pytest.raises(DivergedError, match="round 4: the MODEL diverged: 3 of 4 replies") as raised:
        run(app, rounds=6, checkpoint=file)
    error = raised.value
    assert (error.round, error.good_round) == (4, 2)  # that of round 3 was never trained from
    assert "It began in round 4; the last good state is that after round 2" in logged.text
    _, wanted = run(client_app(), rounds=2)
    for name, array in wanted.arrays.items():
        np.testing.assert_array_equal(error.arrays[name].numpy(), array.numpy(), err_msg=name)
    assert str(file) in str(error)
    again = client_app()
    run(again, rounds=2)  # so that clients are where they were
    _, result = run(again, rounds=4, checkpoint=file)  # continues from the good state
    assert set(result.train_metrics_clientapp) == {3, 4}


def test_a_faulty_minority_is_left_out_and_no_alarm(logged):
    app = client_app(spoil=spoiling(range(1, 99), NAN["statistics"], nodes=(0, 1)))
    strategy, _ = run(app, rounds=3)
    assert len(strategy.left_out) == 2
    assert "diverged" not in logged.text


def test_one_client_alone_is_believed_the_second_time(logged):
    inner = lambda: FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)  # noqa: E731
    app = client_app(spoil=spoiling((2,), NAN["loss"]))
    run(app, nodes=1, rounds=3, strategy=inner())
    assert "diverged" not in logged.text
    with pytest.raises(DivergedError) as raised:
        run(client_app(spoil=spoiling((2, 3), NAN["loss"])), nodes=1, rounds=4, strategy=inner())
    assert (raised.value.round, raised.value.good_round) == (2, 0)


def growing(factor, since=3):
    """From some round on, what all clients report of a layer grows by a factor a round."""
    asked = {}

    def spoil(node, answer):
        asked[node] = asked.get(node, 0) + 1
        update = fbn.from_bytes(answer.content[STATISTICS]["update"].numpy().tobytes())
        return change(answer, var=update["2"].var * factor ** max(0, asked[node] - since))

    return spoil


def test_activations_that_explode_are_named_with_the_round_where_it_began(logged):
    with pytest.raises(DivergedError, match=r"the inputs of layer 2 are .* times as large") as raised:
        run(client_app(spoil=growing(20)), rounds=12)
    assert raised.value.round == 5  # 400 times after two rounds of growth
    run(client_app(spoil=growing(1.5)), rounds=12)


def test_a_calibration_tells_what_to_expect_in_the_first_round(logged):
    loud = lambda node, answer: change(answer, var=torch.full((4,), 1e9))  # noqa: E731
    with pytest.raises(DivergedError, match="round 1: the MODEL diverged") as raised:
        run(calibrating_app_with(loud), rounds=3)
    assert raised.value.arrays["2.num_batches_tracked"].numpy() == 1  # calibrated
    run(client_app(spoil=loud), rounds=3)  # nothing is known of mean 0 and variance 1


def test_a_loss_that_explodes(logged):
    losses = iter([1.0] * 12 + [30.0] * 4 + [5000.0] * 4)
    exploding = lambda node, answer: metrics(answer, loss=next(losses))  # noqa: E731
    with pytest.raises(DivergedError, match=r"round 5: .* the training loss is 5e") as raised:
        run(client_app(spoil=exploding), rounds=6)
    assert raised.value.round == 4


def test_one_client_cannot_raise_the_alarm(logged):
    loud = lambda answer: metrics(change(answer, var=torch.full((4,), 1e12)), loss=1e9)  # noqa: E731
    run(client_app(spoil=spoiling(range(2, 99), loud, nodes=(2,))), rounds=4)
    assert "diverged" not in logged.text


def test_restore_goes_back_and_continues(logged):
    strategy, result = run(
        client_app(spoil=spoiling((3,), NAN["parameters"])),
        rounds=4,
        strategy=FedAdam(eta=0.1),
        on_divergence="restore",
    )
    assert "round 3: back to the state after round 1" in logged.text
    assert strategy.shared["2"].tracked == 2  # rounds 1 and 4
    assert 3 not in result.train_metrics_clientapp
    app = client_app()
    once, _ = run(app, rounds=1, strategy=FedAdam(eta=0.1))
    for key, moments in once.strategy.m_t.items():
        assert moments.shape == strategy.strategy.m_t[key].shape
    with pytest.raises(DivergedError):
        run(client_app(spoil=spoiling(range(3, 99), NAN["loss"])), rounds=9, on_divergence="restore")
    assert logged.text.count("back to the state") == 1 + 3


def test_going_back_does_not_give_back_a_privacy_budget(logged):
    class Accountant:
        releases = 0

        def state_dict(self):
            return {"releases": self.releases}

        def load_state_dict(self, state):
            self.releases = state["releases"]

    class Counted(FedAvg):
        def __init__(self):
            super().__init__()
            self.accountant, self.rounds = Accountant(), 0

        def aggregate_train(self, server_round, replies):
            self.accountant.releases += 1
            self.rounds += 1
            return super().aggregate_train(server_round, replies)

    inner = Counted()
    app = client_app(spoil=spoiling((4,), NAN["loss"]))
    run(app, rounds=5, strategy=inner, on_divergence="restore")
    assert (inner.accountant.releases, inner.rounds) == (4, 3)  # rounds 1 to 3 and 5; after round 2, and 5


def test_ignore_only_says_so(logged):
    app = client_app(spoil=spoiling((2,), NAN["statistics"], nodes=(0, 1, 2)))
    strategy, _ = run(app, rounds=3, on_divergence="ignore")
    assert "round 2: the MODEL diverged" in logged.text
    assert strategy.shared["2"].tracked == 3


def test_a_calibration_with_a_mod_that_keeps_statistics_aside():
    from fedbatchnorm.adapters.flower import statistics_mod

    app = ClientApp(mods=[statistics_mod])

    @app.train("calibrate")
    def measure(message, context):
        assert STATISTICS not in message.content
        return calibrate(fbn.convert(cnn()), message, [batch(0, 0, 6)[0]])

    state = initial(wrapped(), app)
    assert state["2.num_batches_tracked"] == 1


def test_a_reply_that_claims_the_mark_in_training_changes_nothing_more():
    def claim(node, answer):
        answer.content[STATISTICS]["calibrated"] = Array(np.array(1))
        return answer

    found, wanted = (run(client_app(spoil=s), rounds=1)[0].shared["2"] for s in (claim, None))
    assert torch.equal(found.mean, wanted.mean)
