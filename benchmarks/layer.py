"""FBN's training forward and backward against torch's BatchNorm, as ratios in one run.

    python benchmarks/layer.py            # CPU
    python benchmarks/layer.py --device cuda

Each round times every contender once, so that whatever else the machine does hits all of them, and
each round begins with another one, since what ran before decides what the allocator has at hand.
The figure is the ratio of the medians. The C library is told to keep freed memory: otherwise it gives
back and faults in every large tensor anew, which takes longer than the work itself and varies by run.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import fedbatchnorm as fbn

SHAPES = [(50, 64, 32, 32), (500, 128, 16, 16)]
WARM_UP = 4
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**31), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}


def contenders(channels, device):
    plain = nn.BatchNorm2d(channels).to(device)
    federated = fbn.FederatedBatchNorm2d(channels).to(device)
    torch._dynamo.reset()
    eager = {"BatchNorm": plain, "FBN": federated}
    return eager | {f"{name}, compiled": torch.compile(layer) for name, layer in eager.items()}


def timed(layer, x, grad, device):
    start = time.perf_counter()
    layer(x).backward(grad)
    if device == "cuda":
        torch.cuda.synchronize()
    x.grad = None
    return time.perf_counter() - start


def measure(shape, layout, device, rounds):
    x, grad = (torch.randn(shape, device=device).contiguous(memory_format=layout) for _ in range(2))
    x = x.relu().requires_grad_()  # a layer of the paper's network sees what a ReLU leaves
    layers = contenders(shape[1], device)
    times = {name: [] for name in layers}
    names = list(layers)
    for i in range(rounds + WARM_UP):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds = timed(layers[name], x, grad, device)
            if i >= WARM_UP:
                times[name].append(seconds)
    return times


def ratio(times, name, base):
    return statistics.median(times[name]) / statistics.median(times[base])


def machine(device):
    """What the figures were measured on."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        cpu = Path("/proc/cpuinfo")
        models = re.findall(r"model name\s*: (.*)", cpu.read_text()) if cpu.exists() else []
        name = f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"
    return {"name": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def commit():
    """The commit that was measured, marked if there is more in the folder."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"  # noqa: S603


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    rows = []
    print(
        f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, {args.rounds} rounds"
    )
    print(f"{'shape':>20} {'layout':>14} {'BatchNorm ms':>13} {'FBN/BN eager':>13} {'FBN/BN compiled':>16}")
    for shape in SHAPES:
        for layout, memory_format in LAYOUTS.items():
            times = measure(shape, memory_format, args.device, args.rounds)
            row = {
                "shape": list(shape),
                "layout": layout,
                "batchnorm_ms": 1e3 * statistics.median(times["BatchNorm"]),
                "eager": ratio(times, "FBN", "BatchNorm"),
                "compiled": ratio(times, "FBN, compiled", "BatchNorm, compiled"),
            }
            rows.append(row)
            print(
                f"{shape!s:>20} {layout:>14} {row['batchnorm_ms']:>13.2f} "
                f"{row['eager']:>13.2f} {row['compiled']:>16.2f}",
                flush=True,
            )
    if args.json:
        result = {
            "commit": args.commit or commit(),
            "machine": machine(args.device),
            "rounds": args.rounds,
            "rows": rows,
        }
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)  # noqa: S606
    main()
