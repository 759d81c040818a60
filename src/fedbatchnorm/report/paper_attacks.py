"""What the paper says of Byzantine clients (section 5), as claims with rules.

Its text is about the median and gamma; what it says about robust rules in general is also compared with the
appendix (trimmed means, Dirichlet's alpha).
"""

from collections.abc import Callable
from typing import NamedTuple

from .claims import (
    Claim,
    Part,
    Place,
    Rule,
    Study,
    accuracy,
    at_least,
    at_most,
    behind,
    close_to,
    direction,
    line,
    more_than,
    number,
)
from .groups import NO_ATTACK, NO_DEFENSE, Group, Level, level_name
from .tables import ATTACKS

MEDIAN, RULES = "nnm+median", ("nnm+median", "nnm+trimmed_mean")
_STRONG = {"gamma": 0.01, "alpha": 0.1}  # from here down heterogeneity counts as strong
_FEWER = (
    "Byzantine clients hold no data here, so the honest ones, fewer than the clients without attack, share "
    "the classes: a client's own batch is less one-sided, which helps naive BatchNorm. Where it was run, "
    "“honest clients alone” is as many clients without an attack. The paper does not say how it splits the "
    "data."
)


class Cell(NamedTuple):
    """A defense against an attack at one level."""

    group: Group
    rule: str
    level: Level


def _cells(
    study: Study, attacks: tuple[str, ...], rules: tuple[str, ...], strong: bool, alpha: bool = True
) -> list[Cell]:
    """The cells of these attacks and rules that were run; `strong`: where heterogeneity is strong alone."""
    found = []
    for (attack, parameter), group in study.attacks.items():
        used = {one.condition for one in group.lines()}
        if attack in attacks and (alpha or parameter == "gamma"):
            for rule in (rule for rule in rules if rule in used):
                for level in group.levels():
                    weak = level is None or level > _STRONG[parameter]
                    found += [] if strong and weak else [Cell(group, rule, level)]
    return found


def _against(
    cells: list[Cell], scheme: str, other: str, condition: str = "", apart: bool = False
) -> list[Place | None]:
    """At each cell, how far the defended scheme is behind another: under a condition, or defended, too.

    A place is named by the attack, rule or level in which the cells differ.
    """
    attacks, rules = {c.group.example.attack for c in cells}, {c.rule for c in cells}
    found = []
    for group, rule, level in cells:
        ours, theirs = line(scheme, rule, rule=True), line(other, condition or rule, rule=not condition)
        place = behind(group, ours, theirs, level, apart=apart)
        names = [ATTACKS[group.example.attack]] if len(attacks) > 1 else []
        names += [rule] if len(rules) > 1 else []
        found.append(place and place._replace(where=", ".join([*names, level_name(group, level)])))
    return found


def _ahead_of(places: list[Place | None]) -> list[Place | None]:
    return [place and place._replace(value=-place.value) for place in places]


def _on(places: list[Place | None], rule: Rule) -> list[Part]:
    return [direction(rule, places)] if places else []


def _matches(study: Study) -> list[Part]:
    cells = _cells(study, tuple(ATTACKS), RULES, strong=False)
    rule = at_most(1.5, "points between defended FBN and FBN without attack, at every level")
    return _on(_against(cells, "fbn", "fbn", NO_ATTACK, apart=True), rule)


def _edge_of(limit: float, rules: tuple[str, ...], alpha: bool) -> Callable[[Study], list[Part]]:
    """Defended FBN against defended naive BatchNorm, where heterogeneity is strong."""
    rule = at_least(limit, "points that defended FBN is ahead of defended naive BatchNorm")

    def judged(study: Study) -> list[Part]:
        cells = _cells(study, tuple(ATTACKS), rules, strong=True, alpha=alpha)
        return _on(_ahead_of(_against(cells, "fbn", "naive")), rule)

    return judged


def _helps(study: Study) -> list[Part]:
    parts = []
    for scheme, title in (("fbn", "FBN"), ("naive", "naive BatchNorm")):
        places = _ahead_of(_against(_of_sf(study), scheme, scheme, NO_DEFENSE))
        parts += _on(places, more_than(0, f"points that the median gives {title} under sign flipping"))
    return parts + _edge_of(10, (MEDIAN,), alpha=False)(study)


def _of_sf(study: Study) -> list[Cell]:
    return _cells(study, ("sf",), (MEDIAN,), strong=True, alpha=False)


def _naive_lost(study: Study) -> list[Part]:
    places = [accuracy(group, line("naive", NO_DEFENSE), level) for group, _, level in _of_sf(study)]
    if not places:
        return []
    return [
        direction(at_most(20, "final accuracy in percent"), places),
        number(study, close_to(10, "final accuracy"), places),
    ]


def _learns_and_degrades(study: Study) -> list[Part]:
    one = line("fbn", NO_DEFENSE)
    cells = [(group, level) for group, _, level in _of_sf(study) if (one, level) in group.cells]
    if not cells:
        return []
    shares, drops = [], {}
    for group, level in cells:
        runs = [r.summary for r in group.cells[one, level]]
        fallen = [100 * (s["best_accuracy"] - s["accuracy"]) for s in runs]
        ends = ", ".join(f"{100 * s['accuracy']:.1f}" for s in runs)
        count = sum(round(points, 1) >= 10 for points in fallen)
        text = f"{count} of {len(runs)} (they end at {ends})"
        shares.append(Place(level_name(group, level), 100 * count / len(runs), text))
        drops[level] = sum(fallen) / len(runs)
    more = None
    if {0.0, 0.01} <= drops.keys():
        more = Place("", drops[0.0] - drops[0.01], f"{drops[0.0]:.1f} against {drops[0.01]:.1f}")
    best = [accuracy(group, one, level, best=True) for group, level in cells]
    return [
        number(study, close_to(70, "best accuracy on the way"), best),
        direction(at_least(50, "percent of seeds that end 10 points or more below their best"), shares),
        direction(more_than(0, "points that the mean drop at gamma 0 is above that at gamma 0.01"), [more]),
    ]


def _alike(study: Study) -> list[Part]:
    cells = _of_sf(study)
    if not cells:
        return []
    calm = line("naive", NO_ATTACK)
    best = [accuracy(group, calm, level, best=True) for group, _, level in cells if level == 0.01]
    return [
        direction(
            at_most(10, "points between defended naive and naive without attack"),
            _against(cells, "naive", "naive", NO_ATTACK, apart=True),
        ),
        number(study, close_to(30, "naive without attack at gamma 0.01, best accuracy"), best or [None]),
    ]


def _further(study: Study) -> list[Part]:
    cells = _cells(study, ("foe", "alie"), (MEDIAN,), strong=True, alpha=False)
    if not cells:
        return []
    calmer = _of_sf(study)
    under_sf = _against(calmer, "naive", "naive", NO_ATTACK, apart=True)
    gaps = {cell.level: place for cell, place in zip(calmer, under_sf, strict=True)}
    more: list[Place | None] = []
    for cell, place in zip(cells, _against(cells, "naive", "naive", NO_ATTACK, apart=True), strict=True):
        calm = gaps.get(cell.level)
        text = "" if place is None or calm is None else f"{place.value:.1f} against {calm.value:.1f}"
        more.append(place._replace(value=place.value - calm.value, shown=text) if place and calm else None)
    return [
        direction(
            at_least(10, "points that defended naive is behind naive without attack"),
            _against(cells, "naive", "naive", NO_ATTACK),
        ),
        direction(more_than(0, "points that they are farther apart than under sign flipping"), more),
    ]


ATTACK_CLAIMS = [
    Claim("section 5", "With a robust rule FBN matches FBN without attack.", _matches),
    Claim(
        "introduction",
        "With a robust rule FBN is more robust than naive BatchNorm.",
        _edge_of(2, RULES, alpha=True),
    ),
    Claim("section 5", "The median helps both, with a significant edge to FBN.", _helps),
    Claim("section 5", "Undefended naive BatchNorm cannot learn: close to 10%.", _naive_lost, _FEWER),
    Claim(
        "section 5",
        "Undefended FBN reaches close to 70%, then quickly degrades, especially at gamma 0.",
        _learns_and_degrades,
        "Whether and when an undefended run breaks down depends on the seed.",
    ),
    Claim(
        "section 5",
        "Defended naive is like naive without attack, which reaches 30% at gamma 0.01: both poor.",
        _alike,
        _FEWER,
    ),
    Claim(
        "section 5",
        "Under stronger attacks defended naive is further from naive without attack.",
        _further,
        _FEWER,
    ),
]
