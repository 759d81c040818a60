"""The pages on engines and on MONAI say what the files of results say, to the byte."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("script", ["engines_table.py", "monai_table.py"])
def test_page_and_results_agree(script):
    command = [sys.executable, ROOT / "benchmarks" / script, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_cell_of_the_table_passed_or_says_why_it_was_not_run():
    found = json.loads((ROOT / "results" / "engines.json").read_text())["found"]
    assert all(passed for row in found.values() for passed in row.values())
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert "failed" not in text.partition("<!-- engines -->")[2].partition("<!-- /engines -->")[0]


def test_the_wrapper_costs_at_most_a_fifth_of_fedavg_s_own_aggregation():
    """As measured by benchmarks/flower_server.py."""
    measured = json.loads((ROOT / "results" / "benchmarks" / "flower_server.json").read_text())
    assert (measured["replies"], measured["model"]) == (1000, "resnet18")
    assert measured["ratio"] <= 1.2
    page = (ROOT / "docs" / "flower.md").read_text(encoding="utf-8")
    assert f"{measured['ratio']:.2f} times" in page
