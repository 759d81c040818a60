"""Write the table of docs/reliability.md: python benchmarks/reliability_table.py [--check].

What stands between two marks comes from results/reliability/campaign.json, which `make campaign` writes.
"""

import json
from pathlib import Path

from table import table, write_or_check

ROOT = Path(__file__).parents[1]
PAGE, FILE = ROOT / "docs" / "reliability.md", ROOT / "results" / "reliability" / "campaign.json"
MARKS = "<!-- campaign -->\n", "<!-- /campaign -->\n"

# Campaign -> what is tried, and what must hold.
SAYS = {
    "messages": ("a hostile message to `from_bytes`", "a message, or a `FormatError`; `merge` stays finite"),
    "run folders": ("a changed file of a finished run", "what was written, or an error that names the file"),
    "files of runs": (
        "a changed line of a file of runs",
        "what was written, or an error that names the line",
    ),
    "checkpoints of runs": ("changed checkpoints and metrics", "one that was written, to the bit, or none"),
    "checkpoints of servers": ("a changed or forged server's checkpoint", "what was written, or an error"),
    "merges": ("a merge with 1 to 3 hostile updates", "the result of the others alone, to the bit"),
    "kills of runs": ("SIGKILL during a run", "resumed, the bits of an uninterrupted run"),
    "kills of collecting": ("SIGKILL while a file of runs is written", "the old file or the new one"),
    "kills of servers": (
        "SIGKILL of a Flower server, 5 nodes, some of which send garbage",
        "continued, the bits of an uninterrupted run without that garbage",
    ),
    "kills of a federation": (
        "the same with a SuperLink and 3 SuperNodes, which are killed, too",
        "the bits of a run with the replies that came",
    ),
    "full disks": ("no space at a random moment of a run", "an error with a path; then the same bits"),
    "closed streams": ("streams closed, cut, full or in ASCII", "the work done, the right exit status"),
}
READERS = (
    "messages",
    "run folders",
    "files of runs",
    "checkpoints of runs",
    "checkpoints of servers",
    "merges",
)

KILLS = "kills of runs", "kills of collecting", "kills of servers", "kills of a federation"


def figures(result):
    """The table, and what it comes from."""
    found, machine = result["campaigns"], result["machine"]
    missing = sorted(SAYS.keys() - found.keys())
    if missing:
        raise ValueError(f"{FILE} has no figures for {', '.join(missing)}")
    rows = []
    for name, (tried, holds) in SAYS.items():
        one = found[name]
        count = one.get("killed", one["count"])
        refused = f"{one['refused']:,}" if "refused" in one else "-"
        rows.append([tried, f"{count:,}", refused, holds, f"{one['seconds']:,.0f}"])
    inputs = sum(found[name]["count"] for name in READERS)
    kills = sum(found[name]["killed"] for name in KILLS)
    real = found["kills of a federation"]
    seeds = sorted({one["seed"] for one in found.values()})
    commits = list(dict.fromkeys(one["commit"] for one in found.values()))
    nodes, garbage, lost = (real[what] for what in ("SuperNodes killed", "garbage", "replies lost"))
    return (
        f"{inputs:,} hostile inputs and {kills:,} kills; nothing else came out than what the table says. "
        f"A campaign stops at the first thing that does. In the real federation {nodes:,} SuperNodes were "
        f"killed, too, {garbage:,} replies were garbage, and {lost:,} were lost. "
        f"Seed {', '.join(map(str, seeds))}, commit {', '.join(commits)}, "
        f"Python {machine['python']}, torch {machine['torch']}.\n\n"
        + table(["what is tried", "times", "refused", "what must come out", "seconds"], rows)
    )


def page(text):
    """The page, with what the results say between its marks."""
    head, mark, rest = text.partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    if not (mark and end):
        raise ValueError(f"{PAGE} has no marks")
    return f"{head}{mark}{figures(json.loads(FILE.read_text()))}{end}{tail}"


if __name__ == "__main__":
    write_or_check({PAGE: page(PAGE.read_text(encoding="utf-8"))})
