"""One self-contained HTML page from a folder of runs: figures, tables, claims, and how each run was made."""

import base64
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from .. import __version__
from ..experiments.archive import Gathered, gather, nothing_in
from ..experiments.config import Run, describe, local_work
from ..experiments.results import Result
from ..storage.files import write_bytes
from . import figures
from .claims import judge_comparison, judge_rings
from .groups import (
    Comparison,
    Rings,
    Siege,
    comparisons,
    counterpart,
    figures_of,
    final_table,
    rings,
    siege_table,
    sieges,
)
from .liars import judge_siege

_ARTICLE = "Overcoming the Challenges of Batch Normalization in Federated Learning"


def write_report(*places: Path, out: Path | None = None, found: Gathered | None = None) -> Path:
    """Draw every figure that the finished runs allow, and the page around them.

    Args:
        places: folders of run folders, and files of runs.
        out: where the page goes; `report` in the first place if not given.
        found: what `gather` found in these places, if it is at hand.

    Returns:
        The path of the page.
    """
    root = Path(places[0])
    out = Path(out) if out is not None else (root if root.is_dir() else root.parent) / "report"
    results, left_out = found or gather(*map(Path, places))
    if not results:
        raise ValueError(nothing_in(root, left_out))
    groups = comparisons(results)
    content = {
        "version": __version__,
        "article": _ARTICLE,
        "sections": [
            *(
                s
                for i, ring in enumerate(rings(results))
                for s in _ring_sections(ring, out, f"-{i}" if i else "")
            ),
            *_accuracy_sections(groups, out),
            *_siege_sections(sieges(results), out),
        ],
        "holdings": _holdings(groups, out),
        "runs": [_run_row(result) for result in sorted(results, key=lambda r: describe(r.config))],
        "left_out": left_out,
        "machines": _machines(results),
    }
    loader = PackageLoader("fedbatchnorm", "report")
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(
        "page.html.j2"
    )
    page = out / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(page, template.render(content).encode(errors="replace"))
    return page


def _ring_sections(ring: Rings, out: Path, suffix: str) -> list[dict[str, Any]]:
    sections = []
    if ring.keys() >= figures.FIGURE1:
        text = (
            "Ten clients hold one class each, 30 points around a corner of a ring. Centralized BatchNorm "
            "rescales the ring. Naive BatchNorm moves every client's class to the origin, on top of the "
            "others."
        )
        title = "Figure 1: does normalization keep the classes apart?"
        section = _section(title, text, figures.figure1(ring), out, f"fig1{suffix}")
        sections.append(section | {"claims": judge_rings(ring, "figure 1")})
    if ring.keys() >= figures.FIGURE2:
        text = (
            "FBN's picture is nearly the centralized one. FixBN freezes a variance that misses the spread "
            "between clients: its points stay apart, at the wrong scale. Right: the mean distance of the "
            "normalized points from the centralized ones over all rounds; bars are one standard deviation "
            "over seeds. At gamma 1 FixBN is closer than FBN."
        )
        title = "Figure 2: what FBN and FixBN do, and how far from centralized"
        section = _section(title, text, figures.figure2(ring), out, f"fig2{suffix}")
        sections.append(section | {"claims": judge_rings(ring, "figure 2")})
    return sections


def _accuracy_sections(groups: list[Comparison], out: Path) -> list[dict[str, Any]]:
    sections = []
    for i, group in enumerate(groups):
        number = group.figure()
        borrowed = counterpart(group, groups) if group.parameter == "alpha" else None
        name = f"{number.lower().replace('figure ', 'fig')}-{group.example.dataset}-{i}"
        seeds = sorted({len(found) for found in group.cells.values()})
        counted = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        text = (
            f"{group.title()}; {counted} seed{'' if counted == '1' else 's'}. "
            "Bars and bands are one standard deviation over seeds."
        )
        if group.example.dataset == "digits":
            text += (
                " Small scale: scikit-learn's digits, not the paper's CIFAR-10, so the levels differ from "
                "the paper's. The network is a multilayer perceptron on purpose: on digits this small a "
                "convolutional network does not show the collapse, as the class is in the shape, which "
                "channel statistics do not erase."
            )
        section = _section(
            f"{number}: accuracy against heterogeneity",
            text,
            figures.accuracy_figure(group, borrowed),
            out,
            name,
        )
        header, rows = final_table(group)
        sections.append(section | {"claims": judge_comparison(group), "header": header, "rows": rows})
    return sections


def _under_fedavg(run: Run) -> str:
    return f", {local_work(run)}" if run.algorithm == "fedavg" else ""


def _siege_sections(found: list[Siege], out: Path) -> list[dict[str, Any]]:
    """Figures 4 and 6 to 13: a section for each attack and defense."""
    sections = []
    for i, siege in enumerate(found):
        run = siege.example
        struck = " and ".join(run.targets_struck()) or "nothing"
        title = ": ".join(filter(None, [figures_of(siege), siege.name()]))
        text = (
            f"{run.byzantine} of {run.clients} clients lie about {struck}; the data is split among the "
            f"others (among all {run.clients} where there is no attack). {run.dataset}, {run.model}, "
            f"{run.rounds} rounds{_under_fedavg(run)}. "
            "Fewer clients with data differ less, which helps naive BatchNorm: compare its attacked and "
            "defended runs with each other. Thin lines are single seeds, thick ones their median."
        )
        section = _section(
            title, text, figures.siege_figure(siege), out, f"attack-{run.attack.replace(':', '-')}-{i}"
        )
        header, rows = siege_table(siege)
        sections.append(section | {"claims": judge_siege(siege), "header": header, "rows": rows})
    return sections


def _section(title: str, text: str, figure: Figure, out: Path, name: str) -> dict[str, Any]:
    files = figures.save(figure, out, name)
    return {
        "title": title,
        "text": text,
        "figure": Markup(figures.svg(figure)),  # noqa: S704 (matplotlib's own output; it escapes text)
        "files": [file.name for file in files],
        "claims": [],
        "header": [],
        "rows": [],
    }


def _holdings(groups: list[Comparison], out: Path) -> list[dict[str, str]]:
    """Who holds which classes: one picture for each way of splitting, of the first seed."""
    pictures: dict[str, dict[str, str]] = {}
    for group in groups:
        for (_, level), results in sorted(group.cells.items(), key=lambda cell: -(cell[0][1] or 0)):
            held = results[0].holdings
            title = f"{group.example.dataset}, " + (
                "iid" if level is None else f"{group.parameter} = {level:g}"
            )
            if held is not None and title not in pictures:
                file = figures.save(figures.holdings_figure(held, title), out, f"holdings-{len(pictures)}")[1]
                content = base64.b64encode(file.read_bytes()).decode()
                pictures[title] = {"title": title, "png": content}
    return list(pictures.values())


def _run_row(result: Result) -> dict[str, Any]:
    summary = result.summary
    figure = (
        f"distance {summary['distance']:.3f}"
        if "distance" in summary
        else f"{100 * summary['accuracy']:.1f}%"
    )
    seconds = summary.get("seconds")
    return {
        "name": result.path.name,
        "what": describe(result.config),
        "model": result.config.model if isinstance(result.config, Run) else "",
        "result": figure,
        "seconds": "" if seconds is None else f"{seconds:.1f}",
        "config": asdict(result.config),
        "sessions": result.environment,
    }


def _machines(results: list[Result]) -> list[dict[str, Any]]:
    """On what, with what, and how long: one line for each machine and commit."""
    found: dict[tuple[str, ...], list[float]] = {}
    for result in results:
        last = result.environment[-1]
        key = tuple(str(last.get(k)) for k in ("device", "threads", "torch", "fedbatchnorm", "commit"))
        found.setdefault(key, []).append(float(result.summary.get("seconds") or 0.0))
    return [
        {
            "device": key[0],
            "threads": key[1],
            "torch": key[2],
            "version": f"{key[3]} ({key[4] if key[4] != 'None' else 'no commit'})",
            "runs": len(seconds),
            "seconds": f"{statistics.fmean(seconds):.1f}",
        }
        for key, seconds in found.items()
    ]
