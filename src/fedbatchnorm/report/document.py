"""The report as one document: text, figures and tables. `page` and `markdown` render it."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..experiments.archive import Gathered, gather, nothing_in
from ..experiments.results import LeftOut, Result, Unfinished, read_unfinished
from . import tables
from .charts import Chart, accuracy_chart, attack_chart, clouds_chart, holdings_chart
from .claims import Finding, judge, study_of
from .entries import Entry, Scale, entry_of, ring_figures
from .groups import ALONE, Group, Rings, attacked, comparisons, level_name, rings, setting
from .headline import headline
from .paper import ACCURACY_CLAIMS, RING_CLAIMS
from .paper_attacks import ATTACK_CLAIMS
from .tables import Table, attack_name, attack_words

ARTICLE = "Overcoming the Challenges of Batch Normalization in Federated Learning"
AUTHORS = "Guerraoui, Pinot, Rizk, Stephan, Taïani, 2024"
_IN_TITLES = ("partition", "byzantine", "attack", "targets", "weighting")  # or not worth to be in them


class Section(NamedTuple):
    """A part of the document: a title, sentences, at most one figure, and tables."""

    name: str
    title: str
    text: list[str]
    chart: Chart | None
    tables: list[Table]


class Claims(NamedTuple):
    """What the paper says and what was measured, at one scale."""

    scale: Scale
    findings: list[Finding]

    def counted(self) -> str:
        """How many claims agree, partly agree, and do not, as text."""
        verdicts = Counter[str](finding.verdict() for finding in self.findings)
        words = {
            "yes": ("agrees", "agree"),
            "yes, as far as compared": ("agrees as far as compared", "agree as far as compared"),
            "partly": ("agrees partly", "agree partly"),
            "no": ("does not agree", "do not agree"),
        }
        counts = [(verdicts[verdict], word) for verdict, word in words.items() if verdicts[verdict]]
        parts = [f"{count} {one if count == 1 else more}" for count, (one, more) in counts]
        return f"Of {len(self.findings)} claims, {', '.join(parts)}."


class Document(NamedTuple):
    """The content of a report."""

    headline: str
    counted: str
    claims: list[Claims]
    sections: list[Section]
    holdings: list[Chart]
    results: list[Result]
    unfinished: list[Unfinished]
    left_out: list[LeftOut]


def build(*places: Path, found: Gathered | None = None) -> Document:
    """The document of all runs in these places; an error if there is none.

    Args:
        places: folders of run folders, and files of runs.
        found: what `gather` found in these places, if it is at hand.
    """
    results, left_out = found or gather(*map(Path, places))
    unfinished = [run for place in places if Path(place).is_dir() for run in read_unfinished(Path(place))]
    finished = {result.name for result in results}
    unfinished = [run for run in unfinished if run.path.name not in finished]
    unfinished = list({run.path.name: run for run in unfinished}.values())
    if not results and not any(run.metrics for run in unfinished):
        raise ValueError(nothing_in(Path(places[0]), left_out))
    plain, struck, on_ring = comparisons(results, unfinished), attacked(results, unfinished), rings(results)
    entries = [(group, entry_of(group)) for group in (*plain, *struck)]
    parts = [(_accuracy_section(*pair), *pair) for pair in entries[: len(plain)]]
    parts += [(_attack_section(*pair), *pair) for pair in entries[len(plain) :]]
    parts.sort(key=lambda part: 99 if part[2] is None else int(part[2].figures[0].removeprefix("fig")))
    sections = [section for ring in on_ring for section in _ring_sections(ring)]
    sections += _told_apart(parts)
    counted = f"{len(results)} finished runs" + (f", {len(unfinished)} not finished" if unfinished else "")
    return Document(
        headline(plain, struck, on_ring),
        counted if len(results) != 1 else counted.replace("runs", "run", 1),
        _claims(entries, on_ring),
        _with_names(sections),
        _holdings(plain),
        results,
        unfinished,
        left_out,
    )


def _claims(entries: list[tuple[Group, Entry | None]], on_ring: list[Rings]) -> list[Claims]:
    """The claims at each scale at which figures of the paper were run; those on the ring once."""
    ring = next((ring for ring in on_ring if ring_figures(ring)), None)
    found: list[Claims] = []
    for scale in ("full", "small"):
        study = study_of(scale, entries, None, ())
        known = study.gamma is not None or study.attacks
        if ring is not None and (known or scale == "small") and not found:
            study = study._replace(ring=ring, ring_figures=ring_figures(ring))
        findings = judge([*RING_CLAIMS, *ACCURACY_CLAIMS, *ATTACK_CLAIMS], study)
        findings = [finding for finding in findings if finding.verdict() != "not run"]
        if findings:
            found.append(Claims(scale, findings))
    return found


def _ring_sections(ring: Rings) -> list[Section]:
    """Figures 1 and 2, if their runs are there; otherwise one section on what was run."""
    figures, gamma = ring_figures(ring), min(ring.levels())
    run = ring.example
    here = [scheme for scheme in ring.schemes() if (scheme, gamma) in ring.cells]
    table = [tables.ring_table(ring)] if any(s != "centralized" for s in ring.schemes()) else []
    found = []
    if "fig1" in figures:
        text = [
            "Ten clients hold one class each, 30 points around a corner of a ring. Centralized BatchNorm "
            "rescales the ring. Naive BatchNorm moves every client's class to the origin, on top of the "
            "others."
        ]
        shown = [scheme for scheme in ("centralized", "naive", "fbn") if scheme in here]
        title = "Figure 1: does normalization keep the classes apart?"
        found.append(Section("fig1", title, text, clouds_chart(ring, shown, "fig1"), []))
    if "fig2" in figures:
        text = [
            "FBN's points are nearly the centralized ones. FixBN freezes a variance that misses the spread "
            "between clients: its points stay apart, at the wrong scale. The distance is the mean over all "
            "rounds."
        ]
        fixed, ours = (ring.distance(scheme, 1.0) for scheme in ("fixbn", "fbn"))
        if fixed and ours and fixed.mean < ours.mean:
            text.append("At gamma 1 FixBN is closer than FBN.")
        chart = clouds_chart(ring, ("fbn", "fixbn"), "fig2", beside=True)
        title = "Figure 2: what FBN and FixBN do, and how far from centralized"
        found.append(Section("fig2", title, text, chart, table))
    if not found:
        text = [f"{run.clients} clients, {run.points} points each, {run.rounds} rounds, gamma {gamma:g}."]
        chart = clouds_chart(ring, here, "ring", beside=any(s != "centralized" for s in here))
        found.append(Section("ring", "Normalization alone, on the Gaussian ring", text, chart, table))
    return found


def _accuracy_section(group: Group, entry: Entry | None) -> Section:
    run = group.example
    text = [f"{setting(group)}. {_seeds(group)}"]
    if entry is not None and entry.scale == "small":
        text.append(
            "Small scale: scikit-learn's digits, not the paper's CIFAR-10, so the levels differ from the "
            "paper's. The network is a multilayer perceptron on purpose: on digits this small a "
            "convolutional network does not show the collapse, as the class is in the shape, which channel "
            "statistics do not erase."
        )
    if entry is not None and entry.part:
        text.append("Three of the figure's six levels of heterogeneity.")
    several = len({line.scheme for line in group.lines()}) > 1
    levels = group.levels()
    title = (
        "Accuracy against heterogeneity" if len(levels) > 1 else f"Accuracy at {level_name(group, levels[0])}"
    )
    if levels == [None]:
        title = f"Accuracy, {level_name(group, None)} partition"
    if entry is None:
        who = "schemes compared" if several else group.label(group.lines()[0].calm())
        title = f"{title}: {who} on {run.title('dataset')}"
    else:
        title = f"{entry.title()}: {title[0].lower()}{title[1:]}"
    slug = "-".join((entry.figures[0] if entry else "accuracy", run.dataset, run.precision))
    chart = accuracy_chart(group, slug)
    return Section(slug, title, text, chart, [tables.final_table(group, tables.with_seeds)])


def _attack_section(group: Group, entry: Entry | None) -> Section:
    """An attack, and each defense against it."""
    run = group.example
    held = f"{attack_words(group)}. {setting(group)}."
    text = [held[0].upper() + held[1:]]
    if run.byzantine:
        text[0] += (
            f" The data is split among the {run.honest()} honest clients (among all {run.clients} where "
            "there is no attack)."
        )
    if any(line.condition == ALONE for line in group.lines()):
        text.append(f"“{ALONE.capitalize()}” is a run of {run.honest()} clients without an attack.")
    several = any(len(found) > 1 for found in group.cells.values())
    text.append(
        "Thin lines and dots are single seeds, thick lines their median." if several else "One seed each."
    )
    split = f", by {group.parameter}" if group.parameter else ""
    name = f"{attack_name(run)} on {' and '.join(run.targets_struck())}" if run.byzantine else "no attack"
    title = f"Byzantine clients: {name}{split}" if run.byzantine else f"Defenses without an attack{split}"
    if entry is not None:
        title = f"{entry.title()}: {name}{split}"
    slug = "-".join(("attack", run.attack, group.parameter or run.partition, run.precision))
    return Section(
        slug, title, text, attack_chart(group, slug), [tables.final_table(group, tables.with_seeds)]
    )


def _seeds(group: Group) -> str:
    counts = sorted({len(found) for found in group.cells.values()})
    if not counts:
        return "No run is finished."
    if counts == [1]:
        return "One seed."
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{number} seeds; bars and bands are one standard deviation."


def _told_apart(parts: list[tuple[Section, Group, Entry | None]]) -> list[Section]:
    """Sections on training; if they are not a figure of the paper, the title says how they differ.

    That is what differs from most of the groups on the same data, or from others of the same title.
    """
    found = []
    for section, group, entry in parts:
        alike = [(s.title, dict(g.key)) for s, g, _ in parts if _kind(g) == _kind(group)]
        others = [key for title, key in alike if entry is None or title == section.title]
        apart = []
        for name, value in group.key:
            count = Counter(other.get(name) for other in others)
            common = count[value] == max(count.values()) > 1 and entry is None
            if len(count) > 1 and name not in _IN_TITLES and value != "None" and not common:
                apart.append(f"{name} {value}")
        title = section.title + (f" ({', '.join(apart)})" if apart else "")
        found.append(section._replace(title=title))
    return found


def _kind(group: Group) -> tuple[str, bool]:
    return group.example.title("dataset"), group.example.is_plain()


def _with_names(sections: list[Section]) -> list[Section]:
    """Each section has a name of its own, which can stand in a file's name and in a link."""
    taken: set[str] = set()
    found = []
    for section in sections:
        name = plain = re.sub(r"[^a-z0-9]+", "-", section.name.lower()).strip("-")[:60]
        number = 2
        while name in taken:
            name, number = f"{plain}-no{number}", number + 1
        taken.add(name)
        found.append(section._replace(name=name, chart=section.chart and section.chart._replace(name=name)))
    return found


def _holdings(groups: Iterable[Group]) -> list[Chart]:
    """Which client holds which classes: one picture for each partition, of the first seed."""
    found: dict[str, Chart] = {}
    for group in groups:
        for (_, level), results in sorted(group.cells.items(), key=lambda cell: -(cell[0][1] or 0)):
            held, run = results[0].holdings, group.example
            title = f"{run.title('dataset')}, {run.clients} clients, {level_name(group, level)}"
            if held is not None and title not in found:
                found[title] = holdings_chart(held, title, f"holdings-{len(found) + 1}")
    return list(found.values())
