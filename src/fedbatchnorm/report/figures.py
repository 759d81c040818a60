"""The paper's figures, drawn with matplotlib: readable in print, and by the color-blind.

Every function takes results and returns a matplotlib Figure; `save` writes it as SVG and PNG. Schemes are
told apart by color, marker and line alike (colors by Okabe and Ito).
"""

import io
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from safetensors.torch import load_file

from ..simulation.schemes import SCHEMES
from ..storage.files import write_bytes
from .groups import (
    ALONE,
    NO_ATTACK,
    NO_DEFENSE,
    Comparison,
    Rings,
    Siege,
    Spread,
    ring_distances,
    shared_curves,
)

COLORS = ("#000000", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
COLORS += ("#882255", "#999933", "#332288", "#888888")
MARKERS, LINES = "sovDP^X<>*p", ("--", "-", "-.", ":", "-", "--", "-.", ":", "-", "--", "-.")
_CLASSES = (
    "#332288",
    "#88CCEE",
    "#44AA99",
    "#117733",
    "#999933",
    "#DDCC77",
    "#CC6677",
    "#882255",
    "#AA4499",
    "#888888",
)
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.hashsalt": "fedbatchnorm",
    "axes.unicode_minus": False,
}


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw in the house style, whatever the user's own settings are."""

    def drawn(*args: Any, **kwargs: Any) -> Figure:
        with mpl.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return drawn


FIGURE1 = {("centralized", 0.0), ("naive", 0.0)}  # what there must be on a ring
FIGURE2 = {("fbn", 0.0), ("fixbn", 0.0)}


@styled
def figure1(ring: Rings) -> Figure:
    """Points before and after normalization, centralized and naive, one class a client."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for axis, letter, scheme in zip(panels, "ab", ("centralized", "naive"), strict=True):
        data = load_file(ring[scheme, 0.0][0].path / "model.safetensors")
        _clouds(axis, data["points"], data["labels"], marker=".", alpha=0.35)
        _clouds(axis, data["normalised"], data["labels"], marker="+")
        axis.set_title(f"({letter}) {SCHEMES[scheme].title.removesuffix(' BN')} BatchNorm")
        axis.set(xlim=(-13.5, 33), ylim=(-13.5, 13.5), aspect="equal", xticks=[-10, 0, 10])
        inset = axis.inset_axes((15.5, -10, 17, 20), transform=axis.transData)
        _clouds(inset, data["normalised"], data["labels"], marker="+", size=14)
        inset.set(xlim=(-2.9, 2.9), ylim=(-3.4, 3.4), xticks=[-2, 0, 2], yticks=[-2, 0, 2])
        inset.tick_params(labelsize=7)
        inset.set_title("after, enlarged", fontsize=8, pad=3)
    note = "dots: before normalization; crosses: after; a color for each class, which is a client's own"
    figure.supxlabel(note, fontsize=8)
    return figure


@styled
def figure2(ring: Rings) -> Figure:
    """FBN's and FixBN's points after the last round, and every scheme's distance from centralized."""
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    *pictures, error = figure.subplots(1, 3)
    for axis, letter, scheme in zip(pictures, "ab", ("fbn", "fixbn"), strict=True):
        first = ring[scheme, 0.0][0]
        data = load_file(first.path / "model.safetensors")
        _clouds(axis, data["centralised"], data["labels"], marker="o", alpha=0.25, size=12)
        _clouds(axis, data["normalised"], data["labels"], marker="+")
        reach = max(2.2, 1.1 * data["normalised"].abs().max().item())
        _square(axis, reach)
        axis.set_title(f"({letter}) {SCHEMES[scheme].title}, round {len(first.metrics)}")
        axis.set_xlabel("crosses: the scheme; circles: centralized", fontsize=8)
    levels = sorted({gamma for _, gamma in ring}, reverse=True)
    for scheme in SCHEMES:
        found = ring_distances(ring, scheme)
        if scheme != "centralized" and found:
            xs = [levels.index(g) for g in found]
            _line(error, SCHEMES[scheme].title, xs, list(found.values()))
    error.set(
        title="(c) distance from centralized", xlabel="gamma (alike → one class each)", ylabel="mean distance"
    )
    error.set_xticks(range(len(levels)), [f"{g:g}" for g in levels])
    error.set_ylim(bottom=0)
    error.legend(frameon=False)
    return figure


@styled
def accuracy_figure(group: Comparison, borrowed: Comparison | None = None) -> Figure:
    """Final accuracy against heterogeneity, and curves where it is strongest (figures 3 and 5).

    Args:
        group: the runs.
        borrowed: a comparison by gamma, whose strongest level is the last panel (figure 5).
    """
    levels, name = group.levels(), group.parameter
    curves = [(group, level) for level in levels[-2:]]
    if borrowed is not None:
        curves = [(group, levels[-1]), (borrowed, borrowed.levels()[-1])]
    figure = Figure(figsize=(3.8 * (1 + len(curves)), 3.7), layout="constrained")
    final, *panels = figure.subplots(1, 1 + len(curves))
    for label in group.labels():
        found = [(i, s) for i, level in enumerate(levels) if (s := group.final(label, level)) is not None]
        _line(final, label, [i for i, _ in found], [_percent(s) for _, s in found])
    final.set_xticks(range(len(levels)), ["iid" if v is None else f"{v:g}" for v in levels])
    final.set(title="(a) final accuracy", ylabel="test accuracy (%)")
    final.set_xlabel(
        {"gamma": "gamma (alike → extreme)", "alpha": "Dirichlet alpha (alike → extreme)"}.get(name or "", "")
    )
    for axis, letter, (source, level) in zip(panels, "bc", curves, strict=False):
        for label in source.labels():
            rounds, spreads = source.curve(label, level)
            _band(axis, label, rounds, [_percent(s) for s in spreads])
        title = "iid" if source.parameter is None else f"{source.parameter} = {level:g}"
        axis.set(title=f"({letter}) {title}", xlabel="round")
    for axis in (final, *panels):
        axis.set_ylim(0, 100)
    final.legend(frameon=False, loc="lower left")
    return figure


@styled
def siege_figure(siege: Siege) -> Figure:
    """Accuracy over rounds for FBN and naive: undisturbed, attacked, defended; a panel for each level.

    An attacked run breaks down or does not, so single seeds are drawn, thin, and their median, thick.
    """
    levels = siege.levels()
    columns = 2 if len(levels) == 4 else len(levels)
    rows = len(levels) // columns
    size = (max(4.2 * columns, 6.4), 3.1 * rows + 1)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    strokes = {NO_ATTACK: "--", ALONE: (0, (8, 1, 1, 1)), NO_DEFENSE: ":", siege.example.defense: "-"}
    for axis, letter, level in zip(panels, "abcdefgh", levels, strict=False):
        for title, kind in siege.lines():
            rounds, curves = shared_curves(siege.cells.get((title, kind, level), []))
            if rounds:
                _threads(axis, title, rounds, curves, f"{title}, {kind}", linestyle=strokes[kind])
        name = "iid" if level is None else f"{siege.parameter} = {level:g}"
        axis.set(title=f"({letter}) {name}", xlabel="round", ylim=(0, 100))
    for axis in panels[::columns]:
        axis.set_ylabel("test accuracy (%)")
    drawn = [dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True)) for axis in panels]
    names = [name for name in (f"{t}, {k}" for t, k in siege.lines()) if any(name in d for d in drawn)]
    handles = [next(d[name] for d in drawn if name in d) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)
    return figure


@styled
def holdings_figure(holdings: dict[str, Any], title: str) -> Figure:
    """Who holds which classes: a disc for each client and class, its area the number of samples."""
    samples, classes = holdings["samples"], holdings["classes"]
    size = max(2.4, 0.26 * max(len(samples), len(classes)))
    figure = Figure(figsize=(size, size), layout="constrained")
    axis = figure.subplots()
    most = max(max(row) for row in samples)
    spots = [(i, c, n) for i, row in enumerate(samples) for c, n in enumerate(row) if n]
    axis.scatter(
        [s[0] for s in spots],
        [s[1] for s in spots],
        [160 * s[2] / most for s in spots],
        color=COLORS[1],
        linewidths=0,
    )
    axis.set(
        xlabel="client", ylabel="class", xlim=(-0.7, len(samples) - 0.3), ylim=(-0.7, len(classes) - 0.3)
    )
    axis.set_xticks(range(0, len(samples), max(1, len(samples) // 10)))
    names = [_printable(name)[:12] for name in classes]
    axis.set_yticks(range(len(classes)), names, fontsize=7, parse_math=False)
    axis.set_title(_printable(title), fontsize=9, parse_math=False)
    return figure


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG, the same bytes for the same figure."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.svg", folder / f"{name}.png"]
    image = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(image, dpi=150, metadata={"Software": None})
    write_bytes(files[0], svg(figure, standalone=True).encode())
    write_bytes(files[1], image.getvalue())
    return files


def svg(figure: Figure, standalone: bool = False) -> str:
    """A figure as SVG text; without the XML header it can stand inside a page."""
    text = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    content = text.getvalue()
    return content if standalone else content[content.index("<svg") :]


def _style_of(label: str) -> dict[str, Any]:
    titles = [scheme.title for scheme in SCHEMES.values()]
    i = titles.index(label.partition(",")[0]) % len(COLORS)
    return {"color": COLORS[i], "linestyle": LINES[i], "marker": MARKERS[i]}


def _line(axis: Axes, label: str, xs: list[int], spreads: list[Spread]) -> None:
    errors = [s.sd or 0.0 for s in spreads]
    means = [s.mean for s in spreads]
    axis.errorbar(xs, means, errors, label=label, capsize=3, markersize=5, linewidth=1.5, **_style_of(label))


def _band(
    axis: Axes, scheme: str, xs: list[int], spreads: list[Spread], label: str = "", **more: Any
) -> None:
    means, errors = [s.mean for s in spreads], [s.sd or 0.0 for s in spreads]
    style: dict[str, Any] = {"markersize": 3, "markevery": max(1, len(xs) // 8), "linewidth": 1.4}
    style |= _style_of(scheme) | more
    axis.plot(xs, means, label=label or scheme, **style)
    low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
    axis.fill_between(xs, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _threads(
    axis: Axes, scheme: str, xs: list[int], curves: list[list[float]], label: str, **more: Any
) -> None:
    style = _style_of(scheme) | more
    for curve in curves if len(curves) > 1 else []:
        axis.plot(xs, [100 * y for y in curve], **style | {"marker": ""}, linewidth=0.7, alpha=0.5)
    middle = [100 * statistics.median(values) for values in zip(*curves, strict=True)]
    axis.plot(xs, middle, label=label, markersize=3, markevery=max(1, len(xs) // 8), linewidth=1.8, **style)


def _percent(spread: Spread) -> Spread:
    return Spread(100 * spread.mean, None if spread.sd is None else 100 * spread.sd, spread.seeds)


def _clouds(
    axis: Axes, points: Any, labels: Any, *, marker: str, alpha: float = 1.0, size: float = 22
) -> None:
    for label in labels.unique().tolist():
        cloud = points[labels == label]
        axis.scatter(
            cloud[:, 0],
            cloud[:, 1],
            s=size,
            marker=marker,
            color=_CLASSES[label % 10],
            alpha=alpha,
            linewidths=0.8,
        )


def _square(axis: Axes, reach: float) -> None:
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")


def _printable(text: object) -> str:
    """What a file's text says, without characters that a font cannot show."""
    return "".join(c if c.isprintable() else "?" for c in str(text))
