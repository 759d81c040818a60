"""Write the table of docs/monai.md: python benchmarks/monai_table.py [--check].

What stands between two marks comes from results/monai/unet.json, which examples/monai/unet.py writes.
"""

import json
import statistics
from pathlib import Path

from table import table, write_or_check

ROOT = Path(__file__).parents[1]
PAGE, FILE = ROOT / "docs" / "monai.md", ROOT / "results" / "monai" / "unet.json"
MARKS = "<!-- dice -->\n", "<!-- /dice -->\n"


def figures(result):
    """Dice by site: mean and standard deviation over seeds, and each seed's mean over sites."""
    scanners, dice = result["scanners"], result["dice"]
    head = ["site", "what its scanner makes of x", *dice]
    rows = [
        [site, f"{gain:g} x {offset:+g}", *(both(sites[site]) for sites in dice.values())]
        for site, (gain, offset) in scanners.items()
    ]
    over = {name: means(sites) for name, sites in dice.items()}
    rows.append(["mean of the sites", "", *(both(values) for values in over.values())])
    rows += [
        [f"the same, seed {seed}", "", *(f"{values[i]:.3f}" for values in over.values())]
        for i, seed in enumerate(result["seeds"])
    ]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    how = (
        f"{result['rounds']} rounds of one local epoch, SGD with momentum 0.9, learning rate {result['lr']:g}"
    )
    machine = f"{result['machine']['name']}, {result['machine']['threads']} thread(s)"
    seeds, commit = ", ".join(map(str, result["seeds"])), result["commit"][:12]
    return (
        f"{table(head, rows)}\nDice of the final model on each site's test volumes, mean ± standard "
        f"deviation over seeds {seeds}; {how}. `python examples/monai/unet.py`, {machine}, {versions}, "
        f"commit {commit}.\n"
    )


def means(sites):
    """Of each seed, the mean over sites."""
    return [statistics.mean(row) for row in zip(*sites.values(), strict=True)]


def both(values):
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def page(text):
    """The page, with what the results say between its marks."""
    head, mark, rest = text.partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    if not (mark and end):
        raise ValueError(f"{PAGE} has no marks")
    return f"{head}{mark}{figures(json.loads(FILE.read_text()))}{end}{tail}"


if __name__ == "__main__":
    write_or_check({PAGE: page(PAGE.read_text(encoding="utf-8"))})
