"""Write docs/benchmarks.md from the result files: python benchmarks/table.py [--check]."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
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
        f"commit {result['commit']}.\n\n"
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


def page():
    def sections(pattern, section):
        return "".join(section(json.loads(f.read_text())) for f in sorted(RESULTS.glob(pattern)))

    text = HEAD + LAYERS + sections("layer-*.json", layers)
    text += ROUNDS + sections("round-*.json", federated_rounds)
    return text + RULES + sections("rules-*.json", robust_rules)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is not what the results say: run {__file__}")
    PAGE.write_text(page())
