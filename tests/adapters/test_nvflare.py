"""Federated BatchNorm on NVFlare without its processes: exact in every form, whoever misbehaves."""

import copy
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_opt.pt.lazy_tensor_dict import LazyTensorDict
from safetensors.torch import save_file
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm.adapters.nvflare import (
    DivergedError,
    FederatedBatchNormAggregator,
    NothingTrainedError,
    load,
    reply,
)
from fedbatchnorm.adapters.settings import Settings

sys.path.insert(0, str(Path(__file__).parent))
from nvflare_clients import (
    NUMPY,
    TENSORS,
    Clients,
    aggregator_of,
    as_arrays,
    assert_statistics,
    batch,
    begun,
    change,
    cnn,
    exact_statistics,
    one_round,
    run,
    told,
    with_params,
)


def unequal(client):
    return 3 + 4 * client


FORMS = [(form, transfer) for form in (NUMPY, TENSORS) for transfer in ("FULL", "DIFF")]


@pytest.mark.parametrize(("form", "transfer"), FORMS)
def test_statistics_are_those_of_batch_norm_fed_with_what_all_clients_saw(form, transfer):
    clients = Clients(size=unequal, form=form, transfer=transfer)
    aggregator, params = run(clients, rounds=6)
    assert_statistics(params, exact_statistics(clients, 6))
    assert list(params) == list(cnn().state_dict())
    for name in ("2", "5"):
        assert params[f"{name}.num_batches_tracked"].dtype == np.int64
        assert int(params[f"{name}.num_batches_tracked"]) == 6
    assert aggregator.left_out == {}
    state = {name: torch.from_numpy(np.array(value)) for name, value in params.items()}
    fbn.convert(cnn()).load_state_dict(state)


def test_parameters_are_the_mean_by_steps_whatever_the_form():
    results = {key: run(Clients(form=key[0], transfer=key[1]), rounds=2)[1] for key in FORMS}
    clients, sent = Clients(), begun(aggregator_of(), Clients()).request()
    answers = [clients.answer(i, sent) for i in range(4)]
    first = one_round(begun(aggregator_of(), Clients()), Clients())
    for name in ("0.weight", "6.bias"):
        wanted = np.mean([answer.params[name].astype(np.float64) for answer in answers], axis=0)
        np.testing.assert_allclose(first.params[name], wanted, rtol=1e-6, atol=1e-8)
        for params in results.values():
            np.testing.assert_allclose(params[name], results[FORMS[0]][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", [NUMPY, TENSORS])
def test_the_model_comes_back_in_the_kind_in_which_it_was_sent(form):
    aggregator = begun(aggregator_of(), Clients(form=form))
    found = one_round(aggregator, Clients(form=form))
    kind = np.ndarray if form == NUMPY else torch.Tensor
    assert {type(value) for value in found.params.values()} == {kind}
    assert found.params_type == ParamsType.FULL
    assert found.metrics.keys() == {"loss"}


def test_the_order_of_clients_does_not_matter_to_the_last_bit():
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        clients = Clients(size=unequal)
        aggregator = begun(aggregator_of(), clients)
        found = [one_round(aggregator, clients, order=order) for _ in range(3)][-1]
        results.append(as_arrays(found.params))
    for name, value in results[0].items():
        np.testing.assert_array_equal(value, results[1][name], err_msg=name)


def test_several_local_steps_weigh_as_one_update_on_all_that_the_round_saw():
    clients = Clients(count=2, steps=3)
    _, params = run(clients, rounds=1)
    union = torch.cat([x.double() for x in clients.seen["2"]]).transpose(0, 1).flatten(1)
    beta = 1 - 0.9**3
    np.testing.assert_allclose(params["2.running_mean"], beta * union.mean(1), rtol=1e-6)
    np.testing.assert_allclose(params["2.running_var"], 1 - beta + beta * union.var(1), rtol=1e-6)


def test_round_0_calibrates_and_trains_nothing():
    clients = Clients(count=3, size=unequal, lr=0.0)
    aggregator = begun(aggregator_of(calibrate=True), clients, rounds=1)
    sent = aggregator.request()
    assert sent.meta["fedbatchnorm"]["calibrate"]
    found = as_arrays(one_round(aggregator, clients).params)
    for name, value in cnn().state_dict().items():
        if "running" not in name and "tracked" not in name:
            np.testing.assert_array_equal(found[name], value.numpy(), err_msg=name)
    plain = cnn().train()
    for layer in (plain[2], plain[5]):
        layer.momentum = 1.0
    plain(
        torch.cat([batch(i, 0, unequal(i))[0] for i in range(3)])
    )  # the first layer's input is the same for all; the second one's depends on the batch
    np.testing.assert_allclose(found["2.running_mean"], plain[2].running_mean, rtol=1e-5)
    np.testing.assert_allclose(found["2.running_var"], plain[2].running_var, rtol=1e-5)
    assert not aggregator.request().meta["fedbatchnorm"]["calibrate"]
    assert one_round(aggregator, clients).metrics


def test_clients_that_do_not_calibrate_are_passed_over(caplog):
    clients = Clients(count=2)
    with caplog.at_level(logging.WARNING):
        aggregator = begun(aggregator_of(calibrate=True), clients)
        one_round(aggregator, clients, spoil=lambda i, found: told(found, calibrated=0) and None)
    assert "the calibration was skipped" in caplog.text
    assert "wants_calibration" in caplog.text
    assert one_round(aggregator, clients).metrics


def test_the_server_decides_how_much_of_the_gradient_clients_take():
    aggregator = begun(aggregator_of(gradient=0.6, limit=2.0), Clients())
    model = fbn.convert(cnn())
    load(model, aggregator.request())
    assert {layer.gradient for layer in (model[2], model[5])} == {0.6}
    assert {layer.limit for layer in (model[2], model[5])} == {2.0}
    aggregator, clients = begun(aggregator_of(), Clients()), Clients()
    assert aggregator.gradient == 0.8
    one_round(aggregator, clients)
    settings = aggregator.request().meta["fedbatchnorm"]["settings"]
    assert settings["gradient"] == aggregator.gradient != 0.8
    assert set(settings["layers"]) == {"2", "5"}
    assert begun(aggregator_of(gradient=None), Clients()).request().meta["fedbatchnorm"]["settings"] == {}


# What one client sends, and the reason for which it is left out.
BAD = {
    "NaN in a parameter": (lambda a: with_params(a, **{"0_bias": np.full(4, np.nan, "f4")}), "non_finite"),
    "infinity in a parameter": (
        lambda a: with_params(a, **{"6_bias": np.full(3, np.inf, "f4")}),
        "non_finite",
    ),
    "NaN in a mean": (lambda a: change(a, mean=torch.full((4,), torch.nan).double()), "non_finite"),
    "infinity in a variance": (lambda a: change(a, var=torch.full((4,), torch.inf).double()), "non_finite"),
    "negative variance": (lambda a: change(a, var=torch.full((4,), -1.0).double()), "impossible_moments"),
    "wrong shape of a parameter": (lambda a: with_params(a, **{"0_bias": np.zeros(1, "f4")}), "schema"),
    "wrong type of a parameter": (lambda a: with_params(a, **{"0_bias": np.zeros(4, "f8")}), "schema"),
    "wrong shape of a mean": (lambda a: change(a, mean=torch.zeros(1).double()), "schema"),
    "a missing parameter": (lambda a: with_params(a, **{"0_bias": None}), "schema"),
    "a parameter that was not sent": (lambda a: with_params(a, mine=np.zeros(1, "f4")), "schema"),
    "a huge count": (lambda a: change(a, count=10**9), "count_out_of_range"),
    "a huge weight": (lambda a: meta(a, NUM_STEPS_CURRENT_ROUND=2**60), "count_out_of_range"),
    "a weight that is no number": (lambda a: meta(a, NUM_STEPS_CURRENT_ROUND="many"), "schema"),
    "no weight": (lambda a: meta(a, NUM_STEPS_CURRENT_ROUND=None), "schema"),
    "a negative weight": (lambda a: meta(a, NUM_STEPS_CURRENT_ROUND=-1), "count_out_of_range"),
    "a NaN as weight": (lambda a: meta(a, NUM_STEPS_CURRENT_ROUND=float("nan")), "count_out_of_range"),
    "too many steps": (lambda a: told(a, steps=10**9), "count_out_of_range"),
    "steps that are no number": (lambda a: told(a, steps="two"), "schema"),
    "no statistics": (lambda a: meta(a, fedbatchnorm=None), "schema"),
    "statistics that are no message": (lambda a: told(a, update=b"rubbish"), "schema"),
    "statistics that are an array": (lambda a: told(a, update=np.zeros(3)), "schema"),
    "parameters as homomorphic encryption sends them": (
        lambda a: params(a, dict.fromkeys(a.params, b"a ciphertext")),
        "schema",
    ),
    "an encrypted parameter": (lambda a: with_params(a, **{"0_bias": object()}), "schema"),
    "no parameters by name": (lambda a: params(a, [np.zeros(3)]), "schema"),
    "the same answer twice": (lambda a: [a, copy.deepcopy(a)], "duplicate"),
}


def meta(answer, **values):
    answer.meta |= values
    return answer


def params(answer, value):
    answer.params = value
    return answer


@pytest.mark.parametrize("what", BAD)
def test_a_bad_reply_is_left_out_of_both_and_the_round_goes_on(what, caplog):
    """The result is that of the others alone, bit for bit."""
    spoiled, reason = BAD[what]
    with caplog.at_level(logging.WARNING):
        aggregator, found = run(
            Clients(), rounds=1, spoil=lambda i, answer: spoiled(answer) if i == 2 else answer
        )
    _, wanted = run(Clients(), rounds=1, spoil=lambda i, answer: None if i == 2 else answer)
    assert {name: verdict.reason for name, verdict in aggregator.left_out.items()} == {"site-3": reason}
    assert f"client site-3 left out: {reason}" in caplog.text
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_replay_of_the_round_before_is_stale():
    clients, kept = Clients(), {}

    def replay(client, answer):
        if client != 1:
            return answer
        old = kept.get(client)
        kept[client] = copy.deepcopy(answer)
        return old or answer

    aggregator, _ = run(clients, rounds=2, spoil=replay)
    assert {name: v.reason for name, v in aggregator.left_out.items()} == {"site-2": "stale_round"}


def test_a_client_without_a_batch_is_set_aside():
    def nothing(client, answer):
        return meta(told(answer, steps=0), NUM_STEPS_CURRENT_ROUND=0) if client == 0 else answer

    aggregator, _ = run(Clients(), rounds=1, spoil=nothing)
    assert {name: v.reason for name, v in aggregator.left_out.items()} == {"site-1": "empty"}


def test_below_the_quorum_nothing_changes_and_the_log_says_so(caplog):
    clients = Clients()
    aggregator = begun(aggregator_of(quorum=3), clients)
    with caplog.at_level(logging.WARNING):
        found = one_round(aggregator, clients, spoil=lambda i, a: a if i < 2 else None)
    assert "4 asked, 2 answered, 2 used, 3 are needed: nothing changes" in caplog.text
    assert "no answer from clients site-3, site-4, 2 of 4 asked" in caplog.text
    for name, value in cnn().state_dict().items():
        np.testing.assert_array_equal(found.params[name], value.numpy(), err_msg=name)
    assert not np.array_equal(one_round(aggregator, clients).params["0.bias"], found.params["0.bias"])


def test_a_client_that_fails_is_named_and_passed_over(caplog):
    clients = Clients()
    aggregator = begun(aggregator_of(), clients)
    aggregator.reset_stats()
    aggregator.ask(clients.names)
    sent = aggregator.request()
    for client in range(3):
        aggregator.accept_model(clients.answer(client, sent))
    aggregator.fail("site-4", "EXECUTION_EXCEPTION")
    with caplog.at_level(logging.WARNING):
        aggregator.aggregate_model()
    assert "client site-4 failed: EXECUTION_EXCEPTION" in caplog.text
    assert "no answer" not in caplog.text


def test_byzantine_clients_do_not_get_through_a_robust_rule():
    def lie(client, answer):
        return change(answer, mean=torch.full((4,), 50.0).double()) if client == 5 else answer

    rule = fbn.defense("nnm+median", 1)
    _, robust = run(Clients(count=6), rounds=1, spoil=lie, aggregator=rule)
    _, naive = run(Clients(count=6), rounds=1, spoil=lie)
    _, honest = run(Clients(count=6), rounds=1, aggregator=rule)
    assert np.abs(robust["2.running_mean"] - honest["2.running_mean"]).max() < 0.2
    assert np.abs(naive["2.running_mean"] - honest["2.running_mean"]).max() > 0.5


class Median(ModelAggregator):
    """The median of the parameters, as an aggregator of a user's own; keeps what it has seen."""

    def __init__(self, returns=ParamsType.FULL):
        super().__init__()
        self.returns, self.models = returns, []

    def accept_model(self, model):
        self.models.append(model)

    def aggregate_model(self):
        if self.returns is None:
            return None
        stack = {k: np.stack([m.params[k] for m in self.models]) for k in self.models[0].params}
        median = {name: np.median(values, axis=0).astype(np.float32) for name, values in stack.items()}
        if self.returns == ParamsType.DIFF:
            start = cnn().state_dict()
            median = {name: value - start[name].numpy() for name, value in median.items()}
        return FLModel(params_type=self.returns, params=median)

    def reset_stats(self):
        self.models = []


@pytest.mark.parametrize("transfer", ["FULL", "DIFF"])
def test_a_wrapped_aggregator_sees_parameters_alone_and_good_replies_alone(transfer):
    wrapped, clients = Median(), Clients(size=unequal, transfer=transfer)

    def nan(client, answer):
        return with_params(answer, **{"0_bias": np.full(4, np.nan, "f4")}) if client == 1 else answer

    _, found = run(clients, rounds=1, spoil=nan, wrapped=wrapped)
    statistics = [name for name in cnn().state_dict() if "running" in name or "tracked" in name]
    assert [model.meta["client_name"] for model in wrapped.models] == ["site-1", "site-3", "site-4"]
    for model in wrapped.models:
        assert list(model.params) == [name for name in cnn().state_dict() if name not in statistics]
        assert model.params_type == ParamsType.FULL
        assert "fedbatchnorm" not in model.meta
    np.testing.assert_allclose(
        found["0.bias"], np.median([m.params["0.bias"] for m in wrapped.models], axis=0), rtol=1e-6
    )


def test_a_wrapped_aggregator_may_return_a_difference_or_nothing(caplog):
    _, full = run(Clients(), rounds=1, wrapped=Median())
    _, diff = run(Clients(), rounds=1, wrapped=Median(ParamsType.DIFF))
    np.testing.assert_allclose(full["0.weight"], diff["0.weight"], atol=1e-7)
    with caplog.at_level(logging.WARNING):
        aggregator, kept = run(Clients(), rounds=1, wrapped=Median(None))
    assert "returned no parameters: nothing changes" in caplog.text
    np.testing.assert_array_equal(kept["2.running_mean"], np.zeros(4, "f4"))
    assert aggregator.shared["2"].tracked == 0


def mean_of(weights):
    clients = Clients()
    sent = begun(aggregator_of(), clients).request()
    rows = [clients.answer(i, sent).params["0.bias"].astype(np.float64) for i in range(4)]
    return np.average(rows, axis=0, weights=weights)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [1, 1, 1, 1]),
        ({"weight": "num-examples"}, [10, 20, 30, 40]),
        ({"weight": lambda model: 1 + int(model.meta["client_name"][-1])}, [2, 3, 4, 5]),
        ({"aggregation_weights": {"site-2": 3.0}}, [1, 3, 1, 1]),
        ({"weight": "num-examples", "aggregation_weights": {"site-1": 0.5}}, [5, 20, 30, 40]),
    ],
    ids=["steps", "examples", "function", "by client", "examples and by client"],
)
def test_any_weighting(options, weights):
    def examples(client, answer):
        answer.metrics["num-examples"] = 10 * (client + 1)
        return answer

    _, found = run(Clients(), rounds=1, spoil=examples, **options)
    np.testing.assert_allclose(found["0.bias"], mean_of(weights), rtol=1e-6)


def test_metrics_come_back_as_weighted_means_and_other_kinds_are_passed_over():
    def more(client, answer):
        odd = {"auc": np.float32(client), "confusion": {"a": 1}, "name": "x", "flag": torch.tensor(1.5)}
        answer.metrics = odd
        return answer

    clients = Clients()
    found = one_round(begun(aggregator_of(), clients), clients, spoil=more)
    assert found.metrics == {"auc": 1.5, "flag": 1.5}


def test_a_whole_state_dict_in_place_of_parameters_will_do():
    """As Lightning sends it: the client's own statistics do not get through."""

    def whole(client, answer):
        extra = {"2.running_var": np.full(4, 1e9, "f4"), "2.num_batches_tracked": np.array(7)}
        answer.params = dict(answer.params) | extra
        return answer

    _, found = run(Clients(), rounds=1, spoil=whole)
    _, wanted = run(Clients(), rounds=1)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_tensors_on_the_disk_are_read_where_they_lie(tmp_path):
    def to_disk(client, answer):
        folder = tmp_path / str(client)
        folder.mkdir()
        save_file({k: v.contiguous() for k, v in answer.params.items()}, folder / "t.safetensors")
        lazy = LazyTensorDict({k: (str(folder / "t.safetensors"), k) for k in answer.params}, str(folder))
        answer.params = {name: lazy.make_lazy_ref(name) for name in answer.params}
        return answer

    _, found = run(Clients(form=TENSORS), rounds=1, spoil=to_disk)
    _, wanted = run(Clients(form=TENSORS), rounds=1)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_bfloat16_is_refused_with_words():
    aggregator = aggregator_of()
    state = {name: value.bfloat16() if value.dim() else value for name, value in cnn().state_dict().items()}
    with pytest.raises(TypeError, match=r"0\.weight is in bfloat16.*exchange it in float32"):
        aggregator.start(state)


def test_a_cohort_is_corrected_to_all_clients():
    _, corrected = run(Clients(count=2), rounds=1, population=10)
    _, plain = run(Clients(count=2), rounds=1, population=None)
    assert corrected["2.running_var"].mean() > plain["2.running_var"].mean()
    np.testing.assert_array_equal(corrected["2.running_mean"], plain["2.running_mean"])
    clients, aggregator = (
        Clients(count=2),
        aggregator_of(),
    )  # with "connected" ten are, of which two are asked
    aggregator.handle_event(EventType.START_RUN, context(Engine(list(range(10)))))
    found = one_round(begun(aggregator, clients), clients)
    np.testing.assert_array_equal(found.params["2.running_var"], corrected["2.running_var"])


def test_a_model_that_diverges_stops_the_run_and_the_last_good_one_is_kept():
    clients = Clients(count=3)
    aggregator = begun(aggregator_of(), clients)
    good = [as_arrays(one_round(aggregator, clients).params) for _ in range(2)]

    def nan(client, answer):
        return with_params(answer, **{"0_bias": np.full(4, np.nan, "f4")})

    def three_rounds():
        for _ in range(3):
            one_round(aggregator, clients, spoil=nan)

    with pytest.raises(DivergedError, match="3 of 3 replies are not finite"):
        three_rounds()
    for name, value in aggregator.params().items():
        np.testing.assert_array_equal(value, good[0][name], err_msg=name)


def test_clients_that_are_not_converted_end_the_run_with_words():
    with pytest.raises(NothingTrainedError, match="Convert the model of the clients"):
        run(Clients(), rounds=1, spoil=lambda i, answer: meta(answer, fedbatchnorm=None))


def test_a_server_without_the_aggregator_ends_a_client_with_words():
    model, received = fbn.convert(cnn()), FLModel(params=cnn().state_dict())
    load(model, received)  # for an evaluation, say
    with pytest.raises(RuntimeError, match="FederatedBatchNormRecipe"):
        reply(model, received, steps=1)


def test_a_run_continues_from_its_checkpoint_to_the_same_bits(tmp_path):
    file = tmp_path / "server.safetensors"
    _, whole = run(Clients(), rounds=4)
    clients = Clients()
    first = begun(aggregator_of(checkpoint=file), clients)
    assert first.start(as_arrays(cnn().state_dict()), 4) == 4
    for _ in range(2):
        one_round(first, clients)
    second = aggregator_of(checkpoint=file, calibrate=True)  # which is not made when a run continues
    assert second.start(as_arrays(cnn().state_dict()), 4) == 2
    for _ in range(2):
        found = one_round(second, clients)
    for name, value in whole.items():
        np.testing.assert_array_equal(found.params[name], value, err_msg=name)
    third = aggregator_of(checkpoint=file)
    assert third.start(as_arrays(cnn().state_dict()), 4) == 0


def test_a_model_without_statistics_is_averaged():
    def linear():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    with pytest.warns(UserWarning, match="no BatchNorm layer"):
        _, found = run(Clients(make=linear), rounds=2)
    assert not np.array_equal(found["1.bias"], linear()[1].bias.detach())


def test_without_a_model_statistics_are_found_by_their_names():
    aggregator = begun(FederatedBatchNormAggregator(calibrate=False), Clients())
    assert aggregator.shared.keys() == {"2", "5"}
    assert aggregator.shared["5"].momentum == 0.1  # the default, as nothing says 0.3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quorum": 0}, ValueError, "quorum is 0"),
        ({"population": "all"}, ValueError, "population is 'all'.*'connected'"),
        ({"wrapped": object()}, TypeError, "wrapped is a object; it must be a ModelAggregator"),
        ({"settings": Settings(), "quorum": 1}, ValueError, "give settings or quorum, not both"),
        ({"model": {"args": {}}}, ValueError, 'without "class_path"'),
        ({"momentum": 2.0}, ValueError, "momentum"),
    ],
)
def test_settings_that_cannot_be_are_named(options, error, message):
    with pytest.raises(error, match=message):
        FederatedBatchNormAggregator(**options)


def test_an_aggregator_that_knows_no_model_says_so():
    with pytest.raises(RuntimeError, match=r"call start\(model.state_dict\(\)\) first"):
        aggregator_of().aggregate_model()


class Engine:
    """As much of NVFlare's engine as a handler of events sees."""

    def __init__(self, clients):
        self.clients, self.fired = clients, []

    def get_clients(self):
        return self.clients

    def fire_event(self, event_type, fl_ctx):
        self.fired.append(event_type)


def context(engine, **props):
    fl_ctx = FLContext()
    fl_ctx.put("__engine__", engine, private=True, sticky=False)
    for key, value in props.items():
        fl_ctx.set_prop(key, value, private=True, sticky=False)
    return fl_ctx


def task(number, rounds):
    model = FLModel(params=as_arrays(cnn().state_dict()), current_round=number, total_rounds=rounds)
    return FLModelUtils.to_shareable(model)


def test_any_controller_of_nvflare_gets_its_model_amended_on_its_way_to_clients():
    """FedAvg and ScatterAndGather fire this event; nothing else is needed of them."""
    clients, engine = Clients(), Engine(list("abcdef"))
    aggregator = aggregator_of(calibrate=True)
    learnable = make_model_learnable(as_arrays(cnn().state_dict()), {})
    aggregator.handle_event(EventType.START_RUN, context(engine, **{AppConstants.GLOBAL_MODEL: learnable}))
    for number in range(3):
        shareable = task(number, 3)
        aggregator.reset_stats()
        for name in clients.names:
            fl_ctx = context(engine, **{AppConstants.TRAIN_SHAREABLE: shareable})
            peer = FLContext()
            peer.put("__identity_name__", name, private=False, sticky=False)
            fl_ctx.set_peer_context(peer)
            aggregator.handle_event(AppEventType.BEFORE_TRAIN_TASK, fl_ctx)
        sent = FLModelUtils.from_shareable(shareable)
        assert sent.meta["fedbatchnorm"]["calibrate"] == (number == 0)
        assert from_shareable(shareable).data.keys() == cnn().state_dict().keys()
        for client in range(clients.count):
            aggregator.accept_model(clients.answer(client, sent))
        found = aggregator.aggregate_model()
    assert int(found.params["2.num_batches_tracked"]) == 3
    assert engine.fired == []


def test_what_is_wrong_when_a_round_begins_ends_the_job():
    engine = Engine([])
    aggregator = aggregator_of()
    without = {k: v for k, v in as_arrays(cnn().state_dict()).items() if k != "2.running_var"}
    learnable = make_model_learnable(without, {})
    aggregator.handle_event(EventType.START_RUN, context(engine, **{AppConstants.GLOBAL_MODEL: learnable}))
    fl_ctx = context(engine, **{AppConstants.TRAIN_SHAREABLE: task(0, 1)})
    aggregator.handle_event(AppEventType.BEFORE_TRAIN_TASK, fl_ctx)
    assert engine.fired == [EventType.FATAL_SYSTEM_ERROR]
