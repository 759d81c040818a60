"""A run's folder survives crashes: files are whole or as they were, and a torn checkpoint is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file

from fedbatchnorm.experiments.config import Run, digest
from fedbatchnorm.experiments.folder import RunFolder
from fedbatchnorm.experiments.results import read_results
from fedbatchnorm.storage.files import BusyError, write_bytes

TENSORS = {"a": torch.arange(5.0), "b": torch.tensor(3), "c": torch.ones(2, 3, dtype=torch.float64)}


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path, Run(evaluate_every=1))
    with made.open():
        yield made


def row(step):
    return {"round": step, "accuracy": 0.5}


def two_checkpoints(folder):
    for step in (1, 2):
        folder.append(row(step))
        folder.save_checkpoint({k: v + step for k, v in TENSORS.items()}, step, float(step))
    folder.append(row(3))


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
        "from fedbatchnorm.experiments.folder import BusyError, RunFolder\n"
        "try:\n"
        "    with RunFolder(sys.argv[1], Run(evaluate_every=1)).open(): print('in')\n"
        "except BusyError: print('busy')\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert found.stdout == "busy\n"
    assert issubclass(BusyError, RuntimeError)


def test_runs_that_cannot_be_read_are_listed_and_the_others_are_read(tmp_path):
    config = Run(clients=1, rounds=1)
    fine = {
        "config.json": '{"kind": "training", "clients": 1, "rounds": 1}',
        "summary.json": '{"accuracy": 1.0, "best_accuracy": 1.0, "round": 1}',
        "metrics.jsonl": '{"round": 1, "accuracy": 1.0}\n',
        "environment.json": "[{}]",
        "holdings.json": '{"classes": ["a"], "samples": [[1]]}',
    }
    for name, files in {
        "unfinished": {"config.json": '{"kind": "ring"}'},
        "hostile": {"config.json": '{"kind": "ring", "x": 1}', "summary.json": "{}"},
        "torn": {"config.json": '{"kind"', "summary.json": "{}"},
        digest(config): fine,
        "renamed": fine,
    }.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
        (tmp_path / name / "model.safetensors").write_bytes(save({}))
    results, left_out = read_results(tmp_path)
    assert [r.config for r in results] == [config]
    damaged = [Path(left.place).name for left in left_out if left.kind == "damaged"]
    assert damaged == ["hostile", "renamed", "torn"]
    assert [Path(left.place).name for left in left_out if left.kind == "unfinished"] == ["unfinished"]


def test_metrics_that_were_changed_do_not_go_with_a_checkpoint(folder):
    two_checkpoints(folder)
    text = folder.metrics_file.read_text()
    folder.metrics_file.write_text(text.replace('"round": 2, "accuracy": 0.5', '"round": 2, "accuracy": 0.9'))
    assert folder.restore().step == 1
    folder.metrics_file.write_text(text.replace("0.5", "9.0934"))
    assert folder.restore() is None


def test_a_checkpoint_of_another_run_of_the_same_shapes_is_refused(folder, tmp_path):
    two_checkpoints(folder)
    other = RunFolder(tmp_path, Run(evaluate_every=1, seed=1))
    with other.open():
        for file in (folder.metrics_file, *folder.checkpoints):
            shutil.copy(file, other.path / file.name)
        assert other.restore() is None


def of_before(folder):
    """The newest checkpoint as it was when it did not say whose it is, nor of which metrics."""
    from fedbatchnorm.experiments.folder import _digest

    for path in folder.checkpoints:
        with safe_open(path, "pt") as file:
            facts, tensors = dict(file.metadata()), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
        facts = {key: facts[key] for key in ("step", "metrics_bytes", "seconds")}
        save_file(tensors, path, facts | {"digest": _digest(tensors, facts)})


def test_a_checkpoint_from_before_it_said_whose_it_is_is_resumed(folder):
    two_checkpoints(folder)
    of_before(folder)
    assert folder.restore().step == 2
    folder.metrics_file.write_text(folder.metrics_file.read_text().replace("0.5", "9.5"))
    assert folder.restore() is None  # its metrics are checked as far as they can be


@pytest.mark.parametrize("content", ["{", '{"kind": "training", "evaluate_every": 1, "seed": 7}'])
def test_a_configuration_that_is_not_the_folder_s_is_put_aside_at_the_start(tmp_path, content):
    config = Run(evaluate_every=1)
    folder = RunFolder(tmp_path, config)
    with folder.open():
        two_checkpoints(folder)
    (folder.path / "config.json").write_text(content)
    with folder.open():
        assert json.loads((folder.path / "config.json").read_text())["seed"] == 0
        assert folder.restore().step == 2
        of_before(folder)
        assert folder.restore() is None  # whose it is, is not known
    assert (folder.path / "config.json.damaged").read_text() == content


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl"])
def test_symbolic_links_are_not_followed(tmp_path, name):
    folder = RunFolder(tmp_path / "runs", Run(evaluate_every=1))
    folder.path.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder.path / name).symlink_to(victim)
    with pytest.raises(OSError, match=rf"{name} is a symbolic link"), folder.open():
        folder.append(row(1))
    assert victim.read_text() == "precious"
    assert not folder.busy() or name != "lock"


def test_links_with_the_names_of_files_to_come_are_not_followed(tmp_path):
    folder = RunFolder(tmp_path / "runs", Run(evaluate_every=1))
    folder.path.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    names = ("config.json", "summary.json", "model.safetensors", "checkpoint.safetensors")
    for name in names:
        (folder.path / f"{name}.part").symlink_to(victim)
    with folder.open():
        folder.append(row(1))
        folder.save_checkpoint(TENSORS, 1, 1.0)
        folder.finish(TENSORS, {"accuracy": 0.5})
    assert victim.read_text() == "precious"


def test_a_folder_that_was_removed_and_made_anew_is_another_s(tmp_path):
    """Whoever was at the first does not write into the second."""
    config = Run(evaluate_every=1)
    first, second = RunFolder(tmp_path, config), RunFolder(tmp_path, config)
    with first.open():
        two_checkpoints(first)
        shutil.rmtree(first.path)
        with second.open():
            second.append(row(1))
            for write in (
                lambda: first.append(row(4)),
                lambda: first.save_checkpoint(TENSORS, 4, 1.0),
                lambda: first.finish(TENSORS, {}),
                lambda: first.write_json("holdings.json", {}),
            ):
                with pytest.raises(BusyError, match="was removed or recreated"):
                    write()
            assert rounds(second) == [1]
            assert {p.name for p in second.path.iterdir()} == {"config.json", "lock", "metrics.jsonl"}


def test_what_a_killed_writer_left_is_swept_up(tmp_path):
    folder = RunFolder(tmp_path, Run())
    with folder.open():
        pass
    (folder.path / ".summary.json.0123456789abcdef.part").write_text("half")
    with folder.open():
        assert {p.name for p in folder.path.iterdir()} == {"config.json", "lock"}


def test_metrics_and_names_are_on_the_disk_before_the_summary(folder, monkeypatch):
    from fedbatchnorm.storage import files

    done = []
    for name in ("sync", "sync_folder"):
        real = getattr(files, name)
        monkeypatch.setattr(files, name, lambda path, n=name, r=real: (done.append((n, path)), r(path)))
    folder.append(row(1))
    folder.finish(TENSORS, {})
    assert done == [
        ("sync_folder", folder.path),  # the weights' name
        ("sync", folder.metrics_file),
        ("sync_folder", folder.path),  # the summary's
    ]


def test_types_and_shapes_are_part_of_a_checkpoint(folder):
    """The same bytes under another type, or in another shape, are other tensors."""
    for before, after in ((b'"dtype":"F32"', b'"dtype":"I32"'), (b'"shape":[2,3]', b'"shape":[3,2]')):
        folder.save_checkpoint(TENSORS, 1, 1.0)
        newest = folder.checkpoints[0]
        content = newest.read_bytes()
        assert before in content
        newest.write_bytes(content.replace(before, after))
        folder.checkpoints[1].unlink(missing_ok=True)
        assert folder.restore() is None
        newest.write_bytes(content)
        assert folder.restore().step == 1


def test_what_was_restored_does_not_change_with_the_file(folder):
    two_checkpoints(folder)
    found = folder.restore()
    newest = folder.checkpoints[0]
    with newest.open("r+b") as file:
        file.write(bytes(newest.stat().st_size))
    assert torch.equal(found.tensors["c"], TENSORS["c"] + 2)
