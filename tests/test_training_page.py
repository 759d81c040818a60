"""docs/training.md is what the results say; from made-up results, where every count can be seen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SECTIONS = ("dynamics", "constant", "between", "digits", "steps", "clipping", "paper", "hbn", "resnets")
SECTIONS = (*SECTIONS, "attacks")
OURS = {"scheme": "fbn", "gradient": "auto", "limit": "auto", "recalibrate": True}
MARKS = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in SECTIONS)


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("training_table", "table", "front", "pictures"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import training_table

    return training_table


def study(name, rows, common=None, **more):
    environments = [["a machine", "2.0", "c0ffee-changed"]]
    head = {"study": name, "common": common or {}, "environments": environments, "missing": 0}
    return head | {"rows": rows} | more


def run(accuracy, scheme="naive", seed=0, **more):
    how = OURS if scheme == "ours" else {"scheme": scheme, "gradient": 0.0}
    where = {"model": "cnn16", "partition": "gamma", "gamma": 0.0, "alpha": 0.1}
    work = {"local_epochs": 1, "lr": 0.05}
    return where | work | how | {"seed": seed, "accuracy": accuracy} | more


def cells(text, first):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_what_the_results_say():
    subprocess.run([sys.executable, ROOT / "benchmarks" / "training_table.py", "--check"], check=True)


def test_a_cell_has_its_seeds_and_a_row_its_best(page):
    rows = [
        run(0.8, seed=0),
        run(0.9, seed=1),
        run(0.95, "ours"),
        run(0.7, "hbn", seed=0),
        run(0.7, "hbn", 1),
    ]
    text = page.digits(study("digits", rows))
    plain, *rest, hbn, blend, fresh, ours = cells(text, "1 epoch")[3:]
    assert (plain, hbn, blend, fresh) == ("85.0 ± 7.1", "70.0 ± 0.0", "not run", "not run")
    assert ours == "**95.0** [1]"
    assert set(rest) == {"not run"}
    assert "2 seeds" in text
    assert "commit c0ffee with uncommitted changes" in text


def test_columns_are_told_apart_by_share_and_limit(page):
    rows = [run(0.5, "fbn"), run(0.9, "ours"), run(0.1, "fbn", gradient=0.3), run(0.2, "fbn", limit=2.0)]
    rows += [
        run(0.6),
        run(0.7, recalibrate=True),
        run(0.8, "fbn", local_epochs=5, gradient="auto", limit=2.0),
    ]
    text = page.digits(study("digits", rows))
    assert cells(text, "1 epoch")[3:] == [
        "60.0",
        *["not run"] * 2,
        "50.0",
        *["not run"] * 2,
        "70.0",
        "**90.0**",
    ]
    assert cells(text, "5 epochs")[-1] == "80.0"  # as ours was set before


def test_how_often_each_is_close_is_counted_where_something_trains(page):
    rows = []
    for rate, plain, ours in ((0.01, 0.49, 0.1), (0.05, 0.9, 0.88), (0.1, 0.9, 0.6), (0.2, 0.5, 0.99)):
        rows += [run(plain, lr=rate), run(ours, "ours", lr=rate)]
    text = page.digits(study("digits", rows))
    assert cells(text, "all")[1::7] == ["2 of 3", "2 of 3"]
    assert "Ours is within 2 points of the best in 2 of 3 cells. Furthest behind:" in text
    (behind,) = [line for line in text.splitlines() if line.startswith("- ")]
    assert behind == "- one class each, `cnn16`, 1 epoch, lr 0.1, no clipping: 60.0 against 90.0 (plain)"


def test_blocks_by_model_and_split(page):
    rows = [
        run(0.9, model="plain9", partition="dirichlet"),
        run(0.8, clip=1.0, local_epochs=None, local_steps=1),
        run(0.8, gamma=1.0, local_epochs=5),
    ]
    text = page.digits(study("digits", rows))
    assert "**Dirichlet 0.1**, 9 convolutions in a row (`plain9`):" in text
    assert "**one class each**, a CNN with 3 BatchNorm layers (`cnn16`):" in text
    assert cells(text, "1 step")[1:4] == ["0.05", "clip 1", "80.0"]
    assert cells(text, "5 epochs")[2] == "none"


def test_steps_are_at_the_best_rate(page):
    rows = [
        run(a, scheme, seed=seed, lr=rate, local_epochs=None, local_steps=10)
        for scheme, rate, accuracies in (
            ("naive", 0.1, (0.5, 0.7)),
            ("naive", 0.2, (0.9, 0.1)),
            ("ours", 0.2, (0.65, 0.65)),
        )
        for seed, a in enumerate(accuracies)
    ]
    text = page.steps(study("steps", rows, missing=1, note="Take care."))
    row = cells(text, "one class each")
    assert row[1:4] == ["10", "0.1, 0.2", "60.0 ± 14.1 at 0.1"]
    assert row[-1] == "**65.0 ± 0.0** at 0.2"
    assert "1 of 7 runs is missing" in text
    assert "**Note.** Take care." in text


def test_the_paper_s_recipe(page):
    kind = {"momentum_kind": "dampened", "momentum": 0.99, "lr": 0.1}
    rows = [run(0.8, "ours", **kind), run(0.81, "fbn", **kind)]
    assert cells(page.paper(study("paper", rows)), "dampened 0.99")[1:] == [
        "0.1",
        "0",
        "80.0",
        "**81.0**",
        "not run",
    ]


def test_hbn_s_protocol_has_the_last_rounds_and_the_best(page):
    where = {"batch": 4, "alpha": 0.6}
    rows = [
        run(0.5, "ours", **where, last=0.6, best=0.7),
        run(0.5, "fbn_in_hbn", **where, last=0.2, best=0.8),
        run(0.5, "ours", batch=50, alpha=0.6, last=0.3, best=0.4),
    ]
    text = page.hbn(study("hbn", rows))
    assert cells(text, "") == ["", "batch 4, Dirichlet 0.6", "batch 50, Dirichlet 0.6"]
    assert cells(text, "ours") == ["ours", "**60.0** (70.0)", "30.0 (40.0)"]
    assert cells(text, "FBN in HBN's repository") == [
        "FBN in HBN's repository",
        "20.0 (**80.0**)",
        "not run",
    ]
    assert "over the last 10 rounds" in text
    assert "The best of a column is bold." in text


def test_clipping_is_side_by_side_for_each_scheme(page):
    rows = [run(0.5, "ours", lr=0.1), run(0.7, "ours", lr=0.1, clip=1.0), run(0.6, "naive", lr=0.1)]
    rows = [row | {"partition": "dirichlet", "alpha": 0.1} for row in rows]
    assert cells(page.clipping(study("clipping", rows)), "Dirichlet 0.1")[1:] == [
        "0.1",
        "60.0",
        "not run",
        "50.0",
        "**70.0**",
    ]


def test_resnets_by_rate(page):
    rows = [run(0.5, "ours", lr=0.1), run(0.6, "hbn", lr=0.1), run(0.7, "ours", lr=0.2)]
    text = page.resnets(study("resnets", rows))
    assert cells(text, "0.1")[-1] == "50.0"
    assert cells(text, "0.2")[-1] == "70.0"
    assert "**60.0**" in cells(text, "0.1")


@pytest.fixture
def training(page):
    sys.modules.pop("training", None)
    import training

    return training


def test_collecting_keeps_what_the_file_has_of_the_study(training, tmp_path):
    configs = list(training.steps())[:3]
    rows = [training.settings(c) | {"accuracy": 0.1 * i} for i, c in enumerate(configs[:2])]
    del rows[1]["clip"], rows[1]["augment"]  # what all have in common is said once
    foreign = rows[1] | {"lr": 9.0}
    file = tmp_path / "steps.json"
    file.write_text(json.dumps(study("steps", [*rows, foreign], {"clip": 1.0})))
    (tmp_path / "runs").mkdir()
    training.collect(tmp_path / "runs", file, "steps", configs[1:])
    found = json.loads(file.read_text())
    assert [row["accuracy"] for row in found["rows"]] == [0.1]
    assert found["missing"] == 1
    assert found["environments"] == [["a machine", "2.0", "c0ffee-changed"]]


def test_fbn_as_in_hbn_s_repository(training):
    # Two clients with 3 and 1 samples in all, in batches: written out as the repository's loops do it.
    torch.manual_seed(0)
    batches = {0: [torch.randn(4, 1) + 2, torch.randn(4, 1)], 1: [torch.randn(4, 1) - 3]}
    kept, sizes = [], torch.tensor([0.75, 0.25], dtype=torch.float64)
    for own in batches.values():
        state = training.Moments(*(torch.zeros(1, dtype=torch.float64) for _ in range(3)))
        for x in own:
            seen = training.Moments(4, x.mean(0).double(), x.var(0, correction=0).double())
            state = training.mean_over_steps(state, seen, 0.1)
        kept.append(state)
    mean = sum(
        share * sum(x.double().mean() for x in own) / len(own)
        for share, own in zip(sizes, batches.values(), strict=True)
    )
    new_mean = 0.9 * 1.0 + 0.1 * mean
    var = sum(
        share
        * (
            sum(x.double().var(correction=0) for x in own) / len(own)
            + (sum(x.double().mean() for x in own) / len(own) - new_mean) ** 2
        )
        for share, own in zip(sizes, batches.values(), strict=True)
    )
    rows = training.Moments(*(torch.stack(column) for column in zip(*kept, strict=True)))
    one = torch.ones(1, dtype=torch.float64)
    found = training.merge_about_new_mean(one, 2 * one, rows, sizes, 1.0, None)
    torch.testing.assert_close(found[0].item(), new_mean.item(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1].item(), (0.9 * 2 + 0.1 * var).item(), rtol=1e-6, atol=0)


def test_constant_shares(page):
    rows = [
        {"recipe": "a recipe", "split": "iid", "share": share, "seed": seed, "accuracy": accuracy}
        for share, accuracies in ((0.0, (0.5, 0.7)), (1.0, (0.2, 0.2)))
        for seed, accuracy in enumerate(accuracies)
    ]
    machine = {"name": "a machine", "torch": "2.0", "threads": 1}
    text = page.constant({"rows": rows, "machine": machine, "commit": "c0ffee"})
    assert cells(text, "a recipe") == ["a recipe", "iid", "**60.0 ± 14.1**", "20.0 ± 0.0"]


def test_a_page_without_results_says_so_and_one_without_marks_is_an_error(page, tmp_path):
    text = page.page(MARKS, tmp_path)
    assert text.count("Not run.") == len(SECTIONS)
    assert page.page(text, tmp_path) == text
    (tmp_path / "digits.json").write_text(json.dumps(study("digits", [run(0.5)])))
    assert page.page(text, tmp_path).count("Not run.") == len(SECTIONS) - 1
    with pytest.raises(ValueError, match="no marks for steps"):
        page.page(MARKS.replace("<!-- steps -->", ""), tmp_path)


def test_the_figure_leaves_out_what_is_not_finite(page):
    assert page.middle_of([1.0, None, 2.0]) == 2.0
    assert page.middle_of([None, None, 2.0]) != page.middle_of([None, None, 2.0])
