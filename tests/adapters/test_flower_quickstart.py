"""From a plain Flower app to federated BatchNorm: what docs/flower.md says to change is all it takes."""

import importlib
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import FederatedBatchNormStrategy, NothingTrainedError, numpy_client_app
from fedbatchnorm.adapters.local import LocalGrid

HERE = Path(__file__).parent
PLAIN = HERE / "quickstart"
PAGE = (HERE.parents[1] / "docs" / "flower.md").read_text(encoding="utf-8")
DIFFS = dict(re.findall(r"^<!-- (\w+\.py) -->\n```diff\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))


def patched(text, diff):
    """A file after a diff without line numbers: what it takes away must be there, once."""
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the app with some of its files changed; returns the result of the server's strategy."""
    monkeypatch.syspath_prepend(tmp_path)

    def start(*changed, nodes=5, model=None):
        name = f"app_{len(list(tmp_path.iterdir()))}"
        shutil.copytree(PLAIN, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        for file in changed:
            path = tmp_path / name / file
            path.write_text(patched(path.read_text(), DIFFS[file]))
        torch.manual_seed(0)
        client, server = (importlib.import_module(f"{name}.{part}_app") for part in ("client", "server"))
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        server.app(LocalGrid(model or client.app, nodes), context)
        return context.result

    yield start
    for name in [name for name in sys.modules if name.startswith("app_")]:
        del sys.modules[name]


@pytest.fixture
def logged(caplog):
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO, logger="flwr")
    return caplog


def test_the_page_s_changes_are_all_that_a_plain_app_needs(run, logged):
    assert set(DIFFS) == {"task.py", "client_app.py", "server_app.py"}
    plain = run()
    assert "statistics calibrated" not in logged.text
    result = run(*DIFFS)
    assert "round 0: statistics calibrated by 5 of 5 nodes" in logged.text
    assert logged.text.count("5 asked, 5 answered, 5 used") == 3
    assert "left out" not in logged.text
    ours, theirs = (r.arrays.to_torch_state_dict() for r in (result, plain))
    assert ours["norm.num_batches_tracked"] == 1 + 3 * 8  # the calibration, and 8 steps a round
    assert not torch.equal(ours["norm.running_mean"], theirs["norm.running_mean"])
    task = sys.modules["app_1.task"]
    net = task.Net()
    net.load_state_dict(ours)
    right = task.accuracy(net, task.load_data(0, 5)[1])
    assert right > 0.3
    # Clients evaluate with the merged statistics, which do not travel with the arrays.
    assert result.evaluate_metrics_clientapp[3]["accuracy"] == pytest.approx(right, abs=1e-6)


def test_a_client_that_is_not_converted_and_a_server_that_is_not_wrapped_end_in_an_error(run, logged):
    with pytest.raises(InconsistentMessageReplies):  # Flower's own: it refuses two records of arrays
        run("task.py", "client_app.py")
    assert "wrap the server's strategy in FederatedBatchNormStrategy" in logged.text
    with pytest.raises(NothingTrainedError, match="in 3 rounds no model came back") as raised:
        run("server_app.py")  # its clients load arrays alone, which raises
    assert "Missing key" in str(raised.value)
    assert "let clients call load" in str(raised.value)


class Client(NumPyClient):
    """As in Flower's earlier quickstarts."""

    def __init__(self, task, partition, partitions):
        self.net, self.task = fbn.convert(task.Net()), task
        self.loader, self.test = task.load_data(partition, partitions)

    def set_weights(self, arrays):
        names = self.net.state_dict().keys()
        state = {k: torch.from_numpy(v) for k, v in zip(names, arrays, strict=True)}
        self.net.load_state_dict(state)

    def weights(self):
        return [value.numpy() for value in self.net.state_dict().values()]

    def fit(self, parameters, config):
        assert config["server-round"] >= 1
        self.set_weights(parameters)
        loss, steps = self.task.train_locally(self.net, self.loader, lr=0.05)
        return self.weights(), len(self.loader.dataset), {"loss": loss, "steps": steps}

    def evaluate(self, parameters, config):
        self.set_weights(parameters)
        right = self.task.accuracy(self.net, self.test)
        return 1 - right, len(self.test.dataset), {"accuracy": right}


def numpy_app(base, wrap=lambda client: client, **options):
    def client_fn(context):
        task = importlib.import_module(f"{base}.task")
        return wrap(Client(task, context.node_config["partition-id"], context.node_config["num-partitions"]))

    return numpy_client_app(client_fn, **options)


@pytest.mark.parametrize("wrap", [lambda client: client, lambda client: client.to_client()])
def test_numpy_clients_get_what_clients_of_the_message_api_get(run, wrap, logged):
    wanted = run(*DIFFS)
    batches = {"batches": lambda client: (x for x, _ in client.loader)}
    found = run(*DIFFS, model=numpy_app("app_1", wrap, **batches))
    assert "left out" not in logged.text
    assert logged.text.count("statistics calibrated by 5 of 5 nodes") == 2
    ours, theirs = (r.arrays.to_torch_state_dict() for r in (found, wanted))
    assert ours["norm.num_batches_tracked"] == theirs["norm.num_batches_tracked"]
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0.5, atol=0.1)  # other batches
    assert found.evaluate_metrics_clientapp[3]["accuracy"] > 0.5


class Forgetful(Client):
    def fit(self, parameters, config):
        arrays, examples, metrics = super().fit(parameters, config)
        return arrays, examples, {"loss": metrics["loss"]}


class Brief(Client):
    def fit(self, parameters, config):
        arrays, examples, metrics = super().fit(parameters, config)
        return arrays[1:], examples, metrics


class Wrong(Client):
    def fit(self, parameters, config):
        return {}


class Elsewhere(Client):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.network, self.net = self.net, None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Forgetful, "fit's metrics have no 'steps'"),
        (Brief, "fit returned 8 arrays; the model's state_dict has 9"),
        (Wrong, "fit must return a list of arrays, the number of examples, and a dict of metrics"),
        (Elsewhere, "a Elsewhere has no attribute model or net"),
    ],
)
def test_a_numpy_client_is_told_what_is_missing(kind, why, run):
    def client_fn(context):
        task = importlib.import_module("app_0.task")
        return kind(task, context.node_config["partition-id"], context.node_config["num-partitions"])

    with pytest.raises(NothingTrainedError, match=re.escape(why)):
        run(*DIFFS, model=numpy_client_app(client_fn))


def test_a_client_fn_that_returns_something_else_is_told_so():
    app = numpy_client_app(lambda context: object())
    strategy = FederatedBatchNormStrategy(FedAvg(), model=fbn.convert(torch.nn.BatchNorm1d(2)))
    state = ArrayRecord(torch.nn.BatchNorm1d(2).state_dict())
    with pytest.raises(NothingTrainedError, match="client_fn returned a object, expected a NumPyClient"):
        strategy.start(LocalGrid(app, 2), state, num_rounds=1)
