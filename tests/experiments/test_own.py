"""What is the user's own: named, recorded, and read without code."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from fedbatchnorm.experiments import (
    Run,
    attack,
    average,
    dataset,
    merge_exactly,
    model,
    partition,
    rule,
    scheme,
    with_own_batch,
    with_shared,
)
from fedbatchnorm.experiments.archive import gather, read_archive
from fedbatchnorm.experiments.config import digest, from_json, name_of, read_config, to_json
from fedbatchnorm.experiments.results import read_result, read_results
from fedbatchnorm.experiments.runner import run_all
from fedbatchnorm.experiments.sources import source_hash
from fedbatchnorm.report.markdown import write_markdown
from fedbatchnorm.report.page import write_report
from fedbatchnorm.simulation.schemes import SCHEMES
from fedbatchnorm.storage.files import DamagedError


def shards(labels, clients, rng, each=2):
    pieces = np.array_split(np.argsort(labels, kind="stable"), clients * each)
    order = rng.permutation(len(pieces)).reshape(clients, each)
    return [np.concatenate([pieces[i] for i in row]) for row in order]


def net(shape, classes):
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(2, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, classes))


def hush(honest):
    return 0 * honest[0]


def middle(rows, f):
    return rows.sort(0).values[f : len(rows) - f].mean(0)


def everything(**more):
    """A run that has nothing of the package's own."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 2
    x = torch.randn(200, 2, generator=generator) + 4 * y.unsqueeze(1)
    parts = {
        "scheme": scheme("pooled", with_own_batch, merge_exactly, title="Naive, merged exactly"),
        "dataset": dataset("two_clouds", (x, y)),
        "partition": partition("shards", shards)(each=3),
        "model": net,
        "attack": attack("hush", hush, targets=("gradients",)),
        "defense": rule("middle", middle),
    }
    return Run(**({"clients": 5, "byzantine": 1, "rounds": 4, "batch": 8} | parts | more))


def test_a_run_of_nothing_but_own_parts_trains_and_is_read_by_a_process_without_them(tmp_path):
    run = everything()
    (path,) = run_all([run], tmp_path / "runs")
    assert path.name == digest(run)
    code = (
        "import sys\nfrom pathlib import Path\nfrom fedbatchnorm.experiments.results import read_results\n"
        "from fedbatchnorm.experiments.archive import read_archive, write_archive\n"
        "(result,), left = read_results(Path(sys.argv[1]))\nrun = result.config\nassert not left, left\n"
        "print(result.name, run.scheme, run.title(), run.heterogeneity(), run.targets_struck(), run.model)\n"
        "print(*sorted((part.kind, part.source) for part in run.own))\n"
        "write_archive(Path(sys.argv[2]), [result])\n"
        "(again,) = read_archive(Path(sys.argv[2]))\nassert again.name == result.name\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "runs", tmp_path / "a.runs.jsonl"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    wanted = f"{path.name} pooled Naive, merged exactly ('each', 3.0) ('gradients',) net"
    assert first == wanted
    assert second.count("(") == 6
    assert "None" not in second
    assert [r.name for r in read_archive(tmp_path / "a.runs.jsonl")] == [path.name]


ODD_NAME = "../../x/<b>|`$\\frac{\u00e9" + "y" * 300


@pytest.fixture(scope="module")
def calm_and_besieged(tmp_path_factory):
    root = tmp_path_factory.mktemp("both")
    liars = {"byzantine": 1, "attack": "sf", "defense": "median"}
    run_all([Run(rounds=2, clients=4, **more) for more in ({}, liars)], root)
    for path in root.iterdir():  # as before there were digests
        summary = json.loads((path / "summary.json").read_text())
        kept = {k: v for k, v in summary.items() if k not in ("files", "digest")}
        (path / "summary.json").write_text(json.dumps(kept))
    return root


@pytest.mark.parametrize("field", ["dataset", "attack", "defense", "partition", "model", "scheme"])
def test_a_report_of_names_from_elsewhere(tmp_path, calm_and_besieged, field):
    """They are text: in titles, and in the names of files."""
    shutil.copytree(calm_and_besieged, tmp_path / "runs")
    for file in (tmp_path / "runs").glob("*/config.json"):
        content = json.loads(file.read_text())
        if field not in ("attack", "defense") or content["byzantine"]:
            file.write_text(json.dumps(content | {field: ODD_NAME}))
    found = gather(tmp_path / "runs")
    assert (len(found[0]), found[1]) == (2, [])
    page = write_report(tmp_path / "runs", out=tmp_path / "page", found=found)
    assert "y" * 100 in page.read_text() or field == "partition"
    write_markdown(tmp_path / "runs", page=tmp_path / "pages" / "page.md", found=found)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "page", "pages"}


def test_a_report_of_a_dataset_of_one_s_own(tmp_path):
    own = {part.kind: part for part in everything().own}
    runs = [Run(rounds=2, clients=4, model="mlp", dataset=own["dataset"], scheme=own["scheme"])]
    run_all(runs, tmp_path / "runs")
    page = write_report(tmp_path / "runs", out=tmp_path / "page")
    assert "two_clouds" in page.read_text()


def test_what_was_read_of_it_cannot_be_changed_unseen(tmp_path):
    (path,) = run_all([everything()], tmp_path)
    content = json.loads((path / "config.json").read_text())
    for change in ({"source": "0" * 16}, {"parameters": {"each": 4}}):
        content["own"]["partition"] |= change
        (path / "config.json").write_text(json.dumps(content))
        _, (left,) = read_results(tmp_path)
        assert "it is the configuration of" in left.why


def test_what_was_read_is_run_again_only_with_the_object():
    run = everything()
    read = from_json(json.loads(json.dumps(to_json(run))))
    assert read == run
    assert digest(read) == digest(run)
    with pytest.raises(ValueError, match=r"'two_clouds' is known by its name alone, .* give the object"):
        read.used("dataset")


@pytest.mark.parametrize("kind", ["scheme", "dataset", "partition", "model", "attack", "defense"])
def test_names_that_nobody_recorded_are_read_as_names(tmp_path, kind):
    """Of a process whose tables had more rows."""
    run = Run(rounds=2, clients=4, byzantine=1, attack="sf", defense="median")
    (path,) = run_all([run], tmp_path)
    content = json.loads((path / "config.json").read_text())
    content[kind] = "from_elsewhere"
    shutil.rmtree(path / "x", ignore_errors=True)
    (path / "config.json").write_text(json.dumps(content))
    (result,), left = read_results(tmp_path)
    assert not left
    assert getattr(result.config, kind) == result.config.title(kind) == "from_elsewhere"
    with pytest.raises(ValueError, match=f"{kind} (is )?'from_elsewhere'"):
        Run(**{kind: "from_elsewhere"}, byzantine=1 if kind == "attack" else 0)


def test_a_row_that_was_added_to_a_table_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setitem(SCHEMES, "mine", SCHEMES["naive"]._replace(title="Mine, too"))
    run = Run(scheme="mine", rounds=2)
    (path,) = run_all([run], tmp_path)
    monkeypatch.delitem(SCHEMES, "mine")
    (result,), left = read_results(tmp_path)
    assert (result.config.title(), result.name, left) == ("Mine, too", path.name, [])
    assert name_of(*read_config(json.loads((path / "config.json").read_text()))) == path.name


def test_changed_code_is_another_run_and_what_it_calls_counts():
    helper = {"scale": 2}

    def with_scale(scale):
        def normalize(x, running, **more):
            return with_shared(x * scale, running, **more)

        return scheme("scaled", normalize, average)

    assert digest(Run(scheme=with_scale(1))) == digest(Run(scheme=with_scale(1)))
    assert digest(Run(scheme=with_scale(1))) != digest(Run(scheme=with_scale(2)))
    before = source_hash(lambda: helper["scale"])
    helper["scale"] = 3
    assert source_hash(lambda: helper["scale"]) != before
    assert digest(everything()) != digest(everything(partition=partition("shards", shards)))
    assert digest(everything()) == digest(everything())


def test_code_in_a_file_that_is_not_python_has_a_hash(tmp_path):
    """As in a page of documentation; from Python 3.12 on `inspect.getsource` cannot tokenize such a file."""
    page = tmp_path / "page.md"
    page.write_text("It's text.\n" * 5)
    places = {}, {}
    for place in places:
        exec(compile("f = lambda x: x + 1", str(page), "exec"), place)
    assert source_hash(places[0]["f"]) == source_hash(places[1]["f"])


def test_a_setting_that_an_own_scheme_does_not_take_does_not_change_its_name():
    mine = scheme("mine", with_own_batch, average)
    assert digest(Run(scheme=mine, gradient=0.5)) == digest(Run(scheme=mine))
    taking = scheme("taking", with_shared, merge_exactly, settings=("gradient", "limit"))
    assert digest(Run(scheme=taking, gradient=0.5)) != digest(Run(scheme=taking))


SPLIT = partition("shards", shards)
WRONG = {
    "a name with a comma": (lambda: scheme("a, b", with_own_batch), "the name of a scheme is 'a, b'"),
    "a name that is taken": (lambda: rule("median", middle), "'median' is the package's own"),
    "no such parameter": (lambda: SPLIT(many=3), "has no parameter 'many'; it has each"),
    "a field": (lambda: partition("p", lambda labels, clients, rng, seed=1: []), "seed is a field of a run"),
    "too few": (lambda: partition("p", lambda labels: []), "must take (labels, clients, rng)"),
    "another kind": (lambda: Run(scheme=SPLIT), "scheme is the partition 'shards'; it must be a scheme"),
    "no name": (lambda: Run(attack=lambda honest: honest[0]), "it must be a name, or experiments.attack"),
    "no labels": (
        lambda: dataset("d", (np.zeros((4, 2)), np.zeros(3, int))),
        "samples (4, 2) and labels (3,)",
    ),
    "fractions": (lambda: dataset("d", (np.zeros((4, 2)), np.zeros(4))), "labels of train must be whole"),
    "not finite": (lambda: dataset("d", (np.full((4, 2), np.nan), np.zeros(4, int))), "not finite"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_with_an_own_part_is_said(kind):
    make, message = WRONG[kind]
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


LOST = {
    "too few parts": (lambda labels, clients, rng: [np.arange(3)], "gave 1 parts for 4 clients"),
    "an empty part": (
        lambda labels, clients, rng: [np.arange(0)] * clients,
        "gave client 0 no list of indices",
    ),
    "past the end": (lambda labels, clients, rng: [np.arange(3) + 5000] * clients, "not in 0 to 1432"),
}


@pytest.mark.parametrize("kind", LOST)
def test_a_partition_that_is_wrong_names_the_client(tmp_path, kind):
    split, message = LOST[kind]
    with pytest.raises(ValueError, match=message):
        run_all([Run(partition=partition("p", split), clients=4, rounds=1)], tmp_path)


def test_a_rule_that_returns_no_row_is_named(tmp_path):
    wrong = rule("wrong", lambda rows, f: rows)
    with pytest.raises(ValueError, match="it must be one row"):
        run_all([Run(defense=wrong, clients=4, rounds=1)], tmp_path)


def test_a_hostile_record_is_damage(tmp_path):
    (path,) = run_all([everything()], tmp_path)
    whole = json.loads((path / "config.json").read_text())
    for own in (
        [],
        {"color": {}},
        {"scheme": 5},
        {"scheme": {"value": "x"}},
        {"scheme": {"source": "x"}},
        {"partition": {"parameters": []}},
        {"partition": {"parameters": {"a": []}}},
        {"scheme": {"uses": ["a"] * 1000}},
        {"scheme": {"title": "x" * 10**6}},
    ):
        (path / "config.json").write_text(json.dumps(whole | {"own": own}))
        with pytest.raises(DamagedError, match="own"):
            read_result(path)


def test_a_model_part_and_its_string_are_different_things():
    assert Run(model=model("net", net)).model == "net"
    assert Run(model="nowhere:net").own == ()
