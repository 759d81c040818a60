"""The sections of docs/benchmarks.md on FedAvg: from made-up results, where every ratio can be seen."""

import json
import sys
from pathlib import Path

import pytest

from fedbatchnorm.simulation.schemes import SCHEMES

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MACHINE = {"name": "a machine", "torch": "2.0", "threads": 4}


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("table", "front", "pictures", "flower_table", "nvflare_table", "scan_table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import table

    return table


def cells(text):
    """The first cell of each table row -> the rows that begin with it."""
    found = {}
    for line in text.splitlines():
        if line.startswith("| "):
            name, *values = [cell.strip() for cell in line.strip("|").split("|")]
            found.setdefault(name, []).append(values)
    return found


def rounds(**more):
    return {"commit": "c0ffee", "machine": MACHINE, "turns": 5, "rounds": 3, "parts": {}} | more


def accuracies(rows, missing=0):
    environment = {"device": "a machine", "torch": "2.0", "threads": 4, "commit": "c0ffee-changed"}
    setting = {"dataset": "cifar10", "clients": 10, "clip": 1.0, "weighting": "size", "server_lr": 0.5}
    return {"setting": setting, "environment": environment, "rows": rows, "missing": missing}


def run(scheme, lr, accuracy, seed=0, split="gamma 0", **more):
    found = {"scheme": scheme, "split": split, "lr": lr, "seed": seed, "precision": "bf16"}
    return found | {"accuracy": accuracy} | more


def test_rounds_are_compared_within_their_precision(page):
    ms = {
        "FBN, TF32": 30.0,
        "FBN, bf16": 20.0,
        "ten rounds of distributed SGD, TF32": 25.0,
        "ten rounds of distributed SGD, bf16": 16.0,
        "pfl-research, TF32": 300.0,
        "pfl-research, TF32, channels_last": 240.0,
        "pfl-research, bf16": 500.0,
    }
    text = page.fedavg_rounds(rounds(parts={"steps": {"ms": ms}}))
    assert "a machine" in text
    assert "torch 2.0, 4 threads, 5 turns of 3 rounds, commit c0ffee" in text
    found = cells(text)
    assert found["FBN, TF32"] == [["30.00", "8.0", "1.20"]]
    assert found["FBN, bf16"] == [["20.00", "25.0", "1.25"]]
    assert found["pfl-research, TF32"] == [["300.00", "0.8", "12.00"]]
    assert found["ten rounds of distributed SGD, TF32"] == [["25.00", "", "1.00"]]


def test_what_was_not_measured_is_said(page):
    text = page.fedavg_rounds(rounds())
    assert text.count("not measured") == len(page.FEDAVG_PARTS) + 1
    assert not cells(text)
    text = page.fedavg_rounds(rounds(parts={"pfl": {"ms": {"ours, TF32": 5.0}}}))
    assert "pfl-research: not measured" in text
    ms = {"ours, bf16": 5.0, "pfl-research, TF32": 50.0}
    assert cells(page.fedavg_rounds(rounds(parts={"pfl": {"ms": ms}})))["ours, bf16"] == [
        ["5.00", "not measured"]
    ]


def test_growth_is_relative_to_ten_clients(page):
    growth = [
        {"clients": 10, "ms": 20.0, "bytes": 2 * 2**30},
        {"clients": 10_000, "ms": 21.0, "bytes": 3 * 2**30},
    ]
    found = cells(page.fedavg_rounds(rounds(growth=growth)))
    assert found["10,000"] == [["21.00", "1.05", "3.00", "1.50"]]


def test_a_scheme_is_shown_at_its_best_rate(page):
    rows = [
        run("fedbn", 0.1, 0.30, client_accuracy=0.8),
        run("fedbn", 0.2, 0.25, client_accuracy=0.9),
        run("fbn", 0.1, 0.40, best_accuracy=0.9),
        run("fbn", 0.2, 0.50),
        run("naive", 0.1, 0.45),
    ]
    text = page.scheme_accuracies(accuracies(rows, missing=1))
    found = cells(text)
    assert found["FBN"] == [["50.0", "0.2", ""]]
    assert found["FedBN"] == [["30.0", "0.1", "80.0"]]  # the same run's, not the best of its own
    assert found["Naive BN"] == [["45.0", "0.1 *", ""]]
    assert found["HBN"] == [["not measured", "", ""]]
    titles = [scheme.title for scheme in SCHEMES.values() if "fedavg" in scheme.algorithms]
    assert [name for name in found if name in titles] == titles
    assert "1 of the grid's 6 runs is missing" in text
    assert "bf16, 1 seed, commit c0ffee with uncommitted changes" in text
    assert "CIFAR-10, 10 clients, all in every round, gradients clipped at norm 1" in text
    assert "server lr 0.5" in text


def test_the_best_rate_is_that_of_the_mean_over_seeds(page):
    rows = [
        run("fbn", lr, a, seed=i)
        for lr, each in ((0.1, (0.5, 0.6)), (0.2, (0.3, 0.7)))
        for i, a in enumerate(each)
    ]
    text = page.scheme_accuracies(accuracies(rows))
    assert cells(text)["FBN"] == [["55.0 ± 7.1", "0.1", ""]]
    assert "2 seeds" in text
    assert "0 of the grid's 4 runs are missing." in text


def test_a_section_is_there_if_its_results_are(page, tmp_path):
    assert "FedAvg" not in page.page(tmp_path)
    (tmp_path / "fedavg-x.json").write_text(json.dumps(rounds()))
    assert "## FedAvg rounds on a GPU" in page.page(tmp_path)
    assert "## Every scheme under FedAvg" not in page.page(tmp_path)
    (tmp_path / "schemes-x.json").write_text(json.dumps(accuracies([run("fbn", 0.1, 0.4)])))
    assert "## Every scheme under FedAvg" in page.page(tmp_path)


def test_the_exchange_is_shown_beside_what_it_was_before(page):
    row = {"model": "DenseNet-121", "shape": [8, 3, 64, 64], "batchnorm_ms": 100.0, "step": 1.02}
    row |= {"share_step": 1.07, "exchange_ms": 3.0, "exchange": 0.03}
    merged = {"model": "DenseNet-121", "merge": 30.0, "loops": 90.0, "Flower": 400.0}
    result = {"commit": "c0ffee", "machine": MACHINE, "rounds": 5, "clients": 50, "clock": "CPU time"}
    text = page.exchanges(result | {"rows": [row], "merges": [merged, merged | {"model": "MobileNetV2"}]})
    assert cells(text)["DenseNet-121"] == [
        ["8 x 3 x 64 x 64", "100.0", "1.02", "1.07", "1.16", "3.0%", "11 to 17%"],
        ["30.0", "344", "90.0", "400.0"],
    ]
    assert cells(text)["MobileNetV2"] == [["30.0", "not measured", "90.0", "400.0"]]


def epochs_row(split, plain, ours, seed=0, **more):
    found = {"seed": seed, "split": split, "epochs": 5, "lr": 0.05, "plain": {"accuracy": plain}}
    return found | {"ours": {"accuracy": ours} | more}


def test_local_epochs_are_a_mean_over_seeds_for_each_split(page):
    rows = [
        epochs_row("A", 0.5, 0.9),
        epochs_row("A", 0.6, 0.9, seed=1),
        epochs_row("B", 0.3, 0.2, diverged=4),
    ]
    result = {"commit": "c0ffee", "machine": MACHINE, "rounds": {"5": 12}, "rows": rows}
    text = page.local_epochs(result)
    assert cells(text)["5, 12 rounds"] == [["0.05", "55.0 ± 7.1", "90.0 ± 0.0", "30.0", "20.0 *"]]
    assert "2 seeds; 1 of 4 pairs of runs are missing; * stopped as diverged" in text
    assert "a machine, torch 2.0, commit c0ffee" in text


def test_the_page_on_nvflare_is_what_its_results_say(page):
    assert page.nvflare_page() == page.NVFLARE.read_text(encoding="utf-8")


def test_nvflare_alone_collapses_and_with_us_it_is_within_a_point_of_the_simulation(page):
    for row in json.loads((page.RESULTS / "nvflare-cpu.json").read_text())["rows"]:
        assert abs(row["ours"] - row["simulator"]) < 0.01
        assert row["plain"] < row["ours"] - 0.3


def test_the_page_on_flower_is_what_its_results_say(page):
    assert page.flower_page() == page.FLOWER.read_text(encoding="utf-8")


def scanned(**more):
    package = {"version": "1.0", "models": 9, "batch_norm": 4, "converted": 3, "refused": [], "others": []}
    layers = {"Odd": {"models": 1, "layers": 70}, "BatchNorm2d": {"models": 4, "layers": 5000}}
    packages = {"timm": package | {"layers": layers, "not_built": []} | more}
    return {"torch": "2.0", "commit": "c0ffee", "packages": packages}


def test_the_scan_says_what_converts_and_names_what_does_not(page):
    refused = [{"model": f"net{i}", "type": "Odd", "why": "it is odd"} for i in range(2)]
    not_built = [{"model": "late", "why": "no data"}]
    text = page.which_convert(scanned(refused=refused, not_built=not_built))
    assert cells(text)["timm 1.0"] == [["9", "4", "3 (75.0%)", "1"]]
    assert cells(text)["timm"] == [["`BatchNorm2d`", "4", "5,000", "0"], ["`Odd`", "1", "70", "2"]]
    assert "timm, refused: net0, net1. `Odd`: it is odd" in text
    assert "timm, not built: late. no data" in text
    assert "refused:" not in page.which_convert(scanned())


def test_the_scan_as_committed_is_above_what_was_promised(page):
    scan = json.loads((page.RESULTS / "scan-models.json").read_text())["packages"]
    assert scan["timm"]["models"] > 1000
    for package in scan.values():
        assert package["converted"] + len(package["refused"]) >= package["batch_norm"]
        assert package["converted"] >= 0.97 * package["batch_norm"]


def test_a_page_without_marks_is_an_error(page):
    assert page.between("a<!-- x -->\nold<!-- /x -->b", "x", "new\n") == "a<!-- x -->\nnew\n<!-- /x -->b"
    with pytest.raises(ValueError, match="no marks"):
        page.between("a<!-- x -->\nold", "x", "new\n")


def test_the_loop_over_clients_is_compared_with_the_same_loop_by_hand(page):
    plain = {f"centralized, plain PyTorch, {k}, compiled and captured": 4.0 for k in ("TF32", "bf16")}
    found = rounds(peak={"TF32": 4e14, "bf16": 8e14}, operations=3e11)
    by_hand = {page.LOOP: 25.0, page.BY_HAND: 20.0}
    assert "takes 1.25 times as long as the same loop" in page.gpu_rounds(found | {"ms": plain | by_hand})
    assert "times as long" not in page.gpu_rounds(found | {"ms": plain | {page.LOOP: 25.0}})


def test_loops_over_clients_are_compared_with_the_one_by_hand(page):
    found = {
        "commit": "c0ffee",
        "machine": {"name": "a GPU", "torch": "2", "threads": 1},
        "turns": 2,
        "rounds": 3,
    }
    text = page.gpu_loops(found | {"ms": {page.LOOP: 30.0, page.BY_HAND: 20.0}})
    assert f"| {page.LOOP} | 30.00 | 1.50 |" in text
    assert f"| {page.BY_HAND} | 20.00 | 1.00 |" in text
