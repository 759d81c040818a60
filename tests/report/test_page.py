"""The report: what is on the page, and that it is one quiet file in a real browser."""

import base64
import hashlib
import html
import json
import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from fedbatchnorm.experiments import average, dataset, scheme, with_own_batch
from fedbatchnorm.experiments.config import Run, digest, name_of, read_config
from fedbatchnorm.experiments.results import seal
from fedbatchnorm.experiments.runner import run_all
from fedbatchnorm.report.charts import Chart, Mark, Panel
from fedbatchnorm.report.document import build
from fedbatchnorm.report.page import as_csv, machines, write_report
from fedbatchnorm.simulation.ring import Ring
from fedbatchnorm.simulation.schemes import PAPER

sys.path.insert(0, str(Path(__file__).parent))
import chromium
import made_up

ROOT = Path(__file__).parents[2]
HOSTILE = (
    '<script>console.error("in")</script><img src=http://127.0.0.1:9/x onerror=alert(1)>'
    " $\\frac{ =cmd \x1b[31m \"'"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    short = {"rounds": 6, "evaluate_every": 2, "clients": 5}
    configs = [Ring(scheme=s, gamma=g, rounds=5) for s in PAPER for g in (0.0, 1.0)]
    configs += [Run(scheme=s, gamma=g, seed=i, **short) for s in PAPER for g in (0.0, 0.3) for i in range(2)]
    configs += [Run(scheme=s, partition="dirichlet", alpha=1.0, **short) for s in PAPER]
    configs += [
        Run(scheme="fbn", partition="iid", **short),
        Run(scheme="fixbn", gamma=0.3, switch=1, **short),
    ]
    lies = {"byzantine": 2, "attack": "foe", "gamma": 0.3}
    configs += [
        Run(scheme=s, defense=d, **lies, **short) for s in ("fbn", "naive") for d in ("none", "nnm+median")
    ]
    run_all(configs, root)
    return root


@pytest.fixture
def hostile(runs, tmp_path):
    """The same runs, with every free text replaced by an attack."""
    root = tmp_path / "runs"
    shutil.copytree(runs, root)
    for path in list(root.rglob("config.json")):
        content = json.loads(path.read_text())
        if content["kind"] == "training":
            path.write_text(json.dumps(content | {"model": f"x:{HOSTILE}"}))
    for path in root.rglob("environment.json"):
        path.write_text(json.dumps([dict.fromkeys(json.loads(path.read_text())[0], HOSTILE)]))
    for path in root.rglob("holdings.json"):
        held = json.loads(path.read_text())
        path.write_text(json.dumps(held | {"classes": [HOSTILE] * 10}))
    for path in [p.parent for p in root.rglob("config.json")]:
        own = path.with_name(name_of(*read_config(json.loads((path / "config.json").read_text()))))
        path.rename(own)
        summary = json.loads((own / "summary.json").read_text())
        kept = {name: value for name, value in summary.items() if name not in ("files", "digest")}
        (own / "summary.json").write_text(json.dumps(seal(own, kept)))
    bad = root / "'><script>console.error(1)<"
    bad.mkdir()
    (bad / "config.json").write_text(json.dumps({"kind": HOSTILE}))
    (bad / "summary.json").write_text("{}")
    return root


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    """The page of these runs."""
    return write_report(runs, out=tmp_path_factory.mktemp("report"))


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_the_page_has_a_headline_contents_figures_tables_and_runs(runs, written):
    text = written.read_text()
    for part in (
        "FixBN (switch at 1)",
        "iid partition",
        "Gaussian ring",
        "Byzantine clients: fall of empires",
    ):
        assert part in text, part
    (headline,) = re.findall(r"<h1>(.*?)</h1>", text)
    assert headline.startswith("On digits with 5 clients, ")
    sections = set(re.findall(r'<section id="(.*?)">', text))
    assert set(re.findall(r'<li><a href="#(.*?)">', text)) == sections
    assert len(re.findall(r"<figure data-chart=", text)) == 5 + 4  # and who holds which classes
    for kind in ("FBN, no attack", "FBN, no defense", "FBN, nnm+median", "Naive BN, nnm+median"):
        assert f'<th scope="row">{kind}</th>' in text
    for path in runs.iterdir():
        assert path.name in text or path.name == "report"
    # The mean of the seeds, by hand, is in the table.
    finals = []
    for path in runs.rglob("config.json"):
        config = json.loads(path.read_text())
        wanted = {"scheme": "fbn", "gamma": 0.0, "partition": "gamma"}
        if wanted.items() <= config.items():
            finals.append(json.loads((path.parent / "summary.json").read_text())["accuracy"])
    assert len(finals) == 2
    assert f"{100 * sum(finals) / 2:.1f} ±" in text


def test_what_is_no_figure_of_the_paper_has_no_number_and_none_of_its_prose(written):
    text = written.read_text()
    assert not re.findall(r"Figures? \d", text)
    assert "perceptron" not in text
    assert 'class="claims"' not in text


def test_the_figures_of_the_paper_have_theirs(tmp_path):
    results = made_up.figures("fig3", "fig4", scale="full", seeds=2) + made_up.ring(tmp_path)
    text = write_report(tmp_path, out=tmp_path / "report", found=(results, [])).read_text()
    for title in ("Figure 1: ", "Figure 2: ", "Figure 3: ", "Figure 4: "):
        assert f"<h2>{title}" in text
    assert "Of 17 claims, 17 agree." in text
    assert "within 5 points of the paper&#39;s 17%" in text


def test_each_figure_has_files_that_the_page_links_to(written):
    page = written
    links = set(re.findall(r'href="([^#"]+)"', page.read_text()))
    assert links == {path.name for path in page.parent.iterdir()} - {"index.html"}
    assert {Path(link).suffix for link in links} == {".svg", ".png", ".csv"}
    tables = [path.read_text().splitlines() for path in page.parent.glob("accuracy-*.csv")]
    assert {table[0] for table in tables} == {"panel,series,x,y,sd"}
    assert any(line.startswith("gamma 0,FBN,2,") for table in tables for line in table)


def test_the_page_runs_its_own_script_and_nothing_else(written):
    text = written.read_text()
    tags = Tags(text).found
    kinds = {tag for tag, _ in tags}
    assert not kinds & {"link", "iframe", "object", "embed", "form", "img"}
    scripts = [attributes for tag, attributes in tags if tag == "script"]
    assert scripts.count({}) == 1
    assert all(a in ({}, {"type": "application/json"}) for a in scripts)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in html.unescape(
        text
    )
    assert "Copyright 2010-2026 Mike Bostock" in script
    for tag, attributes in tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href"):
                assert re.fullmatch(r"#[a-z0-9-]+|[a-z0-9-]+\.(svg|png|csv)", value), (tag, value)


def test_d3_is_the_one_of_the_site():
    here, there = (ROOT / folder for folder in ("src/fedbatchnorm/report", "docs/playground"))
    for name in ("d3.min.js", "d3.LICENSE.txt"):
        assert (here / name).read_bytes() == (there / name).read_bytes()


def test_seconds_are_of_training_runs_alone(tmp_path):
    run = made_up.result(Run(gamma=0.0), (0.5, 0.6, 0.7), rounds=(100, 200, 300), seconds=8.0)
    rows = machines([run, *made_up.ring(tmp_path)])
    assert [(row["engine"], row["runs"], row["seconds"]) for row in rows] == [
        ("eager", 1, "8.0"),
        ("ring", 13, "-"),
    ]


def test_a_run_that_is_not_finished_is_drawn(runs, tmp_path):
    root = tmp_path / "runs"
    done = Run(scheme="fbn", gamma=0.0, rounds=12, evaluate_every=2, clients=5, seed=0)
    begun = replace(done, seed=1)
    run_all([done, begun], root)
    folder = root / digest(begun)
    (folder / "summary.json").unlink()
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:4]))
    text = write_report(root, out=tmp_path / "report").read_text()
    assert "1 finished run, 1 not finished" in text
    assert "FBN, seed 1, not finished (8 of 12 rounds)" in text
    (folder.parent / digest(done) / "summary.json").unlink()
    text = write_report(root, out=tmp_path / "report").read_text()
    assert "No run is finished yet." in text


def test_what_was_made_with_code_of_one_s_own_is_reported_without_it(tmp_path):
    mine = scheme("mine", with_own_batch, average, title="Mine, of course")
    data = dataset("noise", (torch.randn(200, 4), torch.arange(200) % 4), title="Noise")
    short = {"dataset": data, "model": "mlp", "rounds": 4, "batch": 4, "clients": 4}
    run_all([Run(scheme=s, seed=i, **short) for s in (mine, "fbn") for i in range(2)], tmp_path / "runs")
    built = build(tmp_path / "runs")
    assert all(part.value is None for result in built.results for part in result.config.own)
    assert "Mine, of course" in built.headline
    assert built.headline.startswith("On Noise with 4 clients, ")


def test_the_same_runs_give_the_same_page(runs, written, tmp_path):
    one, two = written.parent, write_report(runs, out=tmp_path).parent
    files = sorted(p.name for p in one.iterdir())
    assert files == sorted(p.name for p in two.iterdir())
    for name in files:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_copies_do_not_count_as_seeds_and_odd_folders_are_listed(runs, tmp_path):
    root = tmp_path / "runs"
    shutil.copytree(runs, root)
    first, *others = sorted(p for p in root.iterdir() if "accuracy" in (p / "summary.json").read_text())
    shutil.copytree(first, root / "more" / first.name)
    shutil.copytree(first, root / "copy")
    odd = {
        "summary.json": "{}",
        "environment.json": "[]",
        "metrics.jsonl": '{"round": 1}',
        "holdings.json": "{}",
        "config.json": '{"kind": "training", "model": "a\\ud800:b"}',
    }
    for path, (name, content) in zip(others, odd.items(), strict=False):
        (path / name).write_text(content)
    ring = next(p for p in root.iterdir() if "distance" in (p / "summary.json").read_text())
    (ring / "model.safetensors").write_bytes(b"junk")
    text = write_report(root, out=tmp_path / "report").read_text()
    left = text[text.index("Left out") :]
    assert "the same configuration as" in left
    for path in (*others[:5], ring, root / "copy"):
        assert re.search(rf"{path.name}</code></td><td class=.break.>damaged", left), path


def test_claims_of_which_nothing_was_measured_are_left_out(tmp_path):
    run_all([Run(scheme="fbn", gamma=0.0, rounds=4, evaluate_every=2)], tmp_path / "runs")
    text = write_report(tmp_path / "runs", out=tmp_path / "report").read_text()
    assert 'class="claims"' not in text


def test_a_folder_without_runs_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="holds no finished run: start one with"):
        write_report(tmp_path)


def test_hostile_text_stays_text(hostile, tmp_path):
    text = write_report(hostile, tmp_path / "report").read_text()
    tags = Tags(text).found
    assert [a for tag, a in tags if tag == "script"].count({}) == 1
    assert "img" not in {tag for tag, _ in tags}
    assert not [a for _, a in tags if "onerror" in a]
    assert "&lt;script&gt;console.error" in text
    assert "<script>console" not in text


def test_a_spreadsheet_does_not_run_a_name():
    chart = Chart("x", "", [Panel("curves", "=1+1", "", "", [Mark("@x", 1, [1], [2.0])])])
    assert as_csv(chart).splitlines()[1] == "'=1+1,'@x,1,2.0,"


needs_browser = pytest.mark.skipif(chromium.browser() is None, reason="Chromium is not installed")


@needs_browser
def test_a_browser_shows_it_without_a_word_or_a_request(hostile, tmp_path):
    page = write_report(hostile, tmp_path / "report")
    document, console, requests, picture = chromium.visit(page, tmp_path)
    assert console == []
    assert requests == []
    assert document.count('<svg width="') >= 8
    assert "script&gt;console.error" in document
    assert document.count("<script>") == 1
    assert picture.stat().st_size > 50_000


@needs_browser
def test_the_browser_would_have_told(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<script>console.error("oh no")</script><img src="http://127.0.0.1:9/x.png">')
    _, console, requests, _ = chromium.visit(page, tmp_path)
    assert any("oh no" in line for line in console)
    assert requests == ["http://127.0.0.1:9/x.png"]
