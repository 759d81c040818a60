"""What the paper says of normalization and accuracy (sections 3 and 4), as claims with rules."""

from collections.abc import Callable
from itertools import pairwise

from safetensors.torch import load_file

from ..simulation.ring import separability
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
    between,
    close_to,
    direction,
    less_than,
    line,
    more_than,
    number,
)
from .groups import Group, Level, Line, level_name

_CENTRAL, _FBN, _FIXBN, _NAIVE = (line(scheme) for scheme in ("centralized", "fbn", "fixbn", "naive"))
_NEAR = 1.5  # points: what counts as unchanged, or as a match
_TITLES = {"fbn": "FBN", "fixbn": "FixBN", "naive": "Naive BN"}


def _points(study: Study, figure: str, scheme: str) -> dict | None:
    """The first seed's points at gamma 0, where the ring is this figure of the paper's."""
    if study.ring is None or figure not in study.ring_figures or (scheme, 0.0) not in study.ring.cells:
        return None
    return load_file(study.ring.cells[scheme, 0.0][0].path / "model.safetensors")


def _apart(study: Study, figure: str, scheme: str) -> Place | None:
    data = _points(study, figure, scheme)
    if data is None:
        return None
    share = 100 * separability(data["normalised"], data["labels"])
    return Place("", share, f"{share:.0f}%")


def _figure1(study: Study) -> list[Part]:
    what = "points nearest to their own class, in percent"
    return [
        direction(more_than(95, f"centralized, {what}"), [_apart(study, "fig1", "centralized")]),
        direction(less_than(40, f"naive, {what}"), [_apart(study, "fig1", "naive")]),
    ]


def _figure2a(study: Study) -> list[Part]:
    data, place = _points(study, "fig2", "fbn"), None
    if data is not None:
        off = (data["normalised"] - data["centralised"]).norm(dim=-1).mean()
        share = (100 * off / data["centralised"].norm(dim=-1).mean()).item()
        place = Place("round 100", share, f"{share:.1f}%")
    what = "points nearest to their own class, in percent"
    rule = at_most(10, "mean distance from the centralized points, in percent of their mean distance from 0")
    return [
        direction(more_than(95, what), [_apart(study, "fig2", "fbn")]),
        direction(rule, [place]),
    ]


def _figure2b(study: Study) -> list[Part]:
    data, place = _points(study, "fig2", "fixbn"), None
    if data is not None:
        larger = (data["normalised"].norm(dim=-1).mean() / data["centralised"].norm(dim=-1).mean()).item()
        place = Place("", larger, f"{larger:.1f} times")
    what = "points nearest to their own class, in percent"
    return [
        direction(more_than(95, what), [_apart(study, "fig2", "fixbn")]),
        direction(more_than(1.5, "points too large, as a multiple of the centralized ones"), [place]),
    ]


def _distances(study: Study, scheme: str) -> list[float]:
    """A scheme's distance at each level, from alike to heterogeneous; none if it is not figure 2."""
    ring = study.ring
    if ring is None or "fig2" not in study.ring_figures:
        return []
    found = [ring.distance(scheme, gamma) for gamma in ring.levels()]
    return [spread.mean for spread in found if spread is not None]


def _figure2c(study: Study) -> list[Part]:
    ours = _distances(study, "fbn")
    place = Place("", max(ours), f"{min(ours):.2f} to {max(ours):.2f}") if ours else None
    ratio = Place("", max(ours) / min(ours), f"{max(ours) / min(ours):.2f}") if ours else None
    steps, growth = [], []
    for scheme in ("fixbn", "naive"):
        found = _distances(study, scheme)
        if found:
            least = min(b - a for a, b in pairwise(found))
            text = ", ".join(f"{value:.2f}" for value in found)
            steps.append(Place(_TITLES[scheme], least, text))
            growth.append(Place(_TITLES[scheme], found[-1] / found[0], f"{found[-1] / found[0]:.1f} times"))
    return [
        direction(at_most(0.5, "FBN's distance from centralized, at every gamma", digits=2), [place]),
        direction(at_most(1.5, "FBN's largest distance as a multiple of its smallest", digits=2), [ratio]),
        direction(
            more_than(0, "how much the others' distance grows from each gamma to the next", digits=2),
            steps or [None],
        ),
        direction(
            more_than(3, "the others' distance at gamma 0 as a multiple of that at gamma 1"), growth or [None]
        ),
    ]


Judge = Callable[[Study], list[Part]]


def _on_figure3(*parts: Callable[[Study, Group], Part]) -> Judge:
    """Parts that need the runs of figure 3."""

    def judged(study: Study) -> list[Part]:
        return [] if study.gamma is None else [part(study, study.gamma) for part in parts]

    return judged


def _similar(study: Study, group: Group) -> Part:
    places: list[Place | None] = []
    for level in (1.0, 0.5, 0.3):
        found = [accuracy(group, one, level) for one in (_CENTRAL, _FBN, _FIXBN, _NAIVE)]
        values = [place.value for place in found if place is not None]
        gap = max(values) - min(values) if len(values) == len(found) else None
        places.append(None if gap is None else Place(level_name(group, level), gap, f"{gap:.1f}"))
    return direction(at_most(3, "points between best and worst scheme, at each gamma"), places)


def _gap(
    rule: Rule, ours: Line, level: Level, best: bool = False, apart: bool = False
) -> Callable[..., Part]:
    return lambda study, group: direction(rule, [behind(group, ours, _CENTRAL, level, best, apart)])


def _level(rule: Rule, ours: Line, level: Level, best: bool = False) -> Callable[..., Part]:
    return lambda study, group: number(study, rule, [accuracy(group, ours, level, best)])


def _loses_forty(study: Study, group: Group) -> Part:
    return number(
        study, between(35, 45, "points behind centralized"), [behind(group, _NAIVE, _CENTRAL, 0.01)]
    )


def _best_of_naive(study: Study, group: Group) -> Part:
    best, final = accuracy(group, _NAIVE, 0.0, best=True), accuracy(group, _NAIVE, 0.0)
    shown = best and final and best._replace(shown=f"{best.shown}, and {final.shown} in the end")
    return number(study, close_to(17, "best accuracy on the way"), [shown])


def _as_at_gamma_1(study: Study, group: Group) -> Part:
    one, other = accuracy(group, _FBN, 0.01), accuracy(group, _FBN, 1.0)
    rule = at_most(_NEAR, "points between FBN at gamma 0.01 and at gamma 1")
    if one is None or other is None:
        return direction(rule, [None])
    return direction(rule, [Place("", abs(one.value - other.value), f"{one.shown} against {other.shown}")])


def _struggles(study: Study, group: Group) -> Part:
    switch, found = group.example.rounds // 2, []  # pyrefly: ignore
    for one in (_FIXBN, _CENTRAL):
        rounds, spreads = group.curve(one, 0.0)
        found.append([s.mean for t, s in zip(rounds, spreads, strict=True) if t <= switch])
    rule = at_least(10, "points behind centralized at the last evaluation before the switch")
    if not all(found):
        return direction(rule, [None])
    ours, central = (100 * values[-1] for values in found)
    return direction(rule, [Place("", central - ours, f"{ours:.1f} against {central:.1f}")])


def _throughout(level: float) -> Callable[..., Part]:
    def part(study: Study, group: Group) -> Part:
        rounds, ours = group.curve(_FBN, level)
        others, central = group.curve(_CENTRAL, level)
        rule = at_most(3, f"points apart at any evaluation, at gamma {level:g}")
        if not rounds or rounds != others:
            return direction(rule, [None])
        gaps = [100 * abs(c.mean - o.mean) for o, c in zip(ours, central, strict=True)]
        worst = gaps.index(max(gaps))
        return direction(rule, [Place(f"round {rounds[worst]}", gaps[worst], f"{gaps[worst]:.1f}")])

    return part


RING_CLAIMS = [
    Claim(
        "section 3, figure 1",
        "Centralized BatchNorm keeps the classes separable, naive BatchNorm does not.",
        _figure1,
    ),
    Claim("section 3, figure 2a", "FBN's points are nearly identical to the centralized ones.", _figure2a),
    Claim("section 3, figure 2b", "FixBN's points are separable, and wrongly scaled.", _figure2b),
    Claim(
        "section 3, figure 2c",
        "FBN stays close to centralized at every gamma; the others' distance grows with heterogeneity.",
        _figure2c,
    ),
]
_BEHIND, _APART = "points behind centralized", "points from centralized, either way"
ACCURACY_CLAIMS = [
    Claim(
        "section 4, figure 3a",
        "With gamma >= 0.3 the schemes perform similarly.",
        _on_figure3(_similar),
        "Naive BatchNorm loses ground little by little as the data become less alike, with no step at 0.3. "
        "The paper gives no number, and the bound of 3 points is ours.",
    ),
    Claim(
        "section 4, figure 3b",
        "At gamma 0.01 naive BatchNorm loses 40 points, to reach 40%.",
        _on_figure3(
            _gap(at_least(20, _BEHIND), _NAIVE, 0.01),
            _loses_forty,
            _level(close_to(40, "final accuracy"), _NAIVE, 0.01),
        ),
    ),
    Claim(
        "section 4, figure 3b",
        "At gamma 0.01 FixBN drops only slightly, and FBN remains unchanged.",
        _on_figure3(
            _gap(between(0, 5, f"FixBN, {_BEHIND}"), _FIXBN, 0.01),
            _gap(at_most(_NEAR, f"FBN, {_APART}"), _FBN, 0.01, apart=True),
            _as_at_gamma_1,
        ),
    ),
    Claim(
        "section 4, figure 3c",
        "At gamma 0 naive BatchNorm collapses: about 17% at best.",
        _on_figure3(
            _gap(at_least(40, f"final, {_BEHIND}"), _NAIVE, 0.0),
            _best_of_naive,
        ),
    ),
    Claim(
        "section 4, figure 3c",
        "At gamma 0 FixBN struggles until the switch; its best accuracy falls to 75%.",
        _on_figure3(
            _struggles,
            _gap(between(1, 10, f"best, {_BEHIND}"), _FIXBN, 0.0, best=True),
            _level(close_to(75, "best accuracy"), _FIXBN, 0.0, best=True),
        ),
    ),
    Claim(
        "section 4, figure 3c",
        "At gamma 0 FBN matches the 80% of centralized training.",
        _on_figure3(
            _gap(at_most(_NEAR, f"best, {_APART}"), _FBN, 0.0, best=True, apart=True),
            _level(close_to(80, "centralized, best accuracy"), _CENTRAL, 0.0, best=True),
        ),
    ),
    Claim(
        "section 4, figures 3b and 3c",
        "FBN almost exactly matches centralized training throughout.",
        _on_figure3(_throughout(0.01), _throughout(0.0)),
        "Running statistics need some rounds to settle. Where rounds are few, FBN is behind until they have.",
    ),
]
