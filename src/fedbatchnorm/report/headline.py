"""One sentence that says what was compared and the result, from the results alone."""

from typing import NamedTuple

from ..simulation.schemes import SCHEMES
from .groups import CALM, NO_DEFENSE, Group, Level, Line, Rings, Spread, level_name
from .tables import attack_name


def headline(groups: list[Group], attacked: list[Group], rings: list[Rings]) -> str:
    """The sentence, on the group with the most finished runs; on attacks or the ring if there is none."""
    groups = [group for group in groups if group.cells]
    attacked = [group for group in attacked if group.cells]
    if groups:
        return _of_comparison(max(groups, key=_size))
    if attacked:
        return _of_attack(max(attacked, key=_size))
    if rings:
        return _of_ring(rings[0])
    return "No run is finished yet."


_MANY = 4  # more lines than these are summed up by the best and the worst


class _End(NamedTuple):
    label: str
    spread: Spread


def _size(group: Group) -> int:
    return sum(map(len, group.cells.values()))


def _of_comparison(group: Group) -> str:
    run = group.example
    levels = [level for level in group.levels() if any(lev == level for _, lev in group.cells)]
    last = levels[-1]
    ends = _ends(group, last)
    where = f"On {run.title('dataset')} with {_clients(run.clients)}"
    at = "" if last is None else f" at {level_name(group, last)}"
    if len(ends) > _MANY:
        best, worst = ends[0], ends[-1]
        text = f"{where}, {len(ends)} ways to normalize end{at} between {_shown(worst.spread)} for "
        text += f"{worst.label} and {_shown(best.spread)} for {best.label} (test accuracy)"
    else:
        words = [f"{end.label} {'at' if i else 'ends at'} {_shown(end.spread)}" for i, end in enumerate(ends)]
        text = f"{where}, {_and(words)} test accuracy{at}"
    first = _ends(group, levels[0])
    if len(levels) > 1 and len(first) > 1:
        means = [100 * end.spread.mean for end in first]
        gap = max(means) - min(means)
        text += f"; at {level_name(group, levels[0])}, {_within(len(first), gap)}"
    return f"{text}."


def _within(count: int, gap: float) -> str:
    both = "both" if count == 2 else f"all {count}"
    return f"{both} are within {gap:.1f} points of each other"


def _of_attack(group: Group) -> str:
    run, last = group.example, group.levels()[-1]
    at = "" if last is None else f" at {level_name(group, last)}"
    who = f"With {run.byzantine} of {run.clients} clients Byzantine ({attack_name(run)}), "
    if not run.byzantine:
        who = f"On {run.title('dataset')} with {_clients(run.clients)} and none of them Byzantine, "
    struck = [line for line in group.lines() if line.condition not in CALM and group.final(line, last)]
    parts = []
    for scheme in dict.fromkeys(line.calm() for line in struck):
        ends = [(line, group.final(line, last)) for line in struck if line.calm() == scheme]
        words = [f"{_shown(s)} {_condition(line)}" for line, s in ends if s is not None]
        parts.append(f"{group.label(scheme)} ends{at} at {_and(words)}")
    return f"{who}{'; '.join(parts)}."


def _condition(line: Line) -> str:
    return "undefended" if line.condition == NO_DEFENSE else f"with {line.condition}"


def _of_ring(ring: Rings) -> str:
    gamma = min(ring.levels())
    found = [(SCHEMES[s].title, ring.distance(s, gamma)) for s in ring.schemes() if s != "centralized"]
    words = [f"{title} is {spread.mean:.2f}" for title, spread in found if spread is not None]
    if not words:
        return "Points on a ring, normalized over all clients together."
    return (
        f"On the Gaussian ring at gamma {gamma:g}, {_and(words)} from centralized normalization on average."
    )


def _ends(group: Group, level: Level) -> list[_End]:
    """The final values of the lines, the best first."""
    found = [(group.label(line), group.final(line, level)) for line in group.lines()]
    ends = [_End(label, spread) for label, spread in found if spread is not None]
    return sorted(ends, key=lambda end: -end.spread.mean)


def _shown(spread: Spread) -> str:
    return f"{100 * spread.mean:.1f}%"


def _clients(count: int) -> str:
    return "one client" if count == 1 else f"{count} clients"


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
