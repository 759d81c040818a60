"""docs/recipes.md runs: each recipe on its own, after the block before the first."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
START, *SECTIONS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def code(text):
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


RECIPES = {text.splitlines()[0]: code(text) for text in SECTIONS if code(text)}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_as_written(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code(START) + RECIPES[name], f"{PAGE}: {name}", "exec"), {"__name__": "__main__"})


def test_every_recipe_is_found():
    assert len(RECIPES) == 8
