"""Write docs/benchmarks.md from the result files: python benchmarks/table.py [--check]."""

import json
import re
import statistics
import sys
from pathlib import Path

from flower_table import local_epochs
from front import PICTURES as FRONT
from nvflare_table import same_clients
from pictures import PICTURES
from scan_table import which_convert

from fedbatchnorm.simulation.schemes import SCHEMES

ROOT = Path(__file__).parents[1]
PAGE, FLOWER, NVFLARE, RECIPES = (
    ROOT / "docs" / f"{name}.md" for name in ("benchmarks", "flower", "nvflare", "recipes")
)
RESULTS = ROOT / "results" / "benchmarks"

HEAD = """# Speed

How much time FBN adds to training on a client, what the server's work costs, and how fast the simulator is.
The first three sections are for federations on Flower, NVFlare or a loop of your own, the others for
simulations.

Within a run, the contenders take turns, so that other load on the machine affects all of them alike. Numbers
are medians and ratios of medians. Each table names the machine and the commit. The scripts that measured them
are in `benchmarks/`, and this page is written by `python benchmarks/table.py` from `results/benchmarks/`; do
not edit it.
"""

LAYERS = """
## Layers

Time of FBN's forward and backward pass in training, relative to torch's BatchNorm: below 1, FBN is
faster. `python benchmarks/layer.py` measures it on your machine. On a GPU, a single eager layer takes
the same time for five times the data: it is limited by how fast the host launches kernels, and FBN
launches more of them.
"""

EXCHANGE = """
## A client's step, and what is exchanged

The first table has, for a whole model, forward, loss, backward and SGD step with FBN, relative to the same
model with torch's BatchNorm; and `collect` and `load_statistics` together, as a share of such a step (in a
round of one step). The second has the server's `merge` of many clients' updates, checks included, beside
Flower's averaging of the same model's parameters (its `aggregate`, used by FedAvg) and beside plain loops
over layers and clients without checks. "Before" is an earlier version that handled each layer and client
separately: `collect` took 64 operations for each layer, where both together now take fewer than 60 in all.
`python benchmarks/exchange.py` measures them on your machine.
"""

ROUNDS = """
## A federated round

One round of distributed SGD in the simulator on a CPU; `python benchmarks/round.py` measures it on your
machine. The loop is what one would write with the library alone: the clients' forward and backward passes
one after another, then `collect` and `merge`. Plain PyTorch is a centralized step on the merged batch with
torch's own BatchNorm and SGD. The simulator puts as many clients into a pass as fit into the cache. For the
large network that is one client, so the round takes as long as the loop; for the small network it is all of
them. One batch of 500 is slower than ten of 50, because with its default settings the C library returns the
memory of large activations to the system after each use.
"""


BYZFL = 42.9
LOOPS = """
## Loops over clients on a GPU

The same round without the simulator, eager and one client after another: with the library
(`load_statistics`, `collect`, `merge`), written by hand for plain BatchNorm (running statistics are loaded
and averaged), and by byzfl 0.0.11, which does not exchange statistics. They take turns in one run,
`python benchmarks/gpu.py --loops`. Counted on a CPU, a round is some 2,400 of torch's operations with the
library and some 900 by hand, since the library measures what every layer is given.
"""

ON_A_GPU = """
## A federated round on a GPU

10 clients with 50 images each and the paper's network; `python benchmarks/gpu.py` measures it on your
machine. On a CUDA GPU the simulator compiles its passes and replays a whole round as a CUDA graph. Plain
centralized is torch's own BatchNorm on the merged batch, compiled and captured in the same way, with the
same rewriting of the first convolution and of flattening. Pooling is rewritten only next to fused FBN;
elsewhere that would be slower. FBN is faster mainly because it normalizes with constants: bias, ReLU,
normalization and statistics take one pass over memory forward and one backward. byzfl 0.0.11 took 42.9
ms in a separate run on the same kind of GPU. "Of peak" compares the round's arithmetic with the
throughput of a large matrix product on the same machine, in the same precision.
"""

GROWTH = """
## How cost grows with the number of clients

Time and memory of FBN in TF32 grow with the number of images in a round, not with the number of clients
(`python benchmarks/gpu.py --growth`). A thousand clients with one image each take longer than one client
with a thousand, because the host draws a batch for every client and the GPU waits for it. If the images of
a round do not fit into memory together, `Simulation(chunk=100)` puts 100 clients into a pass.

![Milliseconds and memory of a round against the number of clients](images/growth.svg)
"""

FEDAVG = """
## FedAvg rounds on a GPU

Milliseconds for one round of FedAvg: the local training of every client in the round, and the server's
update, without evaluation. `python benchmarks/fedavg.py` measures it on your machine. Images are random
bytes, since their content does not affect the time. Where pfl-research was measured, it took turns with
ours in the same run, with its images on the GPU from the start. "Times as fast as pfl-research" is the
time of its fastest row in the same precision, divided by the row's own time. "Lanes" are clients side by
side, each in its own stream; without that word, all clients take a step in one pass ([how it
runs](fedavg.md#how-it-runs)).
"""
PFL, TEN = "pfl-research", "ten rounds of distributed SGD"
FEDAVG_PARTS = {  # part -> what it is, whether pfl-research takes part
    "steps": ("10 clients, 10 local steps of 50 images, the paper's network", True),
    "pfl": (
        "pfl-research's own CIFAR-10 benchmark: 50 of 1000 clients, one epoch of 50 images in batches of 10",
        True,
    ),
    "tiny": ("HBN's protocol: 100 clients, one epoch of 500 images in batches of 4, a small network", False),
    "resnets": ("ResNets, 10 clients, 10 local steps of 50 images", False),
}
NOT_MEASURED = "not measured"
MISSING = f" {NOT_MEASURED}.\n"

ACCURACY = """
## Every scheme under FedAvg

These are accuracies on the test images after the last round, not times. `python benchmarks/schemes.py`
trains the paper's network with every scheme at each learning rate of a small grid. The table gives each
scheme's highest accuracy and the learning rate that reached it, so the rate is picked on the test
images, for all schemes alike. Where clients keep a part of the model to themselves, "own models" is the
mean over clients in the same runs: each client with its own model, on test images with its own
proportions of classes. With gamma 0 and 10 clients, each client holds one class, and its own model is
tested on that class alone.

![Test accuracy of every scheme at each learning rate](images/schemes.svg)
"""

EXACTNESS = """
## The fast path is exact

The simulator (folded, compiled, on a GPU replayed as CUDA graphs) against one client after another with
torch's own BatchNorm, in float64: the largest difference of any weight or statistic after all rounds,
relative to the largest value of its tensor. `python benchmarks/exactness.py` measures it on your
machine.
"""

RULES = """
## Robust rules

Time of each rule relative to a straightforward numpy loop over clients: below 1, ours is faster. Ours
includes the checks of the rows, which matters for the smallest sizes and for the plain mean. f is the
largest number that n allows. Besides its result, nearest-neighbor mixing needs memory for an (n, n) matrix
and a block of columns. `python benchmarks/rules.py` measures it on your machine.
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


RATIOS = {
    "eager": "FBN / BatchNorm, eager",
    "compiled": "FBN / BatchNorm, compiled",
    "share_eager": "with a share of 0.7, eager",
    "share_compiled": "with a share of 0.7, compiled",
}


def layers(result):
    rows = [
        [
            " x ".join(map(str, row["shape"])),
            row["layout"],
            f"{row['batchnorm_ms']:.2f}",
            *(f"{row[key]:.2f}" for key in RATIOS if key in row),
        ]
        for row in result["rows"]
    ]
    header = ["shape", "layout", "BatchNorm, eager (ms)"]
    header += [title for key, title in RATIOS.items() if key in result["rows"][0]]
    clock = f", {result['clock']}" if "clock" in result else ""
    return origin(result, f"{result['rounds']} rounds{clock}, ") + table(header, rows)


BEFORE = {  # of docs in the commits before 3dbbf11, on a machine of the same kind
    "DenseNet-121": {"step": "1.16", "exchange": "11 to 17%", "merge": "344"},
    "MobileNetV2": {"step": "1.25", "exchange": "11 to 17%"},
}


def exchanges(result):
    header = ["model", "images", "BatchNorm (ms)", "FBN / BatchNorm", "with a share of 0.7", "before"]
    header += ["collect and load", "before"]
    rows = [
        [
            row["model"],
            " x ".join(map(str, row["shape"])),
            f"{row['batchnorm_ms']:.1f}",
            f"{row['step']:.2f}",
            f"{row['share_step']:.2f}",
            BEFORE[row["model"]]["step"],
            f"{100 * row['exchange']:.1f}%",
            BEFORE[row["model"]]["exchange"],
        ]
        for row in result["rows"]
    ]
    text = origin(result, f"{result['rounds']} rounds, {result['clock']}, ") + table(header, rows)
    header = ["model", "merge (ms)", "before", "loops without checks (ms)", "Flower's average (ms)"]
    rows = [
        [
            row["model"],
            f"{row['merge']:.1f}",
            BEFORE[row["model"]].get("merge", NOT_MEASURED),
            f"{row['loops']:.1f}",
            f"{row['Flower']:.1f}",
        ]
        for row in result["merges"]
    ]
    return text + f"\nUpdates of {result['clients']} clients:\n\n" + table(header, rows)


def federated_rounds(result):
    text = origin(result, "")
    for row in result["rows"]:
        ms = row["ms"]
        loop, plain = ms["FBN, a plain loop over clients"], ms["centralized, plain PyTorch"]
        rows = [[k, f"{v:.2f}", f"{v / loop:.2f}", f"{v / plain:.2f}"] for k, v in ms.items()]
        text += f"{row['case']} ({row['rounds']} rounds):\n\n"
        text += table(["way", "ms", "over the loop", "over plain centralized"], rows) + "\n"
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


LOOP = "clients one after another, TF32, eager"  # as gpu.py calls them
BY_HAND = "plain BatchNorm by hand, clients one after another, TF32, eager"


def gpu_rounds(result):
    ms, peaks = result["ms"], result["peak"]
    rows = []
    for name, value in ms.items():
        kind = "bf16" if "bf16" in name else "TF32"
        plain = ms[f"centralized, plain PyTorch, {kind}, compiled and captured"]
        share = result["operations"] / (value / 1e3) / peaks[kind]
        rows.append(
            [name, f"{value:.2f}", f"{value / plain:.2f}", f"{BYZFL / value:.1f}", f"{100 * share:.0f}%"]
        )
    header = [
        "way",
        "ms",
        "over plain centralized, compiled and captured",
        "byzfl's 42.9 ms over it",
        "of peak",
    ]
    measured = ", ".join(f"{kind} {rate / 1e12:.0f}" for kind, rate in peaks.items())
    text = origin(result, f"{result['turns']} turns of {result['rounds']} rounds, ")
    text += f"Matrix products of 8192 x 8192: {measured} TFLOP/s; a round's own arithmetic: "
    text += f"{result['operations'] / 1e12:.2f} TFLOP.\n\n" + table(header, rows)
    if LOOP in ms and BY_HAND in ms:
        text += "\nThe loop over clients with the library (`load_statistics`, `collect`, `merge`) takes "
        text += f"{ms[LOOP] / ms[BY_HAND]:.2f} times as long as the same loop written by hand for plain "
        text += "BatchNorm, which loads and averages running statistics.\n"
    if "profile" in result:
        what = f": {result['profile_of']}" if "profile_of" in result else ""
        text += f"\nWhat an FBN round's time goes to, in ms (and kernels){what}:\n\n"
        text += kernel_table(result["profile"])
    return text


def gpu_loops(result):
    ms = result["ms"]
    rows = [[name, f"{value:.2f}", f"{value / ms[BY_HAND]:.2f}"] for name, value in ms.items()]
    where = origin(result, f"{result['turns']} turns of {result['rounds']} rounds, ")
    return where + table(["way", "ms", "over the loop by hand"], rows)


def growth(result):
    rows = [
        [r["kind"], f"{r['clients']}", f"{r['batch']}", f"{r['ms']:.2f}", f"{r['bytes'] / 2**30:.2f}"]
        for r in result["growth"]
    ]
    return origin(result, "") + table(["images", "clients", "batch", "ms", "GiB"], rows)


def fedavg_rounds(result):
    text = origin(result, f"{result['turns']} turns of {result['rounds']} rounds, ").rstrip("\n") + "\n"
    for part in dict.fromkeys([*FEDAVG_PARTS, *result["parts"]]):
        title, with_pfl = FEDAVG_PARTS.get(part, (part, False))
        text += f"\n{title}:"
        text += fedavg_part(result["parts"][part]["ms"], with_pfl) if part in result["parts"] else MISSING
    text += "\nA cohort of 10 out of more and more clients, 10 local steps of 50 images, FBN, TF32; "
    text += "measured one after another:"
    text += cohort_growth(result["growth"]) if result.get("growth") else MISSING
    if result.get("profile"):
        text += "\nWhat the kernels of a round take with 10 clients and 10 local steps, in ms (and kernels). "
        text += "Clients run side by side, so the sum can be more than the round:\n\n"
        text += kernel_table(result["profile"])
    return text


def fedavg_part(ms, with_pfl):
    def precision(name):
        return "bf16" if "bf16" in name else "TF32"

    def fastest(start, kind):
        return min((v for k, v in ms.items() if k.startswith(start) and precision(k) == kind), default=None)

    any_pfl, any_ten = (any(name.startswith(start) for name in ms) for start in (PFL, TEN))
    header = ["way", "ms a round"]
    header += ["times as fast as pfl-research"] if any_pfl else []
    header += ["over ten rounds of distributed SGD"] if any_ten else []
    rows = []
    for name, value in ms.items():
        pfl, ten = (fastest(start, precision(name)) for start in (PFL, TEN))
        row = [name, f"{value:.2f}"]
        if any_pfl:  # ten rounds of distributed SGD are not a round of FedAvg
            row.append("" if name.startswith(TEN) else f"{pfl / value:.1f}" if pfl else NOT_MEASURED)
        if any_ten:
            row.append(f"{value / ten:.2f}" if ten else NOT_MEASURED)
        rows.append(row)
    text = "\n\n" + table(header, rows)
    if any_ten:
        text += (
            "\nTen rounds of distributed SGD are the same arithmetic with weights that all clients share.\n"
        )
    return text + (f"\npfl-research: {NOT_MEASURED}.\n" if with_pfl and not any_pfl else "")


def cohort_growth(found):
    first = next((row for row in found if row["clients"] == 10), None)

    def over(row, key):
        return f"{row[key] / first[key]:.2f}" if first else NOT_MEASURED

    rows = [
        [f"{r['clients']:,}", f"{r['ms']:.2f}", over(r, "ms"), f"{r['bytes'] / 2**30:.2f}", over(r, "bytes")]
        for r in found
    ]
    header = ["clients", "ms a round", "relative to 10 clients", "GPU memory (GiB)", "relative to 10 clients"]
    return "\n\n" + table(header, rows)


def best_rate(runs):
    """The learning rate with the highest mean accuracy over seeds, and its runs."""
    rates = sorted({run["lr"] for run in runs})
    at = {rate: [run for run in runs if run["lr"] == rate] for rate in rates}
    return max(at.items(), key=lambda item: statistics.fmean(run["accuracy"] for run in item[1]))


def per_cent(values):
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread}"


def setting_words(setting):
    """The setting of a file as a list in words; what has no words of its own appears as it is."""
    words = {
        "dataset": lambda v: {"cifar10": "CIFAR-10"}.get(v, v),
        "algorithm": lambda v: {"fedavg": "FedAvg"}.get(v, v),
        "clients": lambda v: f"{v} clients" + ("" if "cohort" in setting else ", all in every round"),
        "cohort": lambda v: f"{v} of them in a round",
        "local_steps": lambda v: f"{v} local steps",
        "batch": lambda v: f"batches of {v}",
        "clip": lambda v: f"gradients clipped at norm {v:g}",
        "schedule": lambda v: f"{v} learning rate schedule",
        "rounds": lambda v: f"{v} rounds",
        "evaluate_every": lambda v: "",  # the last round is what counts
        "calibrate": lambda v: "calibrated start" if v else "no calibration",
        "weighting": lambda v: {"size": "clients weighted by size", "equal": "clients weighted equally"}[v],
    }
    found = [words[k](v) if k in words else f"{k.replace('_', ' ')} {v}" for k, v in setting.items()]
    return ", ".join(word for word in found if word)


def scheme_accuracies(result):
    rows, environment = result["rows"], result["environment"]
    rates, seeds, splits = (list(dict.fromkeys(row[key] for row in rows)) for key in ("lr", "seed", "split"))
    starred = False
    lines = []
    for name, scheme in SCHEMES.items():
        if "fedavg" not in scheme.algorithms:
            continue
        line = [scheme.title]
        for split in splits:
            runs = [row for row in rows if (row["scheme"], row["split"]) == (name, split)]
            if not runs:
                line += [NOT_MEASURED, "", ""]
                continue
            rate, best = best_rate(runs)
            own = [run["client_accuracy"] for run in best if "client_accuracy" in run]
            if not set(scheme.own) - set(scheme.before.learned):  # then evaluation does not use it
                own = []
            star = "" if len(runs) == len(rates) * len(seeds) else " *"
            starred = starred or bool(star)
            line += [per_cent([run["accuracy"] for run in best]), f"{rate:g}{star}"]
            line.append(per_cent(own) if own else "")
        lines.append(line)
    header = ["scheme"]
    for split in splits:
        header += [f"{split}: accuracy (%)", "learning rate", "own models (%)"]
    precisions = ", ".join(dict.fromkeys(row["precision"] for row in rows))
    text = origin(
        {
            "machine": environment | {"name": environment["device"]},
            "commit": (environment["commit"] or "unknown").replace("-changed", " with uncommitted changes"),
        },
        f"{precisions}, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}, ",
    )
    total = len(rows) + result["missing"]
    text += "Machine and commit are those of the last run collected. "
    text += f"Setting: {setting_words(result['setting'])}. "
    text += f"Learning rates: {', '.join(f'{rate:g}' for rate in sorted(rates))}. "
    text += (
        f"{result['missing']} of the grid's {total} runs {'is' if result['missing'] == 1 else 'are'} missing"
    )
    text += "; a star marks a scheme and split with missing runs.\n\n" if starred else ".\n\n"
    return text + table(header, lines)


def kernel_table(profile):
    kinds = {name: kernel_kinds(kernels) for name, kernels in profile.items()}
    names = list(next(iter(kinds.values())))
    rows = [[name, *(f"{k[name][0]:.2f} ({k[name][1]:.0f})" for k in kinds.values())] for name in names]
    return table(["", *kinds], rows)


def kernel_kinds(kernels):
    """Kind of kernel -> (ms, number); the first kind whose pattern is found in a kernel's name."""
    signs = {
        "bias, ReLU, normalization, statistics and their gradients, in one pass each way": (
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


def page(results=RESULTS):
    def sections(pattern, section):
        return "".join(
            section(json.loads(f.read_text())) for f in sorted(results.glob(pattern), key=lambda f: f.stem)
        )

    def optional(text, pattern, section):
        found = sections(pattern, section)
        return text + found if found else ""

    text = HEAD + LAYERS + sections("layer-*.json", layers)
    text += optional(EXCHANGE, "exchange-*.json", exchanges)
    text += RULES + sections("rules-*.json", robust_rules)
    text += ROUNDS + sections("round-*.json", federated_rounds)
    text += ON_A_GPU + sections("gpu-*.json", gpu_rounds)
    text += optional(LOOPS, "loops-*.json", gpu_loops)
    text += GROWTH + sections("growth-*.json", growth)
    text += optional(FEDAVG, "fedavg-*.json", fedavg_rounds)
    text += EXACTNESS + sections("exactness-*.json", exactness)
    return text + optional(ACCURACY, "schemes-*.json", scheme_accuracies)


def flower_page():
    """The page on Flower, with its results between marks."""
    epochs = json.loads((RESULTS / "flower-epochs-cpu.json").read_text())
    text = between(FLOWER.read_text(), "local epochs", local_epochs(epochs))
    return between(text, "results", flower_results())


def nvflare_page():
    """The page on NVFlare, with its results between marks."""
    result = json.loads((RESULTS / "nvflare-cpu.json").read_text())
    return between(NVFLARE.read_text(), "results", same_clients(result))


def recipes_page():
    """The recipes, with the scan of real models between marks."""
    scan = json.loads((RESULTS / "scan-models.json").read_text())
    return between(RECIPES.read_text(), "scan", which_convert(scan))


def between(page, mark, text):
    """The page with this text between `<!-- mark -->` and `<!-- /mark -->`."""
    start, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
    head, found, rest = page.partition(start)
    if not found or end not in rest:
        raise ValueError(f"the page has no marks {start.strip()} and {end}")
    return head + start + text + end + rest.partition(end)[2]


def flower_results():
    """The same clients with and without federated BatchNorm."""
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
    return text


def written():
    """Every file that comes from the results, and its text."""
    images = {
        ROOT / "docs" / "images" / name: draw(RESULTS)
        for name, (file, draw) in (PICTURES | FRONT).items()
        if (RESULTS / file).exists()
    }
    return {PAGE: page(), FLOWER: flower_page(), NVFLARE: nvflare_page(), RECIPES: recipes_page()} | images


def write_or_check(files):
    """Write every file, or with --check only say which is not what the results say."""
    for path, text in files.items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what the results say: run {sys.argv[0]}")


if __name__ == "__main__":
    write_or_check(written())
