"""NVFlare alone and with federated BatchNorm, in NVFlare's simulator: the app that `fedbatchnorm new` writes.

    python benchmarks/nvflare_accuracy.py --json results/benchmarks/nvflare-cpu.json

Digits, ten clients with one class each (gamma 0), a local epoch a round, momentum 0.9 made anew in each.
Beside them the library's own simulation, from the same weights and with the same batches; and the bytes of
tensors and statistics that a round sends to a client and back.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import arguments, write
from nvflare.app_common.abstract.fl_model import FLModel

import fedbatchnorm as fbn
from fedbatchnorm.adapters.nvflare import FederatedBatchNormAggregator, reply
from fedbatchnorm.adapters.scaffold import write_app
from fedbatchnorm.data import datasets, partition
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.recipe import Recipe, stream
from fedbatchnorm.simulation.simulator import Simulation

CLIENTS, SEEDS, ROUNDS, LR = 10, 3, 15, 0.05
# In place of the app's own batches: those of a simulation, round 0 being the pass that calibrates.
TWIN = """

import functools, sys
sys.path.insert(0, "{here}")
from nvflare_accuracy import simulation

@functools.cache
def _twin(clients, epochs, lr, seed):
    from model import model_for
    return simulation(model_for("digits", seed), clients, 1000, epochs, lr, seed).federation

def batches_of(args, client, server_round, epochs):
    data, twin = load_data(args.dataset), _twin(args.clients, args.epochs, args.lr, args.seed)
    if server_round == 0 and not args.plain:
        index, sizes = twin.survey_batches(0, 64)[1][client][None], [None]
    else:
        work = twin.work(server_round - (not args.plain))
        index, sizes = work.index[client], work.sizes[client]
    for row, size in zip(index, sizes, strict=True):
        chosen = torch.as_tensor(row[:size])
        if len(chosen):
            yield data.inputs(data.train.x[chosen]), data.train.y[chosen]
"""


def simulation(model, clients, rounds, epochs, lr, seed):
    """The library's own simulation of what the app does."""
    data = datasets.load("digits")
    parts = partition.gamma_similarity(data.train.y.numpy(), clients, 0.0, stream(seed, "partition"))
    how = {"clients": clients, "batch": 32, "rounds": rounds, "local_epochs": epochs, "lr": lr}
    how |= {"momentum": 0.9, "precision": "float32", "gradient": "auto", "limit": "auto", "seed": seed}
    return Simulation(model, data, parts, Recipe(scheme="fbn", algorithm="fedavg", calibrate=True, **how))


def written(folder):
    """The app in this folder, with the batches of the simulation."""
    write_app("nvflare-app", folder)
    task = folder / "task.py"
    task.write_text(task.read_text() + TWIN.replace("{here}", str(Path(__file__).parent)))
    return folder


def on_nvflare(folder, *flags, clients=CLIENTS, rounds=ROUNDS, lr=LR, seed=0):
    """Run the app; returns the accuracy that it prints, and the folder of the run."""
    settings = {"clients": clients, "rounds": rounds, "lr": lr, "seed": seed}
    command = [sys.executable, "job.py", *(f"--{name}={value}" for name, value in settings.items()), *flags]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True)  # noqa: S603
    if found.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{found.stdout[-4000:]}\n{found.stderr[-4000:]}")
    accuracy = re.search(r"test accuracy ([\d.]+)%", found.stdout)
    return float(accuracy.group(1)) / 100, folder / "workspace" / ("plain" if "--plain" in flags else "fbn")


def traffic(name):
    """Bytes to a client and back in a round: NVFlare's own, and with federated BatchNorm."""
    model = models.build(name, (3, 32, 32), 10, seed=0)
    own = sum(value.nbytes for value in model.state_dict().values())
    aggregator = FederatedBatchNormAggregator(model=model, calibrate=False)
    aggregator.start(model.state_dict())
    sent = aggregator.request()
    down = sum(value.nbytes for value in sent.params.values()) + len(json.dumps(sent.meta))
    answer = reply(fbn.convert(model), FLModel(params=model.state_dict(), meta=sent.meta), steps=1)
    up = sum(value.nbytes for value in answer.params.values()) + len(answer.meta["fedbatchnorm"]["update"])
    return {"model": name, "nvflare": 2 * own, "fbn": down + up}


def main():
    args = arguments(__doc__, rounds=ROUNDS)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = written(Path(place) / "app")
        sys.path.insert(0, str(folder))
        from model import model_for

        for seed in range(SEEDS):
            start, row = time.monotonic(), {"seed": seed}
            twin = simulation(model_for("digits", seed), CLIENTS, args.rounds, 1, LR, seed)
            while twin.step < args.rounds:
                twin.round()
            row["simulator"] = twin.evaluate().accuracy
            row["plain"], _ = on_nvflare(folder, "--plain", rounds=args.rounds, seed=seed)
            row["ours"], _ = on_nvflare(folder, rounds=args.rounds, seed=seed)
            rows.append(row)
            print(f"{time.monotonic() - start:.0f} s: {row}", flush=True)
            setting = {"clients": CLIENTS, "rounds": args.rounds, "lr": LR}
            write(args, setting | {"rows": rows, "traffic": [traffic(name) for name in ("cnn", "resnet18")]})


if __name__ == "__main__":
    main()
