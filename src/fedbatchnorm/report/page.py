"""The document as one self-contained HTML page: interactive figures, claims, every run."""

import base64
import csv
import functools
import hashlib
import io
import json
import statistics
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from .. import __version__
from ..experiments.archive import Gathered
from ..experiments.config import Run, describe
from ..experiments.outcome import divergence
from ..experiments.results import Result
from ..simulation.ring import Ring
from ..storage.files import write_bytes
from . import figures
from .charts import Chart
from .document import ARTICLE, AUTHORS, build


def write_report(*places: Path, out: Path | None = None, found: Gathered | None = None) -> Path:
    """Write the page, and beside it each figure as SVG, as PNG, and its data as CSV.

    Args:
        places: folders of run folders, and files of runs.
        out: the folder of the page; `report` in the first of the places if not given.
        found: what `gather` found in these places, if it is at hand.

    Returns:
        The path of the page.
    """
    root = Path(places[0])
    out = Path(out) if out is not None else (root if root.is_dir() else root.parent) / "report"
    document = build(*places, found=found)
    script = _script()
    content = {
        "version": __version__,
        "article": ARTICLE,
        "authors": AUTHORS,
        "document": document,
        "files": {s.name: write_files(s.chart, out) for s in document.sections if s.chart is not None},
        "runs": [_run_row(result) for result in sorted(document.results, key=lambda r: describe(r.config))],
        "machines": machines(document.results),
        "figure": _figure,
        "style": Markup(_read("page.css")),  # noqa: S704 (the package's own)
        "script": Markup(script),  # noqa: S704
        "hash": f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'",
    }
    loader = PackageLoader("fedbatchnorm", "report")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = out / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    text = environment.get_template("page.html.j2").render(content)
    write_bytes(page, text.encode(errors="replace"))
    return page


def write_files(chart: Chart, folder: Path) -> list[str]:
    """A chart as SVG, PNG and CSV; returns the files' names."""
    files = figures.save(figures.draw(chart), folder, chart.name)
    table = folder / f"{chart.name}.csv"
    write_bytes(table, as_csv(chart).encode(errors="replace"))
    return [file.name for file in (*files, table)]


def as_csv(chart: Chart) -> str:
    """The data of a chart, a line for each point; texts that a spreadsheet would execute are quoted.

    Example:
        >>> from fedbatchnorm.report.charts import Mark, Panel
        >>> mark = Mark("FBN", 1, [100], [80.5])
        >>> print(as_csv(Chart("x", "", [Panel("curves", "gamma 0", "round", "", [mark])])).strip())
        panel,series,x,y,sd
        gamma 0,FBN,100,80.5,
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["panel", "series", "x", "y", "sd"])
    for panel in chart.panels:
        for mark in panel.marks:
            for i, (x, y) in enumerate(zip(mark.x, mark.y, strict=True)):
                at = panel.ticks[int(x)] if panel.ticks else x
                sd = mark.sd[i] if mark.sd else None
                writer.writerow([_inert(panel.title), _inert(mark.key), at, y, "" if sd is None else sd])
    return text.getvalue()


def machines(results: list[Result]) -> list[dict[str, Any]]:
    """Machines and duration of training runs: a line for each machine, engine and commit."""
    found: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        last = result.environment[-1]
        key = tuple(str(last.get(k)) for k in ("device", "threads", "torch", "fedbatchnorm", "commit"))
        engine = "ring" if isinstance(result.config, Ring) else str(result.summary.get("engine", "eager"))
        found.setdefault((*key, engine), []).append(result)
    rows = []
    for (device, threads, torch, version, commit, engine), runs in sorted(found.items()):
        seconds = [r.summary["seconds"] for r in runs if r.summary.get("seconds") is not None]
        rows.append(
            {
                "device": device,
                "threads": threads,
                "torch": torch,
                "version": f"{version} ({commit if commit != 'None' else 'no commit'})",
                "engine": engine,
                "runs": len(runs),
                "seconds": f"{statistics.fmean(seconds):.1f}" if seconds else "-",
            }
        )
    return rows


def _figure(chart: Chart) -> Markup:
    """The element in which the page's script draws a chart, with the chart's data."""
    panels = [{k: _lean(v) for k, v in panel._asdict().items() if v is not None} for panel in chart.panels]
    data = json.dumps({"choices": chart.choices, "panels": panels}, separators=(",", ":"))
    for character in "<>&\u2028\u2029":  # so that no text can end the element
        data = data.replace(character, f"\\u{ord(character):04x}")
    data = "".join(c if not "\ud800" <= c <= "\udfff" else "?" for c in data)
    start = f'<figure data-chart="{escape(chart.name)}" aria-label="{escape(chart.alt)}">'
    noscript = "<noscript>The figure needs JavaScript; the files named below need none.</noscript>"
    block = f'{start}{noscript}<script type="application/json">{data}</script></figure>'
    return Markup(block)  # noqa: S704 (escaped above)


def _lean(value: Any) -> Any:
    """Marks without their empty fields."""
    if isinstance(value, list) and value and hasattr(value[0], "_asdict"):
        return [
            {k: v for k, v in mark._asdict().items() if v is not None and v is not False} for mark in value
        ]
    return value


def _script() -> str:
    """D3 with its license, and the page's own script."""
    license = _read("d3.LICENSE.txt").replace("*/", "* /")
    return f"/*\n{license}*/\n{_read('d3.min.js')}\n{_read('page.js')}"


@functools.cache
def _read(name: str) -> str:
    return resources.files("fedbatchnorm.report").joinpath(name).read_text(encoding="utf-8")


def _inert(text: str) -> str:
    return f"'{text}" if text[:1] in tuple("=+-@\t\r") else text


def _run_row(result: Result) -> dict[str, Any]:
    summary, config = result.summary, result.config
    figure = f"distance {summary['distance']:.3f}" if "distance" in summary else ""
    seconds = summary.get("seconds")
    kept = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "own"}
    if isinstance(config, Run) and config.own:
        kept["own"] = {part.kind: part.record() for part in config.own}
    return {
        "name": result.path.name,
        "what": describe(config),
        "model": config.model if isinstance(config, Run) else "",
        "result": figure or f"{100 * summary['accuracy']:.1f}%",
        "diverged": divergence(result),
        "seconds": "" if seconds is None else f"{seconds:.1f}",
        "config": kept,
        "sessions": result.environment,
    }
