"""Write the tables of docs/comparison.md: python benchmarks/comparison_table.py [--check].

Accuracies come from results/benchmarks/schemes-h200.json and results/training/*.json.
"""

import json
import statistics
from pathlib import Path

from table import NOT_MEASURED, best_rate, between, per_cent, setting_words, table, write_or_check
from training_table import NEAR, TRAINS, cells_of, digits_key, judged, rows_of, split_name

from fedbatchnorm.simulation.schemes import SCHEMES

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "comparison.md", ROOT / "results"
SPLITS = {"Dirichlet 0.1": "Dirichlet 0.1", "gamma 0": "one class each"}  # in the files of the studies
LOCAL_STEPS = 10  # of the study by local steps, as in the study of all schemes

CONTENDERS = {  # row -> the scheme's name in the study of all schemes, and in the studies of training
    "plain BatchNorm, averaged": ("naive", "naive"),
    "FedBN": ("fedbn", None),
    "SiloBN": ("silobn", None),
    "GroupNorm": ("groupnorm", "groupnorm"),
    "FixBN": ("fixbn", "fixbn"),
    "HBN": ("hbn", "hbn"),
    "FedTAN": ("fedtan", None),
    "FBN, as published": ("fbn", "fbn"),
    "blend": ("fbn_blend", "fbn_blend"),
    "**ours**": (None, "ours"),
}


def of_all_schemes(result):
    """{(scheme, split): the accuracy at the best learning rate, with own models in brackets}."""
    found = {}
    for name, split in {(row["scheme"], row["split"]): None for row in result["rows"]}:
        runs = [row for row in result["rows"] if (row["scheme"], row["split"]) == (name, split)]
        _, best = best_rate(runs)
        text = per_cent([run["accuracy"] for run in best])
        scheme = SCHEMES[name]
        if set(scheme.own) - set(scheme.before.learned):  # evaluation uses what clients keep
            text += f" (own {per_cent([run['client_accuracy'] for run in best])})"
        found[name, SPLITS[split]] = text
    return found


def by_local_steps(result):
    """{(column, split): the accuracy at the best learning rate} of the runs with ten local steps."""
    cells = {}
    for row in rows_of(result):
        if row.get("local_steps") == LOCAL_STEPS:
            cell = cells.setdefault((row["column"], split_name(row)), {})
            cell.setdefault(row["lr"], []).append(row["accuracy"] or 0.0)
    return {key: per_cent(max(cell.values(), key=statistics.fmean)) for key, cell in cells.items()}


def on_digits(result):
    """{column: in how many cells it is near the best}."""
    gaps = judged(cells_of(rows_of(result), digits_key)).values()
    found = {}
    for column in {column for gap in gaps for column in gap}:
        run = [gap[column] for gap in gaps if column in gap]
        found[column] = f"{sum(gap <= NEAR + 1e-9 for gap in run)} of {len(run)}"
    return found


def learning_rates(result):
    return ", ".join(f"{rate:g}" for rate in sorted({row["lr"] for row in result["rows"]}))


def explained(schemes, steps, digits):
    """Where the columns come from, and what must be known to read them."""
    where, (device, _, commit) = schemes["environment"], steps["environments"][0]
    machines = "; ".join(f"{name}, commit {commit}" for name, _, commit in digits["environments"])
    lines = [
        "Test accuracy in percent after the last round, one seed unless a standard deviation is given, each "
        "scheme at its best learning rate of the grid, chosen on the test set for all alike. *own*: each "
        "client with its own model, on test data of its own classes.",
        f"(A) {setting_words(schemes['setting'])}; rates {learning_rates(schemes)}; {where['device']}, "
        f"commit {where['commit']}; {schemes['missing']} runs of the grid are missing.",
        f"(B) The same protocol at another commit; rates {learning_rates(steps)}, and for some schemes one "
        f"of them alone; {device}, commit {commit}. {steps.get('note', '')}",
        f"(C) In how many settings a scheme is within {100 * NEAR:g} points of the best, of those in which "
        f"anything reaches {100 * TRAINS:g}%. {digits.get('note', '')} Machines: {machines}.",
    ]
    return "\n" + "\n\n".join(line.strip() for line in lines) + "\n"


def measured(results=RESULTS):
    """The table of accuracies, and where they come from."""

    def read(*names):
        return json.loads(results.joinpath(*names).read_text(encoding="utf-8"))

    schemes, steps = read("benchmarks", "schemes-h200.json"), read("training", "steps.json")
    digits = read("training", "digits.json")
    all_schemes, local_steps, near = of_all_schemes(schemes), by_local_steps(steps), on_digits(digits)
    lines = [
        [
            name,
            *(all_schemes.get((first, split), NOT_MEASURED) for split in SPLITS.values()),
            *(local_steps.get((second, split), NOT_MEASURED) for split in SPLITS.values()),
            near.get(second, NOT_MEASURED),
        ]
        for name, (first, second) in CONTENDERS.items()
    ]
    header = ["", *(f"CIFAR-10 (A), {split}" for split in SPLITS.values())]
    header += [*(f"CIFAR-10 (B), {split}" for split in SPLITS.values()), "digits (C)"]
    return table(header, lines) + explained(schemes, steps, digits)


if __name__ == "__main__":
    write_or_check({PAGE: between(PAGE.read_text(encoding="utf-8"), "measured", measured())})
