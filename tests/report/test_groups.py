"""What is compared with what, what it is called, and when it is a figure of the paper."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedbatchnorm.experiments import dataset, partition, scheme, with_own_batch
from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.results import Unfinished
from fedbatchnorm.report.document import build
from fedbatchnorm.report.entries import entry_of
from fedbatchnorm.report.groups import ALONE, NO_ATTACK, NO_DEFENSE, attacked, comparisons, setting
from fedbatchnorm.report.tables import attack_words, final_table
from fedbatchnorm.simulation.schemes import SCHEMES

sys.path.insert(0, str(Path(__file__).parent))
import made_up


def result(accuracy=0.5, **settings):
    run = Run(**{"gamma": 0.0} | settings)
    return made_up.result(run, (accuracy,) * 3, rounds=(100, 200, 300))


def document(*results, unfinished=()):
    return build(Path("nowhere"), found=(list(results), []))


def words(built):
    return " ".join([built.headline, *(f"{s.title} {' '.join(s.text)}" for s in built.sections)])


def test_a_convolutional_network_on_digits_is_not_called_a_perceptron():
    runs = [result(scheme=s, gamma=g, model="cnn") for s in ("fbn", "naive") for g in (0.0, 0.5, 1.0)]
    text = words(document(*runs))
    assert "perceptron" not in text
    assert "digits, cnn, 10 clients" in text
    assert "perceptron" in words(document(*made_up.figures("fig3", scale="small")))


def test_only_all_of_a_figure_s_cells_are_the_figure():
    cells = made_up.figures("fig3")
    (group,) = comparisons(cells)
    assert entry_of(group).title() == "Figure 3"
    assert "Figure 3: " in words(document(*cells))
    without = [r for r in cells if r.config.gamma != 0.5]
    assert entry_of(comparisons(without)[0]) is None
    assert "Figure" not in words(document(*without))
    (fbn,) = comparisons([r for r in cells if r.config.scheme == "fbn"])
    assert entry_of(fbn) is None
    other = [r._replace(config=replace(r.config, lr=0.05)) for r in cells]
    assert entry_of(comparisons(other)[0]) is None


def test_more_schemes_beside_a_figure_s_and_another_precision_leave_it_the_figure():
    cells = made_up.figures("fig3")
    more = [r._replace(config=replace(r.config, scheme="groupnorm")) for r in cells[:4]]
    half = [r._replace(config=replace(r.config, precision="bf16")) for r in cells]
    for results in (cells + more, half):
        (group,) = comparisons(results)
        assert entry_of(group).title() == "Figure 3"


def test_a_scheme_more_in_the_table_leaves_the_catalogue_as_it_is(monkeypatch):
    from fedbatchnorm.experiments import catalogue

    before = [len(catalogue.demo(3)), len(catalogue.FIGURES["fig3"].runs("full", 1))]
    monkeypatch.setitem(SCHEMES, "extra", SCHEMES["fbn"]._replace(title="Extra, with a comma"))
    assert [len(catalogue.demo(3)), len(catalogue.FIGURES["fig3"].runs("full", 1))] == before == [73, 24]
    (group,) = comparisons(made_up.figures("fig3"))
    assert entry_of(group).title() == "Figure 3"


def test_one_run_of_sign_flipping_is_not_figures_4_and_6():
    one = [result(dataset="cifar10", byzantine=3, attack="sf")]
    assert "Figure" not in words(document(*one))
    (group,) = attacked(made_up.figures("fig4", "fig6"))
    assert entry_of(group).title() == "Figures 4 and 6"
    (group,) = attacked(made_up.figures("fig4"))
    assert entry_of(group).title() == "Figure 4"


def test_a_comma_in_a_title_is_a_comma():
    mine = scheme("mine", with_own_batch, title="Mine, merged, twice")
    runs = [
        result(scheme=mine),
        result(scheme="fbn"),
        result(scheme=mine, byzantine=3, attack="sf", targets="gradients"),
    ]
    built = document(*runs)
    assert "Mine, merged, twice" in words(built)
    (group,) = comparisons(runs[:2])
    assert [group.label(line) for line in group.lines()] == ["FBN", "Mine, merged, twice"]
    (group,) = attacked(runs)
    assert [group.label(line) for line in group.lines()] == [
        "Mine, merged, twice, no attack",
        "Mine, merged, twice, no defense",
    ]


def test_schemes_of_the_same_title_are_two_lines():
    one, other = (scheme(name, with_own_batch, title="Mine") for name in ("one", "two"))
    (group,) = comparisons([result(0.1, scheme=one), result(0.9, scheme=other)])
    assert [group.label(line) for line in group.lines()] == ["Mine (one)", "Mine (two)"]
    assert [group.final(line, 0.0).mean for line in group.lines()] == [0.1, 0.9]


def test_a_scheme_whose_code_changed_is_another_line():
    one, other = (scheme("mine", with_own_batch, title="Mine", pooled=pooled) for pooled in (True, False))
    (group,) = comparisons([result(0.1, scheme=one), result(0.9, scheme=other)])
    labels = [group.label(line) for line in group.lines()]
    assert sorted(labels) == sorted(f"Mine ({part.source[:6]})" for part in (one, other))


def test_data_of_the_same_name_and_other_content_are_not_compared():
    data = [dataset("noise", (torch.randn(100, 2), torch.arange(100) % c)) for c in (2, 4)]
    groups = comparisons([result(dataset=d, model="mlp", scheme=s) for d in data for s in ("fbn", "naive")])
    assert [len(group.cells) for group in groups] == [2, 2]
    titles = [s.title for s in document(*(result(dataset=d, model="mlp") for d in data)).sections]
    assert len(set(titles)) == 2
    assert all("dataset's source" in title for title in titles)


def test_variants_of_a_scheme_are_lines_of_one_figure_and_named_by_what_sets_them_apart():
    runs = [result(), result(gradient=0.5), result(gradient="auto", limit="auto"), result(scheme="naive")]
    runs += [result(scheme="fixbn", switch=10), result(scheme="groupnorm", groups=4)]
    (group,) = comparisons(runs)
    assert {group.label(line) for line in group.lines()} == {
        "FBN (gradient 0, no limit)",
        "FBN (gradient 0.5, no limit)",
        "FBN (gradient auto, limit auto)",
        "Naive BN",
        "FixBN (switch at 10)",
        "GroupNorm (groups 4)",
    }
    assert len(document(*runs).sections) == 1
    (group,) = comparisons([result(), result(calibrate=True)])
    assert [group.label(line) for line in group.lines()] == ["FBN", "FBN (calibrated)"]


def test_a_partition_of_one_s_own_has_its_levels():
    def shards(labels, clients, rng, each=2, order="up"):
        raise NotImplementedError

    mine = partition("shards", shards)
    (group,) = comparisons([result(partition=mine(each=e)) for e in (1, 2, 4)])
    assert (group.parameter, group.levels()) == ("each", [4.0, 2.0, 1.0])
    assert setting(group).endswith("300 rounds, order up")


def test_runs_are_compared_only_with_their_like():
    groups = comparisons([result(), result(scheme="naive"), result(lr=0.2)])
    assert [len(group.cells) for group in groups] == [2, 1]
    assert setting(groups[1]).endswith("lr 0.2")
    titles = [
        section.title for section in document(result(), result(scheme="naive"), result(lr=0.2)).sections
    ]
    assert len(set(titles)) == 2


def test_an_attack_stands_beside_its_baselines_and_all_of_its_defenses():
    struck = {"byzantine": 3, "attack": "sf"}
    runs = [result(), result(clients=7), result(scheme="naive"), result(**struck)]
    runs += [result(0.7, **struck, defense=rule) for rule in ("nnm+median", "krum")]
    (group,) = attacked(runs)
    conditions = [line.condition for line in group.lines()]
    assert conditions == [NO_ATTACK, ALONE, NO_DEFENSE, "krum", "nnm+median"]
    assert {line.scheme for line in group.lines()} == {"fbn"}
    assert attack_words(group) == "3 of 10 clients are Byzantine: sign flipping on means"
    table = final_table(group)
    assert ["FBN, krum", "70.0"] in table.rows or "FBN, krum" in table.header


@pytest.mark.parametrize(
    "other", [{"targets": "gradients"}, {"byzantine": 2}, {"attack": "foe:10"}, {"clients": 20}]
)
def test_another_attack_is_another_group(other):
    struck = {"byzantine": 3, "attack": "sf"}
    assert len(attacked([result(**struck), result(**struck | other)])) == 2


def test_a_defense_that_nobody_attacks_has_a_group_of_its_own():
    (group,) = attacked([result(), result(defense="nnm+median")])
    assert attack_words(group) == "a defense without Byzantine clients"
    assert [line.condition for line in group.lines()] == [NO_ATTACK, "nnm+median"]


def test_a_run_that_is_not_finished_has_a_place_and_no_number():
    run = Run(gamma=0.0, seed=1)
    begun = Unfinished(Path("x"), run, [{"round": t, "accuracy": 0.3} for t in (10, 20, 30)])
    (group,) = comparisons([result()], [begun])
    (line,) = group.lines()
    assert group.final(line, 0.0).seeds == 1
    assert group.begun[line, 0.0] == [begun]
    (group,) = comparisons([], [begun])
    assert group.levels() == [0.0]
    assert group.final(line, 0.0) is None


def test_the_headline_is_a_fact():
    built = document(result(0.9), result(0.2, scheme="naive"), result(0.8, gamma=1.0))
    assert built.headline == (
        "On digits with 10 clients, FBN ends at 90.0% and Naive BN at 20.0% test accuracy at gamma 0."
    )
    assert (
        document(result(0.5)).headline
        == "On digits with 10 clients, FBN ends at 50.0% test accuracy at gamma 0."
    )
    built = document(
        result(0.3, byzantine=3, attack="sf"), result(0.8, byzantine=3, attack="sf", defense="krum")
    )
    assert built.headline == (
        "With 3 of 10 clients Byzantine (sign flipping), FBN ends at gamma 0 at 30.0% undefended and 80.0% "
        "with krum."
    )


def test_the_headline_of_many_lines_names_the_best_and_the_worst():
    runs = [result(0.5 + share / 4, gradient=share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert document(*runs).headline == (
        "On digits with 10 clients, 5 ways to normalize end at gamma 0 between 50.0% for FBN (gradient 0) "
        "and 75.0% for FBN (gradient 1) (test accuracy)."
    )
