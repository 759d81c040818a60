"""On Flower, in one process: plain BatchNorm under FedAvg, and federated BatchNorm, side by side.

    python benchmarks/flower.py --json results/benchmarks/flower-cpu.json

Digits, ten clients with one class each (gamma 0), the paper's recipe: one step a round with dampened
momentum, which stays with the client. Accuracy over rounds for each seed, the simulator's beside it, and the
bytes that a round sends to a client and back.
"""

import logging
import os

import torch
import torch.nn.functional as F
from common import arguments, write

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import FederatedBatchNormStrategy, load, reply
from fedbatchnorm.adapters.local import LocalGrid
from fedbatchnorm.data import datasets, partition
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.federation import draw
from fedbatchnorm.simulation.recipe import Recipe, learning_rate, stream
from fedbatchnorm.simulation.simulator import Simulation

NODES, SEEDS, ROUNDS, BATCH = 10, 3, 300, 10


class Task:
    """The data, who holds what, and the recipe, for one seed."""

    def __init__(self, rounds, seed):
        self.data = datasets.load("digits")
        labels, rng = self.data.train.y.numpy(), stream(seed, "partition")
        self.parts = partition.gamma_similarity(labels, NODES, 0.0, rng)
        self.recipe = Recipe(scheme="fbn", clients=NODES, batch=BATCH, rounds=rounds, seed=seed)

    def model(self):
        """Fresh, with the seed's weights."""
        return models.build("mlp", (1, 8, 8), 10, self.recipe.seed)

    def batch(self, client, step):
        """What a client trains on in a round."""
        index = draw(self.parts, BATCH, stream(self.recipe.seed, "batches", step))[client]
        return self.data.inputs(self.data.train.x[index]), self.data.train.y[index]

    @torch.no_grad()
    def accuracy(self, model):
        """On the test set."""
        predicted = model.eval()(self.data.inputs(self.data.test.x)).argmax(1)
        return (predicted == self.data.test.y).float().mean().item()


def clients(task, federated):
    """An app whose clients take one step a round, with momentum of their own."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        step, model = message.content["config"]["server-round"] - 1, task.model()
        if federated:
            load(fbn.convert(model, gradient=0.0), message)  # the paper's, as in the simulator
        else:
            model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        state, beta = context.state.array_records, task.recipe.momentum
        velocity = state["velocity"].to_torch_state_dict() if "velocity" in state else {}
        x, y = task.batch(context.node_config["partition-id"], step)
        loss = F.cross_entropy(model.train()(x), y)
        loss.backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                velocity[name] = beta * velocity.get(name, 0) + (1 - beta) * p.grad
                p -= learning_rate(task.recipe, step) * velocity[name]
        context.state["velocity"] = ArrayRecord(velocity)
        metrics = {"num-examples": len(y), "loss": loss.item()}
        if federated:
            return reply(model, message, metrics)
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    return app


def on_flower(rounds, seed, federated):
    """Accuracy by round."""
    task, curve = Task(rounds, seed), {}
    model, strategy = task.model(), FedAvg(fraction_evaluate=0.0)
    arrays = ArrayRecord(model.state_dict())
    if federated:
        strategy = FederatedBatchNormStrategy(
            strategy, model=fbn.convert(model), calibrate=False, steps=1, gradient=None
        )

    def evaluate(server_round, arrays):
        model.load_state_dict(arrays.to_torch_state_dict())
        if server_round % max(1, rounds // 30) == 0:
            curve[str(server_round)] = task.accuracy(model)

    grid = LocalGrid(clients(task, federated), NODES)
    strategy.start(grid, arrays, num_rounds=rounds, evaluate_fn=evaluate)
    return curve


def simulated(rounds, seed):
    """Accuracy after the last round in the simulator, from the same weights and batches."""
    task = Task(rounds, seed)
    simulation = Simulation(task.model(), task.data, task.parts, task.recipe)
    while simulation.step < rounds:
        simulation.round()
    return simulation.evaluate().accuracy


def traffic(name):
    """Bytes to a client and back in a round: FedAvg's own, and with federated BatchNorm."""
    model = models.build(name, (3, 32, 32), 10, seed=0)
    own = ArrayRecord(model.state_dict()).count_bytes()
    strategy = FederatedBatchNormStrategy(FedAvg(), model=fbn.convert(model))
    arrays, grid = ArrayRecord(model.state_dict()), LocalGrid(None, 2)
    content = strategy.configure_train(1, arrays, ConfigRecord(), grid)[0].content
    down = sum(record.count_bytes() for record in content.array_records.values())
    answer = reply(model, Message(RecordDict({"arrays": ArrayRecord()}), 1, "train"), {"num-examples": 1})
    up = sum(record.count_bytes() for record in answer.content.array_records.values())
    return {"model": name, "fedavg": 2 * own, "fbn": down + up}


def main():
    args = arguments(__doc__, rounds=ROUNDS)
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows = []
    for seed in range(SEEDS):
        row = {"seed": seed, "simulator": simulated(args.rounds, seed)}
        for name, switch in (("FedAvg", False), ("FBN", True)):
            row[name] = on_flower(args.rounds, seed, switch)
        rows.append(row)
        last = {name: f"{100 * row[name][str(args.rounds)]:.1f}" for name in ("FedAvg", "FBN")}
        print(f"seed {seed}: {last}, simulator {100 * row['simulator']:.1f}", flush=True)
    sizes = [traffic(name) for name in ("cnn", "resnet18")]
    for size in sizes:
        print(f"{size['model']}: {size['fbn'] / size['fedavg']:.4f} x FedAvg's bytes")
    write(args, {"rounds": args.rounds, "rows": rows, "traffic": sizes})


if __name__ == "__main__":
    main()
