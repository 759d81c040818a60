"""The page on the reproduction is what the committed results say, to the byte."""

import re
import sys
from pathlib import Path

import pytest

from fedbatchnorm.experiments.catalogue import FIGURES
from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.runner import run_all
from fedbatchnorm.report.markdown import write_markdown

sys.path.insert(0, str(Path(__file__).parent))
import made_up

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reproduction.md"


def test_the_committed_page_is_what_the_results_say(tmp_path):
    written = write_markdown(ROOT / "results", page=tmp_path / "reproduction.md")
    assert written.read_text() == PAGE.read_text()
    ours, theirs = ({p.name for p in page.with_suffix("").iterdir()} for page in (written, PAGE))
    assert ours == theirs
    shown = set(re.findall(r"\(reproduction/(.*?\.svg)\)", PAGE.read_text()))
    assert shown == theirs
    for name in shown:
        assert (written.with_suffix("") / name).read_bytes() == (PAGE.with_suffix("") / name).read_bytes(), (
            name
        )


def test_the_page_begins_with_the_claims_and_is_not_long():
    text = PAGE.read_text()
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[0] == "What the paper says, and what was measured"
    rows = text[text.index("| the paper says") : text.index("Where we differ")].splitlines()[2:]
    claims = [row.split("|")[1] for row in rows if row]
    assert len(claims) == len(set(claims)) <= 20
    assert "liar" not in text.lower()


def test_a_page_of_one_s_own_runs(tmp_path):
    run_all(
        [Run(rounds=4, scheme=s, precision=p) for s in ("fbn", "naive") for p in ("tf32", "bf16")], tmp_path
    )
    text = write_markdown(tmp_path, page=tmp_path / "own.md").read_text()
    assert text.startswith("# Results\n\n**On digits with 10 clients, ")
    assert "4 finished runs" in text
    assert "(precision bf16)" in text
    assert "| gamma | FBN | Naive BN |" in text
    assert "What the paper says" not in text


def test_every_comparison_has_a_picture_of_its_own(tmp_path):
    run_all([Run(rounds=4, lr=lr, clients=c) for lr in (0.1, 0.2) for c in (5, 10)], tmp_path)
    text = write_markdown(tmp_path, page=tmp_path / "own.md").read_text()
    names = re.findall(r"\(own/(.*?\.svg)\)", text)
    assert len(names) == len(set(names)) == len({(tmp_path / "own" / n).read_bytes() for n in names}) == 4


def test_nothing_to_write_about_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no finished run"):
        write_markdown(tmp_path, page=tmp_path / "own.md")


@pytest.mark.parametrize("name", ["fig1", "fig2"])
def test_a_folder_with_one_figure_of_the_ring_has_a_page(tmp_path, name):
    run_all(FIGURES[name].runs("small", 1), tmp_path / "runs")
    text = write_markdown(tmp_path / "runs", page=tmp_path / "own.md").read_text()
    assert ("Figure 1" in text, "Figure 2" in text) == (name == "fig1", name == "fig2")


def test_the_name_of_a_model_is_no_markup(tmp_path):
    model = "x:<img src=y>](http://z) `a` *b* | c _d_"
    run = made_up.result(Run(model=model), (0.5, 0.6, 0.7))
    run = run._replace(environment=[{"device": "a|b<script>[x](y)"}])
    text = write_markdown(tmp_path, page=tmp_path / "own.md", found=([run], [])).read_text()
    for markup in ("<img", "<script", "](http", "`a`", "*b*", "_d_ ", "](y)"):
        assert re.search(rf"(?<!\\){re.escape(markup)}", text) is None, markup
    assert r"\<img src=y\>\](http://z) \`a\` \*b\* \| c \_d\_" in text
    (row,) = [line for line in text.splitlines() if "script" in line]
    assert len(re.findall(r"(?<!\\)\|", row)) == 7
