"""What FBN adds to a client's training step and to the server, as ratios in one run.

    python benchmarks/exchange.py            # CPU
    python benchmarks/exchange.py --device cuda

A step is forward, loss, backward and SGD; `collect` and `load_statistics` come after a step, as with one
local step in a round, which is where they weigh most. `merge` takes the updates of 50 clients; beside it
Flower averages the parameters of the same model, and a plain loop over layers and clients does what `merge`
does, without its checks. Contenders take turns, and each turn begins with another one. On a machine that
others use too, OMP_NUM_THREADS=1 measures the time that the process itself had.
"""

import statistics
import time

import torch
from common import arguments, clock, keep_memory, ratio, write
from flwr.server.strategy.aggregate import aggregate
from networks import densenet121, mobilenet_v2
from torch import nn

import fedbatchnorm as fbn

CASES = {
    "DenseNet-121": (densenet121, [(8, 3, 64, 64), (32, 3, 32, 32)]),
    "MobileNetV2": (mobilenet_v2, [(8, 3, 64, 64), (32, 3, 32, 32)]),
}
CLIENTS = 50
WARM_UP = 2


class Client:
    """A model that takes a step when it is called."""

    def __init__(self, build, shape, device, gradient=None):
        torch.manual_seed(0)
        model = build()
        self.model = (model if gradient is None else fbn.convert(model, gradient=gradient)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(shape, device=device)
        self.labels = torch.randint(1000, shape[:1], device=device)
        self.device = device

    def step(self):
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.labels).backward()
        self.optimizer.step()

    def exchange(self, shared):
        update = fbn.collect(self.model)
        fbn.load_statistics(self.model, shared)
        return update


def seconds(work, device="cpu"):
    now = clock(device)
    start = now()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return now() - start


def in_turns(contenders, rounds, device="cpu"):
    """Name -> times of all rounds."""
    times, names = {name: [] for name in contenders}, list(contenders)
    for i in range(rounds + WARM_UP):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            taken = seconds(contenders[name], device)
            if i >= WARM_UP:
                times[name].append(taken)
    return times


def measure_steps(build, shape, device, rounds):
    plain, federated, held = (Client(build, shape, device, gradient=g) for g in (None, 0, 0.7))
    shared = fbn.statistics(federated.model)
    exchanges = []

    def step_and_exchange():
        federated.step()
        if device == "cuda":
            torch.cuda.synchronize()
        exchanges.append(seconds(lambda: federated.exchange(shared), device))

    contenders = {"BatchNorm": plain.step, "FBN": step_and_exchange, "share": held.step}
    times = in_turns(contenders, rounds, device)
    exchanges = exchanges[WARM_UP:]
    times["FBN"] = [t - e for t, e in zip(times["FBN"], exchanges, strict=True)]
    return times | {"exchange": exchanges}


def merged_by_loops(shared, updates):
    """The exact merge, a layer and a client at a time; no checks."""
    after = {}
    for name, running in shared.items():
        seen = [update[name] for update in updates]
        total = sum(m.count for m in seen)
        mean = sum(m.count / total * m.mean for m in seen)
        var = sum(m.count / total * (m.var + (m.mean - mean).square()) for m in seen)
        bessel = total / (total - 1)
        beta = running.momentum
        after[name] = (
            ((1 - beta) * running.mean + beta * mean).float(),
            ((1 - beta) * running.var + beta * bessel * var).float(),
        )
    return after


def measure_merge(build, rounds):
    model = fbn.convert(build())
    shared = fbn.statistics(model)
    updates = []
    for i in range(CLIENTS):
        torch.manual_seed(i)
        layers = {
            name: fbn.Moments(100 + i, torch.randn(len(r.mean)).double(), torch.rand(len(r.mean)).double())
            for name, r in shared.items()
        }
        updates.append(fbn.Update(layers, round=0, id=i))
    arrays = [p.detach().numpy() for p in model.parameters()]
    parameters = [([a.copy() for a in arrays], 100 + i) for i in range(CLIENTS)]
    return in_turns(
        {
            "merge": lambda: fbn.merge(shared, updates),
            "loops": lambda: merged_by_loops(shared, updates),
            "Flower": lambda: aggregate(parameters),
        },
        rounds,
    )


def main():
    args = arguments(__doc__, rounds=15)
    rows, merges = [], []
    print(
        f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, {args.rounds} rounds"
    )
    for name, (build, shapes) in CASES.items():
        for shape in shapes:
            times = measure_steps(build, shape, args.device, args.rounds)
            row = {
                "model": name,
                "shape": list(shape),
                "batchnorm_ms": 1e3 * statistics.median(times["BatchNorm"]),
                "step": ratio(times, "FBN", "BatchNorm"),
                "share_step": ratio(times, "share", "BatchNorm"),
                "exchange_ms": 1e3 * statistics.median(times["exchange"]),
                "exchange": ratio(times, "exchange", "BatchNorm"),
            }
            rows.append(row)
            print(*(f"{v:.3f}" if isinstance(v, float) else v for v in row.values()), flush=True)
    for name, (build, _) in CASES.items():
        times = measure_merge(build, args.rounds)
        row = {"model": name, **{k: 1e3 * statistics.median(v) for k, v in times.items()}}
        merges.append(row)
        print(*(f"{v:.1f}" if isinstance(v, float) else v for v in row.values()), flush=True)
    kind = "CPU time" if clock(args.device) is time.process_time else "wall time"
    write(args, {"clock": kind, "rounds": args.rounds, "clients": CLIENTS, "rows": rows, "merges": merges})


if __name__ == "__main__":
    keep_memory()
    main()
