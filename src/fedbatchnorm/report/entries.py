"""Which of the paper's figures a group is: only one that holds all of a figure's cells has its number."""

import functools
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..experiments import catalogue
from ..experiments.config import Run
from ..experiments.results import Result
from ..simulation.ring import Ring
from .groups import Group, Rings, attacked, comparisons

Scale = Literal["full", "small"]


class Entry(NamedTuple):
    """A group's place in the catalogue: figures, and the scale; `part` if it has the demo's levels alone."""

    figures: tuple[str, ...]
    scale: Scale
    part: bool = False

    def title(self) -> str:
        """Figure 3; Figures 6 and 7."""
        numbers = [name.removeprefix("fig") for name in self.figures]
        text = f"Figure{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)}"
        if len(numbers) > 2:
            text = f"Figures {', '.join(numbers[:-1])} and {numbers[-1]}"
        return text + (" at small scale" if self.scale == "small" else "")


def entry_of(group: Group) -> Entry | None:
    """The figures of the paper that a group of training runs is; None if it is none.

    It is one if it has the figure's setting (in any precision) and all of the figure's cells that belong
    together; more schemes and levels may stand beside them.
    """
    for scale in ("full", "small"):
        cells = _cells(group)
        found = [name for name, wanted in _wanted(scale) if any(_is(w, group, cells) for w in wanted)]
        if found:
            return Entry(tuple(found), scale)
    if any(_is(wanted, group, _cells(group)) for wanted in _of_the_demo()):
        return Entry(("fig3",), "small", part=True)
    return None


def ring_figures(ring: Rings) -> tuple[str, ...]:
    """fig1 and fig2, where a ring has the paper's setting and all of their cells."""
    found = []
    for name in ("fig1", "fig2"):
        wanted = [run for run in catalogue.FIGURES[name].runs("full", 1) if isinstance(run, Ring)]
        have = {tuple(sorted(_known(r).items())) for rs in ring.cells.values() for r in (rs[0].config,)}
        if all(tuple(sorted(_known(run).items())) in have for run in wanted):
            found.append(name)
    return tuple(found)


def _known(config: Any) -> dict[str, str]:
    return {k: str(v) for k, v in config.identity().items() if k != "seed"}


def _is(wanted: Group, group: Group, cells: set[Any]) -> bool:
    return _setting(wanted) == _setting(group) and _cells(wanted) <= cells


def _setting(group: Group) -> tuple[Any, ...]:
    return tuple(pair for pair in group.key if pair[0] != "precision")


def _cells(group: Group) -> set[Any]:
    return {(line.scheme, line.settings, line.condition, level) for line, level in group.cells}


@functools.cache
def _wanted(scale: Scale) -> list[tuple[str, list[Group]]]:
    """Each figure's groups at a scale; the undisturbed runs of attack figures are no figure of their own."""
    found = []
    for name, figure in catalogue.FIGURES.items():
        results = _as_results(figure.runs(scale, 1))
        groups = attacked(results)
        if not groups:
            parameter = {"fig3": "gamma", "fig5": "alpha"}.get(name)
            groups = [group for group in comparisons(results) if group.parameter == parameter]
        found.append((name, groups))
    return found


@functools.cache
def _of_the_demo() -> list[Group]:
    return comparisons(_as_results(catalogue.demo(1)))


def _as_results(runs: list[Any]) -> list[Result]:
    return [Result(Path(), run, [], {}, [], None) for run in runs if isinstance(run, Run)]
