"""What the paper says of clients that lie (section 5), and what was measured beside it.

A claim is one function and one row of `LIAR_CLAIMS`, with the attacks, rules and levels of heterogeneity that
it speaks of: the text of section 5 is about the median and gamma; trimmed means and Dirichlet's alpha are in
the appendix, where the figures speak for themselves.
"""

from collections.abc import Callable
from typing import NamedTuple

from ..aggregation.attacks import attack
from ..simulation.schemes import SCHEMES
from .claims import Claim, Finding, Measured, judge
from .groups import ALONE, NO_ATTACK, NO_DEFENSE, Siege, Spread

_FBN, _NAIVE = SCHEMES["fbn"].title, SCHEMES["naive"].title
_ALL, _MEDIAN, _RULES = ("sf", "foe", "alie"), ("nnm+median",), ("nnm+median", "nnm+trimmed_mean")
_STRONG = {"gamma": 0.01, "alpha": 0.1}  # from here down heterogeneity counts as strong


def judge_siege(siege: Siege) -> list[Finding]:
    """The claims that speak of a siege, each with what was measured; none if it is not one of the paper's."""
    run = siege.example
    if run.attack not in _ALL or run.defense not in _RULES or 10 * run.byzantine != 3 * run.clients:
        return []
    if run.targets_struck() != attack(run.attack).targets or run.algorithm != "dsgd":
        return []
    return judge([row.claim for row in LIAR_CLAIMS if row.speaks_of(siege)], siege)


def _strong(siege: Siege) -> list[float | None]:
    limit = _STRONG.get(siege.parameter or "", 0.0)
    return [level for level in siege.levels() if level is not None and level <= limit]


def _levels_where(
    siege: Siege,
    levels: list[float | None],
    cells: list[tuple[str, str, str]],
    agrees: Callable[..., bool],
    beside: tuple[str, str] | None = None,
) -> Measured:
    """Each level at which all cells were run, in words; whether `agrees` holds of all of them.

    Args:
        siege: the runs.
        levels: where to look.
        cells: (scheme's title, kind, final or best).
        agrees: is given the accuracies in percent, in the order of the cells.
        beside: (scheme's title, kind) that is shown too, where it was run.
    """
    texts, right = [], True
    for level in levels:
        found = [(siege.best if which == "best" else siege.spread)(t, k, level) for t, k, which in cells]
        spreads = [s for s in found if isinstance(s, Spread)]
        if len(spreads) == len(cells):
            named = [
                f"{_word(kind, which)} {s.percent()}"
                for (_, kind, which), s in zip(cells, spreads, strict=True)
            ]
            more = siege.spread(*beside, level) if beside else None
            named += [f"{_word(beside[1], 'final')} {more.percent()}"] if beside and more else []
            texts.append(f"{siege.parameter} {level:g}: " + ", ".join(named))
            right &= agrees(*(100 * s.mean for s in spreads))
    return ("; ".join(texts), right) if texts else None


def _word(kind: str, which: str) -> str:
    words = {NO_ATTACK: "undisturbed", ALONE: ALONE, NO_DEFENSE: "undefended"}
    word = words.get(kind, "defended")
    return f"{word}, best on the way" if which == "best" else word


def _defended_matches(siege: Siege) -> Measured:
    cells = [(_FBN, siege.example.defense, "final"), (_FBN, NO_ATTACK, "final")]
    return _levels_where(siege, siege.levels(), cells, lambda ours, calm: ours >= calm - 1.5)


def _ahead(points: float) -> Callable[[Siege], Measured]:
    """Defended FBN against defended naive BatchNorm, at each strong level."""

    def measure(siege: Siege) -> Measured:
        rule = siege.example.defense
        texts, right = [], True
        for level in _strong(siege):
            ours, naive = siege.spread(_FBN, rule, level), siege.spread(_NAIVE, rule, level)
            if ours and naive:
                texts.append(f"{siege.parameter} {level:g}: FBN {ours.percent()}, naive {naive.percent()}")
                right &= 100 * (ours.mean - naive.mean) >= points
        return ("; ".join(texts), right) if texts else None

    return measure


def _naive_lost(siege: Siege) -> Measured:
    cells = [(_NAIVE, NO_DEFENSE, "final"), (_NAIVE, NO_DEFENSE, "best")]
    return _levels_where(siege, _strong(siege), cells, lambda last, best: last <= 20)


def _learns_first(siege: Siege) -> Measured:
    cells = [(_FBN, NO_DEFENSE, "best")]
    return _levels_where(siege, _strong(siege), cells, lambda best: 60 <= best <= 80)


def _then_degrades(siege: Siege) -> Measured:
    texts, right = [], True
    for level in _strong(siege):
        runs = [r.summary for r in siege.cells.get((_FBN, NO_DEFENSE, level), [])]
        fallen = sum(100 * (s["best_accuracy"] - s["accuracy"]) >= 10 for s in runs)
        if runs:
            ends = ", ".join(f"{100 * s['accuracy']:.1f}" for s in runs)
            texts.append(f"{siege.parameter} {level:g}: {fallen} of {len(runs)} seeds (they end at {ends})")
            right = 2 * fallen >= len(runs)  # at the last, the strongest level
    return ("; ".join(texts), right) if texts else None


def _defended_naive(agrees: Callable[[float, float], bool]) -> Callable[[Siege], Measured]:
    """Defended naive BatchNorm against naive without attack, at each strong level."""

    def measure(siege: Siege) -> Measured:
        cells = [(_NAIVE, siege.example.defense, "final"), (_NAIVE, NO_ATTACK, "final")]
        return _levels_where(siege, _strong(siege), cells, agrees, (_NAIVE, ALONE))

    return measure


class Row(NamedTuple):
    """A claim, and what it speaks of."""

    attacks: tuple[str, ...]
    rules: tuple[str, ...]
    parameters: tuple[str, ...]
    claim: Claim

    def speaks_of(self, siege: Siege) -> bool:
        """Whether a siege is among that."""
        run = siege.example
        return run.attack in self.attacks and run.defense in self.rules and siege.parameter in self.parameters


_BOTH, _GAMMA = ("gamma", "alpha"), ("gamma",)
_FEWER = (
    "Liars hold no data here, and so the honest ones, fewer than the clients without attack, share the "
    "classes: a client's own batch is less one-sided, which helps naive BatchNorm. Where it was run, `the "
    "honest alone` is as many clients without any liar. The paper does not say how it splits the data when "
    "some lie."
)
LIAR_CLAIMS = [
    Row(
        _ALL,
        _RULES,
        _BOTH,
        Claim(
            "section 5",
            "FBN with the robust rule matches FBN without attack.",
            "at most 1.5 points behind, at every level",
            _defended_matches,
        ),
    ),
    Row(
        _ALL,
        _RULES,
        _BOTH,
        Claim(
            "introduction",
            "With a robust rule FBN defends better than naive BatchNorm.",
            "defended FBN at least 2 points ahead of defended naive, where heterogeneity is strong",
            _ahead(2),
        ),
    ),
    Row(
        _ALL,
        _MEDIAN,
        _GAMMA,
        Claim(
            "section 5",
            "With the rule both improve, with a significant edge to FBN.",
            "defended FBN at least 10 points ahead of defended naive",
            _ahead(10),
        ),
    ),
    Row(
        ("sf",),
        _MEDIAN,
        _GAMMA,
        Claim(
            "section 5",
            "Undefended naive BatchNorm is unable to learn: close to 10%.",
            "at most 20% in the end",
            _naive_lost,
            _FEWER,
        ),
    ),
    Row(
        ("sf",),
        _MEDIAN,
        _GAMMA,
        Claim(
            "section 5",
            "Undefended FBN learns in the beginning, to close to 70%.",
            "its best between 60% and 80%",
            _learns_first,
            "Whether and when an undefended run breaks down depends on the seed.",
        ),
    ),
    Row(
        ("sf",),
        _MEDIAN,
        _GAMMA,
        Claim(
            "section 5",
            "Then it quickly degrades, especially at gamma 0.",
            "half of the seeds or more end 10 points below their best, where heterogeneity is strongest",
            _then_degrades,
            "Whether an undefended run breaks down depends on the seed.",
        ),
    ),
    Row(
        ("sf",),
        _MEDIAN,
        _GAMMA,
        Claim(
            "section 5",
            "Defended naive is like naive without attack: both poor.",
            "at most 10 points apart",
            _defended_naive(lambda ours, calm: abs(ours - calm) <= 10),
            _FEWER,
        ),
    ),
    Row(
        ("foe", "alie"),
        _MEDIAN,
        _GAMMA,
        Claim(
            "section 5",
            "Under stronger attacks defended naive is further from naive without attack.",
            "at least 10 points behind it",
            _defended_naive(lambda ours, calm: ours <= calm - 10),
            _FEWER,
        ),
    ),
]
