"""One call for a grid: finished runs are skipped, interrupted ones continue, processes share."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedbatchnorm.experiments import Run, Watcher, grid, sweep
from fedbatchnorm.experiments.config import digest
from fedbatchnorm.experiments.folder import RunFolder
from fedbatchnorm.experiments.progress import Progress, clock, display, in_notebook

TINY = {"rounds": 4, "evaluate_every": 2, "clients": 2, "batch": 4, "progress": False}


class Diary(Watcher):
    """What a callback is told."""

    def __init__(self):
        self.lines = []

    def begin(self, config, step):
        self.lines.append(("begin", config.scheme, step))

    def advance(self, rounds, metrics):
        if metrics is not None:
            self.lines.append(("metrics", metrics["round"]))

    def end(self, config, summary):
        self.lines.append(("end", config.scheme, summary and summary["round"]))

    def skip(self, config):
        self.lines.append(("skip", config.scheme))


def test_results_come_in_the_grid_s_order_and_finished_runs_are_skipped(tmp_path):
    diary = Diary()
    first = sweep(scheme=["naive", "fbn"], out=tmp_path, callbacks=[diary], **TINY)
    assert [result.config.scheme for result in first] == ["naive", "fbn"]
    one = [("metrics", 2), ("metrics", 4)]
    assert diary.lines[:4] == [("begin", "naive", 0), *one, ("end", "naive", 4)]
    assert diary.lines[4:] == [("begin", "fbn", 0), *one, ("end", "fbn", 4)]
    diary.lines.clear()
    more = sweep(scheme=["fbn", "none", "naive"], out=tmp_path, callbacks=[diary], **TINY)
    assert [line for line in diary.lines if line[0] != "metrics"] == [
        ("skip", "fbn"),
        ("begin", "none", 0),
        ("end", "none", 4),
        ("skip", "naive"),
    ]
    assert [more[0].summary, more[2].summary] == [first[1].summary, first[0].summary]


def test_runs_in_place_of_settings(tmp_path):
    runs = grid(scheme="naive", rounds=2) + grid(scheme="fbn", rounds=3, clients=2)
    results = sweep(runs, out=tmp_path, progress=False)
    assert [result.config for result in results] == runs
    with pytest.raises(ValueError, match="runs are given, and scheme, too"):
        sweep(runs, scheme="fbn", out=tmp_path)


def test_nothing_is_run_and_no_folder_made_where_a_setting_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="scheme is 'fbm'"):
        sweep(scheme=["fbn", "fbm"], out=tmp_path / "runs", **TINY)
    assert not (tmp_path / "runs").exists()


class Interrupting(Watcher):
    """Ctrl-C after some rounds."""

    def __init__(self, after, number=signal.SIGINT):
        self.left, self.number = after, number

    def advance(self, rounds, metrics):
        self.left -= rounds
        if self.left == 0:
            signal.raise_signal(self.number)


def test_ctrl_c_saves_and_the_same_call_continues_to_the_same_result(tmp_path):
    settings = TINY | {"scheme": ["fbn", "naive"], "rounds": 6}
    whole = sweep(out=tmp_path / "whole", **settings)
    diary, handler = Diary(), signal.getsignal(signal.SIGINT)  # ignored where tests run in the background
    with pytest.raises(KeyboardInterrupt, match=r"stopped at round 3 of 6 .*; the same call continues there"):
        sweep(out=tmp_path / "cut", callbacks=[diary, Interrupting(9)], **settings)
    assert diary.lines[-1] == ("end", "naive", None)
    assert signal.getsignal(signal.SIGINT) is handler
    diary.lines.clear()
    again = sweep(out=tmp_path / "cut", callbacks=[diary], **settings)
    assert [line for line in diary.lines if line[0] != "metrics"] == [
        ("skip", "fbn"),
        ("begin", "naive", 3),
        ("end", "naive", 6),
    ]
    for before, after in zip(whole, again, strict=True):
        same = [{k: v for k, v in row.items() if k != "seconds"} for row in before.metrics]
        assert [{k: v for k, v in row.items() if k != "seconds"} for row in after.metrics] == same


def test_a_wish_to_terminate_is_heard(tmp_path):
    with pytest.raises(SystemExit) as caught:
        sweep(scheme="fbn", out=tmp_path, callbacks=[Interrupting(2, signal.SIGTERM)], **TINY)
    assert caught.value.code == 128 + signal.SIGTERM


def test_a_callback_that_fails_ends_the_run_that_it_was_told_of(tmp_path):
    class Failing(Watcher):
        def advance(self, rounds, metrics):
            raise RuntimeError("the disk of the dashboard is full")

    diary = Diary()
    with pytest.raises(RuntimeError, match="dashboard"):
        sweep(scheme="fbn", out=tmp_path, callbacks=[diary, Failing()], **TINY)
    assert diary.lines == [("begin", "fbn", 0), ("end", "fbn", None)]
    assert len(sweep(scheme="fbn", out=tmp_path, **TINY)) == 1


def test_a_run_that_another_process_is_at_is_waited_for(tmp_path):
    settings = {k: v for k, v in TINY.items() if k != "progress"}
    taken, free = Run(scheme="naive", **settings), Run(scheme="fbn", **settings)
    open_now, diary = threading.Event(), Diary()

    def hold():
        with RunFolder(tmp_path, taken).open():
            open_now.set()
            while not RunFolder(tmp_path, free).finished():
                time.sleep(0.01)
            time.sleep(0.2)

    other = threading.Thread(target=hold)
    other.start()
    open_now.wait(10)
    results = sweep([taken, free], out=tmp_path, callbacks=[diary], progress=False)
    other.join()
    assert [result.config for result in results] == [taken, free]
    assert [line[1] for line in diary.lines if line[0] == "begin"] == ["fbn", "naive"]


@pytest.mark.slow
def test_processes_share_a_folder(tmp_path):
    code = (
        "import json, sys\nfrom fedbatchnorm.experiments import Watcher, sweep\n"
        "class Count(Watcher):\n"
        "    begun = 0\n"
        "    def begin(self, config, step):\n"
        "        self.begun += 1\n"
        "count = Count()\n"
        "found = sweep(scheme=['fbn', 'naive'], seed=range(4), rounds=60,\n"
        "    out=sys.argv[1], callbacks=[count])\n"
        "print(json.dumps([count.begun, [r.name for r in found]]))\n"
    )
    command, environment = [sys.executable, "-c", code, str(tmp_path)], os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        for _ in range(2)
    ]
    answers = []
    for process in started:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err.decode()
        assert err == b""  # not a terminal: no bar
        answers.append(json.loads(out))
    assert sum(begun for begun, _ in answers) == 8
    assert all(begun > 0 for begun, _ in answers)
    wanted = [digest(run) for run in grid(scheme=["fbn", "naive"], seed=range(4), rounds=60)]
    assert answers[0][1] == answers[1][1] == wanted


class Shown:
    """A display that keeps what it is told."""

    def __init__(self):
        self.states, self.closed = [], False

    def update(self, text, outcome, done, total):
        self.states.append((text, outcome, done, total))

    def close(self):
        self.closed = True


def test_what_is_done_and_left_is_counted(monkeypatch):
    shown = Shown()
    monkeypatch.setattr("fedbatchnorm.experiments.progress.display", lambda: shown)
    runs = [Run(seed=seed, rounds=10) for seed in range(4)]
    with Progress(4) as progress:
        progress.expect(runs)
        progress.skip(runs[0])
        progress.leave(runs[1])
        progress.begin(runs[2], 4)
        progress.advance(6, {"accuracy": 0.5})
        progress.begin(runs[3], 0)
        progress.advance(10, None)
    assert shown.closed
    assert shown.states[0] == ("", "", 0, 40)
    assert shown.states[2] == ("2/4 digits, fbn, gamma 0, seed 2", "accuracy 50.0%", 6, 16)
    assert shown.states[-1] == ("3/4 digits, fbn, gamma 0, seed 3", "", 16, 16)
    assert (progress.done, progress.skipped, progress.take_left()) == (3, 1, [runs[1]])


def test_a_notebook_has_a_bar_of_its_own(monkeypatch, capsys):
    class ZMQInteractiveShell:
        pass

    assert not in_notebook()
    assert display() is None  # not a terminal either
    kernel = type(sys)("IPython")
    kernel.get_ipython = ZMQInteractiveShell
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert in_notebook()
    with Progress(1) as progress:
        run = Run(rounds=8)
        progress.expect([run])
        progress.begin(run, 0)
        progress.advance(8, {"accuracy": 0.25})
    shown = capsys.readouterr().err
    assert "1/1 digits, fbn, gamma 0, seed 0: 100%" in shown
    assert "accuracy 25.0%" in shown
    assert clock(59.6) == "1:00"


def test_the_example_is_a_script_of_twenty_lines_that_anybody_can_read_the_results_of(tmp_path):
    """What it makes is read here, where nothing is known of its scheme, dataset and partition."""
    from fedbatchnorm.experiments import read

    script = Path(__file__).parents[2] / "examples" / "own_experiment.py"
    assert len([line for line in script.read_text().splitlines() if line.strip()]) <= 25
    environment = os.environ | {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "own_runs",
        "own_experiment.csv",
        "own_experiment.png",
    }
    assert len((tmp_path / "own_experiment.csv").read_text().splitlines()) == 1 + 6
    assert (tmp_path / "own_experiment.png").read_bytes().startswith(b"\x89PNG")
    results = read(tmp_path / "own_runs")
    assert not results.left_out
    assert str(results) in done.stdout
    table = results.summary().set_index("scheme")
    assert set(table.index) == {"fbn", "naive", "pooled"}
    assert table.accuracy["fbn"] > 0.9 > 0.5 > table.accuracy["naive"]
    assert {part.kind for part in results[-1].config.own} == {"scheme", "dataset", "partition"}
