"""One way to write: whole or not at all, under a name of its own, one at a time; errors name the file."""

import errno
import os
import subprocess
import sys

import pytest

from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.results import read_results
from fedbatchnorm.experiments.runner import run_all
from fedbatchnorm.storage.files import BusyError, is_locked, locked, write_bytes

WRITERS = 6


def test_a_full_disk_leaves_the_old_file_and_says_which_it_is(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/file'"):
        write_bytes(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"old"}


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path):
    code = (
        "import resource, sys, pathlib\n"
        "from fedbatchnorm.storage.files import write_bytes\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "write_bytes(path, b'old')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_bytes(path, b'x' * 5000)\n"
        "except OSError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "file"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"[Errno 27] File too large: '{tmp_path / 'file'}'\n"
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"old"}


def test_a_lock_is_one_process_s_and_free_again_afterwards(tmp_path):
    path = tmp_path / "lock"
    assert not is_locked(path)
    with locked(path) as lock:
        assert is_locked(path)
        with pytest.raises(BusyError, match="another process is working on"), locked(path):
            pass
        path.unlink()
        path.touch()
        assert not lock.holds()
    assert path.exists()  # it is not ours any more
    with locked(path, keep=False):
        pass
    assert not path.exists()


def test_processes_that_collect_into_one_file_lose_nothing(tmp_path):
    """Six at once, each with runs of its own."""
    for i in range(WRITERS):
        run_all([Run(rounds=1, clients=2, seed=seed) for seed in (2 * i, 2 * i + 1)], tmp_path / str(i))
    code = (
        "import sys, pathlib, time\n"
        "from fedbatchnorm.experiments.archive import write_archive\n"
        "from fedbatchnorm.experiments.results import read_results\n"
        "results = read_results(pathlib.Path(sys.argv[1]))[0]\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for result in results: write_archive(pathlib.Path(sys.argv[2]), [result])\n"
    )
    file = tmp_path / "all.runs.jsonl"
    made = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / str(i), file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(WRITERS)
    ]
    for process in made:
        assert process.stdout.readline() == "ready\n"
    for process in made:
        process.stdin.write("go\n")
        process.stdin.close()
    for process in made:
        assert process.wait(60) == 0
        process.stdout.close()
    from fedbatchnorm.experiments.archive import read_archive

    assert sorted(r.config.seed for r in read_archive(file)) == list(range(2 * WRITERS))
    assert {p.name for p in tmp_path.iterdir()} == {file.name, *map(str, range(WRITERS))}
    assert len(read_results(tmp_path)[0]) == 2 * WRITERS
