"""FBN's training forward and backward against torch's BatchNorm, as ratios in one run.

    python benchmarks/layer.py            # CPU
    python benchmarks/layer.py --device cuda

Each round times every contender once, so that whatever else the machine does hits all of them, and
each round begins with another one, since what ran before decides what the allocator has at hand.
The figure is the ratio of the medians. The C library is told to keep freed memory: otherwise it gives
back and faults in every large tensor anew, which takes longer than the work itself and varies by run.
On a machine that others use too, OMP_NUM_THREADS=1 measures the time that the process itself had.
"""

import statistics
import time

import torch
from common import arguments, clock, keep_memory, ratio, write
from torch import nn

import fedbatchnorm as fbn

SHAPES = [(50, 64, 32, 32), (500, 128, 16, 16)]
WARM_UP = 4
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}


def contenders(channels, device):
    plain = nn.BatchNorm2d(channels).to(device)
    federated, held = (fbn.convert(nn.BatchNorm2d(channels).to(device), gradient=g) for g in (0, 0.7))
    torch._dynamo.reset()
    eager = {"BatchNorm": plain, "FBN": federated, "FBN, share": held}
    return eager | {f"{name}, compiled": torch.compile(layer) for name, layer in eager.items()}


def timed(layer, x, grad, device):
    now = clock(device)
    start = now()
    layer(x).backward(grad)
    if device == "cuda":
        torch.cuda.synchronize()
    x.grad = None
    return now() - start


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


def main():
    args = arguments(__doc__, rounds=41)
    rows = []
    print(
        f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, {args.rounds} rounds"
    )
    columns = "BatchNorm ms", "FBN/BN eager", "compiled", "share eager", "compiled"
    print(f"{'shape':>20} {'layout':>14}" + "".join(f"{c:>14}" for c in columns))
    for shape in SHAPES:
        for layout, memory_format in LAYOUTS.items():
            times = measure(shape, memory_format, args.device, args.rounds)
            row = {
                "shape": list(shape),
                "layout": layout,
                "batchnorm_ms": 1e3 * statistics.median(times["BatchNorm"]),
                "eager": ratio(times, "FBN", "BatchNorm"),
                "compiled": ratio(times, "FBN, compiled", "BatchNorm, compiled"),
                "share_eager": ratio(times, "FBN, share", "BatchNorm"),
                "share_compiled": ratio(times, "FBN, share, compiled", "BatchNorm, compiled"),
            }
            rows.append(row)
            print(
                f"{shape!s:>20} {layout:>14}" + "".join(f"{v:>14.2f}" for v in list(row.values())[2:]),
                flush=True,
            )
    kind = "CPU time" if clock(args.device) is time.process_time else "wall time"
    write(args, {"clock": kind, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    keep_memory()
    main()
