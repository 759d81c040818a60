"""The report: what is on the page, and that it is one quiet file in a real browser."""

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedbatchnorm.experiments.config import Run, name_of, read_config
from fedbatchnorm.experiments.results import seal
from fedbatchnorm.experiments.runner import run_all
from fedbatchnorm.report.page import write_report
from fedbatchnorm.simulation.ring import Ring
from fedbatchnorm.simulation.schemes import PAPER

sys.path.insert(0, str(Path(__file__).parent))
import chromium

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


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_the_page_has_figures_tables_claims_and_runs(runs, tmp_path):
    page = write_report(runs, out=tmp_path / "report")
    text = page.read_text()
    for part in (
        "Figure 1",
        "Figure 2",
        "Figure 3",
        "Figure 5",
        "Accuracy: ",
        "FixBN, switch at 1",
        "iid",
    ):
        assert part in text, part
    assert text.count("<svg") == 6
    assert "Liars: foe on means and variances, against nnm+median" in text
    for kind in ("FBN, no attack", "FBN, no defense", "FBN, nnm+median", "Naive BN, nnm+median"):
        assert f'<td class="number">{kind}</td>' in text
    assert len(re.findall(r'class="claims"', text)) == 3
    for path in runs.iterdir():
        assert path.name in text or path.name == "report"
    names = {p.suffix for p in page.parent.iterdir()}
    assert names == {".html", ".svg", ".png"}
    # The mean of the seeds, by hand, is in the table.
    finals = []
    for path in runs.rglob("config.json"):
        config = json.loads(path.read_text())
        if (
            config.get("scheme") == "fbn"
            and config.get("gamma") == 0.0
            and config.get("partition") == "gamma"
        ):
            finals.append(json.loads((path.parent / "summary.json").read_text())["accuracy"])
    assert len(finals) == 2
    assert f"{100 * sum(finals) / 2:.1f} ±" in text


def test_the_page_is_one_file_without_scripts_or_links(runs, tmp_path):
    tags = Tags(write_report(runs, out=tmp_path).read_text()).found
    kinds = {tag for tag, _ in tags}
    assert not kinds & {"script", "link", "iframe", "object", "embed", "form"}
    for tag, attributes in tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href"):
                assert value.startswith(("data:", "#")), (tag, value)


def test_the_same_runs_give_the_same_page(runs, tmp_path):
    one, two = (write_report(runs, out=tmp_path / name).parent for name in "ab")
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
    assert "Figure 3" in text
    assert 'class="claims"' not in text


def test_a_folder_without_runs_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="holds no finished run: start one with"):
        write_report(tmp_path)


def test_hostile_text_stays_text(hostile, tmp_path):
    text = write_report(hostile, tmp_path / "report").read_text()
    tags = Tags(text).found
    assert "script" not in {tag for tag, _ in tags}
    assert not [a for _, a in tags if "onerror" in a]
    assert "&lt;script&gt;console.error" in text


needs_browser = pytest.mark.skipif(chromium.browser() is None, reason="Chromium is not installed")


@needs_browser
def test_a_browser_shows_it_without_a_word_or_a_request(hostile, tmp_path):
    page = write_report(hostile, tmp_path / "report")
    document, console, requests, picture = chromium.visit(page, tmp_path)
    assert console == []
    assert requests == []
    assert document.count("<svg") == 6
    assert "What the paper says, and what was measured" in document
    assert "script&gt;console.error" in document
    assert "<script" not in document
    assert picture.stat().st_size > 50_000


@needs_browser
def test_the_browser_would_have_told(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<script>console.error("oh no")</script><img src="http://127.0.0.1:9/x.png">')
    _, console, requests, _ = chromium.visit(page, tmp_path)
    assert any("oh no" in line for line in console)
    assert requests == ["http://127.0.0.1:9/x.png"]
