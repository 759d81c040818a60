"""What the paper says of Byzantine clients (section 5), as claims with rules.

Its text is about the median and gamma; what it says of robust rules in general is held against the appendix,
too (trimmed means, Dirichlet's alpha).
"""

from collections.abc import Callable, Iterator

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
    "Byzantine clients hold no data here, so the honest ones, fewer than the clients without attack, share the "
    "classes: a client's own batch is less one-sided, which helps naive BatchNorm. Where it was run, “honest "
    "clients alone” is as many clients without an attack. The paper does not say how it splits the data."
)
Cell = tuple[Group, str, Level]


def _cells(study: Study, attacks: tuple[str, ...], rules: tuple[str, ...], strong: bool, alpha: bool = True) -> Iterator[Cell]:
    """(group, rule, level) of the attacks that were run."""
    for (attack, parameter), group in study.attacks.items():
        if attack in attacks and (alpha or parameter == "gamma"):
            used = {one.condition for one in group.lines()}
            for rule in rules:
                for level in group.levels():
                    weak = level is None or level > _STRONG[parameter]
                    if rule in used and not (strong and weak):
                        yield group, rule, level


def _against(cell: Cell, scheme: str, other: str, condition: str, apart: bool = False) -> Place | None:
    """A defended scheme and one under another condition, at a cell; named by attack, rule and level."""
    group, rule, level = cell
    theirs = line(other, condition, rule=condition == rule)
    place = behind(group, line(scheme, rule, rule=True), theirs, level, apart=apart)
    where = f"{ATTACKS[group.example.attack]}, {rule}, {level_name(group, level)}"
    return place and place._replace(where=where)


def _on(places: list[Place | None], rule: Rule) -> list[Part]:
    return [direction(rule, places)] if places else []


def _matches(study: Study) -> list[Part]:
    cells = _cells(study, tuple(ATTACKS), RULES, strong=False)
    rule = at_most(1.5, "points between defended FBN and FBN without attack, at every level")
    return _on([_against(cell, "fbn", "fbn", NO_ATTACK, apart=True) for cell in cells], rule)


def _ahead(limit: float, rules: tuple[str, ...], alpha: bool) -> Callable[[Study], list[Part]]:
    """Defended FBN against defended naive BatchNorm, where heterogeneity is strong."""

    def judged(study: Study) -> list[Part]:
        cells = _cells(study, tuple(ATTACKS), rules, strong=True, alpha=alpha)
        places = [_negated(_against(cell, "fbn", "naive", cell[1])) for cell in cells]
        return _on(places, at_least(limit, "points that defended FBN is ahead of defended naive BatchNorm"))

    return judged


def _edge(study: Study) -> list[Part]:
    cells = list(_cells(study, ("sf",), (MEDIAN,), strong=True, alpha=False))
    parts = []
    for scheme, title in (("fbn", "FBN"), ("naive", "naive BatchNorm")):
        places = [_negated(_against(cell, scheme, scheme, NO_DEFENSE)) for cell in cells]
        parts += _on(places, more_than(0, f"points that the median gives {title} under sign flipping"))
    return parts + _ahead(10, (MEDIAN,), alpha=False)(study)


def _negated(place: Place | None) -> Place | None:
    return place and place._replace(value=-place.value)


def _sf(study: Study) -> list[tuple[Group, Level]]:
    found = _cells(study, ("sf",), (MEDIAN,), strong=True, alpha=False)
    return [(group, level) for group, _, level in found]


def _naive_lost(study: Study) -> list[Part]:
    places = [accuracy(group, line("naive", NO_DEFENSE), level) for group, level in _sf(study)]
    if not places:
        return []
    return [
        direction(at_most(20, "final accuracy in percent"), places),
        number(study, close_to(10, "final accuracy"), places),
    ]


def _learns_and_degrades(study: Study) -> list[Part]:
    best, shares, drops = [], [], {}
    for group, level in _sf(study):
        one = line("fbn", NO_DEFENSE)
        best.append(accuracy(group, one, level, best=True))
        runs = [r.summary for r in group.cells.get((one, level), [])]
        fallen = [100 * (s["best_accuracy"] - s["accuracy"]) for s in runs]
        if runs:
            ends = ", ".join(f"{100 * s['accuracy']:.1f}" for s in runs)
            count = sum(round(points, 1) >= 10 for points in fallen)
            text = f"{count} of {len(runs)} (they end at {ends})"
            shares.append(Place(level_name(group, level), 100 * count / len(runs), text))
            drops[level] = sum(fallen) / len(runs)
    if not best:
        return []
    more = [Place("", drops[0.0] - drops[0.01], f"{drops[0.0]:.1f} against {drops[0.01]:.1f}")] if len(drops) > 1 else [None]
    return [
        number(study, close_to(70, "best accuracy on the way"), best),
        direction(at_least(50, "percent of seeds that end 10 points or more below their best"), shares or [None]),
        direction(more_than(0, "points that the mean drop at gamma 0 is above that at gamma 0.01"), more),
    ]


def _alike(study: Study) -> list[Part]:
    cells = list(_cells(study, ("sf",), (MEDIAN,), strong=True, alpha=False))
    if not cells:
        return []
    places = [_against(cell, "naive", "naive", NO_ATTACK, apart=True) for cell in cells]
    best = [accuracy(group, line("naive", NO_ATTACK), level, best=True) for group, _, level in cells if level == 0.01]
    return [
        direction(at_most(10, "points between defended naive and naive without attack"), places),
        number(study, close_to(30, "naive without attack at gamma 0.01, best accuracy"), best or [None]),
    ]


def _further(study: Study) -> list[Part]:
    cells = list(_cells(study, ("foe", "alie"), (MEDIAN,), strong=True, alpha=False))
    if not cells:
        return []
    gaps = {level: _against((group, MEDIAN, level), "naive", "naive", NO_ATTACK, apart=True) for group, level in _sf(study)}
    more = []
    for cell in cells:
        place, calm = _against(cell, "naive", "naive", NO_ATTACK, apart=True), gaps.get(cell[2])
        text = "" if place is None or calm is None else f"{place.value:.1f} against {calm.value:.1f}"
        more.append(Place(place.where, place.value - calm.value, text) if text else None)
    return [
        direction(
            at_least(10, "points that defended naive is behind naive without attack"),
            [_against(cell, "naive", "naive", NO_ATTACK) for cell in cells],
        ),
        direction(more_than(0, "points that they are farther apart than under sign flipping"), more),
    ]


ATTACK_CLAIMS = [
    Claim("section 5", "With a robust rule FBN matches FBN without attack.", _matches),
    Claim("introduction", "With a robust rule FBN is more robust than naive BatchNorm.", _ahead(2, RULES, alpha=True)),
    Claim("section 5", "The median helps both, with a significant edge to FBN.", _edge),
    Claim("section 5", "Undefended naive BatchNorm cannot learn: close to 10%.", _naive_lost, _FEWER),
    Claim(
        "section 5",
        "Undefended FBN reaches close to 70%, then quickly degrades, especially at gamma 0.",
        _learns_and_degrades,
        "Whether and when an undefended run breaks down depends on the seed.",
    ),
    Claim("section 5", "Defended naive is like naive without attack, which reaches 30% at gamma 0.01: both poor.", _alike, _FEWER),
    Claim("section 5", "Under stronger attacks defended naive is further from naive without attack.", _further, _FEWER),
]
