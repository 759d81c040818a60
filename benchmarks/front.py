"""The two pictures of the front page, each for a light and a dark page; written by table.py.

`ring`: ten clients' points before and after normalization, centralized, naive and FBN. `cifar10`: accuracy
against heterogeneity, and over rounds where it is strongest. From results/ring and
results/cifar10.runs.jsonl.
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from safetensors.torch import load_file

from fedbatchnorm.report.figures import svg

LIGHT = {"ink": "#1f2328", "muted": "#59636e", "grid": "#d1d9e0"}
DARK = {"ink": "#e6edf3", "muted": "#9198a1", "grid": "#3d444d"}
# One color for each class, at 36 degrees' distance; readable on white and on nearly black.
CLASSES = (
    "#c77d00",
    "#8a9a00",
    "#2f9e44",
    "#00a08a",
    "#1098ad",
    "#3b82f6",
    "#7c6cf0",
    "#b455d6",
    "#e0499b",
    "#e5533d",
)
LINES = {  # scheme -> name, color on light, color on dark, marker, line
    "centralized": ("centralized", "#1f2328", "#e6edf3", "s", "--"),
    "fbn": ("FBN", "#0072b2", "#4cb3f0", "o", "-"),
    "fixbn": ("FixBN", "#b07800", "#e3b341", "v", "-."),
    "naive": ("naive", "#c44601", "#ff8a50", "D", ":"),
}
PANELS = (("centralized", "Centralized BatchNorm"), ("naive", "Naive BatchNorm"), ("fbn", "FBN"))


def ring(results: Path, colors: dict[str, str]) -> Figure:
    """The points that ten clients hold, one class each, and what three schemes make of them."""
    runs = {}
    for folder in sorted((results / "ring").iterdir()):
        config = json.loads((folder / "config.json").read_text())
        if config["gamma"] == 0 and config["seed"] == 0:
            runs[config["scheme"]] = load_file(folder / "model.safetensors")
    figure = Figure(figsize=(9.6, 2.75), layout="constrained")
    panels = figure.subplots(1, 4)
    first = runs["centralized"]
    _points(panels[0], first["points"], first["labels"], 13.5, "Before normalization", colors)
    for axis, (scheme, title) in zip(panels[1:], PANELS, strict=True):
        _points(axis, runs[scheme]["normalised"], first["labels"], 2.75, title, colors)
    return figure


def _points(axis: Axes, points, labels, reach: float, title: str, colors: dict[str, str]) -> None:
    for label in labels.unique().tolist():
        cloud = points[labels == label]
        axis.scatter(cloud[:, 0], cloud[:, 1], s=7, color=CLASSES[label], alpha=0.85, linewidths=0)
    ticks = [-10, 0, 10] if reach > 10 else [-2, 0, 2]
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xticks=ticks, yticks=ticks)
    axis.set_title(title, fontweight="bold")


def cifar10(results: Path, colors: dict[str, str]) -> Figure:
    """Test accuracy against gamma, and over rounds with one class for each client."""
    cells: dict[tuple[str, float], list[dict]] = {}
    for line in (results / "cifar10.runs.jsonl").read_text().splitlines():
        run = json.loads(line)
        config = run["config"]
        plain = (config["dataset"], config["partition"], config["clients"], config["precision"])
        if plain == ("cifar10", "gamma", 10, "tf32") and not config["byzantine"]:
            cells.setdefault((config["scheme"], config["gamma"]), []).append(run)
    levels = sorted({gamma for _, gamma in cells}, reverse=True)
    figure = Figure(figsize=(9.6, 3.1), layout="constrained")
    final, rounds = figure.subplots(1, 2)
    for scheme, (name, light, dark, marker, line) in LINES.items():
        color = dark if colors is DARK else light
        style = {"color": color, "marker": marker, "linestyle": line, "linewidth": 1.8, "markersize": 5}
        ends = [[100 * run["summary"]["accuracy"] for run in cells[scheme, level]] for level in levels]
        spread = [statistics.stdev(values) for values in ends]
        final.errorbar(
            range(len(levels)), [statistics.fmean(v) for v in ends], spread, label=name, capsize=2, **style
        )
        runs = cells[scheme, 0.0]
        curves = [
            100 * statistics.fmean(values) for values in zip(*(r["accuracy"] for r in runs), strict=True)
        ]
        rounds.plot(runs[0]["round"], curves, markevery=5, **style)
    final.set_xticks(range(len(levels)), [f"{level:g}" for level in levels])
    final.set(xlabel="gamma (1: iid, 0: one class for each client)", ylabel="test accuracy (%)")
    final.set_title("After 3000 rounds", fontweight="bold")
    rounds.set(xlabel="round")
    rounds.set_title("One class for each client (gamma 0)", fontweight="bold")
    for axis in (final, rounds):
        axis.set_ylim(0, 88)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, handlelength=3.5)
    return figure


def themed(draw: Callable[[Path, dict[str, str]], Figure], colors: dict[str, str]) -> Callable[[Path], str]:
    """A picture as SVG in a theme's colors, without a background of its own."""

    def written(results: Path) -> str:
        style = {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.unicode_minus": False,
            "grid.color": colors["grid"],
            "grid.linewidth": 0.6,
            "axes.edgecolor": colors["muted"],
            "axes.labelcolor": colors["ink"],
            "text.color": colors["ink"],
            "xtick.color": colors["muted"],
            "ytick.color": colors["muted"],
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
            "svg.hashsalt": "fedbatchnorm",
        }
        with mpl.rc_context(style):
            return svg(draw(results.parent, colors), standalone=True)

    return written


PICTURES = {  # picture -> the file or folder of results that it needs, and how it is drawn
    f"{name}{ending}.svg": (needs, themed(draw, colors))
    for name, needs, draw in (("ring", "../ring", ring), ("cifar10", "../cifar10.runs.jsonl", cifar10))
    for ending, colors in (("", LIGHT), ("-dark", DARK))
}
