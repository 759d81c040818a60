"""What the paper says in words, and what was measured beside it.

A claim is one function and one row of `CLAIMS`. It gets the runs, and returns what was measured and whether
that agrees by the criterion in its row; None where the runs that it needs are not there.
"""

from collections.abc import Callable
from typing import NamedTuple

from safetensors.torch import load_file

from ..simulation.ring import separability
from ..simulation.schemes import PAPER, SCHEMES
from .groups import Comparison, Rings, Siege, ring_distances

Measured = tuple[str, bool] | None
_TITLE = {name: SCHEMES[name].title for name in PAPER}


class Claim(NamedTuple):
    """A sentence of the paper, when a measurement agrees with it, how it is measured, and why it may not."""

    where: str
    says: str
    agrees_if: str
    measure: Callable[..., Measured]
    why: str = ""


class Finding(NamedTuple):
    """A claim with what was measured; `agrees` is None where the runs are missing."""

    claim: Claim
    measured: str
    agrees: bool | None


def judge_comparison(group: Comparison) -> list[Finding]:
    """The claims on accuracy, for one comparison by gamma under the paper's algorithm."""
    fits = group.parameter == "gamma" and group.example.algorithm == "dsgd"
    return judge(ACCURACY_CLAIMS, group) if fits else []


def judge_rings(ring: Rings, figure: str) -> list[Finding]:
    """The claims on the Gaussian ring that go with a figure: `figure 1` or `figure 2`."""
    return judge([claim for claim in RING_CLAIMS if claim.where.startswith(figure)], ring)


def judge(claims: list[Claim], source: Comparison | Rings | Siege) -> list[Finding]:
    """Each claim with what was measured; `source` is what the claims' functions take."""
    found = []
    for claim in claims:
        measured = claim.measure(source)
        found.append(Finding(claim, "not run", None) if measured is None else Finding(claim, *measured))
    return found


def _alike(group: Comparison) -> Measured:
    gaps = {}
    for level in group.levels():
        finals = [group.final(title, level) for title in _TITLE.values()]
        if level is not None and level >= 0.3 and None not in finals:
            means = [100 * s.mean for s in finals if s is not None]
            gaps[level] = max(means) - min(means)
    if not gaps:
        return None
    worst = max(gaps, key=lambda level: gaps[level])
    return f"largest gap between schemes: {gaps[worst]:.1f} points, at gamma {worst:g}", gaps[worst] <= 3


def _against_centralized(
    scheme: str, gamma: float, agrees: Callable[[float], bool], best: bool = False
) -> Callable[[Comparison], Measured]:
    """A scheme and centralized training at one gamma; `agrees` judges how many points it is behind."""

    def measure(group: Comparison) -> Measured:
        read = group.best if best else group.final
        ours, central = read(_TITLE[scheme], gamma), read(_TITLE["centralized"], gamma)
        if ours is None or central is None:
            return None
        behind = 100 * (central.mean - ours.mean)
        kind = "best" if best else "final"
        text = f"{kind}: {_TITLE[scheme]} {ours.percent()}, centralized {central.percent()} ({-behind:+.1f})"
        return text, agrees(behind)

    return measure


def _collapse(group: Comparison) -> Measured:
    found = _against_centralized("naive", 0.0, lambda behind: behind >= 40)(group)
    best = group.best(_TITLE["naive"], 0.0)
    if found is None or best is None:
        return None
    return f"{found[0]}; naive's best on the way: {best.percent()}", found[1]


def _before_the_switch(group: Comparison) -> Measured:
    switch = group.example.rounds // 2  # pyrefly: ignore
    found = []
    for scheme in ("fixbn", "centralized"):
        rounds, spreads = group.curve(_TITLE[scheme], 0.0)
        earlier = [s for t, s in zip(rounds, spreads, strict=True) if t <= switch]
        if not earlier:
            return None
        found.append(100 * earlier[-1].mean)
    return f"just before the switch: FixBN {found[0]:.1f}, centralized {found[1]:.1f}", found[1] - found[
        0
    ] >= 10


def _throughout(group: Comparison) -> Measured:
    rounds, ours = group.curve(_TITLE["fbn"], 0.0)
    others, central = group.curve(_TITLE["centralized"], 0.0)
    if not rounds or rounds != others:
        return None
    gaps = [100 * (c.mean - o.mean) for o, c in zip(ours, central, strict=True)]
    later = [abs(g) for t, g in zip(rounds, gaps, strict=True) if 3 * t >= rounds[-1]]
    text = (
        f"from a third of the rounds on, at most {max(later):.1f} points apart; "
        f"over all rounds at most {max(map(abs, gaps)):.1f}"
    )
    return text, max(later) <= 3


def _separable(scheme: str, agrees: Callable[[float], bool]) -> Callable[[Rings], Measured]:
    def measure(ring: Rings) -> Measured:
        if (scheme, 0.0) not in ring:
            return None
        data = load_file(ring[scheme, 0.0][0].path / "model.safetensors")
        share = separability(data["normalised"], data["labels"])
        return f"{100 * share:.0f}% of points are nearest to their own class", agrees(share)

    return measure


def _scale(ring: Rings) -> Measured:
    if ("fixbn", 0.0) not in ring:
        return None
    data = load_file(ring["fixbn", 0.0][0].path / "model.safetensors")
    share = separability(data["normalised"], data["labels"])
    larger = (data["normalised"].norm(dim=-1).mean() / data["centralised"].norm(dim=-1).mean()).item()
    text = f"{100 * share:.0f}% of points are nearest to their own class; {larger:.1f} times too large"
    return text, share > 0.95 and not 0.67 < larger < 1.5


def _flat(ring: Rings) -> Measured:
    found = ring_distances(ring, "fbn")
    if len(found) < 2:
        return None
    means = [s.mean for s in found.values()]
    return f"FBN: between {min(means):.2f} and {max(means):.2f}", max(means) <= 0.5 and max(
        means
    ) <= 1.5 * min(means)


def _grows(ring: Rings) -> Measured:
    texts, agrees = [], True
    for scheme in ("fixbn", "naive"):
        found = ring_distances(ring, scheme)
        if 0.0 not in found or 1.0 not in found:
            return None
        texts.append(f"{_TITLE[scheme]} from {found[1.0].mean:.2f} to {found[0.0].mean:.2f}")
        agrees &= found[0.0].mean > 3 * found[1.0].mean
    return f"gamma 1 to 0: {', '.join(texts)}", agrees


ACCURACY_CLAIMS = [
    Claim(
        "section 4",
        "With gamma >= 0.3 the algorithms perform similarly.",
        "at most 3 points apart",
        _alike,
        "Naive BatchNorm loses ground little by little as the data become less alike, with no step at 0.3; "
        "the paper gives no number, and the bound of 3 points is ours.",
    ),
    Claim(
        "section 4",
        "At gamma 0.01 naive BatchNorm loses 40 points, to 40%.",
        "at least 20 points behind centralized",
        _against_centralized("naive", 0.01, lambda behind: behind >= 20),
    ),
    Claim(
        "section 4",
        "At gamma 0.01 FixBN drops only slightly.",
        "at most 5 points behind",
        _against_centralized("fixbn", 0.01, lambda behind: behind <= 5),
    ),
    Claim(
        "section 4",
        "At gamma 0.01 FBN is unchanged.",
        "at most 1.5 points behind",
        _against_centralized("fbn", 0.01, lambda behind: behind <= 1.5),
    ),
    Claim(
        "section 4",
        "At gamma 0 naive BatchNorm collapses: about 17% at best.",
        "finally at least 40 points behind",
        _collapse,
    ),
    Claim(
        "section 4",
        "At gamma 0 FixBN's best falls to 75%, from 80%.",
        "between 1 and 10 points behind",
        _against_centralized("fixbn", 0.0, lambda behind: 1 <= behind <= 10, best=True),
    ),
    Claim(
        "section 4",
        "At gamma 0 FBN matches the 80% of centralized training.",
        "at most 1.5 points behind",
        _against_centralized("fbn", 0.0, lambda behind: behind <= 1.5, best=True),
    ),
    Claim(
        "section 4",
        "FixBN struggles in the first half at gamma 0.",
        "at least 10 points behind",
        _before_the_switch,
    ),
    Claim(
        "section 4",
        "FBN almost exactly follows centralized training throughout, at gamma 0.",
        "at most 3 points apart after a third of the rounds",
        _throughout,
    ),
]

RING_CLAIMS = [
    Claim(
        "figure 1",
        "Centralized BatchNorm keeps the classes separable.",
        "more than 95% nearest to their own class",
        _separable("centralized", lambda share: share > 0.95),
    ),
    Claim(
        "figure 1",
        "After naive BatchNorm they no longer are.",
        "less than 40% nearest to their own class",
        _separable("naive", lambda share: share < 0.4),
    ),
    Claim(
        "figure 2a",
        "FBN keeps them separable, nearly as centralized.",
        "more than 95% nearest to their own class",
        _separable("fbn", lambda share: share > 0.95),
    ),
    Claim(
        "figure 2b",
        "FixBN's points are separable and wrongly scaled.",
        "more than 95%, and more than 1.5 times too large",
        _scale,
    ),
    Claim("figure 2c", "FBN's error stays small and flat.", "at most 0.5, and within a factor of 1.5", _flat),
    Claim(
        "figure 2c",
        "The others' error grows with heterogeneity.",
        "more than three times as large at gamma 0",
        _grows,
    ),
]
