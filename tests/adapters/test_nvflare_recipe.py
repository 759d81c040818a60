"""Jobs of NVFlare: the recipe as it is written down and built again, and the controller in this process."""

import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.fuel.utils.component_builder import ComponentBuilder

import fedbatchnorm as fbn
from fedbatchnorm.adapters.events import Event
from fedbatchnorm.adapters.nvflare import FederatedBatchNormAggregator
from fedbatchnorm.adapters.nvflare_recipe import FederatedBatchNormFedAvg, FederatedBatchNormRecipe

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from nvflare_clients import (  # noqa: E402
    TENSORS,
    Clients,
    aggregator_of,
    as_arrays,
    assert_statistics,
    cnn,
    exact_statistics,
    with_params,
)
from nvflare_federation import KILLED, Federation, failure  # noqa: E402

SCRIPT = str(HERE / "nvflare_quickstart" / "client.py")
MODEL = {"class_path": "torch.nn.BatchNorm1d", "args": {"num_features": 3}}


class Builder(ComponentBuilder):
    """NVFlare's own way from a job's file to objects."""

    def get_module_scanner(self):
        return None


class OnEvent:
    """A callback that can be written into a job."""

    def __call__(self, event: Event):
        pass


def recipe_of(aggregator=None, **options):
    known = {"name": "job", "model": MODEL, "min_clients": 2, "num_rounds": 3, "train_script": SCRIPT}
    return FederatedBatchNormRecipe(aggregator=aggregator, **known | options)


def built(recipe, folder):
    """The controller as a server builds it from the job that the recipe writes."""
    recipe.export(str(folder))
    config = json.loads((folder / "job" / "app" / "config" / "config_fed_server.json").read_text())
    [workflow] = config["workflows"]
    assert not (folder / "job" / "app" / "custom" / "fedbatchnorm").exists()  # it is installed
    return Builder().build_component(workflow)


def test_a_server_builds_what_the_recipe_was_given(tmp_path):
    given = FederatedBatchNormAggregator(
        aggregator=fbn.defense("nnm+median", 1),
        weight="num-examples",
        aggregation_weights={"site-1": 2.0},
        population=100,
        quorum=3,
        max_count={"": 5.0},
        nonnegative=[""],
        gradient=0.5,
        checkpoint=Path("/tmp/server.safetensors"),
        on_event=OnEvent(),
    )
    controller = built(recipe_of(given, clients_per_round=5, round_timeout=7), tmp_path)
    assert isinstance(controller, FederatedBatchNormFedAvg)
    assert (controller.num_clients, controller.num_rounds, controller.round_timeout) == (5, 3, 7)
    found = controller.aggregator
    for name in ("weight", "aggregation_weights", "population"):
        assert getattr(found, name) == getattr(given, name), name
    for name in ("aggregator", "quorum", "max_count", "gradient", "limit", "checkpoint", "calibrate"):
        assert getattr(found.settings, name) == getattr(given.settings, name), name
    assert isinstance(found.settings.on_event, OnEvent) or type(found.settings.on_event).__name__ == "OnEvent"
    assert found.settings.model.num_features == 3


def test_a_recipe_without_settings_has_the_defaults_and_its_model(tmp_path):
    controller = built(recipe_of(), tmp_path)
    assert (controller.num_clients, controller.round_timeout) == (0, 0)
    assert controller.aggregator.settings.quorum == 1
    assert controller.aggregator.settings.model.num_features == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"aggregator": object()}, TypeError, r"FederatedBatchNormAggregator\(wrapped=...\)"),
        ({"exclude_vars": "bn"}, ValueError, "give `convert` skip="),
        ({"aggregation_weights": {"a": 1.0}}, ValueError, "give aggregation_weights to Federated"),
        ({"clients_per_round": 0}, ValueError, "clients_per_round is 0"),
        ({"round_timeout": -1}, ValueError, "round_timeout is -1"),
        ({"on_event": print}, ValueError, "on_event is a function, which cannot be written into a job"),
        ({"weight": lambda model: 1.0}, ValueError, "weight is a function"),
        ({"rule": lambda rows, f: rows[0]}, ValueError, "the rule of aggregator is a function"),
    ],
)
def test_what_cannot_be_in_a_job_is_named(options, error, message):
    given = {}
    if "rule" in options:
        given = {"aggregator": fbn.defense(options.pop("rule"), 1)}
    given |= {name: options.pop(name) for name in ("on_event", "weight") if name in options}
    aggregator = options.pop("aggregator", None) or FederatedBatchNormAggregator(**given)
    with pytest.raises(error, match=message):
        recipe_of(aggregator, **options)


@pytest.mark.parametrize("form", [None, TENSORS], ids=["numpy", "tensors"])
def test_a_job_calibrates_and_then_trains_its_rounds(form, caplog):
    clients = Clients(size=lambda i: 3 + 4 * i, **({"form": form} if form else {}))
    with caplog.at_level(logging.INFO):
        found = Federation(clients, aggregator_of(calibrate=True), rounds=3).run()
    assert found.panics == []
    assert "round 0: statistics calibrated by 4 of 4 clients" in caplog.text
    assert "round 3: 4 asked, 4 answered, 4 used" in caplog.text
    assert [int(model["2.num_batches_tracked"]) for model in found.saved] == [1, 2, 3, 4]


def test_a_job_is_exact():
    clients = Clients(size=lambda i: 3 + 4 * i)
    found = Federation(clients, aggregator_of(), rounds=5).run()
    assert_statistics(found.saved[-1], exact_statistics(clients, 5))


def test_nvflare_s_own_fedavg_will_do_and_its_first_round_is_the_calibration():
    found = Federation(Clients(), aggregator_of(calibrate=True), rounds=3, controller=FedAvg).run()
    assert found.panics == []
    ours = Federation(Clients(), aggregator_of(calibrate=True), rounds=2).run()
    for name, value in ours.saved[-1].items():
        np.testing.assert_array_equal(found.saved[-1][name], value, err_msg=name)


def test_nvflare_alone_loses_the_variance_between_clients():
    """What all this is for: the same clients, plain, under NVFlare's own average."""

    class Plain(Clients):
        def answer(self, client, sent):
            model = cnn()
            model.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in sent.params.items()})
            self.train(client, model)
            params = {k: v.numpy() for k, v in model.state_dict().items()}
            return FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": 1})

    alone, ours = Plain(count=2), Clients(count=2)
    plain = Federation(alone, None, rounds=1, controller=FedAvg).run().saved[-1]
    found = Federation(ours, aggregator_of(), rounds=1).run().saved[-1]
    union = torch.cat([x.double() for x in ours.seen["2"]]).transpose(0, 1).flatten(1)
    wanted = 0.9 + 0.1 * union.var(1).numpy()
    np.testing.assert_allclose(found["2.running_var"], wanted, rtol=1e-6)
    assert np.abs(plain["2.running_var"] - wanted).max() > 5e-3
    assert plain["2.num_batches_tracked"].dtype != np.int64


def test_clients_that_fail_or_are_killed_are_passed_over(caplog):
    def spoil(number, client, answer):
        if number == 2 and client == 0:
            return failure()
        return KILLED if number == 3 and client in (1, 2) else answer

    with caplog.at_level(logging.INFO):
        found = Federation(Clients(), aggregator_of(quorum=2), rounds=3, spoil=spoil, round_timeout=9).run()
    assert found.panics == []
    assert found.wire.timeout == 9
    why = "EXECUTION_EXCEPTION; the log of site-1 says why"
    assert f"round 2: client site-1 failed: {why}" in caplog.text
    assert "round 3: no answer from clients site-2, site-3, 2 of 4 asked" in caplog.text
    assert "round 3: 4 asked, 2 answered, 2 used" in caplog.text


def test_below_the_quorum_the_model_stays_and_the_job_goes_on():
    def spoil(number, client, answer):
        return KILLED if number == 2 and client else answer

    found = Federation(Clients(), aggregator_of(quorum=2), rounds=3, spoil=spoil).run()
    assert found.panics == []
    first, second, third = found.saved
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)
    assert not np.array_equal(third["0.bias"], second["0.bias"])


def test_a_cohort_is_drawn_and_corrected(caplog):
    with caplog.at_level(logging.INFO):
        found = Federation(Clients(), aggregator_of(), rounds=2, num_clients=2).run()
    assert "round 2: 2 asked, 2 answered, 2 used" in caplog.text
    assert found.panics == []


def test_a_job_in_which_nothing_is_trained_fails_with_the_reason():
    def spoil(number, client, answer):
        return with_params(answer, **{"0_bias": np.zeros(1, "f4")})

    found = Federation(Clients(), aggregator_of(), rounds=2, spoil=spoil).run()
    [panic] = found.panics
    assert "nothing was trained: in 2 rounds no model came back" in panic
    assert "parameter 0.bias is (1,)" in panic


def test_a_job_that_diverges_fails_and_leaves_the_last_good_model():
    def spoil(number, client, answer):
        return with_params(answer, **{"0_bias": np.full(4, np.nan, "f4")}) if number > 2 else answer

    found = Federation(Clients(), aggregator_of(), rounds=9, spoil=spoil).run()
    [panic] = found.panics
    assert "4 of 4 replies are not finite" in panic
    for name, value in found.saved[0].items():
        np.testing.assert_array_equal(found.saved[-1][name], value, err_msg=name)
    assert all(np.isfinite(value).all() for value in found.saved[-1].values())


def test_a_server_that_was_killed_continues_to_the_same_bits(tmp_path, caplog):
    file = tmp_path / "server.safetensors"
    whole = Federation(Clients(), aggregator_of(calibrate=True), rounds=4).run().saved[-1]
    clients = Clients()

    def spoil(number, client, answer):
        if number == 3 and client == 2 and not caplog.records:
            raise KeyboardInterrupt
        return answer

    class Server(FederatedBatchNormFedAvg):
        def control_flow(self, abort_signal, fl_ctx):
            self.fl_ctx, self.abort_signal = fl_ctx, abort_signal
            self.run()  # what is raised is not caught: as if the process ended there

    caplog.set_level(logging.CRITICAL)
    first = Federation(
        clients, aggregator_of(calibrate=True, checkpoint=file), 4, spoil=spoil, controller=Server
    )
    with pytest.raises(KeyboardInterrupt):
        first.run()
    clients.at, numbers = dict.fromkeys(range(4), 1), []  # they train the open round again

    def noted(number, client, answer):
        numbers.append(number)
        return answer

    found = Federation(clients, aggregator_of(calibrate=True, checkpoint=file), 4, spoil=noted).run()
    assert found.panics == []
    assert numbers == [3] * 4 + [4] * 4  # by which a client may choose its batches
    for name, value in whole.items():
        np.testing.assert_array_equal(found.saved[-1][name], value, err_msg=name)
    again = Federation(Clients(), aggregator_of(checkpoint=file), 4).run()  # nothing is left of it
    assert len(again.saved) == 1
    np.testing.assert_array_equal(again.saved[0]["0.bias"], whole["0.bias"])
    assert as_arrays(cnn().state_dict()).keys() == again.saved[0].keys()
