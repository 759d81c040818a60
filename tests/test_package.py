"""The package as a whole: what importing it does, what it never does, and that its documents are true."""

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fedbatchnorm as fbn

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run(code, *args):
    result = subprocess.run([sys.executable, *args, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_everything_public_is_there_and_documented():
    assert sorted(fbn.__all__) == fbn.__all__
    for name in fbn.__all__:
        value = getattr(fbn, name)
        assert name == "__version__" or value.__doc__, name


def test_importing_needs_torch_and_numpy_alone():
    code = """
import sys, importlib.abc
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {
            'safetensors', 'matplotlib', 'scipy', 'sklearn', 'pooch', 'tqdm', 'tyro', 'jinja2', 'flwr'}:
            raise ImportError(f'{name} is not part of the core')
sys.meta_path.insert(0, Refuse())
import fedbatchnorm
from fedbatchnorm.data import datasets, partition
from fedbatchnorm.simulation import models, simulator
simulator.Simulation(models.build('mlp', (2,), 10, 0), datasets.load('gaussian_ring'),
                     [[0, 1, 2], [3, 4]], simulator.Recipe(clients=2, batch=2)).round()
"""
    run(code)


def test_importing_leaves_no_trace():
    code = """
import logging, threading, warnings, torch, numpy, random
before = (len(logging.root.handlers), set(logging.root.manager.loggerDict), threading.active_count(),
          list(warnings.filters), torch.get_rng_state().tolist(), random.getstate(),
          torch.get_default_dtype(), torch.is_grad_enabled(), numpy.random.get_state()[1].tolist())
import fedbatchnorm
after = (len(logging.root.handlers), set(logging.root.manager.loggerDict), threading.active_count(),
         list(warnings.filters), torch.get_rng_state().tolist(), random.getstate(),
         torch.get_default_dtype(), torch.is_grad_enabled(), numpy.random.get_state()[1].tolist())
assert before == after
"""
    run(code)


def test_importing_adds_next_to_nothing_to_torch_s_own():
    code = """
import sys, torch
before = set(sys.modules)
import fedbatchnorm
print(*sorted(m for m in set(sys.modules) - before if not m.startswith('fedbatchnorm')))
"""
    added = run(code).split()
    heavy = [m for m in added if m.startswith(("torch", "numpy", "scipy", "sympy"))]
    assert not heavy
    assert len(added) <= 10, added  # a few small modules of the standard library


def forbidden_calls(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (
                f"import {n}" for n in names if n.split(".")[0] in {"pickle", "cPickle", "dill", "marshal"}
            )
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            # NVFlare writes models with torch.save: its app, and nothing else, reads tensors alone of them.
            tensors_alone = any(ast.unparse(k) == "weights_only=True" for k in node.keywords)
            if call == "torch.load" and tensors_alone and path.parts[-2:] == ("nvflare_app", "job.py"):
                continue
            if call in {"eval", "exec", "torch.load", "yaml.load", "pickle.loads", "pickle.load"}:
                yield call


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_that_arrives_is_ever_executed(path):
    assert not list(forbidden_calls(path))


def test_the_ban_can_fail(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle\nfrom dill import loads\nx = torch.load('f')\neval('1')\n")
    assert len(list(forbidden_calls(bad))) == 4
    bad.write_text("import torch\nx = torch.load('f', weights_only=True)\n")
    assert list(forbidden_calls(bad)) == ["torch.load"]


def blocks(path):
    """The Python of a document, in order: one program, as a reader would type it."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


# The recipes need the packages of the extra `zoo`, and run in tests/zoo.
@pytest.mark.parametrize("path", [p for p in DOCUMENTS if p.name != "recipes.md"], ids=lambda p: p.name)
def test_documents_run_as_written(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(path))
    assert code or path.name != "README.md"
    exec(compile(code, str(path), "exec"), {"__name__": "__main__"})


def test_the_benchmark_page_is_what_the_results_say():
    subprocess.run([sys.executable, ROOT / "benchmarks" / "table.py", "--check"], check=True)


def test_links_in_documents_lead_somewhere():
    for path in DOCUMENTS:
        prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {fbn.__version__}\n" in citation
    changes = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert changes[:2] == ["Unreleased", fbn.__version__]


@pytest.mark.parametrize("base", [None, "https://host/owner/name/blob/v1.0"])
def test_the_readme_of_an_index_page_leads_nowhere_else(base, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from hatch_build import for_index

    readme = (ROOT / "README.md").read_text()
    text = for_index(readme, base)
    assert "docs/flower.md" in readme
    assert text.count("```python") == 1
    assert not re.findall(r"\]\((?!https?:|#)|src=\"(?!https:)|<source", text)
    assert ("host/owner/name/blob/v1.0/docs/flower.md)" in text) == bool(base)
    assert ("https://host/owner/name/raw/v1.0/docs/images/ring.svg" in text) == bool(base)


@pytest.mark.slow
def test_wheel_and_source_distribution_are_whole(tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=True)
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*") if p.is_file()}
    packaged = {p for p in packaged if "__pycache__" not in p and ".egg-info" not in p}
    assert packaged <= set(names)
    assert any(n.endswith("LICENSE") for n in names)
    assert not [n for n in names if n.startswith(("tests", "docs", "results"))]
    with tarfile.open(sdist) as archive:
        held = {n.partition("/")[2] for n in archive.getnames()}
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("/METADATA"))).decode()
    description = metadata.partition("Content-Type: text/markdown\n\n")[2]
    assert "fbn.merge(shared, updates" in description
    assert not re.findall(r"\]\((?!https?:|#)|<img|<source", description)
    needed = {
        "README.md",
        "hatch_build.py",
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
    }
    assert needed <= held
    assert {"docs/index.md", "tests/conftest.py", "results/training/digits.json"} <= held
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target]
    subprocess.run([*pip, wheel], check=True, capture_output=True)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import fedbatchnorm; print(fedbatchnorm.__file__)"
    )
    assert run(code, "-I").strip().startswith(str(target))
