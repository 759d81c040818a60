"""One Markdown page from committed results: the paper's claims, figures and tables, and what was run.

The same results give the same bytes, so that a test can hold the page against them.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..experiments.archive import Gathered, gather, nothing_in
from ..experiments.catalogue import FIGURES, unique
from ..experiments.config import Run
from ..experiments.results import Result
from ..storage.files import write_bytes
from . import figures
from .claims import Finding, judge_comparison, judge_rings
from .groups import (
    Comparison,
    Siege,
    Spread,
    comparisons,
    counterpart,
    figures_of,
    final_table,
    percent_or_dash,
    ring_table,
    rings,
    siege_table,
    sieges,
)
from .liars import judge_siege

_HEAD = """# Reproduction

Written by `fedbatchnorm report --markdown`; do not edit. The paper is "Overcoming the Challenges of Batch
Normalization in Federated Learning" (Guerraoui, Pinot, Rizk, Stephan, Taïani, 2024). {runs} training runs:
{what}. Numbers are test accuracies in percent after the last round, mean ± standard deviation over seeds,
with the number of seeds in brackets; - is not run.
"""


def write_markdown(*places: Path, page: Path, found: Gathered | None = None) -> Path:
    """Write the page, and its figures as SVG into a folder of the same name beside it.

    Args:
        places: folders of run folders, and files of runs.
        page: the Markdown file.
        found: what `gather` found in these places, if it is at hand.
    """
    results, left_out = found or gather(*places)
    if not results:
        raise ValueError(nothing_in(places[0], left_out))
    pictures = page.with_suffix("")
    training = [r for r in results if isinstance(r.config, Run)]
    groups, besieged = comparisons(results), sieges(results)
    what = ", ".join(sorted({f"{g.example.dataset}, {g.example.rounds} rounds" for g in groups}))
    head = _HEAD.format(runs=len(training), what=what or "none without liars")
    parts, taken = [head, _claims(results, groups, besieged)], set[str]()
    for ring in rings(results)[:1]:
        if ring.keys() >= figures.FIGURE1:
            parts.append(_section("Figure 1: separability", figures.figure1(ring), pictures, "fig1", taken))
        if ring.keys() >= figures.FIGURE2:
            parts.append(_section("Figure 2: normalization", figures.figure2(ring), pictures, "fig2", taken))
        distances = "Mean distance of the normalized points from the centralized ones:\n\n"
        parts.append(distances + table(*ring_table(ring)))
    for group in groups:
        name = group.figure()
        borrowed = counterpart(group, groups) if group.parameter == "alpha" else None
        picture = figures.accuracy_figure(group, borrowed)
        slug = f"{name.lower().replace('figure ', 'fig')}-{group.example.dataset}-{group.example.precision}"
        slug += group.unusual_clients() and f"-{group.unusual_clients()}".replace(" ", "-")
        parts.append(_section(f"{name}: {group.title()}", picture, pictures, slug, taken))
        parts.append(table(*final_table(group, _cell)))
    for siege in besieged:
        run = siege.example
        slug = f"{run.attack}-{run.defense}-{siege.parameter}-{run.precision}".replace("+", "-").replace(
            ":", "-"
        )
        number = figures_of(siege)
        title = (
            f"{number}{': ' if number else ''}{siege.name()} ({siege.parameter or 'iid'}, {run.precision})"
        )
        parts.append(_section(title, figures.siege_figure(siege), pictures, slug, taken))
        header, rows = siege_table(siege, _cell)
        parts.append(table(["", *header[1:]], rows))
    parts += [_precisions(groups), _coverage(training), _machines(training)]
    page.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(page, "\n".join(parts).encode())
    return page


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return (
        "\n".join(
            "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in line) + " |" for line in lines
        )
        + "\n"
    )


def plain(text: str) -> str:
    """Text that Markdown shows as it is: a model's name and a device's come from files.

    Example:
        >>> print(plain("x:<b>[y](z)"))
        x:\\<b\\>\\[y\\](z)
    """
    text = "".join(c if c.isprintable() else "?" for c in text)
    return re.sub(r"[\\`*<>\[\]!&|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def _section(title: str, picture: figures.Figure, folder: Path, name: str, taken: set[str]) -> str:
    """A picture under a title; a name that is taken gets a number."""
    folder.mkdir(parents=True, exist_ok=True)
    title = plain(title)
    alike = sum(other == name or other.startswith(f"{name}-no") for other in taken)
    name = f"{name}-no{alike + 1}" if alike else name
    taken.add(name)
    write_bytes(folder / f"{name}.svg", figures.svg(picture, standalone=True).encode())
    return f"## {title}\n\n![{title}]({folder.name}/{name}.svg)\n"


def _claims(results: list[Result], groups: list[Comparison], besieged: list[Siege]) -> str:
    """Every sentence of the paper that can be held against runs, and what the runs say."""
    found: list[tuple[str, Finding]] = []
    for ring in rings(results)[:1]:
        found += [("", f) for figure in ("figure 1", "figure 2") for f in judge_rings(ring, figure)]
    for group in groups:
        words = (group.example.dataset, group.example.precision, group.unusual_clients())
        found += [(", ".join(filter(None, words)), f) for f in judge_comparison(group)]
    for siege in besieged:
        run = siege.example
        found += [
            (f"{run.attack}, {run.defense}, {siege.parameter}, {run.precision}", f)
            for f in judge_siege(siege)
        ]
    found = [(where, f) for where, f in found if f.agrees is not None]
    header = ["where", "the paper says", "measured", "agrees", "counted as agreeing if"]
    rows = [
        [
            f"{f.claim.where}{f' ({where})' if where else ''}",
            f.claim.says,
            f.measured,
            "yes" if f.agrees else "**no**",
            f.claim.agrees_if,
        ]
        for where, f in found
    ]
    differing = list(
        dict.fromkeys((f.claim.says, f.claim.why) for _, f in found if not f.agrees and f.claim.why)
    )
    why = "".join(f"- *{says}* {reason}\n" for says, reason in differing)
    agreed = sum(bool(f.agrees) for _, f in found)
    text = f"## What the paper says, and what was measured\n\n{agreed} of {len(found)} findings agree.\n\n"
    return text + table(header, rows) + (f"\nWhere we differ, and why we think so:\n\n{why}" if why else "")


def _cell(spread: Spread | None) -> str:
    return percent_or_dash(spread) + ("" if spread is None else f" ({spread.seeds})")


def _precisions(groups: list[Comparison]) -> str:
    """Cells that were run in TF32 and in bf16, side by side."""
    rows = []
    for exact in (g for g in groups if g.example.precision == "tf32"):
        title = f"{exact.title()}, precision bf16"
        for half in (g for g in groups if (g.title(), g.parameter) == (title, exact.parameter)):
            for label, level in exact.cells:
                one, other = exact.final(label, level), half.final(label, level)
                if one is not None and other is not None:
                    where = "iid" if level is None else f"{exact.parameter} {level:g}"
                    rows.append([f"{label}, {where}", _cell(one), _cell(other)])
    return "## TF32 and bf16\n\n" + table(["", "TF32", "bf16"], sorted(rows)) if rows else ""


def _coverage(training: list[Result]) -> str:
    """Of each figure's cells, how many have been run, with how many seeds."""
    seeds: dict[Run, int] = {}
    for result in training:
        if isinstance(result.config, Run) and result.config.precision in ("tf32", "bf16"):
            cell = replace(result.config, seed=0, precision="tf32")
            seeds[cell] = seeds.get(cell, 0) + 1
    rows = []
    for name, figure in FIGURES.items():
        cells = [run for run in unique(figure.runs("full", 1)) if isinstance(run, Run)]
        counts = [seeds[run] for run in cells if run in seeds]
        if cells:
            spread = (
                "-"
                if not counts
                else f"{min(counts)}"
                if min(counts) == max(counts)
                else f"{min(counts)} to {max(counts)}"
            )
            rows.append([name, figure.title, f"{len(counts)} of {len(cells)}", spread])
    text = (
        "## What has been run\n\nCells of each figure at full scale; runs in TF32 and bf16 count alike. "
        "`fedbatchnorm reproduce all --scale full --known results` runs the rest.\n\n"
    )
    return text + table(["figure", "what it shows", "cells run", "runs in a cell"], rows)


def _machines(training: list[Result]) -> str:
    found: dict[tuple[str, ...], int] = {}
    for result in training:
        last = result.environment[-1]
        key = (
            str(last.get("device")),
            str(last.get("torch")),
            str(last.get("commit")),
            str(result.summary.get("engine", "eager")),
        )
        found[key] = found.get(key, 0) + 1
    rows = [[*map(plain, key), str(count)] for key, count in sorted(found.items())]
    return "## On what\n\n" + table(["device", "torch", "commit", "engine", "runs"], rows)
