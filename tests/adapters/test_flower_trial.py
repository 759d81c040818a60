"""What goes wrong in practice, and what the server says and does then."""

import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import FederatedBatchNormStrategy, NothingTrainedError, load, reply
from fedbatchnorm.adapters.local import LocalGrid

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "examples" / "flower" / "app")]
from fbn_app import client_app as client_of_the_example  # noqa: E402
from fbn_app import server_app as server_of_the_example  # noqa: E402
from flower_clients import arrays, batch, client_app, cnn, metrics, run, run_for_nothing  # noqa: E402


@pytest.fixture
def logged(caplog):
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO, logger="flwr")
    return caplog


def same(found, wanted):
    for name, array in wanted.arrays.items():
        np.testing.assert_array_equal(found.arrays[name].numpy(), array.numpy(), err_msg=name)


def absent(node):
    """In place of an answer of one node, an error."""
    return lambda i, answer: 1 / 0 if i == node else answer


def test_a_client_without_a_batch_counts_for_nothing_and_is_no_fault(logged):
    plain, app = client_app(), ClientApp()

    @app.train()
    def train(message, context):
        if context.node_config["partition-id"] != 2:
            return plain(message, context)
        model = fbn.convert(cnn())
        load(model, message)
        return reply(model, message, {"num-examples": 0, "loss": 0.0}, steps=0)

    strategy, found = run(app, rounds=2, strategy=FedAvg(fraction_evaluate=0.0))
    _, wanted = run(client_app(spoil=absent(2)), rounds=2, strategy=FedAvg(fraction_evaluate=0.0))
    same(found, wanted)
    assert {node: v.reason for node, v in strategy.left_out.items()} == {3: "empty"}
    assert "round 1: node 3 has nothing to add" in logged.text
    assert "round 1: 4 asked, 4 answered, 3 used" in logged.text


def test_the_example_trains_with_a_client_that_has_no_data(logged, monkeypatch):
    from fbn_app import task

    part_of = task.part_of
    monkeypatch.setattr(task, "part_of", lambda *a: part_of(*a)[:0] if a[1] == 2 else part_of(*a))
    config = USUAL | {"rounds": 1}
    server_of_the_example.app(LocalGrid(client_of_the_example.app, 10, config), here(config))
    assert "round 0: statistics calibrated by 9 of 10 nodes" in logged.text
    assert "round 1: node 3 has nothing to add" in logged.text
    assert "10 asked, 10 answered, 9 used" in logged.text
    assert "failed" not in logged.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_metric_that_is_no_number_does_not_discard_good_parameters(value, logged):
    def spoil(node, answer):
        return metrics(answer, accuracy=value if node == 1 else 0.5 + node / 10)

    strategy, found = run(client_app(spoil=spoil), rounds=2)
    _, wanted = run(client_app(), rounds=2)
    same(found, wanted)
    assert strategy.left_out == {}
    assert found.train_metrics_clientapp[1]["accuracy"] == pytest.approx((0.5 + 0.7 + 0.8) / 3)
    assert "round 1: metric accuracy is not finite at node 2" in logged.text


@pytest.mark.parametrize("claim", [2**50, 10**5])
def test_a_claim_of_many_examples_does_not_take_over_the_average(claim, logged):
    """With no limit set: against what the others claim, and what the client has seen."""
    spoil = lambda node, answer: metrics(answer, **{"num-examples": claim}) if node == 1 else answer  # noqa: E731
    strategy, found = run(client_app(spoil=spoil), rounds=2)
    _, wanted = run(client_app(spoil=absent(1)), rounds=2)
    same(found, wanted)
    assert strategy.left_out[2].reason == "count_out_of_range"
    assert "set the server's max_examples" in logged.text


def test_an_honest_client_with_ninety_times_the_data_is_believed():
    strategy, _ = run(client_app(size=lambda node: 180 if node == 1 else 2), rounds=1)
    assert strategy.left_out == {}


class Silent(LocalGrid):
    """A grid in which some nodes never answer."""

    missing = (2, 4)

    def send_and_receive(self, messages, *, timeout=None):
        answers = super().send_and_receive(messages)
        return [answer for answer in answers if answer.metadata.src_node_id not in self.missing]


def start(grid, rounds=1, **options):
    strategy = FederatedBatchNormStrategy(FedAvg(fraction_evaluate=0.0), model=fbn.convert(cnn()), **options)
    return strategy.start(grid, ArrayRecord(cnn().state_dict()), num_rounds=rounds)


def test_nodes_that_did_not_answer_have_a_line(logged):
    start(Silent(client_app(), 4))
    assert "round 1: no answer from nodes 2, 4, 2 of 4 asked" in logged.text
    assert "round 1: 4 asked, 2 answered, 2 used" in logged.text


class Gone(LocalGrid):
    """A grid with nodes that are gone, for which the SuperLink answers in its own name, as Flower's does."""

    def send_and_receive(self, messages, *, timeout=None):
        messages, answers = list(messages), []
        for i, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"message {i}"
            [answer] = super().send_and_receive([message])
            if message.metadata.dst_node_id in (2, 4):
                answer = Message(Error(5, "Node Unavailable"), reply_to=message)
                answer.metadata.__dict__["_src_node_id"] = 1
            answers.append(answer)
        return answers


def test_a_node_that_is_gone_is_named_and_not_the_superlink(logged):
    start(Gone(client_app(), 4))
    for number in (0, 1):
        assert f"round {number}: no answer" not in logged.text
    for node in (2, 4):
        assert f"round 1: node {node} failed: Node Unavailable" in logged.text
    assert "node 1 failed" not in logged.text
    assert "round 1: 4 asked, 2 answered, 2 used" in logged.text


def test_a_round_without_an_answer_says_how_many_were_asked(logged):
    grid = Silent(client_app(), 2)
    grid.missing = (1, 2)
    with pytest.raises(NothingTrainedError, match="no answer from nodes 1, 2"):
        start(grid)
    assert "round 1: 2 asked, 0 answered, 0 used: nothing changes" in logged.text
    assert logged.text.count("2 asked, 0 answered") == 1


def test_a_resumed_run_says_where_it_is_and_a_finished_one_that_it_is(tmp_path, logged):
    file, app = tmp_path / "server.safetensors", client_app()
    run(app, rounds=2, checkpoint=file)
    run(app, rounds=5, checkpoint=file)
    assert f"continuing with round 3 of 5, from {file}" in logged.text
    logged.clear()
    _, result = run(app, rounds=5, checkpoint=file)
    assert f"all 5 rounds are done, says {file}: nothing is trained" in logged.text
    assert result.arrays["2.num_batches_tracked"].numpy() == 5


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: {k: a for k, a in r.items() if k != "6.bias"}, "parameter 6.bias is missing"),
        (lambda r: dict(r) | {"7.bias": Array(np.zeros(3, np.float32))}, "parameter 7.bias was not sent"),
        (lambda r: dict(r) | {"6.bias": Array(np.zeros(3))}, "parameter 6.bias is (3,) of float64, expected"),
    ],
)
def test_other_parameters_than_were_sent_are_named(change, why, logged):
    spoil = lambda node, answer: arrays(answer, change) if node == 1 else answer  # noqa: E731
    strategy, _ = run(client_app(spoil=spoil), rounds=1)
    assert why in strategy.left_out[2].detail
    assert why in logged.text


def test_clients_that_are_not_converted_end_in_an_error(logged):
    """They load all records, and answer as plain clients do: no statistics."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        model = cnn()
        model.load_state_dict(
            {k: v for r in message.content.array_records.values() for k, v in r.to_torch_state_dict().items()}
        )
        model.train()(batch(0, 0, 6)[0])
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 6})}
        return Message(RecordDict(content), reply_to=message)

    with pytest.raises(NothingTrainedError, match="Convert the model of the clients"):
        start(LocalGrid(app, 3), rounds=5)
    assert "[ROUND 2/5]" not in logged.text
    assert logged.text.count("no statistics in the reply") == 3


def test_one_client_that_is_not_converted_is_left_out(logged):
    plain = lambda node, answer: without_statistics(answer) if node == 1 else answer  # noqa: E731
    strategy, _ = run(client_app(spoil=plain), rounds=1)
    assert "the client's model must be converted" in strategy.left_out[2].detail


def without_statistics(answer):
    del answer.content["statistics"]
    return answer


def test_a_run_in_which_everything_fails_ends_in_an_error_with_the_first_reason():
    spoil = lambda node, answer: metrics(answer, **{"num-examples": -1})  # noqa: E731
    _, why = run_for_nothing(client_app(spoil=spoil), rounds=2)
    assert "nothing was trained: in 2 rounds no model came back" in why
    assert "round 1: node 1 left out: count_out_of_range" in why


def here(config):
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)


def usual():
    import tomllib

    project = HERE.parents[1] / "examples" / "flower" / "app" / "pyproject.toml"
    return tomllib.loads(project.read_text())["tool"]["flwr"]["app"]["config"]


USUAL = usual()


def test_the_example_refuses_another_number_of_clients_than_it_was_made_for():
    """Flower simulates two unless it is told otherwise."""
    assert USUAL["min-nodes"] == 10
    config = USUAL | {"wait": 0.0}
    with pytest.raises(RuntimeError, match=r"2 nodes are connected, and min-nodes is 10.*num-supernodes=10"):
        server_of_the_example.app(LocalGrid(client_of_the_example.app, 2, config), here(config))


def test_what_a_callback_gets_is_what_the_log_says(logged):
    events = []
    spoil = lambda node, answer: metrics(answer, **{"num-examples": -1}) if node == 1 else answer  # noqa: E731
    run(client_app(spoil=spoil), rounds=2, on_event=events.append)
    told = [event for event in events if event.kind == "left_out"]
    assert [(e.round, e.client, e.reason) for e in told] == [(r, 2, "count_out_of_range") for r in (1, 2)]
    rounds = [event for event in events if event.kind == "round"]
    assert [dict(e.values)["used"] for e in rounds] == [3, 3]
    assert all("gradient" in e.values for e in rounds)
    assert all(event.text in logged.text for event in events)


def test_a_callback_that_fails_does_not_end_the_run(logged):
    def broken(event):
        raise OSError("the dashboard is away")

    _, result = run(client_app(), rounds=1, on_event=broken)
    assert result.arrays["2.num_batches_tracked"].numpy() == 1
    assert "on_event failed at 'round' of round 1: OSError('the dashboard is away')" in logged.text
    with pytest.raises(ValueError, match="on_event is 7"):
        run(client_app(), on_event=7)


def test_statistics_stay_where_torch_can_read_them():
    """What a server of plain torch makes of the result: a state_dict like any other."""
    _, result = run(client_app(), rounds=1)
    model = cnn()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    assert not torch.equal(model[2].running_mean, torch.zeros(4))


class Recorder:
    """Stands for a dashboard's client: remembers what is called, with what."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **named: self.calls.append((name, args, named))


def test_the_page_s_callbacks_draw_rounds_and_name_who_was_left_out():
    page = (HERE.parents[1] / "docs" / "flower.md").read_text(encoding="utf-8")
    [code] = [c for c in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "wandb" in c]
    found = {}
    exec(code, found)
    spoil = lambda node, answer: metrics(answer, **{"num-examples": -1}) if node == 1 else answer  # noqa: E731
    for name, arguments in (("to_tensorboard", ()), ("to_wandb", ()), ("to_mlflow", ("run 1",))):
        recorder, events = Recorder(), []
        callback = found[name](recorder, *arguments)
        run(client_app(spoil=spoil), rounds=2, on_event=lambda e, c=callback, es=events: es.append(e) or c(e))
        curves = [args for name, args, _ in recorder.calls if name in ("add_scalar", "log", "log_metric")]
        assert "federation/used" in str(curves), name
        said = [args for name, args, named in recorder.calls if name in ("add_text", "set_tag", "alert")]
        alerts = [named for name, _, named in recorder.calls if name == "alert"]
        assert "count_out_of_range" in str(said) + str(alerts), name


def test_library_and_example_ask_for_the_same_versions_of_flower():
    import tomllib

    root = HERE.parents[1]
    ours, app = (
        tomllib.loads((root / file).read_text())["project"]
        for file in ("pyproject.toml", "examples/flower/app/pyproject.toml")
    )
    [wanted] = ours["optional-dependencies"]["flower"]
    [simulated] = app["optional-dependencies"]["simulation"]
    assert simulated.replace("[simulation]", "") == wanted == "flwr>=1.41,<1.43"


def test_how_to_install_is_said_everywhere_in_the_same_way():
    """No package index has fedbatchnorm yet: nobody is told to ask one for it."""
    root = HERE.parents[1]
    files = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "src").rglob("*.py")]
    files += [f for f in (root / "src").rglob("templates/**/*") if f.suffix in (".md", ".in", ".toml")]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"pip install '?fedbatchnorm", text), file
        for place in re.findall(r"pip install '([^'\n]*\[(?:flower|experiments|nvflare|zoo)[^'\n]*)'", text):
            assert place.startswith(("PATH[", ".[", "flwr[")), (file, place)
