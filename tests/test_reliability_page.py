"""docs/reliability.md is what the last large campaign said, and speaks of every campaign."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("reliability_table", "table", "front", "pictures"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import reliability_table

    return reliability_table


def result(page):
    one = {"count": 1000, "seed": 3, "seconds": 1.5, "refused": 900, "killed": 1001, "commit": "c0ffee"}
    one |= {"SuperNodes killed": 7, "garbage": 8, "replies lost": 9}
    machine = {"python": "3.11", "torch": "2.13"}
    return {"machine": machine, "campaigns": dict.fromkeys(page.SAYS, one)}


def test_the_page_is_what_the_results_say():
    subprocess.run([sys.executable, ROOT / "benchmarks" / "reliability_table.py", "--check"], check=True)


def test_figures_are_added_up_and_all_are_there(page):
    text = page.figures(result(page))
    assert "6,000 hostile inputs and 4,004 kills" in text
    assert "7 SuperNodes were killed, too, 8 replies were garbage, and 9 were lost." in text
    assert "Seed 3, commit c0ffee, Python 3.11, torch 2.13." in text
    few = result(page)
    del few["campaigns"]["merges"]
    with pytest.raises(ValueError, match="no figures for merges"):
        page.figures(few)


def test_the_goals_were_reached(page):
    found = json.loads(page.FILE.read_text())["campaigns"]
    assert sum(found[name]["count"] for name in page.READERS) >= 100_000
    assert found["kills of runs"]["killed"] >= 200
    assert found["kills of servers"]["killed"] >= 20
    assert found["kills of a federation"]["killed"] >= 20
    assert set(found) == set(page.SAYS)
