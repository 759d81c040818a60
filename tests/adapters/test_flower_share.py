"""The share of BatchNorm's gradient on Flower: the server decides, and clients do as they are told."""

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import fedbatchnorm as fbn
from fedbatchnorm.adapters.checkpoint import write_checkpoint
from fedbatchnorm.adapters.flower import DivergedError, FederatedBatchNormStrategy, load, statistics_mod
from fedbatchnorm.adapters.local import LocalGrid
from fedbatchnorm.adapters.memory import plain_state
from fedbatchnorm.aggregation.drift import FIRST_SHARE, MOST

sys.path.insert(0, str(Path(__file__).parent))
from flower_clients import client_app, cnn, metrics, run, run_for_nothing, steps

RECORD = "fedbatchnorm"


def wrapped(**options):
    return FederatedBatchNormStrategy(FedAvg(), model=fbn.convert(cnn()), **options)


def told(strategy, into, convert=None, mods=()):
    """One round; of every client, what came in the record and what its layers were set to by `load`."""
    app, plain = ClientApp(), client_app()

    @app.train(mods=list(mods))
    def train(message, context):
        model = fbn.convert(cnn(), **(convert or {}))
        load(model, message)
        into.append((dict(message.content.config_records.get(RECORD, {})), model[2].gradient, model[5].limit))
        return plain._registered_funcs["train.default"](message, context)

    @app.evaluate()
    def evaluate(message, context):
        assert RECORD not in message.content
        return plain._registered_funcs["evaluate.default"](message, context)

    strategy.start(LocalGrid(app, 4), ArrayRecord(cnn().state_dict()), num_rounds=1)
    return into


def test_clients_take_what_the_server_sends():
    assert told(wrapped(), []) == [({"gradient": FIRST_SHARE, "limit": "auto"}, FIRST_SHARE, "auto")] * 4
    fixed = wrapped(gradient=0.25, limit=None)
    assert told(fixed, [], {"limit": 3.0}) == [({"gradient": 0.25}, 0.25, 3.0)] * 4
    assert fixed.gradient == 0.25


def test_none_sends_nothing_and_leaves_the_model_as_it_is():
    strategy = wrapped(gradient=None)
    assert told(strategy, [], {"gradient": 0.3, "limit": 4.0}) == [({}, 0.3, 4.0)] * 4
    assert strategy.gradient is None


def test_mods_do_not_see_the_record_and_clients_take_it_all_the_same():
    """Flower's mods for privacy refuse a message with two records of settings."""
    assert told(wrapped(), [], mods=[statistics_mod]) == [({}, FIRST_SHARE, "auto")] * 4


@pytest.mark.parametrize("robust", [False, True])
def test_the_next_share_is_that_of_next_gradient_with_the_merge_s_steps(robust):
    """Clients see 6, 12, 18 and 24 examples in 1, 2, 3 and 9 steps: 5 on average, 2.5 in the middle."""
    unlike = lambda node, answer: steps(answer, np.array((1, 2, 3, 9)[node]))  # noqa: E731
    grid = LocalGrid(client_app(lambda node: 6 * (node + 1), spoil=unlike), 4)
    strategy = wrapped(aggregator=fbn.defense("median", f=1) if robust else None)
    arrays, share, seen = ArrayRecord(cnn().state_dict()), FIRST_SHARE, []
    for server_round in (1, 2, 3):
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        before = dict(strategy.shared)
        assert messages[0].content[RECORD]["gradient"] == share
        arrays, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
        assert strategy.result.steps == (2.5 if robust else 5.0)
        share = fbn.next_gradient(share, before, strategy.shared, steps=strategy.result.steps)
        assert strategy.gradient == share
        seen.append(share)
    assert len({FIRST_SHARE, *seen}) == 4


def test_clients_learn_in_which_layers_they_are_alike(tmp_path):
    app, plain, sent, shares = ClientApp(), client_app(lambda node: 6 * (node + 1)), [], []

    @app.train()
    def train(message, context):
        model = fbn.convert(cnn())
        load(model, message)
        sent.append(dict(message.content[RECORD]))
        shares.append([model[2].gradient, model[5].gradient])
        return plain._registered_funcs["train.default"](message, context)

    def start(rounds, file):
        inner = FedAvg(fraction_evaluate=0.0)
        strategy = FederatedBatchNormStrategy(
            inner, model=fbn.convert(cnn()), calibrate=False, checkpoint=file
        )
        strategy.start(LocalGrid(app, 4), ArrayRecord(cnn().state_dict()), num_rounds=rounds)
        return strategy

    strategy = start(1, tmp_path / "half")
    assert shares == [[FIRST_SHARE] * 2] * 4
    known = dict(strategy.result.between)
    assert set(known) == {"2", "5"}
    start(2, tmp_path / "half")
    want = [pytest.approx(1 - min(1 - strategy.gradient, 30 * known[name])) for name in ("2", "5")]
    assert shares[4:] == [want] * 4
    assert sent[4]["layers"] == [*known]
    assert sent[4]["between"] == [*known.values()]
    before = len(shares)
    start(2, tmp_path / "whole")
    assert shares[before + 4 :] == shares[4:8]  # stopped and continued, or at one go


def test_a_round_that_changes_nothing_does_not_change_the_share():
    strategy, _ = run_for_nothing(client_app(), rounds=2, quorum=5)
    assert strategy.gradient == FIRST_SHARE


def test_frozen_layers_tell_nothing_about_drift():
    """Parameters are learned and the round counts, but no layer has seen a value."""

    def frozen():
        model = cnn()
        for layer in (model[2], model[5]):
            layer.train = lambda mode=True, layer=layer: layer
            layer.training = False
        return model

    strategy, result = run(client_app(make=frozen), rounds=1)
    assert not np.array_equal(result.arrays["0.weight"].numpy(), cnn().state_dict()["0.weight"].numpy())
    assert strategy.gradient == FIRST_SHARE


def test_the_share_of_a_run_that_was_stopped_continues(tmp_path):
    whole, _ = run(client_app(), rounds=4)
    app, file = client_app(), tmp_path / "server.safetensors"
    half, _ = run(app, rounds=2, checkpoint=file)
    assert half.gradient not in (FIRST_SHARE, whole.gradient)
    resumed, _ = run(app, rounds=2, checkpoint=file)  # nothing is left to do
    assert resumed.gradient == half.gradient
    resumed, _ = run(app, rounds=4, checkpoint=file)
    assert resumed.gradient == whole.gradient
    fixed, _ = run(app, rounds=4, checkpoint=file, gradient=0.5)  # a setting may be changed
    assert fixed.gradient == 0.5


def test_a_checkpoint_from_before_there_was_a_share_starts_with_the_first(tmp_path):
    file, inner = tmp_path / "server.safetensors", FedAvg()
    write_checkpoint(file, inner, ArrayRecord(cnn().state_dict()), 2, plain_state(inner))
    strategy, _ = run(client_app(), rounds=2, checkpoint=file)
    assert strategy.gradient == FIRST_SHARE


def exploding(rounds):
    """The loss of all clients is not finite in these rounds."""
    asked = {}

    def spoil(node, answer):
        asked[node] = asked.get(node, 0) + 1
        return metrics(answer, loss=float("inf")) if asked[node] in rounds else answer

    return spoil


def test_restoring_holds_as_much_as_can_be(tmp_path):
    file = tmp_path / "server.safetensors"
    options = {"on_divergence": "restore", "rounds": 3}
    strategy, _ = run(client_app(spoil=exploding({3})), checkpoint=file, **options)
    assert strategy.gradient == MOST
    assert run(client_app(), rounds=3, checkpoint=file)[0].gradient == MOST
    fixed, _ = run(client_app(spoil=exploding({3})), gradient=0.5, **options)
    assert fixed.gradient == 0.5


def test_the_good_state_has_its_share(tmp_path):
    file = tmp_path / "server.safetensors"
    good, _ = run(client_app(), rounds=2)
    with pytest.raises(DivergedError) as raised:
        run(client_app(spoil=exploding({4})), rounds=5, checkpoint=file)
    assert raised.value.good_round == 2
    assert raised.value.gradient == good.gradient
    assert run(client_app(), rounds=2, checkpoint=file)[0].gradient == good.gradient


def test_every_start_begins_anew():
    strategy, arrays = wrapped(), ArrayRecord(cnn().state_dict())
    shares = []
    for _ in range(2):
        strategy.start(LocalGrid(client_app(), 4), arrays, num_rounds=1)
        shares.append(strategy.gradient)
    assert shares[0] == shares[1] != FIRST_SHARE


def test_the_summary_says_the_share(caplog):
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO, logger="flwr")
    wrapped().summary()
    wrapped(gradient=None).summary()
    assert "Share of BatchNorm's gradient: 0.8, follows drift; limit auto" in caplog.text
    assert "Share of BatchNorm's gradient: as clients have it" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient": 1.5}, "gradient is 1.5; .*'auto'"),
        ({"gradient": "automatic"}, "gradient is 'automatic'"),
        ({"gradient": True}, "gradient is True"),
        ({"limit": 0.5}, "limit is 0.5"),
        ({"limit": "none"}, "limit is 'none'"),
        ({"strategy": FedAvg(configrecord_key=RECORD)}, "configrecord_key is 'fedbatchnorm'"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        FederatedBatchNormStrategy(**{"strategy": FedAvg()} | settings)
