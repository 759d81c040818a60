"""Groups of comparable results; each cell of a group has the runs of its seeds.

The key of a group is what its runs have in common. Its lines are schemes, each with the settings that
distinguish it, and under attack with the server's rule. Lines are values, not texts: labels are made from
them and never parsed.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..experiments.config import Run, local_work
from ..experiments.results import Result, Unfinished
from ..simulation.recipe import ADVERSARY, LATER, usual
from ..simulation.ring import Ring
from ..simulation.schemes import SCHEMES

NO_ATTACK, NO_DEFENSE = "no attack", "no defense"
ALONE = "honest clients alone"  # no attack, and no more clients than are honest under attack
CALM = (NO_ATTACK, ALONE)
SETTINGS = ("switch", "beta", "groups", "gradient", "limit", "blend", "calibrate", "recalibrate")
Level = float | None
Key = tuple[tuple[str, str], ...]


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


class Line(NamedTuple):
    """A scheme with its settings that are not usual, and under attack the condition.

    source: the hashes of a scheme and a rule of the user's own.
    """

    scheme: str
    settings: tuple[tuple[str, Any], ...] = ()
    condition: str = ""
    source: tuple[str | None, ...] = ()

    def calm(self) -> "Line":
        """The same scheme, whatever the condition."""
        return self._replace(condition="", source=self.source[:1])


@dataclass(frozen=True)
class Group:
    """Training runs that share all but scheme, level of heterogeneity, seed, and under attack the rule.

    key: what they share.
    parameter: the name of the heterogeneity's level, such as gamma; None if there is none.
    cells: the finished runs of the seeds; `begun` has unfinished ones.
    """

    key: Key
    example: Run
    parameter: str | None
    cells: dict[tuple[Line, Level], list[Result]] = field(default_factory=dict)
    begun: dict[tuple[Line, Level], list[Unfinished]] = field(default_factory=dict)

    def levels(self) -> list[Level]:
        """The levels, from alike to heterogeneous."""
        return sorted({level for _, level in (*self.cells, *self.begun)}, key=lambda v: -(v or 0))

    def lines(self) -> list[Line]:
        """The lines in the order of the table of schemes."""
        return sorted({line for line, _ in (*self.cells, *self.begun)}, key=_rank)

    def final(self, line: Line, level: Level) -> Spread | None:
        """Final accuracy over seeds, or None if it was not run."""
        return self._over_seeds(line, level, "accuracy")

    def best(self, line: Line, level: Level) -> Spread | None:
        """Best accuracy over seeds, or None if it was not run."""
        return self._over_seeds(line, level, "best_accuracy")

    def own(self, line: Line, level: Level) -> Spread | None:
        """Final accuracy of clients with models of their own, over seeds, or None if there is none."""
        return self._over_seeds(line, level, "client_accuracy")

    def curve(self, line: Line, level: Level) -> tuple[list[int], list[Spread]]:
        """Rounds that all of the cell's runs have evaluated, and accuracy there over seeds."""
        rounds, curves = shared_curves(self.cells.get((line, level), []))
        return rounds, [Spread.of(list(values)) for values in zip(*curves, strict=True)]

    def label(self, line: Line) -> str:
        """The label of a line: the scheme's title, its distinguishing settings, and the condition."""
        return ", ".join(filter(None, (self._labels[line.calm()], line.condition)))

    @cached_property
    def _labels(self) -> dict[Line, str]:
        titles = {line.calm(): run.title() for line, run in self._runs()}
        found = {}
        for line, title in titles.items():
            apart = self._apart(line, titles)
            found[line] = f"{title} ({', '.join(apart)})" if apart else title
        for more in (lambda line: line.scheme, lambda line: (line.source[0] or "")[:6]):
            alike: dict[str, set[str]] = defaultdict(set)  # two schemes may have the same title
            for line, text in found.items():
                alike[text].add(more(line))
            found = {
                line: f"{text} ({more(line)})" if len(alike[text]) > 1 and more(line) else text
                for line, text in found.items()
            }
        return found

    def _apart(self, line: Line, others: Iterable[Line]) -> list[str]:
        """The settings that distinguish a line from others of its scheme, or from usual settings, as text."""
        alike = [dict(o.settings) for o in others if (o.scheme, o.source) == (line.scheme, line.source)]
        settings = dict(line.settings)
        varying = {n for n in SETTINGS if len({repr(found.get(n, "usual")) for found in alike}) > 1}
        names = [n for n in SETTINGS if n in varying or n in settings]
        words = [_in_words(n, settings.get(n, _usual(self.example, n))) for n in names]
        return [word for word in words if word]

    def _runs(self) -> Iterable[tuple[Line, Run]]:
        for (line, _), found in (*self.cells.items(), *self.begun.items()):
            for one in found:
                if isinstance(one.config, Run):
                    yield line, one.config

    def _over_seeds(self, line: Line, level: Level, key: str) -> Spread | None:
        found = [r.summary[key] for r in self.cells.get((line, level), []) if key in r.summary]
        return Spread.of(found) if found else None


def comparisons(results: Iterable[Result], unfinished: Iterable[Unfinished] = ()) -> list[Group]:
    """The runs without Byzantine clients and defenses, in groups; ordered by dataset and partition."""
    found: dict[Any, Group] = {}
    for one in sorted([*results, *unfinished], key=lambda r: r.config.seed):
        run = one.config
        if isinstance(run, Run) and run.is_plain():
            parameter, level = run.heterogeneity()
            key = _shared(run)
            group = found.setdefault(key, Group(key, run, parameter))
            _put(group, (line_of(run), level), one)
    return sorted(found.values(), key=_order)


def attacked(results: Iterable[Result], unfinished: Iterable[Unfinished] = ()) -> list[Group]:
    """The runs with Byzantine clients or a defense, a group for each attack, with the runs without attack."""
    everything = sorted([*results, *unfinished], key=lambda r: r.config.seed)
    facts = [(one, one.config, _shared(one.config)) for one in everything if isinstance(one.config, Run)]
    found: dict[Any, Group] = {}
    for one, run, shared in facts:
        if not run.is_plain():
            lies = (str(run.byzantine), run.attack, "+".join(run.targets_struck()), _source(run, "attack"))
            names = ("byzantine", "attack", "targets", "attack's source")
            key = (*shared, *((name, str(lie)) for name, lie in zip(names, lies, strict=True)))
            group = found.setdefault(key, Group(key, run, run.heterogeneity()[0]))
            condition = NO_DEFENSE if run.defense == "none" else run.defense
            _put(group, (line_of(run, condition), run.heterogeneity()[1]), one)
    for group in found.values():
        _add_calm(group, [fact for fact in facts if fact[1].is_plain()])
    return sorted(found.values(), key=_order)


def _add_calm(group: Group, plain: list[tuple[Any, Run, Key]]) -> None:
    """Add the same runs without attack to a group, and those with the honest clients only."""
    schemes, levels = {line.calm() for line in group.lines()}, set(group.levels())
    shared = {k: v for k, v in group.key if k not in ("byzantine", "attack", "targets", "attack's source")}
    alone = shared | {"clients": str(group.example.honest())}
    for one, run, key in plain:
        level = run.heterogeneity()[1]
        condition = NO_ATTACK if dict(key) == shared else ALONE if dict(key) == alone else ""
        if condition and level in levels and line_of(run) in schemes:
            _put(group, (line_of(run, condition), level), one)


def _put(group: Group, cell: tuple[Line, Level], one: Result | Unfinished) -> None:
    home: Any = group.cells if isinstance(one, Result) else group.begun
    home.setdefault(cell, []).append(one)


def line_of(run: Run, condition: str = "") -> Line:
    """The line that a run belongs to.

    Example:
        >>> line_of(Run(gradient=0.5)).settings
        (('gradient', 0.5),)
    """
    known = run.identity()
    given = {name: known[name] for name in SETTINGS if name in known}
    if given.get("switch", 0) is None:  # the scheme has none
        del given["switch"]
    settings = tuple((name, value) for name, value in given.items() if value != _usual(run, name))
    source = (
        _source(run, "scheme"),
        *([_source(run, "defense")] if condition not in ("", *CALM, NO_DEFENSE) else []),
    )
    return Line(run.scheme, settings, condition, source)


class Rings(NamedTuple):
    """The runs on the ring with one setting: (scheme, gamma) -> the seeds' results, seed 0 first."""

    example: Ring
    cells: dict[tuple[str, float], list[Result]]

    def levels(self) -> list[float]:
        """The levels of gamma, from alike to heterogeneous."""
        return sorted({gamma for _, gamma in self.cells}, reverse=True)

    def schemes(self) -> list[str]:
        """The schemes in the order of the table."""
        return [name for name in SCHEMES if any(name == scheme for scheme, _ in self.cells)]

    def distance(self, scheme: str, gamma: float) -> Spread | None:
        """The mean distance from centralized over seeds, or None if it was not run."""
        found = self.cells.get((scheme, gamma))
        return Spread.of([r.summary["distance"] for r in found]) if found else None


def rings(results: Iterable[Result]) -> list[Rings]:
    """The runs on the ring: a group for each setting, the one with the most runs first."""
    found: dict[Any, Rings] = {}
    for result in sorted(results, key=lambda r: r.config.seed):
        config = result.config
        if isinstance(config, Ring):
            ignored = {"scheme", "seed", "gamma", "switch"}
            key = tuple(sorted((k, str(v)) for k, v in config.identity().items() if k not in ignored))
            key = (*key, ("switch", str(config.switch_step() if config.scheme == "fixbn" else "")))
            group = found.setdefault(key[:-1], Rings(config, {}))
            group.cells.setdefault((config.scheme, config.gamma), []).append(result)
    return sorted(found.values(), key=lambda ring: -sum(map(len, ring.cells.values())))


def shared_curves(results: list[Result]) -> tuple[list[int], list[list[float]]]:
    """Rounds that all of these runs have evaluated, and each run's accuracy there."""
    runs = [{row["round"]: row["accuracy"] for row in r.metrics} for r in results]
    rounds = sorted(set.intersection(*map(set, runs))) if runs else []
    return rounds, [[run[t] for t in rounds] for run in runs]


def setting(group: Group) -> str:
    """What was run, as text: usual settings by name, all others by value."""
    run = group.example
    text = f"{run.title('dataset')}, {run.title('model')}, {run.clients} clients, batch {run.batch}, "
    text += f"{run.rounds} rounds"
    if run.algorithm == "fedavg":
        text += f", {local_work(run)}"
    plain = vars(Run(dataset=run.dataset, rounds=run.rounds, algorithm=run.algorithm, own=run.own))
    told = {"algorithm", "local_steps", "local_epochs", "cohort", *SETTINGS}
    for name in ("lr", "momentum", "weighting", "precision", "evaluate_every", *LATER):
        if name not in told and getattr(run, name) != plain[name]:
            text += f", {name.replace('_', ' ')} {getattr(run, name)}"
    split = run.part("partition")
    more = [] if split is None else [(n, v) for n, v in split.parameters if n != group.parameter]
    return text + "".join(f", {name} {value}" for name, value in more)


def level_name(group: Group, level: Level) -> str:
    """A level as text: gamma 0.1; the partition's name if there is none."""
    return group.example.title("partition") if level is None else f"{group.parameter} {level:g}"


def _shared(run: Run) -> Key:
    """What runs must have in common to be compared."""
    identity: dict[str, Any] = run.identity()
    if run.algorithm != "dsgd" and run.weighting == usual(run, "weighting"):
        identity.pop("weighting", None)  # it is usual to weigh otherwise where somebody may lie
    ignored = {"scheme", "seed", run.heterogeneity()[0], *SETTINGS, *ADVERSARY}
    own = {f"{kind}'s source": _source(run, kind) for kind in ("dataset", "partition", "model")}
    return tuple(sorted((k, str(v)) for k, v in {**identity, **own}.items() if k not in ignored))


def _source(run: Run, kind: Any) -> str | None:
    part = run.part(kind)
    return None if part is None else part.source


def _usual(run: Run, name: str) -> Any:
    return run.rounds // 2 if name == "switch" else usual(run, name)  # pyrefly: ignore


def _in_words(name: str, value: Any) -> str:
    if isinstance(value, bool):
        words: Mapping[str, str] = {"calibrate": "calibrated", "recalibrate": "recalibrated"}
        return words.get(name, name) if value else ""
    if name == "switch":
        return f"switch at {value}"
    return f"no {name}" if value is None else f"{name} {value:g}" if value != "auto" else f"{name} auto"


def _order(group: Group) -> tuple[Any, ...]:
    run = group.example
    attacks = ["sf", "foe", "alie"]  # in the paper's order
    attack = attacks.index(run.attack) if run.attack in attacks else len(attacks)
    parameter = {"gamma": 0, "alpha": 1}.get(group.parameter or "", 2)
    return run.dataset, parameter, attack, run.attack, -sum(map(len, group.cells.values())), group.key


def _rank(line: Line) -> tuple[Any, ...]:
    """The order of lines: schemes as in their table, first without attack, then without defense."""
    names = list(SCHEMES)
    conditions = ("", *CALM, NO_DEFENSE)
    place = conditions.index(line.condition) if line.condition in conditions else len(conditions)
    scheme = names.index(line.scheme) if line.scheme in names else len(names)
    settings = (len(line.settings), repr(line.settings))
    return scheme, line.scheme, settings, str(line.source[:1]), place, line.condition, str(line.source)
