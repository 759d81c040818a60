"""The table of docs/flower.md on local epochs, from the results of flower_epochs.py."""

import statistics


def local_epochs(result):
    """A line for each number of epochs and learning rate, a column for each split and way."""
    splits = list(dict.fromkeys(row["split"] for row in result["rows"]))
    cells = list(dict.fromkeys((row["epochs"], row["lr"]) for row in result["rows"]))
    header = ["local epochs", "learning rate"]
    header += [f"{split}: {way}" for split in splits for way in ("plain FedAvg", "wrapped")]
    lines = []
    for epochs, lr in sorted(cells):
        rounds = result["rounds"][str(epochs)]
        line = [f"{epochs}, {rounds} rounds", f"{lr:g}"]
        for split in splits:
            found = [r for r in result["rows"] if (r["split"], r["epochs"], r["lr"]) == (split, epochs, lr)]
            line += [_cell([row[way] for row in found]) for way in ("plain", "ours")]
        lines.append(line)
    rows = [header, ["---"] * len(header), *lines]
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
    return f"{text}\n{_seeds(result, len(splits) * len(cells))} {_origin(result)}\n"


def _cell(runs):
    """Mean and deviation over seeds, in per cent; a star where a run was stopped as diverged."""
    if not runs:
        return "not measured"
    values = [100 * run["accuracy"] for run in runs]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}{' *' if any('diverged' in r for r in runs) else ''}"


def _seeds(result, cells):
    """How many seeds there are, and whether some are missing in some cells."""
    seeds = {row["seed"] for row in result["rows"]}
    missing = len(seeds) * cells - len(result["rows"])
    words = f"Test accuracy (%), {len(seeds)} seed{'s' * (len(seeds) > 1)}"
    words += f"; {missing} of {len(seeds) * cells} pairs of runs are missing" if missing else ""
    starred = any("diverged" in row["ours"] for row in result["rows"])
    return words + ("; * stopped as diverged, the last good state's." if starred else ".")


def _origin(result):
    machine = result["machine"]
    where = f"{machine['name']}, torch {machine['torch']}, commit {result['commit']}"
    return f"`python benchmarks/flower_epochs.py`, {where}."
