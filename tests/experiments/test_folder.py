"""A run's folder survives crashes: files are whole or as they were, and a torn checkpoint is refused."""

import json
import subprocess
import sys

import pytest
import torch

from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.folder import BusyError, RunFolder, read_results, write_bytes

TENSORS = {"a": torch.arange(5.0), "b": torch.tensor(3), "c": torch.ones(2, 3, dtype=torch.float64)}


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path, Run())
    with made.open():
        yield made


def two_checkpoints(folder):
    for step in (1, 2):
        folder.append({"round": step})
        folder.save_checkpoint({k: v + step for k, v in TENSORS.items()}, step, float(step))
    folder.append({"round": 3})


def rounds(folder):
    return [json.loads(line)["round"] for line in folder.metrics_file.read_text().splitlines()]


def test_a_checkpoint_comes_back_and_the_metrics_are_cut_to_it(folder):
    two_checkpoints(folder)
    found = folder.restore()
    assert (found.step, found.seconds) == (2, 2.0)
    assert all(
        torch.equal(found.tensors[k], v + 2) and found.tensors[k].dtype == v.dtype for k, v in TENSORS.items()
    )
    assert rounds(folder) == [1, 2]


@pytest.mark.parametrize("damage", ["torn", "empty", "one bit", "metadata", "gone"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(folder, damage):
    two_checkpoints(folder)
    newest = folder.checkpoints[0]
    content = bytearray(newest.read_bytes())
    if damage == "torn":
        content = content[:-10]
    elif damage == "empty":
        content = b""
    elif damage == "one bit":
        content[-1] ^= 1
    elif damage == "metadata":
        content = content.replace(b'"step":"2"', b'"step":"9"')
        assert b'"step":"9"' in content
    newest.write_bytes(content)
    if damage == "gone":
        newest.unlink()
    assert folder.restore().step == 1
    assert rounds(folder) == [1]


def test_without_a_whole_checkpoint_the_run_starts_anew(folder):
    two_checkpoints(folder)
    for path in folder.checkpoints:
        path.write_bytes(b"nothing")
    assert folder.restore() is None
    assert rounds(folder) == []


def test_metrics_shorter_than_the_checkpoint_says_do_not_go_with_it(folder):
    two_checkpoints(folder)
    folder.metrics_file.write_text("")
    assert folder.restore() is None


def test_what_is_not_finite_becomes_null(folder):
    folder.append({"round": 1, "loss": float("nan"), "accuracy": float("inf")})
    assert json.loads(folder.metrics_file.read_text()) == {"round": 1, "loss": None, "accuracy": None}


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"


def test_two_processes_do_not_work_on_one_run(folder, tmp_path):
    code = (
        "import sys\n"
        "from fedbatchnorm.experiments.config import Run\n"
        "from fedbatchnorm.experiments.folder import *\n"
        "try:\n"
        "    with RunFolder(sys.argv[1], Run()).open(): print('in')\n"
        "except BusyError: print('busy')\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert found.stdout == "busy\n"
    assert issubclass(BusyError, RuntimeError)


def test_runs_that_cannot_be_read_are_listed_and_the_others_are_read(tmp_path):
    for name, files in {
        "unfinished": {"config.json": '{"kind": "ring"}'},
        "hostile": {"config.json": '{"kind": "ring", "x": 1}', "summary.json": "{}"},
        "torn": {"config.json": '{"kind"', "summary.json": "{}"},
        "fine": {
            "config.json": '{"kind": "training"}',
            "summary.json": '{"accuracy": 1.0, "best_accuracy": 1.0}',
            "metrics.jsonl": '{"round": 1, "accuracy": 1.0}\n',
            "environment.json": "[{}]",
            "holdings.json": '{"classes": ["a"], "samples": [[1]]}',
        },
    }.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
    results, left_out = read_results(tmp_path)
    assert [r.path.name for r in results] == ["fine"]
    assert [name for name, _ in left_out] == ["hostile", "torn", "unfinished"]
