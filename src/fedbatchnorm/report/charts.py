"""Charts as plain data: panels with series. The page draws them in the browser, `figures` in print."""

import statistics
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from safetensors.torch import load_file

from ..experiments.results import Unfinished
from ..simulation.schemes import SCHEMES
from .groups import (
    ALONE,
    NO_ATTACK,
    NO_DEFENSE,
    Group,
    Level,
    Line,
    Rings,
    Spread,
    level_name,
    shared_curves,
)

SCHEME_COLORS = {"centralized": 0, "fbn": 1, "fixbn": 2, "naive": 3, "groupnorm": 4, "layernorm": 6, "hbn": 5}
COLORS = 10  # in the palettes of the page and of print; the first and the last are shades of gray
_CONDITIONS = {NO_ATTACK: 0, ALONE: 9, NO_DEFENSE: 3}
_DEFENSES = (1, 4, 5, 6, 2, 7, 8)
_NEAR = 5  # points: curves that are closer than this to the reference get a panel of differences
FEW = 3  # with fewer points than this a table says it


class Mark(NamedTuple):
    """A series: a line, or a cloud of points.

    key: its entry in the legend, the same in all panels; x, y: its points; sd: their standard deviations.
    seeds: single runs, drawn thin, on the same x. dots: at each x, the values of single runs.
    groups: of a cloud, each point's class; sizes: its area.
    unfinished: whether the runs are unfinished.
    """

    key: str
    color: int
    x: list[float]
    y: list[float]
    sd: list[float | None] | None = None
    seeds: list[list[float]] | None = None
    dots: list[list[float]] | None = None
    groups: list[int] | None = None
    sizes: list[float] | None = None
    unfinished: bool = False


class Panel(NamedTuple):
    """Axes and what they show.

    kind: curves over rounds; levels, with names for ticks; points of classes; discs with areas.
    ticks, rows: the labels of the places 0, 1, ... of x and y.
    low, high: the range of y (and for points of x), if it is fixed. choice: the level that it shows.
    detail: whether print shows it for the last choice alone. note: a line below it.
    """

    kind: Literal["curves", "levels", "points", "discs"]
    title: str
    x_label: str
    y_label: str
    marks: list[Mark]
    low: float | None = None
    high: float | None = None
    ticks: list[str] | None = None
    rows: list[str] | None = None
    choice: str = ""
    detail: bool = False
    note: str = ""


class Chart(NamedTuple):
    """A figure: its name (and that of its files), a description, and panels.

    choices: levels of which the page shows one at a time, the last one first; print shows `printed`.
    columns: how many panels print has in a row.
    """

    name: str
    alt: str
    panels: list[Panel]
    choices: list[str] = []  # noqa: RUF012 (a NamedTuple's default, which nobody changes)
    printed: list[str] = []  # noqa: RUF012
    columns: int = 2

    def in_print(self) -> list[Panel]:
        """The panels that a picture shows."""
        last = self.printed[-1] if self.printed else ""
        return [
            panel
            for panel in self.panels
            if not panel.choice or panel.choice == last or (panel.choice in self.printed and not panel.detail)
        ]


def accuracy_chart(group: Group, name: str) -> Chart | None:
    """Final accuracy against heterogeneity, curves for each level, and differences between close curves."""
    lines, levels = group.lines(), group.levels()
    colors = line_colors(lines)
    panels = _levels_panel(
        group, [(line, group.label(line), colors[line]) for line in lines], "final accuracy"
    )
    choices = [level_name(group, level) for level in levels]
    for level, choice in zip(levels, choices, strict=True):
        marks = [m for line in lines for m in _curves(group, line, level, group.label(line), colors[line])]
        panels += _curve_panel(marks, choice, choice)
        panels += _difference_panel(group, level, choice, colors)
    return _chart(
        name, panels, choices, choices[-2:], f"Test accuracy; {', '.join(map(group.label, lines))}."
    )


def attack_chart(group: Group, name: str) -> Chart | None:
    """A column of panels for each scheme: the effect of the attack, and of each defense."""
    levels, schemes = group.levels(), list(dict.fromkeys(line.calm() for line in group.lines()))
    conditions = list(dict.fromkeys(line.condition for line in group.lines()))
    rules = [condition for condition in conditions if condition not in _CONDITIONS]
    color = _CONDITIONS | {rule: _DEFENSES[i % len(_DEFENSES)] for i, rule in enumerate(rules)}
    panels, choices = [], [level_name(group, level) for level in levels]
    ours = {s: [x for x in group.lines() if x.calm() == s] for s in schemes}
    for scheme in schemes:
        named = [(line, line.condition, color[line.condition]) for line in ours[scheme]]
        title = f"{group.label(scheme)}: final accuracy"
        panels += _levels_panel(group, named, title, median=True)
    for level, choice in zip(levels, choices, strict=True):
        for scheme in schemes:
            marks = [
                mark
                for line in ours[scheme]
                for mark in _curves(group, line, level, line.condition, color[line.condition], median=True)
            ]
            panels += _curve_panel(marks, f"{group.label(scheme)}, {choice}", choice)
    printed = choices[-1:] if len(levels) >= FEW else choices
    alt = f"Test accuracy of {', '.join(map(group.label, schemes))}: {', '.join(conditions)}."
    chart = _chart(name, panels, choices, printed, alt)
    return chart and chart._replace(columns=min(3, len(schemes)))


def clouds_chart(ring: Rings, schemes: Iterable[str], name: str, beside: bool = False) -> Chart:
    """Points of the ring after normalization by these schemes, at the strongest heterogeneity, on one scale.

    Args:
        ring: the runs.
        schemes: which of them.
        name: of the figure.
        beside: show the centralized points beside each scheme's, and each scheme's distance from them; else
            the points before normalization come first.
    """
    gamma = min(ring.levels())
    found = [(s, load_file(ring.cells[s, gamma][0].path / "model.safetensors")) for s in schemes]
    reach = 1.1 * max(data["normalised"].abs().max().item() for _, data in found)
    panels, words = [], "a color for each class"
    if not beside:
        before = [_cloud("before normalization", found[0][1], "points", color=0)]
        far = 1.1 * found[0][1]["points"].abs().max().item()
        panels.append(Panel("points", "before normalization", "", "", before, -far, far))
    for scheme, data in found:
        marks = [_cloud("after normalization", data, "normalised", color=1)]
        if beside:
            marks.insert(0, _cloud("centralized", data, "centralised", color=0))
        panels.append(Panel("points", SCHEMES[scheme].title, "", "", marks, -reach, reach))
    if beside:
        panels += _distances_panel(ring)
        words = "the centralized ones as circles"
    titles = ", ".join(SCHEMES[s].title for s, _ in found)
    alt = f"Points on a ring, normalized by {titles}, at gamma {gamma:g}; {words}."
    return Chart(name, alt, panels, columns=len(panels))


def holdings_chart(holdings: dict[str, Any], title: str, name: str) -> Chart:
    """Which client holds which classes: a disc for each pair, its area the number of samples."""
    samples, classes = holdings["samples"], holdings["classes"]
    spots = [(i, c, n) for i, row in enumerate(samples) for c, n in enumerate(row) if n]
    clients, kinds, counts = ([spot[i] for spot in spots] for i in range(3))
    mark = Mark("samples", 1, clients, kinds, sizes=counts)
    names = ["".join(c if c.isprintable() else "?" for c in str(name))[:12] for name in classes]
    ticks = [str(i) for i in range(len(samples))]
    panel = Panel("discs", title, "client", "class", [mark], -0.7, len(classes) - 0.3, ticks, names)
    return Chart(name, f"Samples of each class that each client holds: {title}.", [panel], columns=1)


def line_colors(lines: list[Line]) -> dict[Line, int]:
    """A color for each line: the first of a scheme has the scheme's own."""
    found: dict[Line, int] = {}
    for line in lines:
        color = SCHEME_COLORS.get(line.scheme)
        if color is not None and color not in found.values():
            found[line] = color
    free = [i for i in (1, 3, 4, 5, 2, 6, 7, 8, 9, 0) if i not in found.values()] or list(range(COLORS))
    rest = [line for line in lines if line not in found]
    return found | {line: free[i % len(free)] for i, line in enumerate(rest)}


def _chart(name: str, panels: list[Panel], choices: list[str], printed: list[str], alt: str) -> Chart | None:
    """The figure, if there is anything to draw."""
    used = [choice for choice in choices if any(panel.choice == choice for panel in panels)]
    return Chart(name, alt, panels, used, [c for c in printed if c in used]) if panels else None


def _levels_panel(
    group: Group, lines: list[tuple[Line, str, int]], title: str, median: bool = False
) -> list[Panel]:
    levels = group.levels()
    if group.parameter is None or len(levels) < FEW:
        return []
    marks = []
    for line, label, color in lines:
        found = [(i, s) for i, level in enumerate(levels) if (s := group.final(line, level)) is not None]
        if found:
            mark = _mark(label, color, [i for i, _ in found], [s for _, s in found])
            marks.append(_as_median(mark, group, line) if median else mark)
    ticks = ["" if level is None else f"{level:g}" for level in levels]
    label = f"{group.parameter} (alike → heterogeneous)"
    return [Panel("levels", title, label, "test accuracy (%)", marks, 0, 100, ticks)] if marks else []


def _as_median(mark: Mark, group: Group, line: Line) -> Mark:
    """The median instead of the mean: an attacked run either breaks down or not, so single runs are shown."""
    levels = [group.levels()[int(i)] for i in mark.x]
    dots = [[_short(100 * r.summary["accuracy"]) for r in group.cells[line, level]] for level in levels]
    return mark._replace(y=[_short(statistics.median(values)) for values in dots], sd=None, dots=dots)


def _curve_panel(marks: list[Mark], title: str, choice: str) -> list[Panel]:
    longest = max((len(mark.x) for mark in marks), default=0)
    if longest < FEW:
        return []
    return [Panel("curves", title, "round", "test accuracy (%)", marks, 0, 100, choice=choice)]


def _curves(
    group: Group, line: Line, level: Level, label: str, color: int, median: bool = False
) -> list[Mark]:
    """A line's curve over seeds, and one for each of its runs that is not finished."""
    found = []
    rounds, curves = shared_curves(group.cells.get((line, level), []))
    if rounds:
        spreads = [Spread.of(list(values)) for values in zip(*curves, strict=True)]
        mark = _mark(label, color, rounds, spreads)
        if median:
            middle = [_short(100 * statistics.median(values)) for values in zip(*curves, strict=True)]
            thin = [[_short(100 * y) for y in curve] for curve in curves] if len(curves) > 1 else None
            mark = mark._replace(y=middle, sd=None, seeds=thin)
        found.append(mark)
    for run in group.begun.get((line, level), []):
        found += _begun(run, label, color)
    return found


def _begun(run: Unfinished, label: str, color: int) -> list[Mark]:
    rows = [(row["round"], _short(100 * row["accuracy"])) for row in run.metrics]
    if not rows:
        return []
    text = f"{label}, seed {run.config.seed}, not finished ({rows[-1][0]} of {run.config.rounds} rounds)"
    return [Mark(text, color, [x for x, _ in rows], [y for _, y in rows], unfinished=True)]


def _difference_panel(group: Group, level: Level, choice: str, colors: dict[Line, int]) -> list[Panel]:
    """Points from the first line, for the lines that lie near it once a third of the rounds have passed."""
    run = [line for line in group.lines() if (line, level) in group.cells]
    if len(run) < 2:
        return []
    base, marks, far = run[0], [], []
    for line in run[1:]:
        rounds, spreads = _differences(group, base, line, level)
        later = [abs(s.mean) for t, s in zip(rounds, spreads, strict=True) if 3 * t >= rounds[-1]]
        if len(rounds) >= FEW and statistics.median(later) <= _NEAR / 100:
            marks.append(_mark(group.label(line), colors[line], rounds, spreads))
        else:
            far.append(group.label(line))
    if not marks:
        return []
    ends = [abs(y) + (sd or 0) for m in marks for y, sd in zip(m.y, m.sd or m.y, strict=True)]
    reach = min(2.0 * _NEAR, max(1.0, *ends))
    title = f"{choice}: difference from {group.label(base)}"
    note = f"Too far off for this scale: {', '.join(far)}." if far else ""
    panel = Panel("curves", title, "round", "points", marks, -reach, reach, choice=choice, detail=True)
    return [panel._replace(note=note)]


def _differences(group: Group, base: Line, line: Line, level: Level) -> tuple[list[int], list[Spread]]:
    """A line minus the base, seed by seed where both have the seeds, else mean minus mean."""
    ours, theirs = (
        {r.config.seed: {row["round"]: row["accuracy"] for row in r.metrics} for r in group.cells[one, level]}
        for one in (line, base)
    )
    seeds = sorted(ours.keys() & theirs.keys())
    if seeds:
        rounds = sorted(set.intersection(*(set(run[s]) for s in seeds for run in (ours, theirs))))
        return rounds, [Spread.of([ours[s][t] - theirs[s][t] for s in seeds]) for t in rounds]
    rounds, one = group.curve(line, level)
    others, other = group.curve(base, level)
    if rounds != others:
        return [], []
    return rounds, [Spread(a.mean - b.mean, None, a.seeds) for a, b in zip(one, other, strict=True)]


def _distances_panel(ring: Rings) -> list[Panel]:
    levels, marks = ring.levels(), []
    if len(levels) < FEW:
        return []
    for scheme in ring.schemes():
        found = [(i, s) for i, gamma in enumerate(levels) if (s := ring.distance(scheme, gamma)) is not None]
        if scheme != "centralized" and found:
            title = SCHEMES[scheme].title
            x, y = [float(i) for i, _ in found], [_short(s.mean) for _, s in found]
            marks.append(Mark(title, SCHEME_COLORS[scheme], x, y, [s.sd for _, s in found]))
    ticks, high = [f"{g:g}" for g in levels], 1.05 * max(y for mark in marks for y in mark.y)
    label = "gamma (alike → one class each)"
    return [Panel("levels", "distance from centralized", label, "mean distance", marks, 0, high, ticks)]


def _mark(label: str, color: int, x: Iterable[float], spreads: list[Spread]) -> Mark:
    sd = [None if s.sd is None else _short(100 * s.sd) for s in spreads]
    return Mark(label, color, list(x), [_short(100 * s.mean) for s in spreads], sd if any(sd) else None)


def _cloud(key: str, data: dict[str, Any], what: str, color: int) -> Mark:
    points = data[what].reshape(-1, 2).tolist()
    xs, ys = ([_short(point[i]) for point in points] for i in range(2))
    return Mark(key, color, xs, ys, groups=data["labels"].flatten().tolist())


def _short(value: float) -> float:
    return round(value, 2)
