"""Results brought together: runs that differ in scheme, heterogeneity and seed alone make one comparison."""

import statistics
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

from ..experiments.catalogue import FIGURES
from ..experiments.config import Run, local_work
from ..experiments.results import Result
from ..simulation.recipe import ADVERSARY, LATER, usual
from ..simulation.ring import Ring
from ..simulation.schemes import SCHEMES

_CLIENTS = 10  # in the paper
Rings = dict[tuple[str, float], list[Result]]  # (scheme, gamma) -> the seeds' results, seed 0 first


NO_ATTACK, NO_DEFENSE = "no attack", "no defense"
ALONE = "the honest alone"  # no attack, and no more clients than are honest under attack
_CALM = (NO_ATTACK, ALONE)


class Spread(NamedTuple):
    """Mean and standard deviation (n - 1; None for a single value) over seeds."""

    mean: float
    sd: float | None
    seeds: int

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Of at least one value."""
        sd = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), sd, len(values))

    def percent(self) -> str:
        """As percent with one digit: 96.7 ± 0.3."""
        return f"{100 * self.mean:.1f}" + ("" if self.sd is None else f" ± {100 * self.sd:.1f}")


class Comparison(NamedTuple):
    """Training runs that share everything but scheme, level of heterogeneity and seed.

    cells: (scheme label, level) -> the seeds' results. `parameter` is gamma, alpha or None.
    """

    example: Run
    parameter: str | None
    cells: dict[tuple[str, float | None], list[Result]]

    def title(self) -> str:
        """What was run, in words; settings that are not the usual ones are named."""
        run = self.example
        text = f"{run.dataset}, {run.model}, {run.clients} clients, batch {run.batch}, {run.rounds} rounds"
        if run.algorithm == "fedavg":
            text += f", {local_work(run)}"
        plain = vars(Run(dataset=run.dataset, rounds=run.rounds, algorithm=run.algorithm))
        told = {"algorithm", "local_steps", "local_epochs", "cohort"}
        for name in ("lr", "momentum", "beta", "weighting", "precision", "evaluate_every", *LATER):
            if name not in told and getattr(run, name) != plain[name]:
                text += f", {name.replace('_', ' ')} {getattr(run, name)}"
        return text

    def figure(self) -> str:
        """Which of the paper's figures this is."""
        names = {"gamma": "Figure 3", "alpha": "Figure 5"} if self.example.algorithm == "dsgd" else {}
        return names.get(self.parameter or "", "Accuracy")

    def unusual_clients(self) -> str:
        """How many clients there are, where they are not as many as in the paper."""
        return "" if self.example.clients == _CLIENTS else f"{self.example.clients} clients"

    def levels(self) -> list[float | None]:
        """The levels, from alike to heterogeneous."""
        return sorted({level for _, level in self.cells}, key=lambda v: -(v or 0))

    def labels(self) -> list[str]:
        """The schemes' labels in the table's order."""
        return sorted({label for label, _ in self.cells}, key=_rank)

    def final(self, label: str, level: float | None) -> Spread | None:
        """Final accuracy over seeds, or None if it was not run."""
        return self._over_seeds(label, level, "accuracy")

    def best(self, label: str, level: float | None) -> Spread | None:
        """Best accuracy over seeds, or None if it was not run."""
        return self._over_seeds(label, level, "best_accuracy")

    def own(self, label: str, level: float | None) -> Spread | None:
        """Final accuracy of clients with models of their own, over seeds, or None if there is none."""
        results = self.cells.get((label, level), [])
        found = [r.summary["client_accuracy"] for r in results if "client_accuracy" in r.summary]
        return Spread.of(found) if found else None

    def curve(self, label: str, level: float | None) -> tuple[list[int], list[Spread]]:
        """Rounds, and accuracy there over seeds."""
        return mean_curve(self.cells.get((label, level), []))

    def _over_seeds(self, label: str, level: float | None, key: str) -> Spread | None:
        found = self.cells.get((label, level))
        return Spread.of([r.summary[key] for r in found]) if found else None


def comparisons(results: list[Result]) -> list[Comparison]:
    """The training runs, brought together; in the order dataset, partition."""
    found: dict[tuple[Any, ...], Comparison] = {}
    for result in sorted(results, key=lambda r: r.config.seed):
        run = result.config
        if not isinstance(run, Run) or not run.is_plain():
            continue
        parameter, level = run.heterogeneity()
        shared = _shared(run, {"scheme", "seed", "switch", parameter})
        group = found.setdefault(shared, Comparison(run, parameter, {}))
        group.cells.setdefault((_label(run), level), []).append(result)
    return sorted(found.values(), key=lambda c: (c.example.dataset, -_order(c.parameter), c.title()))


class Siege(NamedTuple):
    """Training runs under one attack with one defense, beside the undefended and the undisturbed ones.

    cells: (scheme's title, NO_ATTACK, ALONE, NO_DEFENSE or the defense, level) -> the seeds' results.
    """

    example: Run
    parameter: str | None
    cells: dict[tuple[str, str, float | None], list[Result]]

    def levels(self) -> list[float | None]:
        """The levels at which the attack was run, from alike to heterogeneous."""
        found = {level for _, kind, level in self.cells if kind not in _CALM}
        return sorted(found, key=lambda v: -(v or 0))

    def lines(self) -> list[tuple[str, str]]:
        """(scheme's title, kind), in the order in which they are drawn."""
        kinds = (*_CALM, NO_DEFENSE, self.example.defense)
        found = {(title, kind) for title, kind, _ in self.cells}
        return sorted(found, key=lambda line: (*_rank(line[0]), kinds.index(line[1])))

    def name(self) -> str:
        """What is done to whom, in words."""
        run = self.example
        lies = f"{run.attack} on {' and '.join(run.targets_struck())}" if run.byzantine else "none"
        return f"Liars: {lies}, {'undefended' if run.defense == 'none' else f'against {run.defense}'}"

    def spread(self, title: str, kind: str, level: float | None) -> Spread | None:
        """Final accuracy over seeds, or None if it was not run."""
        return self._over_seeds(title, kind, level, "accuracy")

    def best(self, title: str, kind: str, level: float | None) -> Spread | None:
        """Best accuracy over seeds, or None if it was not run."""
        return self._over_seeds(title, kind, level, "best_accuracy")

    def _over_seeds(self, title: str, kind: str, level: float | None, key: str) -> Spread | None:
        found = self.cells.get((title, kind, level))
        return Spread.of([r.summary[key] for r in found]) if found else None


def sieges(results: list[Result]) -> list[Siege]:
    """The runs with liars or a defense, brought together: one for each attack and defense.

    Undefended runs go with the defended ones of the same attack, and make one of their own without such.
    """
    runs = [(r.config, r) for r in sorted(results, key=lambda r: r.config.seed) if isinstance(r.config, Run)]
    found: dict[tuple[Any, ...], Siege] = {}
    for run, _ in sorted(runs, key=lambda pair: pair[0].defense == "none"):
        parameter = run.heterogeneity()[0]
        ignored = {"scheme", "seed", "switch", parameter, *ADVERSARY}
        shared = _shared(run, ignored)
        key = (shared, run.byzantine, run.attack, run.targets_struck(), run.defense)
        defended = any(k[:4] == key[:4] for k in found) and run.defense == "none"
        if run.is_plain() or defended or key in found:
            continue
        siege = found[key] = Siege(run, parameter, {})
        for other, result in runs:
            same = (other.byzantine, other.attack, other.targets_struck()) == key[1:4]
            alone = other.is_plain() and run.byzantine and other.clients == run.honest()
            kind = ALONE if alone else NO_ATTACK if other.is_plain() else other.defense
            kind = NO_DEFENSE if kind == "none" else kind
            fits = kind in _CALM or (same and kind in (NO_DEFENSE, run.defense))
            like = replace(other, clients=run.clients) if alone else other
            if fits and other.scheme != "centralized" and _shared(like, ignored) == shared:
                cell = (_label(other), kind, other.heterogeneity()[1])
                siege.cells.setdefault(cell, []).append(result)
        struck = {label for label, kind, _ in siege.cells if kind not in _CALM}
        found[key] = siege._replace(cells={k: v for k, v in siege.cells.items() if k[0] in struck})
    return list(found.values())


def figures_of(siege: Siege) -> str:
    """Which of the paper's figures a siege belongs to, in words; empty if none."""
    run = siege.example
    if run.algorithm != "dsgd":
        return ""
    names = [
        name.removeprefix("fig")
        for name, figure in FIGURES.items()
        if any(
            isinstance(r, Run)
            and (r.attack, r.defense) == (run.attack, run.defense)
            and r.heterogeneity()[0] == siege.parameter
            for r in figure.runs("full", 1)
        )
    ]
    return f"Figure{'s' if len(names) > 1 else ''} {' and '.join(names)}" if names else ""


def rings(results: list[Result]) -> list[Rings]:
    """The runs on the ring, brought together: one for each setting."""
    found: dict[tuple[Any, ...], Rings] = {}
    for result in sorted(results, key=lambda r: r.config.seed):
        if isinstance(result.config, Ring):
            shared = _shared(result.config, {"scheme", "seed", "gamma", "switch"})
            group = found.setdefault(shared, {})
            group.setdefault((result.config.scheme, result.config.gamma), []).append(result)
    return [found[key] for key in sorted(found, key=lambda key: -sum(map(len, found[key].values())))]


def mean_curve(results: list[Result]) -> tuple[list[int], list[Spread]]:
    """Rounds that all of these runs have evaluated, and accuracy there over seeds."""
    rounds, curves = shared_curves(results)
    return rounds, [Spread.of(list(values)) for values in zip(*curves, strict=True)]


def shared_curves(results: list[Result]) -> tuple[list[int], list[list[float]]]:
    """Rounds that all of these runs have evaluated, and each run's accuracy there."""
    runs = [{row["round"]: row["accuracy"] for row in r.metrics} for r in results]
    rounds = sorted(set.intersection(*map(set, runs))) if runs else []
    return rounds, [[run[t] for t in rounds] for run in runs]


def counterpart(group: Comparison, groups: list[Comparison]) -> Comparison | None:
    """The comparison by gamma that goes with one by Dirichlet's alpha: figure 5 borrows a panel of it."""
    ignored = {"scheme", "seed", "switch", "partition", "gamma", "alpha"}
    for other in groups:
        if other.parameter == "gamma" and _shared(other.example, ignored) == _shared(group.example, ignored):
            return other
    return None


def percent_or_dash(spread: Spread | None) -> str:
    """How a table shows a cell; - is not run."""
    return "-" if spread is None else spread.percent()


def final_table(
    group: Comparison, show: Callable[[Spread | None], str] = percent_or_dash
) -> tuple[list[str], list[list[str]]]:
    """Final accuracies in percent: the header, and a row for each level of heterogeneity."""
    personal = [label for label in group.labels() if any(group.own(label, level) for level in group.levels())]
    header = [
        group.parameter or "partition",
        *group.labels(),
        *(f"{label}, own models" for label in personal),
    ]
    rows = []
    for level in group.levels():
        cells = [group.final(label, level) for label in group.labels()]
        cells += [group.own(label, level) for label in personal]
        rows.append(["iid" if level is None else f"{level:g}", *map(show, cells)])
    return header, rows


def ring_distances(ring: Rings, scheme: str) -> dict[float, Spread]:
    """gamma -> a scheme's distance from centralized over seeds, from alike to heterogeneous."""
    found = {g: Spread.of([r.summary["distance"] for r in rs]) for (s, g), rs in ring.items() if s == scheme}
    return dict(sorted(found.items(), reverse=True))


def ring_table(ring: Rings) -> tuple[list[str], list[list[str]]]:
    """Distances from centralized: the header, and a row for each scheme."""
    levels = sorted({gamma for _, gamma in ring}, reverse=True)
    rows = []
    for name, scheme in SCHEMES.items():
        found = ring_distances(ring, name)
        if found and name != "centralized":
            rows.append([scheme.title, *(f"{found[g].mean:.2f}" if g in found else "-" for g in levels)])
    return ["gamma", *(f"{g:g}" for g in levels)], rows


def siege_table(
    siege: Siege, show: Callable[[Spread | None], str] = percent_or_dash
) -> tuple[list[str], list[list[str]]]:
    """Final accuracies in percent: the header, and a row for each scheme undisturbed, attacked, defended."""
    levels = siege.levels()
    rows = []
    for scheme, kind in siege.lines():
        spreads = [siege.spread(scheme, kind, level) for level in levels]
        rows.append([f"{scheme}, {kind}", *map(show, spreads)])
    names = ["iid" if level is None else f"{siege.parameter} {level:g}" for level in levels]
    return [f"{siege.example.byzantine} x {siege.example.attack}", *names], rows


def _shared(config: Run | Ring, ignored: Collection[str | None]) -> tuple[Any, ...]:
    """What runs must have in common to be compared."""
    identity = config.identity()
    if (
        isinstance(config, Run)
        and config.algorithm != "dsgd"
        and config.weighting == usual(config, "weighting")
    ):
        identity.pop("weighting", None)  # it is usual to weigh otherwise where somebody may lie
    return tuple(sorted((k, str(v)) for k, v in identity.items() if k not in ignored))


def _order(parameter: str | None) -> int:
    return {"gamma": 2, "alpha": 1}.get(parameter or "", 0)


def _rank(label: str) -> tuple[int, str]:
    """Where a scheme's label comes: in the order of the table."""
    titles = [scheme.title for scheme in SCHEMES.values()]
    return titles.index(label.partition(",")[0]), label


def _label(run: Run) -> str:
    title = SCHEMES[run.scheme].title
    unusual = run.scheme == "fixbn" and run.switch_step() != run.rounds // 2  # pyrefly: ignore
    return f"{title}, switch at {run.switch_step()}" if unusual else title
