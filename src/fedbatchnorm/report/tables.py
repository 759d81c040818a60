"""Tables of final accuracies and distances: a header, and rows of texts."""

from collections.abc import Callable
from typing import NamedTuple

from ..simulation.schemes import SCHEMES
from .groups import Group, Rings, Spread, level_name

Show = Callable[[Spread | None], str]
_COLUMNS = 5


class Table(NamedTuple):
    """A title, the columns' names, and rows as long as they are."""

    title: str
    header: list[str]
    rows: list[list[str]]


def percent_or_dash(spread: Spread | None) -> str:
    """A cell of a table; - means not run."""
    return "-" if spread is None else spread.percent()


def with_seeds(spread: Spread | None) -> str:
    """The same with the number of seeds: 96.7 ± 0.3 (3)."""
    return percent_or_dash(spread) + ("" if spread is None else f" ({spread.seeds})")


def final_table(group: Group, show: Show = percent_or_dash) -> Table:
    """Final accuracies in percent: lines and levels. A few lines are columns, more are rows."""
    levels, lines = group.levels(), group.lines()
    columns = [(group.label(line), [show(group.final(line, level)) for level in levels]) for line in lines]
    for line in lines:
        own = [group.own(line, level) for level in levels]
        if any(own):
            columns.append((f"{group.label(line)}, own models", [*map(show, own)]))
    title = "Final test accuracy (%), mean ± standard deviation over seeds"
    if len(columns) > _COLUMNS:
        header = ["", *(level_name(group, level) for level in levels)]
        return Table(title, header, [[label, *cells] for label, cells in columns])
    names = [f"{level:g}" if level is not None else level_name(group, None) for level in levels]
    header = [group.parameter or "partition", *(label for label, _ in columns)]
    rows = [[name, *(cells[i] for _, cells in columns)] for i, name in enumerate(names)]
    return Table(title, header, rows)


def ring_table(ring: Rings) -> Table:
    """Distances from centralized: a row for each scheme, a column for each level."""
    levels, rows = ring.levels(), []
    for name in ring.schemes():
        found = [ring.distance(name, gamma) for gamma in levels]
        if name != "centralized" and any(found):
            rows.append([SCHEMES[name].title, *("-" if s is None else f"{s.mean:.2f}" for s in found)])
    title = "Mean distance of the normalized points from the centralized ones"
    return Table(title, ["", *(f"gamma {g:g}" for g in levels)], rows)


def attack_words(group: Group) -> str:
    """Who attacks what, as text.

    Example:
        >>> from fedbatchnorm.experiments import Run
        >>> attack_words(Group((), Run(byzantine=3, attack="sf"), "gamma"))
        '3 of 10 clients are Byzantine: sign flipping on means'
    """
    run = group.example
    if not run.byzantine:
        return "a defense without Byzantine clients"
    struck = " and ".join(run.targets_struck())
    return f"{run.byzantine} of {run.clients} clients are Byzantine: {attack_name(run)} on {struck}"


ATTACKS = {"sf": "sign flipping", "foe": "fall of empires", "alie": "a little is enough"}


def attack_name(run: object) -> str:
    """An attack's full name, with its factor if it has one."""
    title = run.title("attack")  # pyrefly: ignore
    name, _, factor = title.partition(":")
    return ATTACKS.get(name, name) + (f" (factor {factor})" if factor else "")
