"""The small NVFlare app that `fedbatchnorm new` writes: in NVFlare's simulator, and in POC."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbatchnorm.adapters.scaffold import write_app

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "nvflare" / "app"
QUICKSTART, PAGE = Path(__file__).parent / "nvflare_quickstart", ROOT / "docs" / "nvflare.md"
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "benchmarks")]
from nvflare_accuracy import simulation, written  # noqa: E402
from nvflare_processes import (  # noqa: E402
    ending,
    environment,
    model_in,
    poc_alone,
    processes_in,
    rounds_in,
    run_job,
    start_poc,
    wait_for,
)


def test_the_example_is_what_the_command_writes(tmp_path):
    files = write_app("nvflare-app", tmp_path / "app")
    names = {file.relative_to(tmp_path / "app") for file in files}
    assert names == {p.relative_to(APP) for p in APP.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    torch_here = f"torch=={torch.__version__.partition('+')[0]}"
    for name in names:
        example = re.sub(r"torch==[\d.]+", torch_here, (APP / name).read_text())
        assert example == (tmp_path / "app" / name).read_text(), name
    assert torch_here in (tmp_path / "app/requirements.txt").read_text()


def test_the_pin_is_the_version_that_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["nvflare"] == ["nvflare==2.9.*"]


FORMS = {
    "numpy, FULL": '"server_expected_format": "numpy", "params_transfer_type": "FULL",',
    "tensors, DIFF, on the disk": (
        '"server_expected_format": "pytorch", "params_transfer_type": "DIFF", '
        '"enable_tensor_disk_offload": True,'
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_nvflare_and_the_library_s_simulation_agree(tmp_path, form):
    """Calibration, local epochs, FedAvg: with the same batches the same statistics."""
    folder, rounds = written(tmp_path / "app"), 2
    job = folder / "job.py"
    job.write_text(job.read_text().replace('"name": ', f'{FORMS[form]} "name": '))
    assert job.read_text().count(FORMS[form]) == 1
    text = run_job(folder, "--clients=3", f"--rounds={rounds}", "--lr=0.01")
    assert "statistics calibrated by 3 of 3 clients" in text
    assert rounds_in(text) == [(1, 3, 3, 3), (2, 3, 3, 3)]
    state = model_in(folder / "workspace")
    sys.path.insert(0, str(folder))
    try:
        from model import model_for
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("model", None)
    twin = simulation(model_for("digits"), 3, rounds, epochs=1, lr=0.01, seed=0)
    for _ in range(rounds):
        twin.round()
    for name, value in twin.model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            assert (state[name].dtype, int(state[name])) == (
                np.int64,
                int(value) + 1,
            )  # the calibration counts
        else:
            np.testing.assert_allclose(state[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_the_job_says_at_once_that_data_are_missing(tmp_path):
    write_app("nvflare-app", tmp_path / "app")
    (tmp_path / "data").mkdir()
    nowhere = {"FEDBATCHNORM_DATA": str(tmp_path / "data"), "HTTPS_PROXY": "http://127.0.0.1:9"}
    command = [sys.executable, "job.py", "--dataset=cifar10", "--clients=2"]
    how = {"cwd": tmp_path / "app", "env": environment(tmp_path) | nowhere, "capture_output": True}
    done = subprocess.run(command, **how, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"CIFAR-10 is not in {tmp_path / 'data'} and could not be downloaded" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "app" / "workspace").exists()


@pytest.mark.slow
@pytest.mark.cifar10
def test_the_job_runs_on_cifar10(tmp_path):
    write_app("nvflare-app", tmp_path / "app")
    flags = ("--dataset=cifar10", "--clients=3", "--gamma=0.5", "--rounds=1", "--lr=0.01")
    text = run_job(tmp_path / "app", *flags)
    assert "statistics calibrated by 3 of 3 clients" in text
    assert rounds_in(text) == [(1, 3, 3, 3)]
    assert float(re.search(r"test accuracy ([\d.]+)%", text)[1]) > 25


@pytest.fixture
def converted(tmp_path):
    """The plain quickstart job, with what docs/nvflare.md says to change."""
    folder = tmp_path / "quickstart"
    shutil.copytree(QUICKSTART, folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert not any("fedbatchnorm" in file.read_text() for file in folder.iterdir())
    diff = re.search(r"```diff\n(--- a/client.py\n.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    subprocess.run(["git", "apply", "-p1", "-"], cwd=folder, input=diff, text=True, check=True)
    return folder


def test_the_diff_of_the_page_applies_to_a_plain_job(converted):
    for name in ("client.py", "job.py"):
        text = (converted / name).read_text()
        compile(text, name, "exec")
        assert "fedbatchnorm" in text


@pytest.mark.slow
def test_a_plain_job_with_the_diff_of_the_page_runs(converted):
    text = run_job(converted)
    assert "statistics calibrated by 2 of 2 clients" in text
    assert rounds_in(text) == [(number, 2, 2, 2) for number in (1, 2, 3)]
    tracked = model_in(converted / "workspace")["1.num_batches_tracked"]
    assert (tracked.dtype, int(tracked)) == (np.int64, 1 + 3 * 15)  # the calibration, and 15 steps a round


@pytest.mark.slow
def test_poc_completes_also_with_a_client_killed(tmp_path):
    """Server and clients in processes of their own: first all take part, then one is killed."""
    folder = tmp_path / "app"
    write_app("nvflare-app", folder)
    log = f"{folder}/poc/example_project/prod_00/server/*/log.txt"

    def server_says(text):
        return any(text in file.read_text() for file in Path("/").glob(log[1:]))

    flags = ("--clients=3", "--rounds=2", "--min-clients=2", "--round-timeout=20")
    with poc_alone(), ending(folder), start_poc(folder, 3, *flags) as process:
        # A round with all, and the kill as soon as the last one begins.
        wait_for(lambda: server_says("Round 2 started") or process.poll() is not None, 400)
        assert process.poll() is None, (folder / "out.txt").read_text()
        for victim in processes_in(folder, "/site-2"):
            victim.kill()
        assert wait_for(lambda: process.poll() is not None, 200), (folder / "out.txt").read_text()
        out = (folder / "out.txt").read_text()
        assert process.returncode == 0, out
        assert "test accuracy" in out
        [server] = Path("/").glob(f"{folder}/poc/example_project/prod_00/*/transfer/*/workspace/log.txt"[1:])
        text = server.read_text()
    assert "statistics calibrated by 3 of 3 clients" in text
    assert rounds_in(text) == [(1, 3, 3, 3), (2, 3, 2, 2)]
    assert "round 2: no answer from client site-2, 1 of 3 asked" in text
    assert not processes_in(folder)
