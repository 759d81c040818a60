"""What is read of finished runs is checked to the last field, and nothing that it names is imported."""

import json
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedbatchnorm.cli import main
from fedbatchnorm.experiments.archive import gather, read_archive, write_archive
from fedbatchnorm.experiments.config import Run, digest
from fedbatchnorm.experiments.results import read_result, read_results, read_unfinished, seal
from fedbatchnorm.experiments.runner import run_all
from fedbatchnorm.simulation.ring import Ring
from fedbatchnorm.storage.files import DamagedError

RUN = Run(rounds=6, evaluate_every=2, clients=4)
RING = Ring(rounds=3)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    run_all([RUN, RING], root)
    return root


@pytest.fixture
def runs(made, tmp_path):
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs"


def without_digests(path):
    """A folder as it was before there were digests."""
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(
        json.dumps({k: v for k, v in summary.items() if k not in ("files", "digest")})
    )


def change(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def call(*arguments):
    try:
        main([str(a) for a in arguments])
    except SystemExit as stop:
        return stop.code
    return 0


EVIL = "evil_of_the_test.sub:f"


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A package beside the results that says when it is imported, and results that name it."""
    package = tmp_path / "evil_of_the_test"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    (package / "sub.py").write_text("def f(): raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "imported"
    sys.modules.pop("evil_of_the_test", None)


@pytest.mark.parametrize(
    "command",
    [
        ["report", "runs"],
        ["report", "kept.runs.jsonl", "--out", "page"],
        ["report", "runs", "kept.runs.jsonl", "--markdown", "page.md"],
        ["collect", "runs", "kept.runs.jsonl"],
        ["collect", "folder", "other.runs.jsonl"],
        ["reproduce", "fig1", "--device", "cpu", "--known", "kept.runs.jsonl"],
        ["reproduce", "fig1", "--device", "cpu", "--known", "folder", "--out", "folder"],
    ],
    ids=" ".join,
)
def test_no_command_that_reads_imports_what_is_named(runs, planted, tmp_path, command):
    write_archive(tmp_path / "kept.runs.jsonl", read_results(runs)[0])
    (line,) = (json.loads(text) for text in (tmp_path / "kept.runs.jsonl").read_text().splitlines())
    line.pop("digest", None)
    line["config"]["model"] = EVIL
    (tmp_path / "kept.runs.jsonl").write_text(json.dumps(line) + "\n")
    folder = tmp_path / "folder" / digest(RUN)
    shutil.copytree(runs / digest(RUN), folder)
    shutil.copytree(runs / digest(RING), folder.parent / digest(RING))
    change(folder / "config.json", model=EVIL)
    without_digests(folder)
    assert call(*command) == 0
    assert not planted.exists()


def test_the_trap_works(planted, tmp_path):
    with pytest.raises(ValueError, match="cannot be"):
        run_all([Run(model="evil_of_the_test.nothing:f", rounds=1)], tmp_path / "x")
    assert planted.exists()


def test_a_model_of_one_s_own_keeps_its_name_without_its_source(tmp_path, monkeypatch):
    """The hash of the source is kept beside the run, and goes into the file of runs."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "net_of_the_reader.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    (path,) = run_all([Run(model="net_of_the_reader:net", rounds=2)], tmp_path / "runs")
    sys.modules.pop("net_of_the_reader")
    (tmp_path / "net_of_the_reader.py").write_text("changed")
    (result,), _ = read_results(tmp_path / "runs")
    assert result.name == path.name
    write_archive(tmp_path / "kept.runs.jsonl", [result])
    assert [r.name for r in read_archive(tmp_path / "kept.runs.jsonl")] == [path.name]
    change(path / "config.json", source="0" * 16)
    with pytest.raises(DamagedError, match="it is the configuration of"):
        read_result(path)


HUGE = 10**400
DEEP = "[" * 100_000 + "]" * 100_000
# File, what it holds instead (text, or fields that are changed), and what the error says of it.
DAMAGES = {
    "another seed": ("config.json", {"seed": 3}, "it is the configuration of"),
    "another gamma": ("config.json", {"gamma": 0.5}, "it is the configuration of"),
    "an impossible gamma": ("config.json", {"gamma": HUGE}, "gamma is a number of many digits"),
    "huge rounds": ("config.json", {"rounds": HUGE}, "rounds is a number of many digits"),
    "a dataset that is a list": ("config.json", {"dataset": []}, r"dataset is \[\]"),
    "a defense that is a number": ("config.json", {"defense": 5}, "defense is 5"),
    "a kind that is a list": ("config.json", {"kind": []}, "kind must be one of"),
    "a surrogate": ("config.json", {"model": "a\ud800:b"}, "model is 'a.ud800:b'"),
    "deep": ("config.json", DEEP, "nested too deeply"),
    "many digits": ("config.json", '{"kind": ' + "9" * 5000 + "}", "not JSON"),
    "a torn configuration": ("config.json", '{"kind": "trai', "not JSON"),
    "a torn summary": ("summary.json", "{", "not JSON"),
    "no summary": ("summary.json", "[]", "not an object"),
    "750 percent": ("summary.json", {"accuracy": 7.5}, "accuracy is 7.5; the metrics say"),
    "a text for a number": ("summary.json", {"best_accuracy": "0.5"}, "best_accuracy is '0.5'"),
    "a huge number of seconds": ("summary.json", {"seconds": HUGE}, "seconds is a number of many digits"),
    "NaN": ("summary.json", '{"accuracy": NaN}', "NaN is not a number"),
    "an engine that is a list": ("summary.json", {"engine": []}, "engine is a list"),
    "empty metrics": ("metrics.jsonl", "", "0 rows; a run of 6 rounds has 3"),
    "metrics of text": ("metrics.jsonl", '{"round": "1", "accuracy": "x"}\n', "row 1: round is '1'"),
    "one row": ("metrics.jsonl", '{"round": 2, "accuracy": 0.5}\n', "1 rows"),
    "an impossible accuracy": ("metrics.jsonl", '{"round": 2, "accuracy": 9.0934}\n', "accuracy is 9.0934"),
    "rows that are no objects": ("metrics.jsonl", "1\n2\n3\n", "row 1: not an object"),
    "no text": ("metrics.jsonl", b"\xff\xfe", "not JSON"),
    "a hole in the environment": ("environment.json", "[]", "not a list of sessions"),
    "a deep environment": ("environment.json", json.dumps([{"a": [1]}]), "'a' is a list"),
    "an odd session": ("environment.json", "[5]", "session 1: not an object"),
    "no holdings": ("holdings.json", "{}", "not classes and samples"),
    "few holdings": ("holdings.json", {"samples": [[1]]}, "samples of 1 clients; 4 hold data"),
    "odd holdings": ("holdings.json", {"samples": [[0.5] * 10] * 4}, "client 0 has 0.5 samples"),
    "no weights": ("model.safetensors", "", "model.safetensors"),
    "weights of junk": ("model.safetensors", b"junk" * 100, "model.safetensors"),
}


@pytest.mark.parametrize("old", [True, False], ids=["before digests", "with digests"])
@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_wrong_with_a_folder_is_named(runs, name, old, capsys):
    file, content, message = DAMAGES[name]
    path = runs / digest(RUN)
    if old:
        without_digests(path)
        read_result(path)
    if isinstance(content, dict):
        change(path / file, **content)
    else:
        (path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DamagedError, match=message) as caught:
        read_result(path)
    assert str(path / file) in str(caught.value)
    assert len(str(caught.value)) < 600
    assert call("report", runs) == 1
    out, err = capsys.readouterr()
    assert f"left out: {path}: damaged: " in err
    assert "error: 1 runs are left out" in err
    assert "report: " in out
    assert call("report", runs, "--allow-damaged") == 0


RING_DAMAGES = {
    "another shape": (lambda t: t | {"points": t["points"][:2].clone()}, "points is not there, or not of"),
    "another type": (lambda t: t | {"labels": t["labels"].float()}, "labels is of type torch.float32"),
    "NaN": (lambda t: t | {"normalised": t["normalised"] * torch.nan}, "normalised is not finite"),
    "missing": (lambda t: {"points": t["points"]}, "labels is not there"),
}


@pytest.mark.parametrize("name", RING_DAMAGES)
def test_points_on_the_ring_are_checked(runs, name):
    path = runs / digest(RING)
    without_digests(path)
    spoil, message = RING_DAMAGES[name]
    save_file(spoil(load_file(path / "model.safetensors")), path / "model.safetensors")
    with pytest.raises(DamagedError, match=message):
        read_result(path)


def test_what_a_digest_alone_can_tell(runs):
    """Values that are possible, but are not what was written."""
    path = runs / digest(RUN)
    weights = load_file(path / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, path / "model.safetensors")
    with pytest.raises(DamagedError, match=r"model.safetensors: its content has changed"):
        read_result(path)
    save_file(weights, path / "model.safetensors")
    change(path / "summary.json", seconds=1.0)
    with pytest.raises(DamagedError, match=r"summary.json: its content has changed"):
        read_result(path)
    without_digests(path)
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(seal(path, summary)))
    assert read_result(path).summary["seconds"] == 1.0
    change(path / "summary.json", files={"../x": "0"})
    with pytest.raises(DamagedError, match="it must be the files' digests"):
        read_result(path)


def test_a_folder_whose_parts_are_no_files_is_named(runs):
    path = runs / digest(RUN)
    for name in ("summary.json", "metrics.jsonl", "model.safetensors", "config.json"):
        kept = (path / name).read_bytes()
        (path / name).unlink()
        if name != "summary.json":
            with pytest.raises(DamagedError, match=rf"{name}: No such file"):
                read_result(path)
        os.mkfifo(path / name)  # which nobody writes to: reading it would wait for ever
        with pytest.raises(DamagedError, match=rf"{name}: not a file"):
            read_result(path)
        (path / name).unlink()
        (path / name).write_bytes(kept)
    (path / "config.json").unlink()
    results, (left,) = read_results(runs)
    assert [r.config for r in results] == [RING]
    assert left.why == "damaged: config.json: No such file or directory"


LINES = {
    "an accuracy of 750%": (lambda line: line["summary"].update(accuracy=7.5), "accuracy is 7.5"),
    "a curve above 1": (lambda line: line["accuracy"].__setitem__(0, 7.5), "row 1: accuracy is 7.5"),
    "a huge round": (lambda line: line["round"].__setitem__(0, HUGE), "round is a number of many digits"),
    "a curve of text": (lambda line: line.update(loss="abc"), "loss is not a list"),
    "text for losses": (lambda line: line["loss"].__setitem__(0, "x"), "loss is 'x'"),
    "nobody's environment": (lambda line: line.update(environment=[[]]), "session 1: not an object"),
    "another seed": (lambda line: line["config"].update(seed=5), "its content has changed"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_a_file_of_runs_is_named_and_the_others_are_read(runs, tmp_path, name, capsys):
    file = tmp_path / "some.runs.jsonl"
    run_all([Run(rounds=6, evaluate_every=2, clients=4, seed=1)], runs)
    write_archive(file, read_results(runs)[0])
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    spoil, message = LINES[name]
    if name != "another seed":
        lines[1].pop("digest")
    spoil(lines[1])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=rf"some.runs.jsonl, line 2.*{message}"):
        read_archive(file)
    results, (left,) = gather(file)
    assert (len(results), left.kind) == (1, "damaged")
    before = file.read_bytes()
    with pytest.raises(ValueError, match="line 2"):
        write_archive(file, [])
    assert file.read_bytes() == before
    assert call("report", file, "--out", tmp_path / "page") == 1
    assert f"left out: {file}, line 2: damaged: " in capsys.readouterr().err


def test_a_run_that_is_not_finished_is_named_and_counts_as_missing(runs, tmp_path, capsys):
    (runs / digest(RUN) / "summary.json").unlink()
    assert call("report", runs, "--markdown", tmp_path / "page.md") == 1
    assert f"left out: {runs / digest(RUN)}: not finished" in capsys.readouterr().err
    run_all([Run(rounds=1, clients=2)], runs)
    assert call("collect", runs, tmp_path / "a.runs.jsonl") == 1
    assert call("collect", runs, tmp_path / "a.runs.jsonl", "--allow-damaged") == 0


def test_nothing_but_damage_is_an_error_and_writes_no_file(runs, tmp_path, capsys):
    shutil.rmtree(runs / digest(RING))
    (runs / digest(RUN) / "summary.json").write_text("{")
    assert call("collect", runs, tmp_path / "a.runs.jsonl") == 1
    assert "holds no finished run" in capsys.readouterr().err
    assert not (tmp_path / "a.runs.jsonl").exists()


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        (["report", "runs"], "runs/report"),
        (["report", "runs", "--markdown", "pages/page.md"], "pages"),
        (["data", "digits", "--split", "iid", "--plot", "plots/x.png"], "plots"),
    ],
    ids=["page", "markdown", "data"],
)
def test_links_with_the_names_of_pages_and_pictures_are_not_followed(
    runs, tmp_path, monkeypatch, command, folder
):
    monkeypatch.chdir(tmp_path)
    assert call(*command) == 0
    victim = tmp_path / "victim"
    victim.write_text("precious")
    written = {path: path.read_bytes() for path in (tmp_path / folder).rglob("*") if path.is_file()}
    for path in written:
        path.unlink()
        path.symlink_to(victim)
    assert call(*command) == 0
    assert victim.read_text() == "precious"
    assert {path: path.read_bytes() for path in written} == written


def test_a_folder_without_training_runs_is_not_collected_into_an_empty_file(runs, tmp_path, capsys):
    (runs / digest(RUN) / "summary.json").write_text("{")
    assert call("collect", runs, tmp_path / "a.runs.jsonl") == 1
    err = capsys.readouterr().err
    assert f"left out: {runs / digest(RUN)}: damaged" in err
    assert "holds no finished training run: nothing is collected; those on the ring stay" in err
    assert not (tmp_path / "a.runs.jsonl").exists()


def test_runs_that_differ_in_what_they_do_not_use_are_one(runs, tmp_path):
    other = tmp_path / "other" / digest(RUN)
    shutil.copytree(runs / digest(RUN), other)
    without_digests(other)
    change(other / "config.json", alpha=3.0)
    results, left_out = gather(runs, tmp_path / "other")
    assert (len(results), left_out) == (2, [])


def test_curves_of_what_is_not_finished_are_read(runs):
    (runs / digest(RUN) / "summary.json").unlink()
    with (runs / digest(RUN) / "metrics.jsonl").open("a") as file:
        file.write('{"round": 8')
    (found,) = read_unfinished(runs)
    assert (found.config, [row["round"] for row in found.metrics]) == (RUN, [2, 4, 6])
    change(runs / digest(RUN) / "config.json", seed=3)
    assert read_unfinished(runs) == []
