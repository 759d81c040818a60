"""The two pictures of the README, for a light page, a dark page and a phone; written by table.py.

`ring`: ten clients' points before and after normalization, centralized, naive and FBN. `cifar10`: accuracy
against heterogeneity, and over rounds where it is strongest. From results/ring and
results/cifar10.runs.jsonl.
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from safetensors.torch import load_file

from fedbatchnorm.report.charts import SCHEME_COLORS
from fedbatchnorm.report.figures import LINES, MARKERS, styled, svg
from fedbatchnorm.report.palette import CLASSES, COLORS, dark

SCHEMES = {"centralized": "centralized", "fbn": "FBN", "fixbn": "FixBN", "naive": "naive"}
PANELS = (("centralized", "Centralized BatchNorm"), ("naive", "Naive BatchNorm"), ("fbn", "FBN"))


@styled
def ring(results: Path, narrow: bool = False) -> Figure:
    """The points that ten clients hold, one class each, and what three schemes make of them."""
    runs = {}
    for folder in sorted((results / "ring").iterdir()):
        config = json.loads((folder / "config.json").read_text())
        if config["gamma"] == 0 and config["seed"] == 0:
            runs[config["scheme"]] = load_file(folder / "model.safetensors")
    figure = Figure(figsize=(4.8, 5.2) if narrow else (9.6, 2.75), layout="constrained")
    panels = (figure.subplots(2, 2) if narrow else figure.subplots(1, 4)).flatten()
    first = runs["centralized"]
    _points(panels[0], first["points"], first["labels"], 13.5, "Before normalization")
    for axis, (scheme, title) in zip(panels[1:], PANELS, strict=True):
        _points(axis, runs[scheme]["normalised"], first["labels"], 2.75, title)
    return figure


def _points(axis: Axes, points, labels, reach: float, title: str) -> None:
    for label in labels.unique().tolist():
        cloud = points[labels == label]
        axis.scatter(cloud[:, 0], cloud[:, 1], s=7, color=CLASSES[label], alpha=0.85, linewidths=0)
    ticks = [-10, 0, 10] if reach > 10 else [-2, 0, 2]
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xticks=ticks, yticks=ticks)
    axis.set_title(title, loc="center")


@styled
def cifar10(results: Path, narrow: bool = False) -> Figure:
    """Test accuracy against gamma, and over rounds with one class for each client."""
    cells: dict[tuple[str, float], list[dict]] = {}
    for line in (results / "cifar10.runs.jsonl").read_text().splitlines():
        run = json.loads(line)
        config = run["config"]
        plain = (config["dataset"], config["partition"], config["clients"], config["precision"])
        if plain == ("cifar10", "gamma", 10, "tf32") and not config["byzantine"]:
            cells.setdefault((config["scheme"], config["gamma"]), []).append(run)
    levels = sorted({gamma for _, gamma in cells}, reverse=True)
    figure = Figure(figsize=(4.8, 6) if narrow else (9.6, 3.1), layout="constrained")
    final, rounds = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    for i, (scheme, name) in enumerate(SCHEMES.items()):
        look = SCHEME_COLORS[scheme]
        style = {"color": COLORS[look], "marker": MARKERS[look], "linestyle": LINES[look], "linewidth": 1.8}
        # The reference is a large open square, in which another scheme's marker can be seen.
        style |= (
            {"markersize": 8, "markerfacecolor": "none"} if scheme == "centralized" else {"markersize": 5}
        )
        ends = [[100 * run["summary"]["accuracy"] for run in cells[scheme, level]] for level in levels]
        spread = [statistics.stdev(values) for values in ends]
        final.errorbar(
            range(len(levels)), [statistics.fmean(v) for v in ends], spread, label=name, capsize=2, **style
        )
        runs = cells[scheme, 0.0]
        curves = [
            100 * statistics.fmean(values) for values in zip(*(r["accuracy"] for r in runs), strict=True)
        ]
        rounds.plot(runs[0]["round"], curves, markevery=(i, 6), **style)
    final.set_xticks(range(len(levels)), [f"{level:g}" for level in levels])
    final.set(xlabel="gamma (1: iid, 0: one class for each client)", ylabel="test accuracy (%)")
    final.set_title("After 3000 rounds")
    rounds.set(xlabel="round")
    rounds.set_title("One class for each client (gamma 0)")
    for axis in (final, rounds):
        axis.set_ylim(0, 88)
    figure.legend(loc="outside lower center", ncols=2 if narrow else 4, frameon=False, handlelength=3.5)
    return figure


def editions(draw: Callable[..., Figure]) -> dict[str, Callable[[Path], str]]:
    """A picture for a light page, for a dark one and for a phone, by the ending of the file's name."""

    def light(results: Path, narrow: bool = False) -> str:
        return svg(draw(results.parent, narrow))

    return {
        "": light,
        "-dark": lambda results: dark(light(results)),
        "-narrow": lambda results: light(results, narrow=True),
    }


PICTURES = {  # picture -> the file or folder of results that it needs, and how it is drawn
    f"{name}{ending}.svg": (needs, written)
    for name, needs, draw in (("ring", "../ring", ring), ("cifar10", "../cifar10.runs.jsonl", cifar10))
    for ending, written in editions(draw).items()
}
