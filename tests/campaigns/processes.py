"""Processes that are killed, disks that are full, streams that are closed: what was done stays.

Children are forked from this process, which has imported all and started no threads, so that each takes a
fraction of a second.
"""

import collections
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from fedbatchnorm.cli import main
from fedbatchnorm.experiments import runner
from fedbatchnorm.experiments.archive import gather, read_archive, write_archive
from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.folder import RunFolder
from fedbatchnorm.experiments.results import read_results
from fedbatchnorm.experiments.runner import Options, run_all

SCHEMES = ("fbn", "naive", "fixbn", "centralized")
CRASHED = 99


def fork(work):
    """A child that does something; its number."""
    child = os.fork()
    if child:
        return child
    status = CRASHED
    try:
        work()
        status = 0
    except SystemExit as stop:
        status = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(child):
    """Its exit status, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(path):
    """Metrics without times, and the weights' bytes."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("seconds", None)
    return rows, (path / "model.safetensors").read_bytes()


def kills(count, rng, place):
    """SIGKILL at random moments; the run that is resumed ends with the bits of the undisturbed one."""
    runner._load("digits", None)
    found, seed = collections.Counter(), 0
    while found["killed"] < count:
        config = Run(scheme=SCHEMES[seed % 4], rounds=40, evaluate_every=4, clients=4, seed=seed)
        seed += 1
        start = time.monotonic()
        assert ended(fork(lambda c=config: run_all([c], place / "whole"))) == 0
        takes = time.monotonic() - start
        folder, killed = RunFolder(place / "killed", config), 0
        options = Options(checkpoint_seconds=rng.choice([0.0, 0.01, 0.05]))
        while not folder.finished():
            child = fork(lambda c=config, o=options: run_all([c], place / "killed", o))
            if killed < 8:  # then it may finish
                time.sleep(rng.random() * takes)
                os.kill(child, signal.SIGKILL)
            status = ended(child)
            assert status in (0, -signal.SIGKILL)
            killed += status != 0
            results, left_out = read_results(place / "killed")
            assert all(left.kind == "unfinished" for left in left_out), left_out
            assert all(result.config == config for result in results)
        assert outcome(folder.path) == outcome(RunFolder(place / "whole", config).path)
        assert not list(folder.path.glob("*.damaged"))
        found["killed"] += killed
        found["runs"] += 1
        shutil.rmtree(place / "killed")
    return found


def killed_collects(count, rng, place):
    """SIGKILL while a file of runs is written: it is the old one or the new one."""
    run_all([Run(rounds=1, clients=2, seed=seed) for seed in range(4)], place / "runs")
    results = read_results(place / "runs")[0]
    file, found = place / "some.runs.jsonl", collections.Counter()
    for _ in range(count):
        file.unlink(missing_ok=True)
        write_archive(file, results[:1])

        def more():
            for result in results[1:]:
                write_archive(file, [result])

        child = fork(more)
        time.sleep(rng.random() * 0.012)
        os.kill(child, signal.SIGKILL)
        found["killed"] += ended(child) != 0
        held = [result.config.seed for result in read_archive(file)]
        assert results[0].config.seed in held
        assert write_archive(file, results) == (4, 4 - len(held))
        assert not list(place.glob(".*.part"))
    return found


@contextlib.contextmanager
def small_disk(place, size):
    """A file system of so many bytes where mounting is allowed, else None."""
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    mounted = shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


def full_disks(count, rng, place):
    """No space at a random moment: an error that names a file; with space again, the same bits."""
    import resource

    runner._load("digits", None)
    config = Run(rounds=20, evaluate_every=2, clients=4)
    assert ended(fork(lambda: run_all([config], place / "whole"))) == 0
    wanted, found = outcome(RunFolder(place / "whole", config).path), collections.Counter()
    for number in range(count):
        out = place / f"full{number}"
        size = rng.randrange(4096, 500_000)
        with small_disk(out, size) as mounted:
            limited = not mounted or rng.random() < 0.3

            def work(limited=limited, out=out, size=size):
                if limited:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
                os.dup2(os.open(place / "errors", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
                sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
                try:
                    run_all([config], out, Options(checkpoint_seconds=0))
                except OSError as error:
                    print(error, file=sys.stderr)
                    sys.exit(1)

            status, said = ended(fork(work)), (place / "errors").read_text()
            assert status in (0, 1), said
            found["full" if status else "enough"] += 1
            if status:
                assert str(out) in said, said
                assert "Traceback" not in said, said
            if mounted:
                subprocess.run(["mount", "-o", "remount,size=10m", str(out)], check=True)
            assert not [left for left in read_results(out)[1] if left.kind == "damaged"]
            assert ended(fork(lambda out=out: run_all([config], out))) == 0
            assert outcome(RunFolder(out, config).path) == wanted
        shutil.rmtree(out)
    return found


COMMANDS = {  # a command, and what it leaves
    "list": (["list"], None),
    "run": (["run", "--rounds", "2", "--clients", "2", "--device", "cpu", "--out"], "summary.json"),
    "collect": (["collect"], "x.runs.jsonl"),
    "version": (["--version"], None),
}


def closed_streams(count, rng, place):
    """Standard streams closed, cut off, full or in ASCII: the work is done, without a traceback."""
    runner._load("digits", None)
    run_all([Run(rounds=1, clients=2)], place / "good")
    found = collections.Counter()
    for number in range(count):
        name, out = rng.choice(list(COMMANDS)), place / f"out{number}"
        out.mkdir()
        arguments, left = COMMANDS[name]
        arguments = [*arguments, str(out)] if name == "run" else list(arguments)
        if name == "collect":
            arguments += [str(place / "good"), str(out / "x.runs.jsonl")]
        kinds = [rng.choice(["closed", "cut", "full", "file", "ascii"]) for _ in range(2)]
        status = ended(fork(lambda a=arguments, k=kinds: _with_streams(a, k, place)))
        said = "".join((place / f"stream{i}").read_text() for i in (1, 2))
        assert status == (1 if kinds[0] == "full" and name != "nothing" else 0), (arguments, kinds, said)
        assert "Traceback" not in said, said
        assert "Exception ignored" not in said, said
        assert left is None or list(out.rglob(left)), (arguments, kinds)
        if left == "x.runs.jsonl":
            assert len(gather(out / left)[0]) == 1
        found[f"{kinds[0]} output"] += 1
        shutil.rmtree(out)
    return found


def _with_streams(arguments, kinds, place):
    """Run the command with standard output and errors of these kinds."""
    for number, kind in zip((1, 2), kinds, strict=True):
        kept = os.open(place / f"stream{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if kind == "cut":
            reader, kept = os.pipe()
            os.close(reader)
        elif kind == "full":
            kept = os.open("/dev/full", os.O_WRONLY)
        os.dup2(kept, number)
        os.close(kept)
        stream = None if kind == "closed" else open(number, "w", encoding="ascii", closefd=False)  # noqa: SIM115
        if kind == "closed":
            os.close(number)
            os.open(os.devnull, os.O_RDWR)  # as the start of the command does
        setattr(sys, ("stdout", "stderr")[number - 1], stream)
    main(arguments)


def here(path):
    """A folder for the campaign's files: in memory where there is such a place."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else path
