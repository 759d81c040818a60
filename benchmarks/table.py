"""Write docs/benchmarks.md from the result files: python benchmarks/table.py [--check]."""

import json
import re
import statistics
import sys
from pathlib import Path

from pictures import PICTURES

ROOT = Path(__file__).parents[1]
PAGE, FLOWER = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "flower.md"
RESULTS = ROOT / "results" / "benchmarks"

HEAD = """# Speed

Written by `python benchmarks/table.py` from `results/benchmarks/`; do not edit. Contenders take turns in one
run, so that whatever else the machine does hits all of them; figures are medians, and ratios of medians.
"""

LAYERS = """
## Layers

FBN's training forward and backward over that of torch's BatchNorm in training mode: below 1 FBN is faster.
`python benchmarks/layer.py` measures it on your machine. On a GPU a single eager layer takes the same time
for five times the data: what is compared there is the host launching kernels, of which FBN has more.
"""

ROUNDS = """
## A federated round

`python benchmarks/round.py` measures it on your machine. The loop is what one would write with the library
and no simulator: the clients' forward and backward one after another, `collect`, `merge`. Plain PyTorch is a
centralised step on the merged batch with torch's own BatchNorm and SGD. On a CPU the simulator puts as many
clients into a pass as fit the cache: for the large network that is one, and the round takes what the loop
takes; for the small one it is all of them. In default settings the C library gives the memory of large
activations back and faults it in anew, which is why whole batches of 500 take longer than ten of 50.
"""


BYZFL = 42.9
ON_A_GPU = """
## A federated round on a GPU

10 clients with 50 images each and the paper's network; `python benchmarks/gpu.py` measures it on your
machine. On a CUDA GPU the simulator compiles its passes and replays a whole round as a CUDA graph. Plain
centralised is torch's own BatchNorm on the merged batch, compiled and captured in the same way, with the same
rewriting of the first convolution and of flattening; pooling is rewritten where it stands beside fused FBN,
since elsewhere that is slower. Most of FBN's lead is that it normalises with constants: bias, ReLU,
normalisation and statistics are one pass over memory forward and one backward. byzfl 0.0.11,
as its users run it, was measured once at 42.9 ms on the same kind of GPU; it is not installed where this was
measured, so that column compares two runs. Per cent of peak is the round's arithmetic against the matrix
product of the same machine and precision.
"""

GROWTH = """
## How cost grows with the number of clients

FBN, TF32, in time and in memory (`python benchmarks/gpu.py --growth`): with the images in a round, not with
the clients. A thousand clients of one image each take longer than one client of a thousand because the
host draws every client's batch, and is still at it when the GPU has finished. Where all images at once are
too many for the memory, `Simulation(chunk=100)` puts 100 clients into a pass.

![Milliseconds and memory of a round against the number of clients](images/growth.svg)
"""

EXACTNESS = """
## The fast path is exact

The simulator (folded, compiled, on a GPU replayed as CUDA graphs) against one client after another with
torch's own BatchNorm, in float64: the largest difference of any weight or statistic after all rounds,
relative to the largest value of its tensor. `python benchmarks/exactness.py` measures it on your machine.
"""

RULES = """
## Robust rules

Each rule over straightforward numpy that goes client by client: below 1 ours is faster. Checks of what was
sent are part of ours, and show in the smallest sizes and the plain mean. f is the largest that n allows.
Beyond its result, nearest-neighbour mixing takes the memory of a matrix (n, n) and a block of columns.
`python benchmarks/rules.py` measures it on your machine.
"""


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def origin(result, rounds):
    machine = result["machine"]
    return (
        f"\n### {machine['name']}\n\ntorch {machine['torch']}, {machine['threads']} threads, {rounds}"
        f"commit {result['commit']}." + (f" {result['note']}" if "note" in result else "") + "\n\n"
    )


def layers(result):
    rows = [
        [
            " x ".join(map(str, row["shape"])),
            row["layout"],
            f"{row['batchnorm_ms']:.2f}",
            f"{row['eager']:.2f}",
            f"{row['compiled']:.2f}",
        ]
        for row in result["rows"]
    ]
    header = [
        "shape",
        "layout",
        "BatchNorm, eager (ms)",
        "FBN / BatchNorm, eager",
        "FBN / BatchNorm, compiled",
    ]
    return origin(result, f"{result['rounds']} rounds, ") + table(header, rows)


def federated_rounds(result):
    text = origin(result, "")
    for row in result["rows"]:
        ms = row["ms"]
        loop, plain = ms["FBN, a plain loop over clients"], ms["centralised, plain PyTorch"]
        rows = [[k, f"{v:.2f}", f"{v / loop:.2f}", f"{v / plain:.2f}"] for k, v in ms.items()]
        text += f"{row['case']} ({row['rounds']} rounds):\n\n"
        text += table(["way", "ms", "over the loop", "over plain centralised"], rows) + "\n"
        if "outside" in row:
            share = f"{100 * row['outside']:.1f}%"
            text += (
                f"{share} of the simulator's FBN round is outside the model's own forward and backward.\n\n"
            )
    return text.rstrip("\n") + "\n"


def robust_rules(result):
    sizes = list(dict.fromkeys((row["n"], row["d"]) for row in result["rows"]))
    found = {(row["rule"], row["n"], row["d"]): row["ours"] / row["plain"] for row in result["rows"]}
    names = list(dict.fromkeys(row["rule"] for row in result["rows"]))
    rows = [[name, *(f"{found[name, n, d]:.2f}" for n, d in sizes)] for name in names]
    header = ["rule", *(f"n = {n}, d = {d:,}" for n, d in sizes)]
    return origin(result, f"{result['rounds']} rounds, ") + table(header, rows)


def gpu_rounds(result):
    ms, peaks = result["ms"], result["peak"]
    rows = []
    for name, value in ms.items():
        kind = "bf16" if "bf16" in name else "TF32"
        plain = ms[f"centralised, plain PyTorch, {kind}, compiled and captured"]
        share = result["operations"] / (value / 1e3) / peaks[kind]
        rows.append(
            [name, f"{value:.2f}", f"{value / plain:.2f}", f"{BYZFL / value:.1f}", f"{100 * share:.0f}%"]
        )
    header = [
        "way",
        "ms",
        "over plain centralised, compiled and captured",
        "byzfl's 42.9 ms over it",
        "of peak",
    ]
    measured = ", ".join(f"{kind} {rate / 1e12:.0f}" for kind, rate in peaks.items())
    text = origin(result, f"{result['turns']} turns of {result['rounds']} rounds, ")
    text += f"Matrix products of 8192 x 8192: {measured} TFLOP/s; a round's own arithmetic: "
    text += f"{result['operations'] / 1e12:.2f} TFLOP.\n\n" + table(header, rows)
    if "profile" in result:
        what = f": {result['profile_of']}" if "profile_of" in result else ""
        text += f"\nWhat an FBN round's time goes to, in ms (and kernels){what}:\n\n"
        kinds = {precision: kernel_kinds(kernels) for precision, kernels in result["profile"].items()}
        names = list(next(iter(kinds.values())))
        rows = [[name, *(f"{k[name][0]:.2f} ({k[name][1]:.0f})" for k in kinds.values())] for name in names]
        text += table(["", *kinds], rows)
    return text


def growth(result):
    rows = [
        [r["kind"], f"{r['clients']}", f"{r['batch']}", f"{r['ms']:.2f}", f"{r['bytes'] / 2**30:.2f}"]
        for r in result["growth"]
    ]
    return origin(result, "") + table(["images", "clients", "batch", "ms", "GiB"], rows)


def kernel_kinds(kernels):
    """Kind of kernel -> (ms, number); the first kind whose pattern is found in a kernel's name."""
    signs = {
        "bias, ReLU, normalisation, statistics and their gradients, in one pass each way": (
            "^_(forward|backward|combine|add_up)$"
        ),
        "convolutions and matrix products": "xmma|cutlass|cudnn|wgrad|nhwc|gemm|nvjet|splitkreduce",
        "fused point by point: pooling, dropout, patches of the images": "triton_poi",
        "fused sums: merge, loss, gradients of biases": "triton_(red|per)",
        "the rest: momentum, step, batches": "",
    }
    found = dict.fromkeys(signs, (0.0, 0.0))
    for row in kernels:
        kind = next(k for k, pattern in signs.items() if re.search(pattern, row["kernel"].lower()))
        found[kind] = (found[kind][0] + row["ms"], found[kind][1] + row["calls"])
    return found


def exactness(result):
    rows = [
        [r["model"], r["scheme"], r["engine"], f"{r['rounds']}", f"{r['difference']:.0e}"]
        for r in result["rows"]
    ]
    return origin(result, "") + table(["model", "scheme", "engine", "rounds", "difference"], rows)


def page():
    def sections(pattern, section):
        return "".join(
            section(json.loads(f.read_text())) for f in sorted(RESULTS.glob(pattern), key=lambda f: f.stem)
        )

    text = HEAD + LAYERS + sections("layer-*.json", layers)
    text += ROUNDS + sections("round-*.json", federated_rounds)
    text += ON_A_GPU + sections("gpu-*.json", gpu_rounds)
    text += GROWTH + sections("growth-*.json", growth)
    text += EXACTNESS + sections("exactness-*.json", exactness)
    return text + RULES + sections("rules-*.json", robust_rules)


def flower_page():
    """The page on Flower, with its results between two marks."""
    result = json.loads((RESULTS / "flower-cpu.json").read_text())
    last, seeds = str(result["rounds"]), result["rows"]

    def spread(values):
        sd = statistics.stdev(values)
        return f"{100 * statistics.fmean(values):.1f} ± {100 * sd:.1f}"

    ways = {
        "FedAvg, plain BatchNorm": [row["FedAvg"][last] for row in seeds],
        "FedAvg, federated BatchNorm": [row["FBN"][last] for row in seeds],
        "the simulator, FBN": [row["simulator"] for row in seeds],
    }
    rows = [[name, spread(values)] for name, values in ways.items()]
    machine = result["machine"]
    text = table(["", f"test accuracy (%) after {last} rounds, {len(seeds)} seeds"], rows)
    sizes = [
        [r["model"], f"{r['fedavg']:,}", f"{r['fbn']:,}", f"{r['fbn'] / r['fedavg']:.4f}"]
        for r in result["traffic"]
    ]
    text += "\nBytes of arrays to a client and back in a round:\n\n"
    text += table(["model", "FedAvg alone", "with federated BatchNorm", "ratio"], sizes)
    text += f"\n`python benchmarks/flower.py`, {machine['name']}, torch {machine['torch']}, "
    text += f"commit {result['commit']}.\n"
    head, _, rest = FLOWER.read_text().partition("<!-- results -->\n")
    return f"{head}<!-- results -->\n{text}<!-- /results -->{rest.partition('<!-- /results -->')[2]}"


def written():
    """Every file that comes from the results, and its text."""
    images = {ROOT / "docs" / "images" / name: draw(RESULTS) for name, draw in PICTURES.items()}
    return {PAGE: page(), FLOWER: flower_page()} | images


if __name__ == "__main__":
    for path, text in written().items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what the results say: run {__file__}")
