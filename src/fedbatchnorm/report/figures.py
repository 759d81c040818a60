"""Charts in print, drawn with matplotlib in one style, with labels at the lines' ends."""

import functools
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..storage.files import write_bytes
from .charts import Chart, Mark, Panel, holdings_chart
from .palette import CLASSES, COLORS, EDGE, GRID, INK, SOFT

LINES: tuple[Any, ...] = (
    (0, (6, 2)),
    "-",
    (0, (5, 1, 1, 1)),
    (0, (1, 1.2)),
    "-",
    (0, (6, 2, 1, 2)),
    "--",
    "-.",
    ":",
    (0, (2, 2)),
)
MARKERS = "sovDP^X<>p"
_STYLE: dict[str, Any] = {
    "font.size": 9.5,
    "font.family": ["DejaVu Sans"],
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": EDGE,
    "axes.labelcolor": SOFT,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "text.parse_math": False,
    "svg.hashsalt": "fedbatchnorm",
}


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Draw in the house style, whatever the user's own settings are."""

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        with mpl.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return drawn


@styled
def draw(chart: Chart) -> Figure:
    """A chart as a matplotlib figure."""
    panels = chart.in_print()
    columns = min(chart.columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    width, height = _size(panels, columns)
    figure = Figure(figsize=(width, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        _DRAW[panel.kind](axis, panel)
        title = _wrapped(_printable(panel.title), 46 if width / columns > 4 else 30)
        axis.set_title(title, pad=8)
        below = (_printable(panel.x_label), _wrapped(_printable(panel.note), 64))
        axis.set_xlabel("\n".join(filter(None, below)))
        axis.set_ylabel(_wrapped(panel.y_label, 40))
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.draw_without_rendering()  # the layout is found once, not for each file
    figure.set_layout_engine("none")
    return figure


@styled
def holdings_figure(holdings: dict[str, Any], title: str) -> Figure:
    """Which client holds which classes: a disc for each pair, its area the number of samples."""
    return draw(holdings_chart(holdings, _printable(title), "holdings"))


@styled
def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG, the same bytes for the same figure."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.svg", folder / f"{name}.png"]
    image = io.BytesIO()
    figure.savefig(image, dpi=150, metadata={"Software": None})
    write_bytes(files[0], svg(figure).encode(errors="replace"))
    write_bytes(files[1], image.getvalue())
    return files


@styled
def svg(figure: Figure) -> str:
    """A figure as SVG text."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _size(panels: list[Panel], columns: int) -> tuple[float, float]:
    """Width of the figure and height of a row, in inches."""
    if panels[0].kind == "discs":
        columns, rows = len(panels[0].ticks or ()), len(panels[0].rows or ())
        return max(3.4, 1 + 0.26 * columns), max(2.8, 1 + 0.26 * rows)
    if panels[0].kind == "points":
        return 2.9 * columns, 3.1
    return max(4.9 * columns, 5.5), 3.4


def _curves(axis: Axes, panel: Panel) -> None:
    ends = []
    for i, mark in enumerate(panel.marks):
        style = {"color": COLORS[mark.color], "linestyle": LINES[mark.color]}
        width = 1.0 if mark.unfinished else 1.7
        for curve in mark.seeds or []:
            axis.plot(mark.x, curve, linewidth=0.6, alpha=0.45, color=style["color"])
        every = max(1, len(mark.x) // 8)
        start = i * every // len(panel.marks)  # curves that lie on each other show their markers in turn
        marker = {"marker": MARKERS[mark.color], "markersize": 3.6, "markevery": (start, every)}
        axis.plot(mark.x, mark.y, linewidth=width, **style, **marker)
        if mark.sd:
            low, high = _edges(mark)
            axis.fill_between(mark.x, low, high, color=style["color"], alpha=0.13, linewidth=0)
        ends.append(mark)
    axis.set_ylim(panel.low, panel.high)
    if panel.low is not None and panel.low < 0:
        xs = [x for mark in panel.marks for x in mark.x]
        axis.plot([min(xs), max(xs)], [0, 0], color=SOFT, linewidth=0.8)
    _label_ends(axis, ends, panel)


def _levels(axis: Axes, panel: Panel) -> None:
    for mark in panel.marks:
        style: dict[str, Any] = {"color": COLORS[mark.color], "linestyle": LINES[mark.color]}
        style |= {"marker": MARKERS[mark.color]}
        # The reference is a large open square, in which another line's marker can be seen.
        style |= {"markersize": 8, "markerfacecolor": "none"} if mark.color == 0 else {"markersize": 4.5}
        errors = [sd or 0.0 for sd in mark.sd] if mark.sd else None
        axis.errorbar(mark.x, mark.y, errors, capsize=3, linewidth=1.6, **style)
        for x, values in zip(mark.x, mark.dots or [], strict=False):
            if len(values) > 1:
                axis.scatter([x] * len(values), values, s=7, color=style["color"], alpha=0.55, linewidths=0)
    axis.set_ylim(panel.low, panel.high)
    axis.set_xticks(range(len(panel.ticks or ())), panel.ticks or ())
    _label_ends(axis, panel.marks, panel)


def _points(axis: Axes, panel: Panel) -> None:
    for mark in panel.marks:
        colors = [CLASSES[c % len(CLASSES)] for c in mark.groups or []]
        if mark.color == 0:
            axis.scatter(mark.x, mark.y, 14, marker="o", facecolors="none", edgecolors=colors, linewidths=0.7)
        else:
            axis.scatter(mark.x, mark.y, 24, marker="+", color=colors, linewidths=0.8)
    axis.set(xlim=(panel.low, panel.high), ylim=(panel.low, panel.high), aspect="equal")


def _discs(axis: Axes, panel: Panel) -> None:
    (mark,), ticks, rows = panel.marks, panel.ticks or [], panel.rows or []
    most = max(mark.sizes or [1])
    axis.scatter(mark.x, mark.y, [150 * n / most for n in mark.sizes or []], color=COLORS[1], linewidths=0)
    axis.set(xlim=(-0.7, len(ticks) - 0.3), ylim=(panel.low, panel.high))
    every = max(1, len(ticks) // 10)
    axis.set_xticks(range(0, len(ticks), every), ticks[::every])
    axis.set_yticks(range(len(rows)), rows, fontsize=8)


_DRAW = {"curves": _curves, "levels": _levels, "points": _points, "discs": _discs}


def _label_ends(axis: Axes, marks: list[Mark], panel: Panel) -> None:
    """Each line's name beside the axes, at the height of its end; names are moved apart if they overlap."""
    low, high = axis.get_ylim()
    step = 0.062 * (high - low)
    ends = sorted(
        (min(max(mark.y[-1], low), high), i) for i, mark in enumerate(marks) if mark.y and not mark.unfinished
    )
    places = spread_out([y for y, _ in ends], step, low, high)
    right = max((mark.x[-1] for mark in marks if mark.x), default=1)
    left = min((mark.x[0] for mark in marks if mark.x), default=0)
    kept = [t for t in axis.get_xticks() if left <= t <= right]
    margin = 0.03 * (right - left or 1)
    axis.set_xlim(left - margin, right + margin)
    for place, (_, i) in zip(places, ends, strict=True):
        text = _printable(marks[i].key)
        axis.annotate(
            text if len(text) <= 30 else text[:29] + "…",
            (1, place),
            (4, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=COLORS[marks[i].color],
            fontsize=8.5,
            annotation_clip=False,
        )
    if panel.ticks is None:
        axis.set_xticks(kept)


def spread_out(places: list[float], step: float, low: float, high: float) -> list[float]:
    """Sorted places, moved so that neighbors are a step apart, within the limits where there is room.

    Example:
        >>> spread_out([1.0, 1.0, 9.0], 2.0, 0.0, 10.0)
        [0.0, 2.0, 9.0]
    """
    groups: list[list[float]] = []  # of places that touch: their middle, and how many they are
    for place in places:
        groups.append([place, 1])
        while True:
            middle, count = groups[-1]
            half = step * (count - 1) / 2
            middle = min(max(middle, low + half), max(high - half, low + half))
            groups[-1][0] = middle
            if len(groups) < 2 or groups[-2][0] + step * (groups[-2][1] - 1) / 2 + step <= middle - half:
                break
            other, more = groups[-2]
            groups[-2:] = [[(other * more + middle * count) / (more + count), more + count]]
    return [middle + step * (i - (count - 1) / 2) for middle, count in groups for i in range(int(count))]


def _edges(mark: Mark) -> tuple[list[float], list[float]]:
    pairs = list(zip(mark.y, mark.sd or [], strict=False))
    return [y - (sd or 0) for y, sd in pairs], [y + (sd or 0) for y, sd in pairs]


def _wrapped(text: str, width: int) -> str:
    """A text in lines that are not much longer than a width."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _printable(text: object) -> str:
    """A text without characters that a font cannot show."""
    return "".join(c if c.isprintable() else "?" for c in str(text))
