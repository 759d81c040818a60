"""The command, as a user meets it."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import textwrap
import time
import tomllib

import pandas
import pytest
import torch

from fedbatchnorm import flags
from fedbatchnorm.aggregation.attacks import ATTACKS
from fedbatchnorm.cli import COMMANDS, main
from fedbatchnorm.data.datasets import DATASETS
from fedbatchnorm.data.partition import PARTITIONS
from fedbatchnorm.experiments import grids
from fedbatchnorm.experiments.catalogue import FIGURES
from fedbatchnorm.experiments.config import Run, digest
from fedbatchnorm.experiments.folder import RunFolder
from fedbatchnorm.experiments.runner import Options, Stopped, run_all
from fedbatchnorm.simulation.models import MODELS
from fedbatchnorm.simulation.schemes import SCHEMES

SHORT = ["--rounds", "6", "--evaluate-every", "3", "--clients", "4", "--device", "cpu"]
COMMAND = [sys.executable, "-c", "from fedbatchnorm.cli import main; main()"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(capsys, *arguments):
    """Exit status, output and errors of a command."""
    try:
        main([str(a) for a in arguments])
        status = 0
    except SystemExit as stop:
        status = stop.code or 0
    return (status, *capsys.readouterr())


def test_list_names_everything(capsys):
    status, out, _ = call(capsys, "list")
    assert status == 0
    for name in (*SCHEMES, *DATASETS, *PARTITIONS, *MODELS, *FIGURES):
        assert re.search(rf"^  {name} ", out, re.MULTILINE), name


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=str)
def test_help_is_there_for_everything(capsys, command):
    status, out, _ = call(capsys, *command, "--help")
    assert status == 0
    assert len(out) > 200


def test_a_run_ends_with_its_accuracy_and_is_not_run_twice(capsys, tmp_path):
    status, out, err = call(capsys, "run", "--scheme", "naive", *SHORT)
    assert status == 0
    assert "final accuracy" in out
    assert err == ""  # not a terminal: no progress bar
    folder = tmp_path / "runs" / digest(Run(scheme="naive", rounds=6, evaluate_every=3, clients=4))
    assert str(folder.relative_to(tmp_path)) in out
    accuracy = json.loads((folder / "summary.json").read_text())["accuracy"]
    assert f"final accuracy {100 * accuracy:.2f}%" in out
    status, again, _ = call(capsys, "run", "--scheme", "naive", *SHORT)
    assert status == 0
    assert "1 of them finished before" in again


def test_report_draws_what_has_run(capsys, tmp_path):
    call(capsys, "run", *SHORT, "--out", "a")
    status, out, _ = call(capsys, "report", "a")
    assert status == 0
    assert "report: a/report/index.html" in out
    page = (tmp_path / "a/report/index.html").read_text()
    assert "<h2>Accuracy at gamma 0: FBN on digits</h2>" in page  # one run is no figure of the paper
    assert "Figure" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def test_reproduce_runs_a_figure_and_draws_it(capsys, tmp_path):
    status, out, _ = call(capsys, "reproduce", "fig2", "--seeds", "1", "--device", "cpu")
    assert status == 0
    assert "mean distance of the normalized points" in out
    assert (tmp_path / "runs/report/fig2.png").exists()


CIFAR10 = pytest.param("cifar10", marks=pytest.mark.cifar10)


@pytest.mark.parametrize("name", [CIFAR10, "digits", "gaussian_ring"])
def test_data_is_described_and_a_split_is_drawn(capsys, tmp_path, name):
    status, out, _ = call(capsys, "data", name, "--split", "dirichlet", "--plot", "p.svg")
    assert status == 0
    assert f"{name}: " in out
    assert (tmp_path / "p.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--scheme", "fbm"], "scheme is 'fbm'; it must be one of centralized, fbn, fixbn, naive"),
        (["run", "--dataset", "kmnist"], "it must be one of gaussian_ring, digits, cifar10"),
        (["run", "--partition", "x"], "it must be one of iid, gamma, dirichlet"),
        (["run", "--model", "x"], "it must be one of cnn, cnn16, mlp, resnet20"),
        (["run", "--gamma", "2"], "gamma is 2.0"),
        (["run", "--scheme", "fbn,fbm"], "scheme is 'fbm'"),
        (
            ["run", "--scheme", "groupnorm", "--gradient", "1"],
            "gradient is given, but scheme groupnorm does not",
        ),
        (["run", "--groups", "4"], "groups is given, but scheme fbn does not use it"),
        (["run", "--alpha", "1"], "alpha is given, but partition is gamma"),
        (["run", "--clients", "5000"], "clients is 5000; it must be between 1 and 1433"),
        (["run", "--device", "toaster"], "choose auto, cpu, cuda or mps"),
        (["run", "--device", "meta"], "choose auto, cpu, cuda or mps"),
        (["run", "--batch", "1", "--scheme", "naive"], "more than 1 value per channel"),
        (["run", "--model", "nowhere:f"], "cannot be imported"),
        (["run", "--dataset", "gaussian_ring", "--model", "cnn"], "use mlp"),
        (["reproduce", "fig99"], "choose from fig1, fig2, fig3, fig4, fig5, fig6, fig7"),
        (["reproduce", "fig1", "--seeds", "0"], "seeds is 0"),
        (["report", "nowhere"], "nowhere is neither a folder of runs nor"),
        (["report", "."], "holds no finished run"),
        (["data", "kmnist"], "choose from gaussian_ring, digits, cifar10"),
        (["demo", "--seeds", "0"], "seeds is 0"),
        (["demo", "--seeds", "9" * 20], f"seeds is {'9' * 20}; it must be between 1 and 1000"),
        (["reproduce", "all", "--seeds", "1001"], "seeds is 1001; it must be between 1 and 1000"),
        (["run", "--defense", "clipping:-1+median"], "defense is 'clipping:-1+median'"),
        (["run", "--defense", "centred_clipping:nan"], "defense is 'centred_clipping:nan'"),
        (["run", "--checkpoint-seconds", "nan"], "checkpoint_seconds is nan; it must be at least 0"),
        (["run", "--checkpoint-seconds", "-1"], "checkpoint_seconds is -1"),
        (["run", "--batch", "100000000"], "batch is 100000000; digits has 1433 training samples"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_mistake_gets_one_clear_line(capsys, arguments, message):
    status, _, err = call(capsys, *arguments)
    assert status == 1
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [["run", "--devise", "cpu"], ["frobnicate"], ["run", "--rounds", "x"], []], ids=str
)
def test_a_wrong_flag_is_explained(capsys, arguments):
    status, _, err = call(capsys, *arguments)
    assert status == 2
    assert "help" in err


def test_missing_data_says_where_to_put_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("fedbatchnorm.data.cifar10.URL", "http://127.0.0.1:9/x.tar.gz")
    monkeypatch.setattr(
        "fedbatchnorm.data.cifar10.download.__defaults__", (False, "http://127.0.0.1:9/x.tar.gz", "0")
    )
    status, _, err = call(
        capsys, "run", "--dataset", "cifar10", "--data-dir", tmp_path / "data", "--device", "cpu"
    )
    assert status == 1
    assert "To put it there by hand" in err
    assert not (tmp_path / "runs").exists()


def test_a_model_of_the_user_s_own_from_the_current_folder(capsys, tmp_path):
    (tmp_path / "my_net_for_the_command.py").write_text(
        textwrap.dedent("""
        from torch import nn
        def net(shape, classes):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, classes))
    """)
    )
    status, out, err = call(capsys, "run", "--model", "my_net_for_the_command:net", *SHORT)
    assert (status, err) == (0, "")
    assert "final accuracy" in out


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path):
    arguments = ["run", "--rounds", "3000", "--evaluate-every", "50", "--device", "cpu", "--out", "runs"]
    folder = RunFolder(tmp_path / "runs", Run(rounds=3000, evaluate_every=50))
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True)
    while not folder.metrics_file.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert re.search(r"stopped at round \d+ of 3000 .*Run the same command again to continue", err)
    assert "Traceback" not in err
    assert folder.checkpoints[0].exists()
    assert not folder.finished()


@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl", "model.safetensors", "config.json"])
def test_a_damaged_run_is_named_and_run_again(capsys, tmp_path, file):
    _, first, _ = call(capsys, "run", *SHORT)
    (folder,) = (tmp_path / "runs").iterdir()
    (folder / file).write_text("{")
    with pytest.warns(UserWarning, match=rf"a damaged run is run again \(runs/{folder.name}/{file}[:,]"):
        status, out, _ = call(capsys, "run", *SHORT)
    assert status == 0
    assert next(line for line in out.splitlines() if "accuracy" in line) in first
    assert (folder / f"{file}.damaged").read_text() == "{"
    assert call(capsys, "report", "runs")[0] == 0


def test_a_reproduction_runs_what_is_damaged_again(capsys, tmp_path):
    arguments = ["reproduce", "fig1", "--device", "cpu"]
    call(capsys, *arguments)
    damaged = [path for path in sorted((tmp_path / "runs").iterdir()) if path.name != "report"]
    for folder, file in zip(damaged, ("summary.json", "config.json"), strict=True):
        (folder / file).write_text("{")
    with pytest.warns(UserWarning, match="a damaged run is run again"):
        status, out, err = call(capsys, *arguments)
    assert (status, err) == (0, "")
    assert "finished before" not in out
    assert call(capsys, *arguments)[1].count("2 of them finished before") == 1


def test_a_reproduction_without_all_of_its_runs_is_not_a_success(capsys, tmp_path):
    """Another process is at one of them."""
    (run, *_) = FIGURES["fig1"].runs("small", 1)
    with RunFolder(tmp_path / "runs", run).open():
        status, out, err = call(capsys, "reproduce", "fig1", "--device", "cpu")
    assert status == 1
    assert "1 of 2 runs are not there" in err
    assert "report: " in out
    assert call(capsys, "reproduce", "fig1", "--device", "cpu")[0] == 0


def test_a_file_in_the_current_folder_does_not_stand_in_for_a_library(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise SystemExit('executed')")
    done = subprocess.run([*COMMAND[:1], "-P", *COMMAND[1:], "run", *SHORT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_closed_pipe_is_no_error(tmp_path):
    process = subprocess.Popen([*COMMAND, "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait()


def frames(width, *arguments):
    """What a terminal of this width shows, line by line, each state of a line one after another."""
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, width))
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=child, stdout=child, stderr=child, env=environment
    )
    os.close(child)
    shown = b""
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(parent)
    assert process.wait() == 0, shown.decode()
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]+", shown.decode())]


@pytest.mark.parametrize("width", [150, 80, 60, 40])
def test_on_a_terminal_there_is_a_bar_with_accuracy_and_time_left(width):
    arguments = ["run", "--rounds", "500", "--evaluate-every", "10", "--device", "cpu", "--gamma", "0.123,1"]
    lines = frames(width, *arguments, "--seed", "0")
    bars = [line for line in lines if re.search(r"accuracy \d+\.\d%  ?\d+:\d\d left$", line)]
    assert bars
    assert max(map(len, bars)) == width
    assert all("━" in line for line in bars)
    run = "1/2 digits, fbn, gamma 0.123, seed 0"
    assert any(line.startswith(run if width >= 80 else run[:6]) for line in bars)
    assert any(line.startswith("2/2 ") for line in bars)


@pytest.mark.slow
def test_the_demo_shows_what_it_promises(capsys, tmp_path):
    """At gamma 0 FBN is within 1.5 points of centralized training, and naive at least 15 below."""
    status, out, _ = call(capsys, "demo")
    assert status == 0
    row = re.search(r"^ +0  +(.*)$", out[out.index("final test accuracy") :], re.MULTILINE).group(1)
    central, fbn, _, naive = (float(cell) for cell in re.findall(r"([\d.]+) ±", row))
    assert abs(central - fbn) <= 1.5
    assert naive <= central - 15
    assert re.search(r"report: out/demo/report/index.html", out)
    page = (tmp_path / "out/demo/report/index.html").read_text()
    for figure in ("Figure 1", "Figure 2", "Figure 3"):
        assert figure in page
    levels = re.findall(r"^ +(\S+)  +[\d.]+ ± ", out, re.MULTILINE)
    assert levels == ["1", "0.1", "0"]


def test_runs_are_collected_and_need_not_be_run_again(capsys, tmp_path):
    call(capsys, "run", *SHORT, "--out", "a")
    status, out, _ = call(capsys, "collect", "a", "kept.runs.jsonl")
    assert (status, out) == (0, "kept.runs.jsonl: 1 runs, 1 of them new\n")
    status, out, _ = call(capsys, "report", "kept.runs.jsonl", "--out", "page")
    assert status == 0
    assert (tmp_path / "page" / "index.html").is_file()
    status, out, _ = call(capsys, "report", "a", "--markdown", "page.md")
    assert (status, out) == (0, "page.md\n")
    assert "| FBN |" in (tmp_path / "page.md").read_text()
    for wrong in (["collect", "a", "kept.json"], ["collect", "b", "kept.runs.jsonl"], ["report", "page.md"]):
        status, out, err = call(capsys, *wrong)
        assert status == 1
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_a_reproduction_takes_over_what_is_known(capsys, tmp_path):
    runs = [Run(gamma=0.0, seed=0, scheme=s, precision="bf16", rounds=2) for s in ("fbn", "naive")]
    for run in runs:
        call(capsys, "run", "--scheme", run.scheme, "--precision", "bf16", "--rounds", "2", "--out", "a")
    call(capsys, "collect", "a", "kept.runs.jsonl")
    status, _, err = call(capsys, "reproduce", "fig1", "--known", "nothing", "--device", "cpu")
    assert (status, err.startswith("error: nothing is neither a folder of runs nor")) == (1, True)
    status, out, _ = call(capsys, "reproduce", "fig1", "--known", "kept.runs.jsonl", "--device", "cpu")
    assert status == 0
    assert "2 runs on" in out


def test_a_warning_is_one_line(tmp_path):
    (tmp_path / "own.py").write_text(
        "import warnings\nfrom torch import nn\n"
        "def net(shape, classes):\n"
        "    warnings.warn('mind the gap')\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), nn.BatchNorm1d(classes))\n"
    )
    done = subprocess.run([*COMMAND, "run", "--model", "own:net", *SHORT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "warning: mind the gap\n"


@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM"])
def test_other_signals_save_as_ctrl_c_does(tmp_path, name):
    """A terminal that goes says so twice, which is not a second wish to stop."""
    number = getattr(signal, name)
    arguments = ["run", "--rounds", "30000", "--evaluate-every", "50", "--device", "cpu", "--out", "runs"]
    folder = RunFolder(tmp_path / "runs", Run(rounds=30000, evaluate_every=50))

    def listen():  # the tests themselves may run under nohup
        signal.signal(number, signal.SIG_DFL)

    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, preexec_fn=listen)
    while not folder.metrics_file.exists() and process.poll() is None:
        time.sleep(0.02)
    for _ in range(2 if name == "SIGHUP" else 1):
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert re.search(r"stopped at round \d+ of 30000", err)
    assert folder.checkpoints[0].exists()


def test_under_nohup_a_terminal_that_goes_is_nothing(tmp_path):
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    folder = RunFolder(tmp_path / "runs", Run(rounds=300, evaluate_every=10))
    arguments = ["run", "--rounds", "300", "--evaluate-every", "10", "--device", "cpu"]
    process = subprocess.Popen([*COMMAND, *arguments], preexec_fn=ignore, stdout=subprocess.DEVNULL)
    while not folder.metrics_file.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    assert folder.finished()


def test_a_corrupt_environment_does_not_block_a_run(capsys, tmp_path, monkeypatch):
    """No result depends on it: it is put aside, and the run continues where it was."""
    config = Run(rounds=6, evaluate_every=3, clients=4)
    answers = iter([False] * 3 + [True])
    with pytest.raises(Stopped):
        run_all([config], tmp_path / "runs", Options(stop=lambda: next(answers)))
    folder = RunFolder(tmp_path / "runs", config)
    (folder.path / "environment.json").write_text('[{"a": ')
    with pytest.warns(UserWarning, match="the record of the run's earlier sessions is lost"):
        status, out, _ = call(capsys, "run", *SHORT)
    assert (status, "final accuracy" in out) == (0, True)
    assert json.loads((folder.path / "environment.json").read_text())[0]["from_round"] == 4


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError("Unable to allocate 5 TiB"), "5 TiB"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            "can't allocate",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), "Tried to allocate 9 GiB"),
    ],
    ids=["numpy", "CPU", "CUDA"],
)
def test_out_of_memory_is_one_line(capsys, monkeypatch, error, message):
    def full(*_, **__):
        raise error

    monkeypatch.setattr("fedbatchnorm.cli.run_all", full)
    status, _, err = call(capsys, "run", *SHORT)
    assert status == 1
    assert re.search(rf"^error: out of memory: a smaller --batch.*{message}", err)
    monkeypatch.setattr("fedbatchnorm.cli.run_all", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # what is no lack of memory is not called one
        call(capsys, "run", *SHORT)


MODULES = {
    "raises": ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
    "does not parse": ("def f(:", "cannot be imported: SyntaxError: "),
    "exits": ("raise SystemExit('bye')", "cannot be imported: SystemExit: bye"),
    "fails": ("def f(): raise KeyError('x')", "cannot be made: KeyError: 'x'"),
}


@pytest.mark.parametrize("kind", MODULES)
def test_a_model_s_module_that_fails_is_one_line(capsys, tmp_path, kind):
    text, message = MODULES[kind]
    name = f"own_model_that_{kind.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(text + "\n")
    status, _, err = call(capsys, "run", "--model", f"{name}:f", *SHORT)
    assert status == 1
    assert err.startswith(f"error: model '{name}:f' {message}")
    assert f"{name}.py, line 1" in err
    assert err.count("\n") == 1


def test_a_grid_ends_with_a_table_and_is_not_run_twice(capsys, tmp_path):
    grid = ["run", "--scheme", "naive,fbn", "--gamma", "0,1", "--seed", "0..2", *SHORT, "--out", "a"]
    status, out, err = call(capsys, *grid)
    assert (status, err) == (0, "")
    assert out.startswith("12 runs on ")
    assert "digits, mlp, 4 clients, batch 10, 6 rounds: final test accuracy (%), mean ± sd over seeds" in out
    rows = {line.split()[0]: line for line in out.splitlines() if "±" in line and "sd" not in line}
    assert list(rows) == ["1", "0"]
    assert re.search(r"^ +gamma +FBN +Naive BN", out, re.MULTILINE)
    short = {"rounds": 6, "evaluate_every": 3, "clients": 4}
    found = [
        json.loads(
            (tmp_path / "a" / digest(Run(scheme="naive", seed=seed, **short)) / "summary.json").read_text()
        )
        for seed in range(3)
    ]
    mean = 100 * sum(summary["accuracy"] for summary in found) / 3
    assert re.search(rf"{mean:.1f} ± \S+ *$", rows["0"])
    assert "12 of them finished before" in call(capsys, *grid)[1]


def test_a_grid_goes_into_a_file_and_comes_out_of_it(capsys, tmp_path):
    grid = ["--scheme", "naive,fbn", "--gamma", "0.5,1", "--seed", "0..1", "--limit", "none,2", "--calibrate"]
    status, out, _ = call(capsys, "run", *grid, "--rounds", "2", "--write-config", "new/run.toml")
    assert (status, out) == (0, "12 runs described in new/run.toml: fedbatchnorm run --config new/run.toml\n")
    assert not (tmp_path / "runs").exists()
    text = (tmp_path / "new" / "run.toml").read_text()
    assert 'scheme = ["naive", "fbn"]\nlimit = ["none", 2.0]\ncalibrate = true\n' in text
    assert "# alpha = 0.1\n" in text
    assert set(tomllib.loads(text)) == {"scheme", "gamma", "seed", "limit", "calibrate", "rounds"}
    given = flags.read_toml(tmp_path / "new" / "run.toml")
    assert {digest(run) for run in flags.runs_of(given)} == {
        digest(run)
        for run in grids.grid(
            scheme=["naive", "fbn"],
            gamma=[0.5, 1.0],
            seed=[0, 1],
            limit=[None, 2.0],
            calibrate=True,
            rounds=2,
        )
    }
    naive = ["--scheme", "naive", "--seed", "5", "--gamma", "1"]
    status, _, err = call(capsys, "run", "--config", "new/run.toml", *naive)
    assert (status, err.startswith("error: limit is given, but scheme naive does not use it")) == (1, True)
    (tmp_path / "b.toml").write_text("scheme = 'naive'\nevaluate-every = 1\nseed = '3..4'\ngamma = 1\n")
    status, out, err = call(capsys, "run", "--config", "b.toml", "--rounds", "2", "--seed", "7")
    assert (status, err) == (0, "")
    run = Run(scheme="naive", evaluate_every=1, seed=7, gamma=1.0, rounds=2)
    assert f"run folder: runs/{digest(run)}" in out


def test_every_flag_of_a_run_goes_through_a_file(tmp_path):
    """What `--write-config` comments out can be read when the comment sign is taken away."""
    flags.write_toml(tmp_path / "all.toml", {})
    lines = (tmp_path / "all.toml").read_text().splitlines()
    settings = [line.removeprefix("# ") for line in lines if re.match(r"# \w+ = .", line)]
    unset = [line for line in lines if re.match(r"# \w+ =$", line)]
    assert len(settings) + len(unset) == len(grids.FIELDS)
    (tmp_path / "some.toml").write_text("\n".join(settings))
    found = flags.read_toml(tmp_path / "some.toml")
    assert Run(**{name: value for name, (value,) in found.items()}) == Run()


FILES = {
    "missing": (None, "f.toml is not there: --write-config f.toml writes one"),
    "not TOML": ("scheme = fbn", "f.toml is not TOML: Invalid value (at line 1, column 10)"),
    "unknown": ("color = 1", "f.toml: a run has no 'color'"),
    "a table": ("[scheme]\nname = 'fbn'", "f.toml: scheme must be a value or a list of values"),
    "nothing": ("seed = []", "f.toml: seed must be a value or a list of values"),
    "no number": ("gamma = 'x'", "f.toml: gamma is 'x'; it must be numbers"),
    "a wrong type": ("seed = 1.5", "seed is 1.5"),
    "a wrong name": ("scheme = ['fbn', 'fbm']", "scheme is 'fbm'; it must be one of centralized, fbn"),
}


@pytest.mark.parametrize("kind", FILES)
def test_what_is_wrong_with_a_file_of_settings_is_one_line(capsys, tmp_path, kind):
    text, message = FILES[kind]
    if text is not None:
        (tmp_path / "f.toml").write_text(text)
    status, _, err = call(capsys, "run", "--config", "f.toml")
    assert status == 1
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_file_of_settings_is_not_overwritten(capsys, tmp_path):
    (tmp_path / "f.toml").write_text("mine")
    status, _, err = call(capsys, "run", "--write-config", "f.toml")
    assert (status, err) == (1, "error: f.toml is there already: give another name, or remove it\n")
    assert (tmp_path / "f.toml").read_text() == "mine"


VALUES = {
    "--seed 4..0": "--seed: seed is 4..0; the first of a range must be below the last",
    "--gamma 0..1": "--gamma: gamma is '0..1'; it must be numbers; 0..4 is for whole numbers: list values",
    "--scheme fbn,": "--scheme: scheme is ''; it must be names",
    "--rounds 3,x": "--rounds: rounds is 'x'; it must be whole numbers or none",
    "--algorithm sgd": "--algorithm: algorithm is 'sgd'; it must be dsgd or fedavg",
    "--augment maybe": "--augment: augment is 'maybe'; it must be true or false",
}


@pytest.mark.parametrize("flag", VALUES)
def test_a_value_that_is_none_is_one_line(capsys, flag):
    status, _, err = call(capsys, "run", *flag.split())
    assert (status, err) == (2, f"error: {VALUES[flag]} (see fedbatchnorm run --help)\n")


def test_help_has_the_choices_and_examples(capsys):
    _, out, _ = call(capsys, "run", "--help")
    words = re.sub(r"[\s│]+", " ", out)
    for names in (SCHEMES, DATASETS, PARTITIONS, ["none", *ATTACKS]):
        assert ", ".join(name for name in names if name != "none") in words or ", ".join(names) in words
    for name in (*MODELS, "--scheme fbn,naive --gamma 0,0.1,1 --seed 0..4", "--config run.toml"):
        assert name in words


def test_own_objects_are_named_as_file_and_name(capsys, tmp_path):
    (tmp_path / "own_parts_for_the_command.py").write_text(
        "import numpy as np\nfrom fedbatchnorm import experiments as fx\n"
        "pooled = fx.scheme('pooled', fx.with_own_batch, fx.merge_exactly)\n"
        "def shards(labels, clients, rng, each=1):\n"
        "    return np.array_split(np.argsort(labels, kind='stable'), clients)\n"
        "def hush(honest):\n    return 0 * honest[0]\n"
    )
    own = "own_parts_for_the_command"
    parts = ["--partition", f"{own}:shards", "--attack", f"{own}:hush", "--byzantine", "1"]
    status, out, err = call(capsys, "run", "--scheme", f"naive,{own}:pooled", *parts, *SHORT)
    assert (status, err) == (0, "")
    assert re.search(r"each +Naive BN +pooled", out)
    status, _, err = call(capsys, "run", "--scheme", f"{own}:nothing")
    assert status == 1
    assert err.startswith(f"error: scheme '{own}:nothing' cannot be imported: AttributeError")
    assert err.count("\n") == 1


def test_a_divergence_is_said_in_words(capsys):
    away = ["--lr", "1e9", *SHORT]
    status, out, _ = call(capsys, "run", *away)
    assert status == 0
    line = r"^diverged: accuracy \d+\.\d%, which is chance .*, and the loss is not finite from round 3 on$"
    assert re.search(line, out, re.MULTILINE)
    _, out, _ = call(capsys, "run", *away, "--seed", "0,1")
    assert re.search(r"\d+\.\d ± \d+\.\d, 2 of 2 diverged", out)
    assert out.count(": diverged: accuracy") == 2


def test_a_grid_without_all_of_its_runs_is_not_a_success(capsys, tmp_path):
    """Another process is at one of them."""
    with RunFolder(tmp_path / "runs", Run(seed=1, rounds=6, evaluate_every=3, clients=4)).open():
        status, out, err = call(capsys, "run", "--seed", "0,1", *SHORT)
    assert status == 1
    assert "1 of 2 runs are not there" in err
    assert "1 of them are still being run by other processes" in out
    assert call(capsys, "run", "--seed", "0,1", *SHORT)[0] == 0


def test_runs_are_written_as_a_table(capsys, tmp_path):
    call(capsys, "run", "--scheme", "fbn,naive", *SHORT, "--out", "a")
    status, out, err = call(capsys, "report", "a", "--csv", "runs.csv", "--csv-curves", "curves.csv")
    assert (status, err) == (0, "")
    assert out == "runs.csv: 2 runs\ncurves.csv: 2 runs, a row for each evaluation\n"
    runs = pandas.read_csv(tmp_path / "runs.csv")
    assert runs.scheme.tolist() == ["fbn", "naive"]
    assert len(pandas.read_csv(tmp_path / "curves.csv")) == 4
    assert not (tmp_path / "a" / "report").exists()
    assert call(capsys, "report", "a", "--csv", "x.csv", "--markdown", "x.md")[0] == 1
    status, _, err = call(capsys, "report", ".", "--csv", "x.csv", "--allow-damaged")
    assert status == 0


def test_a_table_on_a_narrow_terminal_loses_nothing():
    lines = frames(40, "run", "--scheme", "fbn,naive", "--lr", "1e9", "--seed", "0,1", *SHORT)
    table = lines[next(i for i, line in enumerate(lines) if "final test accuracy" in line) :]
    assert "…" not in "".join(table)
    rows = [re.split(r" {2,}", line.strip()) for line in table if line.startswith("  ")]
    fbn, naive = ("".join(row[column] for row in rows if len(row) > column) for column in (1, 2))
    assert re.search(r"\d+\.\d±\d+\.\d,2of2diverged", fbn.replace(" ", ""))
    assert naive.replace(" ", "").startswith("Naive")


def test_a_report_of_a_file_without_runs_does_not_advise_to_run_into_it(capsys, tmp_path):
    (tmp_path / "none.runs.jsonl").write_text("")
    status, _, err = call(capsys, "report", "none.runs.jsonl")
    assert (status, err) == (1, "error: none.runs.jsonl holds no finished run\n")
