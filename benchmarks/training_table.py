"""Write the tables and the figure of docs/training.md: python benchmarks/training_table.py [--check].

Everything between two marks comes from results/training/, as `benchmarks/training.py STUDY RUNS --json FILE`
and `benchmarks/dynamics.py --json FILE` write it.
"""

import json
import math
import statistics
from pathlib import Path

from matplotlib.figure import Figure
from table import per_cent, table, write_or_check

from fedbatchnorm.report.figures import LINES, styled, svg
from fedbatchnorm.report.palette import COLORS

ROOT = Path(__file__).parents[1]
PAGE, IMAGE = ROOT / "docs" / "training.md", ROOT / "docs" / "images" / "dynamics.svg"
RESULTS = ROOT / "results" / "training"

NAMES = {"naive": "plain", "groupnorm": "GroupNorm", "fixbn": "FixBN", "fbn": "FBN", "hbn": "HBN"}
NAMES |= {"fbn_blend": "blend", "fresh": "plain, fresh", "ours": "ours"}
MODELS = {"cnn16": "a CNN with 3 BatchNorm layers", "plain9": "9 convolutions in a row"}
NOT_RUN = "not run"
TRAINS, NEAR = 0.5, 0.02  # a cell counts if anything reaches the one; close is within the other
WORST = 6  # cells that are named


def contender(row):
    """Which column a run belongs to; None if to no column.

    "auto" with a limit of 2 is how ours was set before; files with such rows say so in their note.
    """
    if row["scheme"] != "fbn":
        return "fresh" if row.get("recalibrate") else row["scheme"]
    kind = row["gradient"], row.get("limit")
    return {(0.0, None): "fbn", ("auto", 2.0): "ours", ("auto", "auto"): "ours"}.get(kind)


def split_name(row):
    if row["partition"] == "dirichlet":
        return f"Dirichlet {row['alpha']:g}"
    return {0.0: "one class each", 1.0: "iid"}.get(row["gamma"], f"gamma {row['gamma']:g}")


def work_name(row):
    count, unit = (row["local_epochs"], "epoch") if row.get("local_epochs") else (row["local_steps"], "step")
    return f"{count} {unit}{'' if count == 1 else 's'}"


def rows_of(result):
    """Every run with all of its settings, and the column that it belongs to."""
    rows = [result["common"] | row for row in result["rows"]]
    return [row | {"column": contender(row)} for row in rows if contender(row)]


def cells_of(rows, key):
    """{key: {column: the accuracies of all seeds}}, in the order of the runs."""
    found = {}
    for row in rows:
        cell = found.setdefault(key(row), {}).setdefault(row["column"], [])
        cell.append(row["accuracy"] or 0.0)  # a run whose model is not finite gets nothing right
    return found


def means(cell):
    return {column: statistics.fmean(values) for column, values in cell.items()}


def line(cell, columns, seeds, extra=lambda column: ""):
    """The cells of a row as text: the best in bold, what has fewer seeds than the others marked."""
    best = max(means(cell).values(), default=math.nan)
    texts = []
    for column in columns:
        values = cell.get(column)
        if not values:
            texts.append(NOT_RUN)
            continue
        text = per_cent(values)
        if len(cell) > 1 and f"{100 * statistics.fmean(values):.1f}" == f"{100 * best:.1f}":
            text = f"**{text}**"
        fewer = f" [{len(values)}]" if len(values) < seeds else ""
        texts.append(text + extra(column) + fewer)
    return texts


def count_of(number, word):
    return f"{number} {word}{'' if number == 1 else 's'}"


def origin(result, cells):
    """A line on where results come from and how many seeds there are."""
    seeds = max((len(v) for cell in cells.values() for v in cell.values()), default=0)
    fewer = any(len(v) < seeds for cell in cells.values() for v in cell.values())
    text = f"Accuracy in percent on the test set after the last round, {count_of(seeds, 'seed')}"
    text += " (mean ± standard deviation)" if seeds > 1 else ""
    text += "; a number in brackets is that of the seeds where it is smaller" if fewer else ""
    text += ". The best of a row is bold."
    if result.get("missing"):
        missing, total = result["missing"], result["missing"] + len(result["rows"])
        text += f" {missing} of {count_of(total, 'run')} {'is' if missing == 1 else 'are'} missing."
    places = [
        f"{device}, torch {torch}, commit "
        + (commit or "unknown").replace("-changed", " with uncommitted changes")
        for device, torch, commit in result["environments"]
    ]
    text += f" `python benchmarks/training.py {result['study']}`; {'; '.join(places)}.\n"
    return text + (f"\n**Note.** {result['note']}\n" if result.get("note") else ""), seeds


def digits_key(row):
    """What makes a cell of the study on digits."""
    clip = f"clip {row['clip']:g}" if row.get("clip") else "none"
    return row["model"], split_name(row), work_name(row), row["lr"], clip


def digits(result):
    rows = rows_of(result)
    cells = cells_of(rows, digits_key)
    text, seeds = origin(result, cells)
    blocks = list(dict.fromkeys(key[:2] for key in cells))
    text += "\n" + closeness(cells, blocks)
    for block in blocks:
        inside = {key[2:]: cell for key, cell in cells.items() if key[:2] == block}
        lines = [
            [work, f"{rate:g}", clip, *line(cell, NAMES, seeds)]
            for (work, rate, clip), cell in inside.items()
        ]
        model, split = block
        text += f"\n**{split}**, {MODELS.get(model, model)} (`{model}`):\n\n"
        text += table(["work a round", "lr", "clipping", *NAMES.values()], lines)
    return text


def judged(cells):
    """The cells in which something trains: {key: {column: how far its mean is from the best}}."""
    found = {}
    for key, cell in cells.items():
        mean = means(cell)
        best = max(mean.values())
        if best >= TRAINS:
            found[key] = {column: best - value for column, value in mean.items()}
    return found


def closeness(cells, blocks):
    """How often each scheme is close to the best, and where ours is furthest from it."""
    gaps = judged(cells)
    lines = []
    for block in [*blocks, None]:
        inside = [gap for key, gap in gaps.items() if block in (None, key[:2])]
        row = ["all" if block is None else f"{block[1]}, `{block[0]}`"]
        for column in NAMES:
            run = [gap[column] for gap in inside if column in gap]
            row.append(f"{sum(g <= NEAR + 1e-9 for g in run)} of {len(run)}" if run else NOT_RUN)
        lines.append(row)
    text = f"In how many cells a scheme is within {100 * NEAR:g} points of the best, of those cells where "
    text += f"something reaches {100 * TRAINS:g}%:\n\n"
    text += table(["", *NAMES.values()], lines)
    ours = {key: gap["ours"] for key, gap in gaps.items() if "ours" in gap}
    near = sum(g <= NEAR + 1e-9 for g in ours.values())
    text += f"\nOurs is within {100 * NEAR:g} points of the best in {near} of {count_of(len(ours), 'cell')}."
    far = sorted((k for k, g in ours.items() if g > NEAR + 1e-9), key=lambda k: -ours[k])[:WORST]
    if far:
        named = []
        for k in far:
            mean = means(cells[k])
            best = max(mean, key=lambda column: mean[column])
            model, split, work, rate, clip = k
            clip = "no clipping" if clip == "none" else clip
            named.append(
                f"- {split}, `{model}`, {work}, lr {rate:g}, {clip}: {100 * mean['ours']:.1f} against "
                f"{100 * mean[best]:.1f} ({NAMES[best]})"
            )
        text += " Furthest behind:\n\n" + "\n".join(named)
    return text + "\n"


def steps(result):
    rows = rows_of(result)
    cells = cells_of(rows, lambda row: (split_name(row), row["local_steps"], row["lr"]))
    text, seeds = origin(result, cells)
    places = sorted({key[:2] for key in cells}, key=lambda p: ([s for s, *_ in cells].index(p[0]), p[1]))
    lines = []
    for place in places:
        best, rate_of = {}, {}
        for (*where, rate), cell in cells.items():
            if tuple(where) == place:
                for column, values in cell.items():
                    if column not in best or statistics.fmean(values) > statistics.fmean(best[column]):
                        best[column], rate_of[column] = values, rate
        grid = sorted({key[2] for key in cells if key[:2] == place})
        several = len(grid) > 1
        texts = line(
            best,
            NAMES,
            seeds,
            lambda c, several=several, rate_of=rate_of: f" at {rate_of[c]:g}" if several else "",
        )
        lines.append([place[0], f"{place[1]}", ", ".join(f"{r:g}" for r in grid), *texts])
    text += (
        "\nEach scheme is at its best learning rate of the grid, chosen on the test set for all alike.\n\n"
    )
    return text + table(["data", "local steps", "learning rates", *NAMES.values()], lines)


def paper(result):
    rows = rows_of(result)
    cells = cells_of(rows, lambda row: (row["momentum_kind"], row["momentum"], row["lr"], row["gamma"]))
    text, seeds = origin(result, cells)
    columns = {"ours": "ours", "fbn": "FBN", "centralized": "centralized"}
    lines = [
        [f"{kind} {momentum:g}", f"{rate:g}", f"{gamma:g}", *line(cell, columns, seeds)]
        for (kind, momentum, rate, gamma), cell in cells.items()
    ]
    return text + "\n" + table(["momentum", "lr", "gamma", *columns.values()], lines)


def clipping(result):
    """Plain BatchNorm and ours at each learning rate, with and without clipping side by side."""
    rows = rows_of(result)
    for row in rows:
        row["column"] += " clipped" if row.get("clip") else ""
    cells = cells_of(rows, lambda row: (split_name(row), row["lr"]))
    text, seeds = origin(result, cells)
    columns = {
        f"{c}{clipped}": f"{NAMES[c]}, {words}"
        for c in ("naive", "ours")
        for clipped, words in (("", "no clipping"), (" clipped", "clip 1"))
    }
    lines = [[split, f"{rate:g}", *line(cell, columns, seeds)] for (split, rate), cell in cells.items()]
    return text + "\n" + table(["data", "lr", *columns.values()], lines)


HBN_NAMES = {"naive": "BatchNorm", "groupnorm": "GroupNorm", "layernorm": "LayerNorm", "fixbn": "FixBN"}
HBN_NAMES |= {"hbn": "HBN", "fbn_in_hbn": "FBN in HBN's repository", "fbn": "FBN", "fbn_blend": "blend"}
HBN_NAMES |= {"ours": "ours"}


def hbn(result):
    """A row for each scheme: the mean over the last rounds, and the best, by batch and split."""
    rows = rows_of(result)
    text, seeds = origin(result, cells_of(rows, lambda row: (row["batch"], row["alpha"])))
    places = sorted({(row["batch"], -row["alpha"]) for row in rows})
    found = {}
    for row in rows:
        place = found.setdefault((row["batch"], -row["alpha"]), {})
        place.setdefault(row["column"], []).append((row["last"], row["best"]))
    columns = {}
    for place, cell in found.items():
        last, best = ({c: [v[i] for v in values] for c, values in cell.items()} for i in (0, 1))
        texts = zip(line(last, HBN_NAMES, seeds), line(best, HBN_NAMES, seeds), strict=True)
        columns[place] = [NOT_RUN if a == NOT_RUN else f"{a} ({b})" for a, b in texts]
    lines = [
        [f"{name}", *(columns[place][i] for place in places)] for i, name in enumerate(HBN_NAMES.values())
    ]
    heads = [f"batch {batch}, Dirichlet {-alpha:g}" for batch, alpha in places]
    text = text.replace("after the last round", "over the last 10 rounds, and the best of all in parentheses")
    return text.replace("of a row", "of a column") + "\n" + table(["", *heads], lines)


def resnets(result):
    rows = rows_of(result)
    cells = cells_of(rows, lambda row: row["lr"])
    text, seeds = origin(result, cells)
    lines = [[f"{rate:g}", *line(cell, NAMES, seeds)] for rate, cell in sorted(cells.items())]
    return text + "\n" + table(["lr", *NAMES.values()], lines)


def attacks(result):
    rows = rows_of(result)
    cells = cells_of(
        rows, lambda row: (row["algorithm"], row.get("attack", "none"), row.get("defense", "none"))
    )
    text, seeds = origin(result, cells)
    columns = {"ours": "ours", "fbn": "FBN"}
    names = {
        "dsgd": "the paper's recipe, `mlp`, one class each",
        "fedavg": "FedAvg, 1 epoch, `cnn16`, gamma 0.5",
    }
    lines = [
        [names[algorithm], attack, defense, *line(cell, columns, seeds)]
        for (algorithm, attack, defense), cell in cells.items()
    ]
    return text + "\n" + table(["training", "attack", "defense", *columns.values()], lines)


def where_measured(result):
    machine, setting = result["machine"], result["setting"]
    seeds = count_of(len({row["seed"] for row in result["rows"]}), "seed")
    return (
        f"`python benchmarks/dynamics.py`: digits, `{setting['model']}`, {setting['clients']} clients, "
        f"batches of {setting['batch']}, {count_of(setting['local_epochs'], 'local epoch')}, momentum 0.9, "
        f"lr {setting['lr']:g}, no clipping, calibrated start; medians of {seeds}. {machine['name']}, torch "
        f"{machine['torch']}, commit {result['commit']}.\n"
    )


def between(result):
    """The part of each layer's variance between clients, with ours: the median over rounds and seeds."""
    rows = [row for row in result["rows"] if "between" in row]
    lines = []
    for split in dict.fromkeys(row["split"] for row in rows):
        layers = zip(*(row["between"] for row in rows if row["split"] == split), strict=True)
        middle = [statistics.median(part for seed in layer for part in seed) for layer in layers]
        lines.append([split, *(f"{part:.3f}" for part in middle)])
    if not lines:
        return ""
    columns = [f"layer {i + 1}" for i in range(len(lines[0]) - 1)]
    return "f in the runs of the figure above, with ours; medians over rounds and seeds:\n\n" + table(
        ["data", *columns], lines
    )


ROWS = {  # quantity -> what the axis says, and whether it is logarithmic
    "weights": ("weights' norm / at start", False),
    "variance": ("running variance", True),
    "gradient": ("gradient's norm", True),
    "radial": ("radial part of gradient", False),
    "drift": ("drift of the mean (sd)", True),
}
CONTENDERS = {  # in dynamics.json -> in the legend
    "plain": "plain BatchNorm",
    "FBN": "FBN (share 0)",
    "0.7, limit": "share 0.7, with its limit",
    "ours": "ours (by drift and by layer)",
    "1": "share 1",
}


@styled
def dynamics(result):
    """Accuracy for each split above; below, for one of them, what moves in each layer."""
    rows, shown = result["rows"], "Dirichlet 0.1"
    splits = list(dict.fromkeys(row["split"] for row in rows))
    figure = Figure(figsize=(9, 12), layout="constrained")
    panels = figure.subplots(1 + len(ROWS), 3, sharex=True)

    def draw(axis, split, read):
        for i, name in enumerate(CONTENDERS):
            curves = [read(r) for r in rows if (r["split"], r["contender"]) == (split, name)]
            middle = [middle_of(values) for values in zip(*curves, strict=True)]
            style = {"color": COLORS[i], "linestyle": LINES[i], "linewidth": 1.6}
            axis.plot(range(1, 1 + len(middle)), middle, label=CONTENDERS[name], **style)

    for axis, split in zip(panels[0], splits, strict=True):
        draw(axis, split, lambda row: [100 * (a or 0) for a in row["accuracy"]])
        axis.set(title=f"{split}", ylim=(0, 100))
    panels[0, 0].set_ylabel("test accuracy (%)")
    for line_of_panels, (name, (label, logarithmic)) in zip(panels[1:], ROWS.items(), strict=True):
        for layer, axis in enumerate(line_of_panels):
            draw(axis, shown, lambda row, name=name, layer=layer: row[name][layer])
            axis.set_yscale("log" if logarithmic else "linear")
        low, high = zip(*(axis.get_ylim() for axis in line_of_panels), strict=True)
        for axis in line_of_panels:
            axis.set_ylim(0 if name == "radial" else min(low), max(high))
            axis.yaxis.set_major_formatter("{x:g}")
        line_of_panels[0].set_ylabel(label)
    for layer, axis in enumerate(panels[1]):
        axis.set_title(f"{shown}, layer {layer + 1}")
    for axis in panels[-1]:
        axis.set_xlabel("round")
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3, frameon=False)
    return figure


def middle_of(values):
    """The median; what is not finite counts as larger than all else, and is not drawn."""
    middle = statistics.median(math.inf if v is None else v for v in values)
    return middle if math.isfinite(middle) else math.nan


def constant(result):
    """Accuracy at the end for constant shares, recipe and split by row."""
    rows, found = result["rows"], {}
    for row in rows:
        place = found.setdefault((row["recipe"], row["split"]), {})
        place.setdefault(row["share"], []).append(row["accuracy"] or 0.0)
    shares, seeds = sorted({row["share"] for row in rows}), len({row["seed"] for row in rows})
    lines = [[*place, *line(cell, shares, seeds)] for place, cell in found.items()]
    machine = result["machine"]
    return (
        f"Accuracy in percent at the end, digits, constant shares, no limit, {count_of(seeds, 'seed')}. "
        f"`python benchmarks/dynamics.py --shares`, {machine['name']}, torch {machine['torch']}, commit "
        f"{result['commit']}.\n\n" + table(["", "data", *(f"share {share:g}" for share in shares)], lines)
    )


SECTIONS = {
    "dynamics": where_measured,
    "constant": constant,
    "between": between,
    "digits": digits,
    "steps": steps,
    "clipping": clipping,
    "paper": paper,
    "hbn": hbn,
    "resnets": resnets,
    "attacks": attacks,
}


def page(text, results=RESULTS):
    """The page, with what the results say between the marks of each section."""
    for name, section in SECTIONS.items():
        file = results / f"{'dynamics' if name == 'between' else name}.json"
        found = section(json.loads(file.read_text())) if file.exists() else f"{NOT_RUN.capitalize()}.\n"
        head, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"<!-- /{name} -->\n")
        if not (mark and end):
            raise ValueError(f"the page has no marks for {name}")
        text = f"{head}{mark}{found}{end}{tail}"
    return text


def written():
    """Every file that comes from the results, and its text."""
    found = {PAGE: page(PAGE.read_text(encoding="utf-8"))}
    file = RESULTS / "dynamics.json"
    if file.exists():
        found[IMAGE] = svg(dynamics(json.loads(file.read_text())))
    return found


if __name__ == "__main__":
    write_or_check(written())
