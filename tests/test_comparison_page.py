"""docs/comparison.md is what the results say; from made-up results, where every number can be seen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = ("comparison_table", "training_table", "table", "flower_table", "scan_table")
    for name in (*tables, "front", "pictures"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import comparison_table

    return comparison_table


def test_the_page_is_what_the_results_say():
    subprocess.run([sys.executable, ROOT / "benchmarks" / "comparison_table.py", "--check"], check=True)


def test_a_scheme_is_shown_at_its_best_rate_and_with_the_clients_own_models(page):
    def run(scheme, lr, accuracy, own=None):
        row = {"scheme": scheme, "split": "gamma 0", "lr": lr, "accuracy": accuracy}
        return row | ({} if own is None else {"client_accuracy": own})

    rows = [
        run("naive", 0.1, 0.3),
        run("naive", 0.2, 0.4),
        run("fedbn", 0.1, 0.2, 0.9),
        run("hbn", 0.1, 0.5, 0.6),
    ]
    found = page.of_all_schemes({"rows": rows})
    assert found["naive", "one class each"] == "40.0"
    assert found["fedbn", "one class each"] == "20.0 (own 90.0)"
    assert found["hbn", "one class each"] == "50.0"  # what its clients keep plays no part in evaluation


def test_only_ten_local_steps_are_shown_and_ours_is_told_from_fbn(page):
    common = {"scheme": "fbn", "partition": "gamma", "gamma": 0.0, "lr": 0.1, "local_steps": 10}
    rows = [
        {"gradient": 0.0, "limit": None, "accuracy": 0.1},
        {"gradient": "auto", "limit": "auto", "accuracy": 0.2},
        {"gradient": "auto", "limit": "auto", "accuracy": 0.3, "lr": 0.2},
        {"gradient": "auto", "limit": "auto", "accuracy": 0.9, "local_steps": 50},
    ]
    found = page.by_local_steps({"common": common, "rows": rows})
    assert found == {("fbn", "one class each"): "10.0", ("ours", "one class each"): "30.0"}


def test_every_scheme_of_the_page_was_measured_somewhere(page):
    text = page.measured()
    for name in page.CONTENDERS:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        assert any(character.isdigit() for character in line)
    schemes = json.loads((page.RESULTS / "benchmarks" / "schemes-h200.json").read_text())
    assert f"commit {schemes['environment']['commit']}" in text
