"""Streams that are closed, full or in ASCII: the work is done, and the exit status says what is there."""

import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from fedbatchnorm.terminal import Patient, patient_streams

START = [sys.executable, "-m", "fedbatchnorm_start"]
SHORT = [
    "run",
    "--rounds",
    "4",
    "--evaluate-every",
    "2",
    "--clients",
    "4",
    "--device",
    "cpu",
    "--out",
    "runs",
]


# A model that writes as libraries in C do, whatever Python's streams are.
LOUD = """
import contextlib, os
from torch import nn
class Loud(nn.Linear):
    def forward(self, x):
        for number in (0, 1, 2):
            with contextlib.suppress(OSError):
                os.write(number, b"a warning of a library")
        return super().forward(x)
def net(shape, classes):
    return nn.Sequential(nn.Flatten(), Loud(64, classes), nn.BatchNorm1d(classes))
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shell(line):
    """The exit status of `fedbatchnorm` in a line of bash, and its errors; {f} is the command."""
    command = " ".join(f"'{word}'" for word in START)
    done = subprocess.run(
        ["bash", "-c", line.replace("{f}", command) + "\nexit ${PIPESTATUS[0]}"],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("LC_")},
    )
    return done.returncode, done.stdout, done.stderr


class Broken(io.StringIO):
    """A stream that fails after some characters."""

    def __init__(self, error, after=0):
        super().__init__()
        self.error, self.left = error, after

    def write(self, text):
        self.left -= len(text)
        if self.left < 0:
            raise self.error
        return super().write(text)


def test_a_reader_that_has_left_is_no_failure():
    stream = Patient(Broken(BrokenPipeError(), after=3))
    for _ in range(3):
        print("ab", file=stream)
        stream.flush()
    assert stream.getvalue() == "ab\n"
    assert stream.lost is None


def test_a_full_disk_is_a_failure_and_stops_nothing():
    stream = Patient(Broken(OSError(28, "No space left on device")))
    print("ab", file=stream)
    assert stream.lost.errno == 28
    closed = io.StringIO()
    closed.close()
    print("ab", file=Patient(closed))


def test_a_character_that_cannot_be_shown_is_written_otherwise():
    raw = io.BytesIO()
    stream = Patient(io.TextIOWrapper(raw, encoding="ascii"))
    print("97.1 ± 0.2 → π \udc80", file=stream)
    stream.flush()
    assert raw.getvalue() == b"97.1 +- 0.2 -> \\u03c0 \\udc80\n"
    raw = io.BytesIO()
    stream = Patient(io.TextIOWrapper(raw, encoding="utf-8"))
    print("± \udc80", file=stream)
    stream.flush()
    assert raw.getvalue() == "± \\udc80\n".encode()


def test_streams_that_are_not_there_are_made(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with patient_streams() as out:
        print("x", file=sys.stderr)
        assert not sys.stderr.isatty()
        assert sys.stdout is out
    assert sys.stderr is None


def test_a_reader_that_leaves_early_changes_nothing_about_the_work(tmp_path):
    """M1: `| true`, before a run and before a report."""
    assert shell(f"{{f}} {' '.join(SHORT)} | true")[::2] == (0, "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "summary.json").exists()
    assert shell("{f} report runs | true")[::2] == (0, "")
    assert (tmp_path / "runs" / "report" / "index.html").exists()
    (folder / "summary.json").write_text("{")
    status, _, err = shell("{f} report runs | true")
    assert status == 1  # what was asked for is not there
    assert "Traceback" not in err
    assert shell("{f} list | head -1")[::2] == (0, "")


def test_closed_streams_and_a_full_disk(tmp_path):
    """M2: no error stream, no output; what is opened later does not take their place."""
    (tmp_path / "loud.py").write_text(LOUD)
    assert shell(f"{{f}} {' '.join(SHORT)} --model loud:net 2>&- >&- <&-")[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    for file in folder.iterdir():
        assert b"a warning of a library" not in file.read_bytes(), file
    assert (folder / "summary.json").exists()
    assert shell("{f} report runs 2>&-")[0] == 0
    status, _, err = shell("{f} list > /dev/full")
    assert status == 1
    assert re.match(r"error: the standard output is incomplete: .*No space left", err)


def test_a_terminal_of_ascii_shows_all_there_is(tmp_path):
    """M7: two seeds, and so a plus-minus sign in the table."""
    code = (
        "from pathlib import Path; from fedbatchnorm.experiments.config import Run;"
        "from fedbatchnorm.experiments.runner import run_all;"
        "from fedbatchnorm.experiments import catalogue;"
        "from fedbatchnorm import cli;"
        "runs = [Run(rounds=2, clients=2, seed=s) for s in (0, 1)];"
        "catalogue.FIGURES['fig1'] = catalogue.Figure('', lambda scale, seeds: runs);"
        "cli.main(['reproduce', 'fig1', '--device', 'cpu'])"
    )
    status, out, err = shell(f'LC_ALL=C PYTHONIOENCODING=ascii {sys.executable} -c "{code}"')
    assert (status, err) == (0, "")
    assert re.search(r"0[ |]+\d+\.\d \+- \d+\.\d", out)
    assert out.isascii()
    assert (tmp_path / "runs" / "report" / "index.html").exists()


def test_ctrl_c_while_libraries_are_imported_is_quiet():
    """L14: at any of these moments after the start."""
    for wait in (0.15, 0.4, 0.8):
        process = subprocess.Popen(
            [*START, "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert "fedbatchnorm" not in err, err  # Python itself may still be starting
        assert process.returncode in (-signal.SIGINT, 130, 0, 1), err
        assert process.returncode != 1 or "site" in err or err.strip() == "KeyboardInterrupt"


def test_it_says_which_version_it_is(capsys):
    from fedbatchnorm import __version__
    from fedbatchnorm.cli import main

    main(["--version"])
    assert capsys.readouterr().out == f"fedbatchnorm {__version__}\n"
