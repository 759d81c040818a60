"""Write docs/benchmarks.md from the result files: python benchmarks/table.py [--check]."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "results" / "benchmarks"

HEAD = """# Speed of the layers

Written by `python benchmarks/table.py` from `results/benchmarks/`; do not edit.

FBN's training forward and backward over that of torch's BatchNorm in training mode, in one run: below 1
FBN is faster. Each figure is a ratio of medians over rounds in which all contenders took turns.
`python benchmarks/layer.py` measures it on your machine. On a GPU a single eager layer takes the same time
for five times the data: what is compared there is the host launching kernels, of which FBN has more.
"""


def section(result):
    machine = result["machine"]
    lines = [
        f"\n## {machine['name']}\n",
        f"torch {machine['torch']}, {machine['threads']} threads, {result['rounds']} rounds, "
        f"commit {result['commit']}.\n",
        "| shape | layout | BatchNorm, eager (ms) | FBN / BatchNorm, eager | FBN / BatchNorm, compiled |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        shape = " x ".join(map(str, row["shape"]))
        cells = (
            shape,
            row["layout"],
            f"{row['batchnorm_ms']:.2f}",
            f"{row['eager']:.2f}",
            f"{row['compiled']:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page():
    return HEAD + "".join(section(json.loads(f.read_text())) for f in sorted(RESULTS.glob("layer-*.json")))


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is not what the results say: run {__file__}")
    PAGE.write_text(page())
