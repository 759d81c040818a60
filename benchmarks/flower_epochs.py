"""A quickstart app on Flower with local epochs: as it is, and wrapped with the wrapper's defaults.

    python benchmarks/flower_epochs.py --json results/benchmarks/flower-epochs-cpu.json

Digits, a CNN with 3 BatchNorm layers, ten clients, batches of 32, SGD with momentum 0.9 that is reset in
every round, in one process. Plain is FedAvg over all arrays, BatchNorm's buffers among them.
"""

import itertools
import logging
import os
import time

import torch
import torch.nn.functional as F
from common import arguments, write

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import (
    DivergedError,
    FederatedBatchNormStrategy,
    calibrate,
    load,
    reply,
)
from fedbatchnorm.adapters.local import LocalGrid
from fedbatchnorm.data import datasets, partition
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.recipe import stream

NODES, BATCH, SEEDS = 10, 32, 3
ROUNDS = {1: 30, 5: 12}  # by local epochs
RATES = (0.01, 0.05)
SPLITS = {
    "Dirichlet 0.1": lambda labels, rng: partition.dirichlet(labels, NODES, 0.1, rng),
    "one class each": lambda labels, rng: partition.gamma_similarity(labels, NODES, 0.0, rng),
}


class Task:
    """The data, who holds what, and the first weights, for one seed."""

    def __init__(self, split, seed):
        self.data, self.seed = datasets.load("digits"), seed
        self.parts = SPLITS[split](self.data.train.y.numpy(), stream(seed, "partition"))

    def model(self):
        """Fresh, with the seed's weights."""
        return models.build("cnn16", (1, 8, 8), 10, self.seed)

    def batches(self, client, server_round, epochs):
        """What a client trains on in a round."""
        rng, part = stream(self.seed, "batches", server_round, client), torch.from_numpy(self.parts[client])
        for _ in range(epochs):
            for index in part[torch.from_numpy(rng.permutation(len(part)))].split(BATCH):
                yield self.data.inputs(self.data.train.x[index]), self.data.train.y[index]

    @torch.no_grad()
    def accuracy(self, arrays):
        """On the test set."""
        model = self.model()
        model.load_state_dict(arrays.to_torch_state_dict())
        right = model.eval()(self.data.inputs(self.data.test.x)).argmax(1) == self.data.test.y
        return right.float().mean().item()


def train_locally(model, batches, lr):
    """SGD over the batches; returns the mean loss, the examples and the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model.train()
    total, examples, steps = 0.0, 0, 0
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total, examples, steps = total + loss.item() * len(y), examples + len(y), steps + 1
    return total / examples, examples, steps


def clients(task, epochs, lr, federated):
    """The quickstart app, with what docs/flower.md adds to it if federated."""
    app = ClientApp()

    def batches(message, context, epochs):
        server_round = message.content["config"]["server-round"]
        return task.batches(context.node_config["partition-id"], server_round, epochs)

    @app.train()
    def train(message, context):
        model = task.model()
        if federated:
            load(fbn.convert(model), message)
        else:
            model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loss, examples, steps = train_locally(model, batches(message, context, epochs), lr)
        metrics = {"num-examples": examples, "loss": loss}
        if federated:
            return reply(model, message, metrics, steps=steps)
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    @app.train("calibrate")
    def measure(message, context):
        return calibrate(fbn.convert(task.model()), message, (x for x, _ in batches(message, context, 1)))

    return app


def trained(task, epochs, lr, federated):
    """A run's accuracy after its last round; where it stopped, if it did, with the last good state's."""
    strategy, model = FedAvg(fraction_evaluate=0.0), task.model()
    arrays = ArrayRecord(model.state_dict())
    if federated:
        strategy = FederatedBatchNormStrategy(strategy, model=fbn.convert(model))
    grid = LocalGrid(clients(task, epochs, lr, federated), NODES)
    try:
        result = strategy.start(grid, arrays, num_rounds=ROUNDS[epochs])
    except DivergedError as error:
        return {"accuracy": task.accuracy(error.arrays), "diverged": error.round}
    share = {"gradient": strategy.gradient} if isinstance(strategy, FederatedBatchNormStrategy) else {}
    return {"accuracy": task.accuracy(result.arrays)} | share


def main():
    args = arguments(__doc__, rounds=SEEDS)  # the times that every contender takes its turn are seeds
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    rows = []
    for seed, split, epochs, lr in itertools.product(range(args.rounds), SPLITS, ROUNDS, RATES):
        row = {"seed": seed, "split": split, "epochs": epochs, "lr": lr}
        start = time.monotonic()
        for name, switch in (("plain", False), ("ours", True)):
            row[name] = trained(Task(split, seed), epochs, lr, switch)
        rows.append(row)
        print(f"{time.monotonic() - start:.0f} s: {row}", flush=True)
        # After every pair, so that a run that is cut short leaves what it has.
        write(args, {"rounds": ROUNDS, "seeds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
