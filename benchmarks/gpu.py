"""Rounds on a GPU: folded FBN against plain centralized BatchNorm, a loop over clients, and the machine.

    python benchmarks/gpu.py                 # ms per round of every way, in one run
    python benchmarks/gpu.py --profile       # and what an FBN round's time goes to
    python benchmarks/gpu.py --growth        # instead, how cost grows with the number of clients
    python benchmarks/gpu.py --loops         # instead, loops over clients: the library's, by hand, byzfl's

10 clients with 50 images each and the paper's network. Contenders take turns, in random order, at many rounds
in a row; figures are medians over turns. Nothing waits for the GPU within a turn.
"""

import argparse
import copy
import gc
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import result
from round import Centralized, Loop, dataset
from torch import nn

from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.device import (
    Replay,
    arithmetic,
    compiled,
    model_inputs,
    own_random_state,
    set_seed,
    weighted_loss,
)
from fedbatchnorm.simulation.federation import draw
from fedbatchnorm.simulation.recipe import Recipe, stream
from fedbatchnorm.simulation.simulator import Simulation

CLIENTS, BATCH, SHAPE = 10, 50, (3, 32, 32)
CONVOLUTIONS = [(3, 64, 32), (64, 64, 32), (64, 128, 16), (128, 128, 16)]  # channels in, out, size
LOOP = "clients one after another, TF32, eager"
BY_HAND = "plain BatchNorm by hand, clients one after another, TF32, eager"
DENSE = [(8192, 128), (128, 10)]


class PlainCompiled(Centralized):
    """A centralized step with torch's BatchNorm, compiled and captured as the simulator does its rounds."""

    def __init__(self, model, data, parts, recipe, device):
        super().__init__(model.to(memory_format=torch.channels_last), data, parts, recipe, device)
        self.device, self.parameters = torch.device(device), list(self.model.parameters())
        self.velocity = [torch.zeros_like(p) for p in self.parameters]
        self.weights = torch.full((CLIENTS * BATCH,), 1 / (CLIENTS * BATCH), device=device)
        state = lambda: self.model.state_dict() | {f"v{i}": v for i, v in enumerate(self.velocity)}  # noqa: E731
        self.replay = Replay(self.work, state)

    def work(self, name, rate, index):
        x = compiled(model_inputs)(self.data, self.data.train.x[index], True)
        half = self.recipe.precision == "bf16"
        loss = compiled(weighted_loss)(self.model, x, self.data.train.y[index], self.weights, half)
        loss.backward()
        with torch.no_grad():
            torch._foreach_lerp_(self.velocity, [p.grad for p in self.parameters], 0.01)
            torch._foreach_add_(self.parameters, self.velocity, alpha=-rate)
        for p in self.parameters:
            p.grad = None
        return loss.detach()

    def round(self):
        self.model.train()
        index = draw(self.parts, BATCH, stream(0, "batches", self.step)).ravel()
        index = torch.from_numpy(index).pin_memory()
        with own_random_state(self.device), arithmetic(self.device, self.recipe.precision):
            self.replay("plain", 0.1, index=index, seed=lambda: set_seed(self.device, self.step))
        self.step += 1


class OneByOne(Loop):
    """The plain loop over clients, with TF32."""

    def round(self):
        with arithmetic(torch.device("cuda"), "tf32"):
            super().round()


class ByHand:
    """`OneByOne` as one would write it for plain BatchNorm: running statistics and gradients are averaged.

    Every client begins with the shared running statistics; all copies and sums are fused over layers.
    """

    def __init__(self, model, data, parts, recipe, device):
        self.model, self.data, self.parts, self.recipe = model.to(device), data.to(device), parts, recipe
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.99, dampening=0.99)
        layers = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.running = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var)]
        self.shared, self.step = [buffer.clone() for buffer in self.running], 0

    def round(self):
        self.model.train()
        self.optimizer.zero_grad()
        total = [torch.zeros_like(value) for value in self.shared]
        with arithmetic(torch.device(self.shared[0].device), "tf32"):
            for index in draw(self.parts, self.recipe.batch, stream(0, "batches", self.step)):
                x, y = self.data.inputs(self.data.train.x[index]), self.data.train.y[index]
                torch._foreach_copy_(self.running, self.shared)
                (F.cross_entropy(self.model(x), y) / CLIENTS).backward()  # gradients add up
                torch._foreach_add_(total, self.running, alpha=1 / CLIENTS)
            self.optimizer.step()
        self.shared = total
        self.step += 1


class PlainEager(Centralized):
    """Plain PyTorch on the merged batch, with TF32."""

    def round(self):
        with arithmetic(torch.device("cuda"), "tf32"):
            super().round()


class Byzfl:
    """byzfl as its users run it: a Client object after another, a DataLoader each, flat gradients."""

    def __init__(self, model, data, parts, recipe, device):
        from byzfl import Client, Server
        from byzfl.fed_framework import models as known
        from torch.utils.data import DataLoader, TensorDataset

        known.ours = lambda: copy.deepcopy(model)  # it looks models up by name
        images = TensorDataset(data.inputs(data.train.x), data.train.y)
        learning = {
            "learning_rate": recipe.lr,
            "weight_decay": 0.0,
            "milestones": [],
            "learning_rate_decay": 1.0,
        }
        shared = {"model_name": "ours", "device": device} | learning
        own = {"loss_name": "CrossEntropyLoss", "LabelFlipping": False, "nb_labels": 10}
        own |= {"momentum": recipe.momentum, "store_per_client_metrics": False}

        def loader(part):
            return DataLoader(torch.utils.data.Subset(images, part), recipe.batch, shuffle=True)

        self.clients = [Client(shared | own | {"training_dataloader": loader(part)}) for part in parts]
        average = {"aggregator_info": {"name": "Average", "parameters": {}}, "pre_agg_list": []}
        self.server = Server(shared | average | {"test_loader": loader(parts[0]), "optimizer_name": "SGD"})

    def round(self):
        for client in self.clients:
            client.compute_gradients()
        self.server.update_model_with_gradients(
            [client.get_flat_gradients_with_momentum() for client in self.clients]
        )
        state = self.server.get_dict_parameters()
        for client in self.clients:
            client.set_model_state(state)


def made(kind, clients=CLIENTS, batch=BATCH, data=None, recipe=None, **options):
    data = data or dataset(SHAPE)
    recipe = Recipe(**{"scheme": "fbn", "clients": clients, "batch": batch} | (recipe or {}))
    parts = np.array_split(np.arange(len(data.train.y)), recipe.honest())
    return kind(models.build("cnn", SHAPE, 10, seed=0), data, parts, recipe, device="cuda", **options)


def contenders():
    robust = {"byzantine": 3, "attack": "sf", "defense": "nnm+median"}
    bf16 = {"precision": "bf16"}
    rows = {
        "FBN, TF32": lambda: made(Simulation),
        "FBN, bf16": lambda: made(Simulation, recipe=bf16),
        "FBN, TF32, eager": lambda: made(Simulation, engine="eager"),
        "naive, TF32": lambda: made(Simulation, recipe={"scheme": "naive"}),
        "naive, bf16": lambda: made(Simulation, recipe={"scheme": "naive"} | bf16),
        "centralized, plain PyTorch, TF32, eager": lambda: made(PlainEager),
        "centralized, plain PyTorch, TF32, compiled and captured": lambda: made(PlainCompiled),
        "centralized, plain PyTorch, bf16, compiled and captured": lambda: made(PlainCompiled, recipe=bf16),
        LOOP: lambda: made(OneByOne),
        BY_HAND: lambda: made(ByHand),
        "FBN, 7 honest and 3 Byzantine clients, NNM and median, TF32": lambda: made(
            Simulation, recipe=robust
        ),
        "FBN, gradients of each client and NNM and median, TF32": lambda: made(
            Simulation, recipe=robust | {"targets": "all"}
        ),
    }
    return rows | ({"byzfl, clients one after another": lambda: made(Byzfl)} if _has_byzfl() else {})


def _has_byzfl():
    try:
        import byzfl  # noqa: F401
    except Exception:  # it may be there, and what it needs not fit this torch
        return False
    return True


def milliseconds(contender, rounds):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        contender.round()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / rounds


def peak(dtype):
    """The rate of a large matrix product, in FLOP/s."""
    n = 8192
    with arithmetic(torch.device("cuda"), "tf32"):
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        for _ in range(3):
            a @ b
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()
    return 10 * 2 * n**3 / (time.perf_counter() - start)


def operations():
    """Floating-point operations of a round: forward, and twice that backward, but for the first input."""
    convolutions = [2 * 9 * i * o * s * s for i, o, s in CONVOLUTIONS]
    forward = sum(convolutions) + sum(2 * i * o for i, o in DENSE)
    return CLIENTS * BATCH * (3 * forward - convolutions[0])


def compare(turns, rounds):
    return take_turns({name: make() for name, make in contenders().items()}, turns, rounds, warm_up=5)


def take_turns(found, turns, rounds, warm_up):
    """Median milliseconds of each contender, and every turn's; they take turns, in random order."""
    for contender in found.values():
        milliseconds(contender, warm_up)
    times = {name: [] for name in found}
    for turn in range(turns):
        for name in np.random.default_rng(turn).permutation(list(found)):
            times[name].append(milliseconds(found[name], rounds))
    return {name: statistics.median(ms) for name, ms in times.items()}, times


GROWTH = {  # clients, samples of each, clients in a pass
    "1000 in all": [(n, 1000 // n, None) for n in (1, 10, 100, 1000)],
    "5 each": [(n, 5, None) for n in (1, 10, 100, 1000)],
    "50 each": [(n, 50, None) for n in (1, 10, 100, 300)],
    "50 each, 100 clients in a pass": [(n, 50, 100) for n in (300, 1000)],
}


def growth(rounds):
    """ms a round and memory against the number of clients: a fixed total batch, and a fixed batch each."""
    rows = []
    data = dataset(SHAPE)
    for kind, sizes in GROWTH.items():
        for clients, batch, chunk in sizes:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            simulation = made(Simulation, clients, batch, data, chunk=chunk)
            milliseconds(simulation, 3)
            ms = statistics.median(milliseconds(simulation, rounds) for _ in range(3))
            memory = torch.cuda.max_memory_reserved() - before
            rows.append(
                {
                    "kind": kind,
                    "clients": clients,
                    "batch": batch,
                    "ms": ms,
                    "bytes": memory,
                    "engine": simulation.engine,
                }
            )
            print(
                f"  {kind:<30} {clients:>5} clients x {batch:<5} {ms:>8.2f} ms   {memory / 2**30:>6.2f} GiB",
                flush=True,
            )
            del simulation
    return rows


def profile(precision):
    """An FBN round's kernels, by time."""
    simulation = made(Simulation, recipe={"precision": precision})
    milliseconds(simulation, 5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        milliseconds(simulation, 20)
    rows = [(e.key, e.self_device_time_total / 20e3, e.count / 20) for e in profiler.key_averages()]
    rows = sorted((r for r in rows if r[1] > 0), key=lambda r: -r[1])
    return [{"kernel": k[:120], "ms": ms, "calls": calls} for k, ms, calls in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7, help="turns of every contender")
    parser.add_argument("--rounds", type=int, default=30, help="rounds in a turn")
    parser.add_argument("--growth", action="store_true", help="instead, against the number of clients")
    parser.add_argument("--loops", action="store_true", help="instead, the loops over clients alone")
    parser.add_argument("--profile", action="store_true", help="also what an FBN round's time goes to")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here")
    if args.growth:
        content = {"growth": growth(args.rounds)}
    else:
        content = loops(args) if args.loops else rounds_of_every_way(args)
    if args.json:
        args.json.write_text(json.dumps(result(args, "cuda") | content, indent=1) + "\n")
    for precision, rows in content.get("profile", {}).items():
        whole, calls = (sum(r[key] for r in rows) for key in ("ms", "calls"))
        print(f"\n{precision}: {whole:.2f} ms in {calls:.0f} kernels")
        for row in rows[:25]:
            print(f"  {row['ms']:>7.3f} ms {row['calls']:>6.1f} x {row['kernel'][:100]}")


def loops(args):
    """Eager loops over clients, without the simulator."""
    rows = {name: make() for name, make in contenders().items() if "clients one after another" in name}
    found, times = take_turns(rows, args.turns, args.rounds, warm_up=3)
    for name, ms in found.items():
        print(f"  {name:<64} {ms:>7.2f} ms {ms / found[BY_HAND]:>6.2f} x by hand", flush=True)
    return {"ms": found, "turns": args.turns, "rounds": args.rounds, "times": times}


def rounds_of_every_way(args):
    peaks = {"TF32": peak(torch.float32), "bf16": peak(torch.bfloat16)}
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; matrix products: "
        + ", ".join(f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in peaks.items())
    )
    found, times = compare(args.turns, args.rounds)
    plain = {kind: found[f"centralized, plain PyTorch, {kind}, compiled and captured"] for kind in peaks}
    for name, ms in found.items():
        kind = "bf16" if "bf16" in name else "TF32"
        share = operations() / (ms / 1e3) / peaks[kind]
        print(
            f"  {name:<58} {ms:>7.2f} ms {ms / plain[kind]:>6.2f} x plain {100 * share:>5.1f}% of peak",
            flush=True,
        )
    print(f"  clients one after another: {found[LOOP] / found[BY_HAND]:.2f} x plain BatchNorm by hand")
    if not _has_byzfl():
        print("  byzfl's clients: no row, byzfl cannot be imported here")
    content = {"peak": peaks, "operations": operations(), "ms": found}
    content |= {"turns": args.turns, "rounds": args.rounds, "times": times}
    if args.profile:
        content["profile"] = {precision: profile(precision) for precision in ("tf32", "bf16")}
    return content


if __name__ == "__main__":
    main()
