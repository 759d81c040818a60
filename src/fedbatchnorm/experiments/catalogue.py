"""The paper's figures as lists of runs. A new figure is one function and one row of `FIGURES`.

They only have `PAPER_SCHEMES`, so that a new row in the table of schemes does not change them.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from ..simulation.ring import Ring
from ..simulation.schemes import PAPER as PAPER_SCHEMES
from .config import Run, digest

Scale = Literal["full", "small"]
DATASET = {"full": "cifar10", "small": "digits"}
GAMMAS = (1.0, 0.5, 0.3, 0.1, 0.01, 0.0)
ALPHAS = (10.0, 1.0, 0.5, 0.1)
RING_GAMMAS = (1.0, 0.3, 0.1, 0.0)
LIARS = 3  # of 10


class Figure(NamedTuple):
    """A figure of the paper: what it shows, and its runs at a scale with a number of seeds."""

    title: str
    runs: Callable[[Scale, int], list[Run | Ring]]


def fig1(scale: Scale, seeds: int) -> list[Run | Ring]:
    """Points before and after normalization, centralized and naive."""
    return [Ring(scheme=scheme, gamma=0.0) for scheme in ("centralized", "naive")]


def fig2(scale: Scale, seeds: int) -> list[Run | Ring]:
    """Points as FBN and FixBN normalize them, and each scheme's distance from centralized."""
    schemes = [scheme for scheme in PAPER_SCHEMES if scheme != "centralized"]
    return [
        Ring(scheme=scheme, gamma=gamma, seed=seed)
        for gamma in RING_GAMMAS
        for scheme in schemes
        for seed in range(seeds)
    ]


def fig3(scale: Scale, seeds: int, gammas: Iterable[float] = GAMMAS) -> list[Run | Ring]:
    """Final accuracy against gamma, and curves at gamma 0.01 and 0."""
    return [
        Run(dataset=DATASET[scale], scheme=scheme, gamma=gamma, seed=seed)
        for seed in range(seeds)
        for gamma in gammas
        for scheme in PAPER_SCHEMES
    ]


def fig5(scale: Scale, seeds: int) -> list[Run | Ring]:
    """As figure 3 with Dirichlet; its last panel is at gamma 0, as in the paper."""
    runs: list[Run | Ring] = [
        Run(dataset=DATASET[scale], scheme=scheme, partition="dirichlet", alpha=alpha, seed=seed)
        for seed in range(seeds)
        for alpha in ALPHAS
        for scheme in PAPER_SCHEMES
    ]
    return runs + fig3(scale, seeds, gammas=[0.0])


def under_attack(
    scale: Scale,
    seeds: int,
    attacks: Iterable[str],
    rule: str,
    gammas: Iterable[float] = (),
    alphas: Iterable[float] = (),
) -> list[Run | Ring]:
    """FBN and naive BatchNorm: without attack; with 3 of 10 clients Byzantine; and with a defense."""
    splits: list[dict[str, Any]] = [{"gamma": gamma} for gamma in gammas]
    splits += [{"partition": "dirichlet", "alpha": alpha} for alpha in alphas]
    runs: list[Run | Ring] = []
    for seed in range(seeds):
        for split in splits:
            for scheme in ("fbn", "naive"):
                calm = Run(dataset=DATASET[scale], scheme=scheme, seed=seed, **split)
                runs.append(calm)
                for attack in attacks:
                    struck = replace(calm, byzantine=LIARS, attack=attack)
                    runs += [struck, replace(struck, defense=rule)]
    return runs


def _attack_figures() -> dict[str, Figure]:
    """Figures 4 and 6 to 13: which attacks, which rule, at which levels."""
    strong, all_four = (0.01, 0.0), (0.5, 0.1, 0.01, 0.0)
    names = {"sf": "sign flipping", "foe": "fall of empires", "alie": "a little is enough"}
    rules = {"nnm+median": "median", "nnm+trimmed_mean": "trimmed mean"}
    figures = {
        "fig4": Figure(
            "Sign flipping on the statistics, gamma 0.01 and 0, against NNM and median",
            partial(under_attack, attacks=("sf",), rule="nnm+median", gammas=strong),
        )
    }
    for attack, text in names.items():
        for rule, short in rules.items():
            runs = partial(under_attack, attacks=(attack,), rule=rule, gammas=all_four)
            title = f"{text.capitalize()}, gamma 0.5, 0.1, 0.01 and 0, against NNM and {short}"
            figures[f"fig{5 + len(figures)}"] = Figure(title, runs)
    for rule, short in rules.items():
        runs = partial(under_attack, attacks=tuple(names), rule=rule, alphas=(1.0, 0.1))
        title = f"All three attacks, Dirichlet alpha 0.1 and 1, against NNM and {short}"
        figures[f"fig{5 + len(figures)}"] = Figure(title, runs)
    return figures


def demo(seeds: int) -> list[Run | Ring]:
    """The runs of the demo: figures 1 and 2, and figure 3 on digits at three levels."""
    return unique([*fig1("small", seeds), *fig2("small", seeds), *fig3("small", seeds, (0.0, 0.1, 1.0))])


FIGURES: dict[str, Figure] = {
    "fig1": Figure("Separability: centralized and naive BatchNorm on the Gaussian ring", fig1),
    "fig2": Figure("Normalization: FBN, FixBN, and the distance from centralized", fig2),
    "fig3": Figure("Accuracy against gamma, and curves at gamma 0.01 and 0", fig3),
    "fig5": Figure("Accuracy against Dirichlet's alpha, and curves at alpha 0.1 and gamma 0", fig5),
}
FIGURES |= _attack_figures()
FIGURES = dict(sorted(FIGURES.items(), key=lambda row: int(row[0].removeprefix("fig"))))


def unique(runs: Iterable[Run | Ring]) -> list[Run | Ring]:
    """Each run once, in order: figures share some."""
    return list({digest(run): run for run in runs}.values())
