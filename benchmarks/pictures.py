"""The pictures beside the benchmarks' tables, as SVG; written by table.py."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from fedbatchnorm.report.figures import LINES, MARKERS, styled, svg
from fedbatchnorm.report.palette import COLORS
from fedbatchnorm.simulation.schemes import SCHEMES


@styled
def flower(results: Path) -> Figure:
    """Accuracy over rounds on Flower, with and without federated BatchNorm."""
    result = json.loads((results / "flower-cpu.json").read_text())
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axis = figure.subplots()
    for name, label, color, marker in (
        ("FBN", "FedAvg, federated BatchNorm", COLORS[1], "o"),
        ("FedAvg", "FedAvg, plain BatchNorm", COLORS[3], "D"),
    ):
        rounds = [int(r) for r in result["rows"][0][name]]
        curves = [[100 * row[name][str(r)] for r in rounds] for row in result["rows"]]
        for curve in curves:
            axis.plot(rounds, curve, color=color, linewidth=0.7, alpha=0.5)
        middle = [statistics.median(values) for values in zip(*curves, strict=True)]
        axis.plot(rounds, middle, color=color, marker=marker, markersize=3, linewidth=1.8, label=label)
    simulated = 100 * statistics.fmean(row["simulator"] for row in result["rows"])
    label = "simulator with FBN, after the last round"
    axis.axhline(simulated, color=COLORS[0], linestyle="--", linewidth=1, label=label)
    axis.set(xlabel="round", ylabel="test accuracy (%)", ylim=(0, 100))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


@styled
def growth(results: Path) -> Figure:
    """Time and memory of a round on a GPU against the number of clients."""
    rows = json.loads((results / "growth-h200.json").read_text())["growth"]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    for axis, label, read in (
        (panels[0], "ms a round", lambda row: row["ms"]),
        (panels[1], "GPU memory (GiB)", lambda row: row["bytes"] / 2**30),
    ):
        for i, kind in enumerate(dict.fromkeys(row["kind"] for row in rows)):
            mine = [row for row in rows if row["kind"] == kind]
            axis.plot(
                [row["clients"] for row in mine],
                [read(row) for row in mine],
                color=COLORS[i],
                marker=MARKERS[i],
                linestyle=LINES[i],
                markersize=4,
                label=f"images: {kind}",
            )
        axis.set(xscale="log", yscale="log", xlabel="clients", ylabel=label)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


@styled
def schemes(results: Path) -> Figure:
    """Accuracy of every scheme under FedAvg at each learning rate, one panel a split."""
    rows = json.loads((results / "schemes-h200.json").read_text())["rows"]
    splits = list(dict.fromkeys(row["split"] for row in rows))
    names = [name for name in SCHEMES if any(row["scheme"] == name for row in rows)]
    rates = sorted({row["lr"] for row in rows})
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    panels = figure.subplots(1, len(splits), sharey=True, squeeze=False)[0]
    for axis, split in zip(panels, splits, strict=True):
        for i, rate in enumerate(rates):
            found = {}
            for row in rows:
                if (row["split"], row["lr"]) == (split, rate):
                    found.setdefault(row["scheme"], []).append(100 * row["accuracy"])
            axis.plot(
                [statistics.fmean(values) for values in found.values()],
                [names.index(name) + 0.22 * (i - (len(rates) - 1) / 2) for name in found],
                color=COLORS[i + 1],
                marker=MARKERS[i],
                linestyle="",
                markersize=5.5,
                label=f"learning rate {rate:g}",
            )
        axis.set(title=split, xlabel="test accuracy (%)", ylim=(len(names) - 0.5, -0.5))
        axis.set_yticks(range(len(names)), [SCHEMES[name].title for name in names])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _written(draw: Callable[[Path], Figure]) -> Callable[[Path], str]:
    return lambda results: svg(draw(results))


PICTURES = {  # picture -> the result file that it needs, and how it is drawn
    "flower.svg": ("flower-cpu.json", _written(flower)),
    "growth.svg": ("growth-h200.json", _written(growth)),
    "schemes.svg": ("schemes-h200.json", _written(schemes)),
}
