"""Clients and runs that the tests of the Flower adapter share."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import (
    STATISTICS,
    FederatedBatchNormStrategy,
    NothingTrainedError,
    load,
    reply,
)
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
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for _ in range(steps):
            at = rounds[node] = rounds.get(node, -1) + 1
            x, y = batch(node, at, size(node))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
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


def run_for_nothing(app, nodes=4, rounds=1, strategy=None, make=cnn, **options):
    """A run in which no round changes anything: the wrapped strategy, and what was wrong first."""
    strategy = FederatedBatchNormStrategy(strategy or FedAvg(), model=fbn.convert(make()), **options)
    with pytest.raises(NothingTrainedError) as raised:
        strategy.start(LocalGrid(app, nodes), ArrayRecord(make().state_dict()), num_rounds=rounds)
    for name, value in make().state_dict().items():
        np.testing.assert_array_equal(strategy.session.arrays[name], value.numpy(), err_msg=name)
    return strategy, str(raised.value)


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


def arrays(answer, change):
    """The answer with another record of parameters."""
    answer.content["arrays"] = ArrayRecord(change(answer.content["arrays"]))
    return answer


def renamed(answer, record, name):
    answer.content[name] = answer.content[record]
    return without(answer, record)


def metrics(answer, **values):
    answer.content["metrics"] = MetricRecord(dict(answer.content["metrics"]) | values)
    return answer


def steps(answer, value):
    answer.content[STATISTICS]["steps"] = Array(value)
    return answer


def with_config(answer):
    answer.content["arrays"] = ConfigRecord({"mine": 1})
    return answer
