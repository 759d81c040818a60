"""Claims of the paper compared with runs: the rules that decide, and a verdict for each claim.

A claim has parts: a direction (who is ahead, what grows), and a number where the paper gives one. Each has a
rule, and the text of the rule is made from the limits that decide. A claim agrees if all parts hold.
"""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from .entries import Entry, Scale
from .groups import Group, Level, Line, Rings, level_name

CLOSE = 5  # points: how near a measured accuracy must be to a number of the paper's
Verdict = Literal["yes", "partly", "no", "yes, as far as compared", "not run"]
_ROUNDING = 1e-9
_MANY = 5  # with more places than this the worst stands for all


class Rule(NamedTuple):
    """A rule as text, and the margin of a value: at least 0 if the rule holds.

    digits: values are rounded to this many digits before they are judged, as they are displayed.
    """

    text: str
    margin: Callable[[float], float]
    digits: int = 1


def at_most(limit: float, what: str, digits: int = 1) -> Rule:
    """A value must not be above a limit.

    Example:
        >>> rule = at_most(3, "points apart")
        >>> rule.text, rule.margin(2.5), rule.margin(3.5)
        ('points apart: at most 3', 0.5, -0.5)
    """
    return Rule(f"{what}: at most {limit:g}", lambda value: limit - value, digits)


def at_least(limit: float, what: str) -> Rule:
    """A value must not be below a limit."""
    return Rule(f"{what}: at least {limit:g}", lambda value: value - limit)


def more_than(limit: float, what: str, digits: int = 1) -> Rule:
    """A value must be above a limit."""
    return Rule(f"{what}: more than {limit:g}", lambda value: value - limit or -1.0, digits)


def less_than(limit: float, what: str) -> Rule:
    """A value must be below a limit."""
    return Rule(f"{what}: less than {limit:g}", lambda value: limit - value or -1.0)


def between(low: float, high: float, what: str) -> Rule:
    """A value must be neither below one limit nor above the other."""
    return Rule(f"{what}: {low:g} to {high:g}", lambda value: min(value - low, high - value))


def close_to(number: float, what: str) -> Rule:
    """An accuracy must be near the paper's."""
    rule = between(number - CLOSE, number + CLOSE, what)
    return rule._replace(text=f"{what}: within {CLOSE} points of the paper's {number:g}%")


class Place(NamedTuple):
    """A value at one place, and how it is shown there."""

    where: str
    value: float
    shown: str


class Part(NamedTuple):
    """A part of a claim, judged.

    holds: None if runs are missing or nothing can be compared. whole: whether it was run at all places.
    """

    kind: Literal["direction", "number"]
    rule: str
    measured: str
    holds: bool | None
    whole: bool = True


class Study(NamedTuple):
    """The groups that are the paper's figures, at one scale. attacks: (attack, parameter) -> its group."""

    scale: Scale
    ring: Rings | None
    ring_figures: tuple[str, ...]
    gamma: Group | None
    attacks: dict[tuple[str, str], Group]


class Claim(NamedTuple):
    """A sentence of the paper, how it is judged, and why results may differ."""

    where: str
    says: str
    judge: Callable[[Study], list[Part]]
    why: str = ""


class Finding(NamedTuple):
    """A claim with its judged parts."""

    claim: Claim
    parts: list[Part]

    def verdict(self) -> Verdict:
        """Whether the claim agrees with what was measured."""
        judged = [part.holds for part in self.parts if part.holds is not None]
        if not judged:
            return "not run"
        if all(judged):
            whole = all(part.holds and part.whole for part in self.parts)
            return "yes" if whole else "yes, as far as compared"
        return "partly" if any(judged) else "no"


def judge(claims: Iterable[Claim], study: Study) -> list[Finding]:
    """Each claim with what was measured."""
    return [Finding(claim, claim.judge(study)) for claim in claims]


def study_of(
    scale: Scale, groups: Iterable[tuple[Group, Entry | None]], ring: Rings | None, figures: tuple[str, ...]
) -> Study:
    """Which of the paper's figures were run at a scale."""
    gamma, attacks = None, {}
    for group, entry in groups:
        if entry is None or entry.scale != scale:
            continue
        if "fig3" in entry.figures:
            gamma = gamma or group
        if group.example.byzantine and group.parameter is not None:
            attacks.setdefault((group.example.attack, group.parameter), group)
    return Study(scale, ring, figures, gamma, attacks)


def direction(rule: Rule, places: Iterable[Place | None]) -> Part:
    """A part on who is ahead or what grows: it must hold at every place."""
    return _part("direction", rule, places)


def number(study: Study, rule: Rule, places: Iterable[Place | None]) -> Part:
    """A part on a number of the paper's, which is for CIFAR-10: other data have other levels."""
    if study.scale == "small":
        return Part("number", rule.text, "not compared: the paper's number is for CIFAR-10", None)
    return _part("number", rule, places)


def _part(kind: Literal["direction", "number"], rule: Rule, places: Iterable[Place | None]) -> Part:
    """The rule must hold at every place; it judges values as they are shown."""
    given = list(places)
    found = [place for place in given if place is not None]
    if not found:
        return Part(kind, rule.text, "not run", None)
    margins = [rule.margin(round(place.value, rule.digits)) for place in found]
    holds = min(margins) >= -_ROUNDING
    if len(found) <= _MANY:
        text = "; ".join(f"{place.where}: {place.shown}".removeprefix(": ") for place in found)
    else:
        worst = found[margins.index(min(margins))]
        kept = sum(margin >= -_ROUNDING for margin in margins)
        text = f"holds at {kept} of {len(found)} places; farthest off, {worst.where}: {worst.shown}"
    missing = len(given) - len(found)
    text += f"; {missing} not run" if missing else ""
    return Part(kind, rule.text, text, holds, whole=not missing)


def line(scheme: str, condition: str = "", rule: bool = False) -> Line:
    """One of the paper's lines: a scheme with usual settings, and its condition; `rule` for a defense."""
    return Line(scheme, (), condition, (None, None) if rule else (None,))


def accuracy(group: Group, one: Line, level: Level, best: bool = False) -> Place | None:
    """An accuracy in percent, or None if it was not run."""
    found = (group.best if best else group.final)(one, level)
    return None if found is None else Place(level_name(group, level), 100 * found.mean, found.percent())


def behind(
    group: Group, ours: Line, theirs: Line, level: Level, best: bool = False, apart: bool = False
) -> Place | None:
    """How many points one line is behind another, or apart from it, with both accuracies."""
    one, other = accuracy(group, ours, level, best), accuracy(group, theirs, level, best)
    if one is None or other is None:
        return None
    points = other.value - one.value
    text = f"{one.shown} against {other.shown}"
    return Place(one.where, abs(points) if apart else points, text)
