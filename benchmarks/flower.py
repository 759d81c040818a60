"""On Flower, in one process: plain BatchNorm under FedAvg, and federated BatchNorm, side by side.

    python benchmarks/flower.py --json results/benchmarks/flower-cpu.json

Digits, ten clients with one class each (gamma 0), the app in examples/flower/app. Accuracy over rounds for
each seed, the simulator's beside it, and the bytes that a round sends to a client and back.
"""

import json
import logging
import os
import sys
import tempfile
import tomllib
from pathlib import Path

import torch
from common import arguments, write

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")
APP = Path(__file__).parents[1] / "examples" / "flower" / "app"
sys.path.insert(0, str(APP))
from fbn_app import client_app, server_app, task  # noqa: E402
from flwr.app import ArrayRecord, Context, Message, RecordDict  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402

import fedbatchnorm as fbn  # noqa: E402
from fedbatchnorm.adapters.flower import FederatedBatchNormStrategy, reply  # noqa: E402
from fedbatchnorm.adapters.local import LocalGrid  # noqa: E402
from fedbatchnorm.data import partition  # noqa: E402
from fedbatchnorm.simulation import models  # noqa: E402
from fedbatchnorm.simulation.recipe import Recipe, stream  # noqa: E402
from fedbatchnorm.simulation.simulator import Simulation  # noqa: E402

USUAL = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
NODES, SEEDS = 10, 3


def on_flower(**settings):
    """Accuracy by round."""
    with tempfile.TemporaryDirectory() as folder:
        config = USUAL | settings | {"min-nodes": NODES, "output": f"{folder}/model.safetensors"}
        server = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
        server_app.app(LocalGrid(client_app.app, NODES, config), server)
        return json.loads(Path(folder, "model.json").read_text())


def simulated(rounds, seed):
    """Accuracy after the last round in the simulator, from the same weights and batches."""
    data = task.load_data("digits")
    parts = partition.gamma_similarity(data.train.y.numpy(), NODES, 0.0, stream(seed, "partition"))
    recipe = Recipe(scheme="fbn", clients=NODES, batch=USUAL["batch"], rounds=rounds, seed=seed)
    simulation = Simulation(task.new_model(USUAL | {"seed": seed}), data, parts, recipe)
    while simulation.step < rounds:
        simulation.round()
    return simulation.evaluate().accuracy


def traffic(name):
    """Bytes to a client and back in a round: FedAvg's own, and with federated BatchNorm."""
    model = models.build(name, (3, 32, 32), 10, seed=0)
    own = ArrayRecord(model.state_dict()).count_bytes()
    strategy = FederatedBatchNormStrategy(FedAvg(), model=fbn.convert(model))
    strategy._split(ArrayRecord(model.state_dict()))
    down = ArrayRecord(dict(strategy._sent)).count_bytes() + ArrayRecord(strategy._statistics()).count_bytes()
    answer = reply(model, Message(RecordDict({"arrays": ArrayRecord()}), 1, "train"), {"num-examples": 1})
    up = sum(record.count_bytes() for record in answer.content.array_records.values())
    return {"model": name, "fedavg": 2 * own, "fbn": down + up}


def main():
    args = arguments(__doc__, rounds=USUAL["rounds"])
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows = []
    for seed in range(SEEDS):
        row = {"seed": seed, "simulator": simulated(args.rounds, seed)}
        for name, switch in (("FedAvg", False), ("FBN", True)):
            row[name] = on_flower(fbn=switch, rounds=args.rounds, seed=seed)
        rows.append(row)
        last = {name: f"{100 * row[name][str(args.rounds)]:.1f}" for name in ("FedAvg", "FBN")}
        print(f"seed {seed}: {last}, simulator {100 * row['simulator']:.1f}", flush=True)
    sizes = [traffic(name) for name in ("cnn", "resnet18")]
    for size in sizes:
        print(f"{size['model']}: {size['fbn'] / size['fedavg']:.4f} x FedAvg's bytes")
    write(args, {"rounds": args.rounds, "rows": rows, "traffic": sizes})


if __name__ == "__main__":
    main()
