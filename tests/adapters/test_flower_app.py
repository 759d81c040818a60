"""The small Flower app: what `fedbatchnorm new` writes, in one process and on a real federation."""

import json
import logging
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from fedbatchnorm.adapters.local import LocalGrid
from fedbatchnorm.adapters.scaffold import write_app
from fedbatchnorm.data import datasets, partition
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.recipe import Recipe, stream
from fedbatchnorm.simulation.simulator import Simulation

EXAMPLES = Path(__file__).parents[2] / "examples" / "flower"
APP = EXAMPLES / "app"
sys.path += [str(APP), str(EXAMPLES)]
from fbn_app import client_app, server_app, task  # noqa: E402
from federation import Federation, make_key  # noqa: E402

USUAL = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def run_here(tmp_path, nodes=10, app=client_app.app, **settings):
    """The app in this process; returns the final state and the accuracies by round."""
    config = USUAL | settings | {"min-nodes": nodes, "output": str(tmp_path / "model.safetensors")}
    logging.getLogger("flwr").setLevel(logging.ERROR)
    grid = LocalGrid(app, nodes, config)
    server_app.app(grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config))
    curve = json.loads((tmp_path / "model.json").read_text())
    return load_file(tmp_path / "model.safetensors"), curve


def simulation(rounds, clients=10, local_epochs=1, lr=USUAL["lr"]):
    data = datasets.load("digits")
    parts = partition.gamma_similarity(data.train.y.numpy(), clients, 0.0, stream(0, "partition"))
    how = {"clients": clients, "batch": USUAL["batch"], "rounds": rounds, "local_epochs": local_epochs}
    how |= {"lr": lr, "momentum": USUAL["momentum"], "precision": "float32"}
    how |= {"gradient": "auto", "limit": "auto"}  # what the wrapper sends
    recipe = Recipe(scheme="fbn", algorithm="fedavg", calibrate=True, **how)
    model = models.build("mlp", (1, 8, 8), 10, seed=0)
    return Simulation(model, data, parts, recipe)


def batches_of_the_simulator(twin):
    """In place of the app's own batches: those of a simulation, round 0 being the pass that calibrates."""

    def batches_of(config, client, clients, server_round, epochs):
        data, federation = task.load_data(config["dataset"]), twin.federation
        if server_round == 0:
            index, sizes = federation.survey_batches(0, 64)[1][client][None], [None]
        else:
            work = federation.work(server_round - 1)
            index, sizes = work.index[client], work.sizes[client]
        for row, size in zip(index, sizes, strict=True):
            chosen = torch.from_numpy(np.asarray(row[:size]))
            if len(chosen):
                yield data.inputs(data.train.x[chosen]), data.train.y[chosen]

    return batches_of


def test_the_example_is_what_the_command_writes(tmp_path):
    written = write_app("flower-app", tmp_path / "app")
    names = {file.relative_to(tmp_path / "app") for file in written}
    assert names == {
        p.relative_to(APP) for p in APP.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    torch_here = f"torch=={torch.__version__.partition('+')[0]}"
    for name in names:
        example = re.sub(r"torch==[\d.]+", torch_here, (APP / name).read_text())
        assert example == (tmp_path / "app" / name).read_text(), name
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert torch_here in project["project"]["dependencies"]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        write_app("flower-app", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("rounds", "epochs"), [(1, 1), (4, 1), (2, 3)])
def test_flower_and_the_simulator_agree_round_by_round(tmp_path, monkeypatch, rounds, epochs):
    """Calibration, local epochs, FedAvg: with the same batches the same numbers."""
    twin = simulation(rounds, local_epochs=epochs, lr=0.01)
    monkeypatch.setattr(client_app, "batches_of", batches_of_the_simulator(twin))
    state, _ = run_here(tmp_path, rounds=rounds, lr=0.01, **{"local-epochs": epochs})
    for _ in range(rounds):
        twin.round()
    for name, value in twin.model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            assert state[name] == value + 1  # the calibration counts
            continue
        torch.testing.assert_close(
            state[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
def test_fedavg_alone_collapses_and_with_federated_batchnorm_it_is_the_simulator_s(tmp_path):
    """Ten clients with one digit each, 15 rounds of one epoch."""
    _, ours = run_here(tmp_path, rounds=15)
    _, alone = run_here(tmp_path, rounds=15, fbn=False)
    twin = simulation(15)
    while twin.step < 15:
        twin.round()
    wanted = twin.evaluate().accuracy
    assert wanted > 0.8
    assert abs(ours["15"] - wanted) <= 0.03  # not the same batches
    assert alone["15"] < wanted - 0.3


@pytest.mark.slow
def test_a_server_process_that_is_killed_goes_on_to_the_same_result(tmp_path):
    """SIGKILL as soon as some rounds are done; a new process finishes the run."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import pathlib, test_flower_app as t\n"
        "t.run_here(pathlib.Path(sys.argv[3]), nodes=3, rounds=25, checkpoint=sys.argv[4], lr=0.01)\n"
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()

    def command(folder):
        paths = [Path(__file__).parent, APP, folder, folder / "server.safetensors"]
        return [sys.executable, "-c", code, *map(str, paths)]

    subprocess.run(command(whole), check=True, capture_output=True)
    process = subprocess.Popen(command(killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (killed / "server.safetensors").exists() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "model.safetensors").exists()
    subprocess.run(command(killed), check=True, capture_output=True)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (killed, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours["3.num_batches_tracked"] > 25  # steps, of which a round has several


# What bad nodes do on the real federation: (node, round) -> what is wrong with the reply, and its verdict.
FAULTS = {
    (1, 1): ("NaN", "non_finite"),
    (2, 1): ("negative variance", "impossible_moments"),
    (1, 2): ("wrong shape", "schema"),
    (2, 2): ("huge count", "count_out_of_range"),
}
HOSTILE = f"""
import numpy as np
from flwr.app import Array
from flwr.clientapp import ClientApp
from fedbatchnorm.norm.messages import Update
from fedbatchnorm.norm.wire import from_bytes, to_bytes
from .client_app import app as honest

FAULTS = {FAULTS!r}
app = ClientApp()

@app.train("calibrate")
def measure(message, context):
    return honest(message, context)

@app.train()
def train(message, context):
    server_round = message.content["config"]["server-round"]
    answer = honest(message, context)
    fault, _ = FAULTS.get((context.node_config["partition-id"], server_round), (None, None))
    if fault:
        record = answer.content["statistics"]
        update = from_bytes(record["update"].numpy().tobytes())
        layer, (count, mean, var) = next(iter(update.items()))
        wrong = {{
            "NaN": lambda: (count, mean * float("nan"), var),
            "negative variance": lambda: (count, mean, -var - 1),
            "wrong shape": lambda: (count, mean[:3], var[:3]),
            "huge count": lambda: (10**9, mean, var),
        }}[fault]()
        layers = {{**update, layer: type(update[layer])(*wrong)}}
        spoilt = to_bytes(Update(layers, round=update.round))
        record["update"] = Array(np.frombuffer(spoilt, dtype=np.uint8))
    return answer
"""


@pytest.mark.slow
def test_a_real_federation_withstands_bad_replies_a_node_that_dies_and_a_stranger(tmp_path):
    """A SuperLink and three SuperNodes on loopback with TLS and keys; two nodes send what no server can use
    in the first two of three rounds, one of them is killed in the third, and one more is not registered."""
    out, app = tmp_path / "out" / "model.safetensors", tmp_path / "app"
    write_app("flower-app", app)
    (app / "fbn_app" / "hostile.py").write_text(HOSTILE)
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace("fbn_app.client_app:app", "fbn_app.hostile:app"))
    with Federation(3, tmp_path) as federation:
        make_key(tmp_path, "node-3")
        federation.start_node(3)
        run = federation.submit(app, f"rounds=3 min-nodes=3 lr=0.01 timeout=45.0 output='{out}'")
        until = time.monotonic() + 180
        while (
            federation.log("supernode-2").count("Receiving: train message") < 3 and time.monotonic() < until
        ):
            time.sleep(0.1)  # until it is asked for the third time
        federation.kill(2)
        assert federation.wait(run) == "finished:completed", federation.log("superlink")[-3000:]
        processes, log = list(federation.processes.values()), federation.server_log(run)
    assert all(process.poll() is not None for process in processes)
    assert "Receiving: train message" not in federation.log("supernode-3")
    for (node, server_round), (_, reason) in FAULTS.items():
        assert f"round {server_round}: node {federation.ids[node]} left out: {reason}" in log, log[-3000:]

    def absent(message, context):
        key = context.node_config["partition-id"], message.content["config"]["server-round"]
        answer = client_app.app(message, context)
        if key in FAULTS or key == (2, 3):
            raise RuntimeError("left out")
        return answer

    (tmp_path / "here").mkdir()
    wanted, _ = run_here(tmp_path / "here", app=absent, nodes=3, rounds=3, lr=0.01)
    found = load_file(out)
    assert "round 0: statistics calibrated by 3 of 3 nodes" in log
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name].numpy(), value.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_the_app_runs_in_one_process_with_settings_from_the_command_line(tmp_path):
    def start(*arguments):
        command = [sys.executable, "-m", "fbn_app", *arguments]
        return subprocess.run(command, cwd=APP, capture_output=True, text=True, check=False)

    out = tmp_path / "model.safetensors"
    done = start("rounds=2", "lr=0.02", "batch=1000", f"output={out}")
    assert done.returncode == 0, done.stderr
    assert load_file(out)["3.num_batches_tracked"] == 1 + 2  # one step a round
    failed = start("rounds=9", "lr=1000", "local-epochs=3")
    assert failed.returncode == 1
    assert "the MODEL diverged" in failed.stderr
    for wrong, message in (("round=2", "round=2: write NAME=VALUE"), ("rounds=two", "rounds is of type int")):
        failed = start(wrong)
        assert failed.returncode == 1
        assert message in failed.stderr
        assert "Traceback" not in failed.stderr
