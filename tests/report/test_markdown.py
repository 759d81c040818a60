"""The page on the reproduction is what the committed results say, to the byte."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedbatchnorm.experiments.catalogue import FIGURES
from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.results import Result
from fedbatchnorm.experiments.runner import run_all
from fedbatchnorm.report.groups import NO_ATTACK, NO_DEFENSE, figures_of, sieges
from fedbatchnorm.report.liars import judge_siege
from fedbatchnorm.report.markdown import write_markdown

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


def test_a_page_of_one_s_own_runs(tmp_path):
    run_all(
        [Run(rounds=4, scheme=s, precision=p) for s in ("fbn", "naive") for p in ("tf32", "bf16")], tmp_path
    )
    text = write_markdown(tmp_path, page=tmp_path / "own.md").read_text()
    assert "4 training runs" in text
    assert "## TF32 and bf16" in text
    assert "| FBN, gamma 0 |" in text


def test_every_comparison_has_a_picture_of_its_own(tmp_path):
    run_all([Run(rounds=4, lr=lr, clients=c) for lr in (0.1, 0.2) for c in (5, 10)], tmp_path)
    text = write_markdown(tmp_path, page=tmp_path / "own.md").read_text()
    names = re.findall(r"\(own/(.*?\.svg)\)", text)
    assert len(names) == len(set(names)) == len({(tmp_path / "own" / n).read_bytes() for n in names}) == 4


def test_nothing_to_write_about_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no finished run"):
        write_markdown(tmp_path, page=tmp_path / "own.md")


def result(accuracy=0.5, **settings):
    run = Run(gamma=0.0, **settings)
    summary = {"accuracy": accuracy, "best_accuracy": accuracy}
    return Result(Path("x"), run, [{"round": 300, "accuracy": accuracy}], summary, [{}], None)


def test_an_attack_without_a_defended_run_has_a_section_of_its_own():
    (siege,) = sieges([result(), result(byzantine=3, attack="sf")])
    assert siege.lines() == [("FBN", NO_ATTACK), ("FBN", NO_DEFENSE)]
    assert siege.name() == "Liars: sf on means, undefended"
    (siege,) = sieges([result(), result(defense="nnm+median")])
    assert siege.lines() == [("FBN", NO_ATTACK), ("FBN", "nnm+median")]
    assert judge_siege(siege) == []


def test_schemes_that_nobody_attacked_are_left_out():
    (siege,) = sieges(
        [result(), result(scheme="naive"), result(byzantine=3, attack="sf", defense="nnm+median")]
    )
    assert {label for label, _ in siege.lines()} == {"FBN"}
    assert figures_of(siege) == "Figures 4 and 6"


def test_another_switch_step_is_another_line():
    lies = {"byzantine": 3, "attack": "sf", "defense": "nnm+median", "scheme": "fixbn"}
    (siege,) = sieges([result(0.9, **lies), result(0.5, switch=10, **lies)])
    assert siege.lines() == [("FixBN", "nnm+median"), ("FixBN, switch at 10", "nnm+median")]


@pytest.mark.parametrize(
    "other", [{"targets": "gradients"}, {"defense": "krum"}, {"byzantine": 2}, {"attack": "foe:10"}]
)
def test_claims_are_judged_on_the_paper_s_own_setting_alone(other):
    lies = {"byzantine": 3, "attack": "sf", "defense": "nnm+median"}
    assert judge_siege(sieges([result(), result(**lies)])[0])
    assert judge_siege(sieges([result(), result(**lies | other)])[0]) == []


@pytest.mark.parametrize("name", ["fig1", "fig2"])
def test_a_folder_with_one_figure_of_the_ring_has_a_page(tmp_path, name):
    run_all([replace(run, rounds=3) for run in FIGURES[name].runs("small", 1)], tmp_path / "runs")
    text = write_markdown(tmp_path / "runs", page=tmp_path / "own.md").read_text()
    assert ("Figure 1" in text, "Figure 2" in text) == (name == "fig1", name == "fig2")


def test_the_name_of_a_model_is_no_markup(tmp_path):
    model = "x:<img src=y>](http://z) `a` *b* | c _d_"
    run = result(model=model)._replace(environment=[{"device": "a|b<script>[x](y)"}])
    text = write_markdown(tmp_path, page=tmp_path / "own.md", found=([run], [])).read_text()
    for markup in ("<img", "<script", "](http", "`a`", "*b*", "_d_ ", "](y)"):
        assert re.search(rf"(?<!\\){re.escape(markup)}", text) is None, markup
    assert r"\<img src=y\>\](http://z) \`a\` \*b\* \| c \_d\_" in text
    (row,) = [line for line in text.splitlines() if "script" in line]
    assert len(re.findall(r"(?<!\\)\|", row)) == 6
