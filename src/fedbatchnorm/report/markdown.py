"""The document as one Markdown page: the headline, the paper's claims, figures and tables, and what was run.

The same results give the same bytes, so that a test can compare the page with them.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..experiments.archive import Gathered
from ..experiments.catalogue import FIGURES, unique
from ..experiments.config import Run
from ..experiments.results import Result
from ..storage.files import write_bytes
from . import figures
from .claims import Finding
from .document import ARTICLE, AUTHORS, Claims, Document, Section, build
from .page import machines

_SIGNS = {True: "✓", False: "✗", None: "-"}


def write_markdown(*places: Path, page: Path, found: Gathered | None = None) -> Path:
    """Write the page, and its figures as SVG into a folder of the same name beside it.

    Args:
        places: folders of run folders, and files of runs.
        page: the Markdown file.
        found: what `gather` found in these places, if it is at hand.
    """
    document = build(*places, found=found)
    folder = page.with_suffix("")
    training = [result for result in document.results if isinstance(result.config, Run)]
    full = any(claims.scale == "full" for claims in document.claims)
    parts = [_head(document, "Reproduction" if full else "Results")]
    parts += [_claims(claims) for claims in document.claims]
    parts += [_section(section, folder) for section in document.sections]
    parts += [_coverage(training)] if full else []
    parts += [_machines(document.results)]
    page.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(page, "\n".join(parts).encode(errors="replace"))
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


def _head(document: Document, title: str) -> str:
    written = "Written by `fedbatchnorm report --markdown`; do not edit."
    numbers = (
        "Numbers are test accuracies in percent after the last round, mean ± standard deviation over seeds, "
        "with the number of seeds in brackets; - is not run."
    )
    return f"# {title}\n\n**{plain(document.headline)}**\n\n{document.counted}. {numbers} {written}\n"


def _claims(claims: Claims) -> str:
    """Every claim of the paper that can be compared with runs, and the result."""
    where = " at small scale" if claims.scale == "small" else ""
    text = (
        f'The paper is "{ARTICLE}" ({AUTHORS}). {claims.counted()} A claim agrees if all of its rules hold '
        "(✓), and partly if some do. Accuracies are in percent, and judged as they are shown.\n\n"
    )
    header = ["the paper says", "agrees", "rule: what was measured"]
    rows = [_row(finding) for finding in claims.findings]
    whys: dict[str, list[str]] = {}
    for finding in claims.findings:
        if finding.claim.why and finding.verdict() in ("no", "partly"):
            whys.setdefault(finding.claim.why, []).append(f"*{finding.claim.says}*")
    why = "".join(f"- {' '.join(says)} {reason}\n" for reason, says in whys.items())
    ending = f"\nWhere we differ, and why we think so:\n\n{why}" if why else ""
    return f"## What the paper says, and what was measured{where}\n\n{text}{table(header, rows)}{ending}"


def _row(finding: Finding) -> list[str]:
    rules = [f"{_SIGNS[part.holds]} {part.rule} → {plain(part.measured)}" for part in finding.parts]
    verdict = finding.verdict()
    claim = f"{finding.claim.says} ({finding.claim.where})"
    return [claim, verdict if verdict == "yes" else f"**{verdict}**", "<br>".join(rules)]


def _section(section: Section, folder: Path) -> str:
    title = plain(section.title)
    parts = [f"## {title}\n\n{' '.join(map(plain, section.text))}\n"]
    if section.chart is not None:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = figures.svg(figures.draw(section.chart))
        write_bytes(folder / f"{section.name}.svg", drawn.encode(errors="replace"))
        parts.append(f"![{plain(section.chart.alt)}]({folder.name}/{section.name}.svg)\n")
    for found in section.tables:
        if found.rows:
            words = f"{found.title}:\n\n" if found.title.startswith("Mean distance") else ""
            parts.append(
                words + table([*map(plain, found.header)], [[*map(plain, row)] for row in found.rows])
            )
    return "\n".join(parts)


def _coverage(training: list[Result]) -> str:
    """How many of each figure's cells have been run, with how many seeds."""
    seeds: dict[Run, int] = {}
    for result in training:
        if isinstance(result.config, Run) and result.config.precision in ("tf32", "bf16"):
            cell = replace(result.config, seed=0, precision="tf32")
            seeds[cell] = seeds.get(cell, 0) + 1
    rows = []
    for name, figure in FIGURES.items():
        cells = [run for run in unique(figure.runs("full", 1)) if isinstance(run, Run)]
        counts = sorted({seeds[run] for run in cells if run in seeds})
        if cells:
            spread = (
                "-" if not counts else f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            )
            done = sum(run in seeds for run in cells)
            rows.append([name, figure.title, f"{done} of {len(cells)}", spread])
    text = (
        "## What has been run\n\nCells of each figure at full scale; runs in TF32 and bf16 count alike. "
        "`fedbatchnorm reproduce all --scale full --known results` runs the rest.\n\n"
    )
    return text + table(["figure", "what it shows", "cells run", "runs in a cell"], rows)


def _machines(results: list[Result]) -> str:
    header = ["device", "torch", "version (commit)", "engine", "runs", "seconds a run"]
    names = ("device", "torch", "version", "engine", "runs", "seconds")
    rows = [[plain(str(row[name])) for name in names] for row in machines(results)]
    return "## What it ran on\n\n" + table(header, rows)
