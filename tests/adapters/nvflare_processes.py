"""Runs of NVFlare in processes of its own, which are ended reliably."""

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

POC_LOCK = Path(tempfile.gettempdir()) / "fedbatchnorm-poc.lock"
# Submits the job when all clients are there: NVFlare starts it as soon as there are `min_clients`.
DRIVER = """
import pathlib, runpy, sys, time, types
import nvflare.recipe.poc_env as poc

clients, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])

def sleep(seconds):
    until = time.monotonic() + 120
    while seconds == poc.SERVICE_START_TIMEOUT and time.monotonic() < until:
        logs = folder.glob("example_project/prod_00/server/log.txt")
        if sum(log.read_text().count(" joined.") for log in logs) >= clients:
            break
        time.sleep(0.5)
    time.sleep(1)

poc.time = types.SimpleNamespace(sleep=sleep)
sys.argv = ["job.py", *sys.argv[3:]]
sys.path.insert(0, ".")
runpy.run_path("job.py", run_name="__main__")
"""


def processes_in(folder, part=""):
    """The processes that were started on something in this folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if str(folder) in command and part in command and process.pid != os.getpid():
            found.append(process)
    return found


@contextlib.contextmanager
def ending(folder):
    """Ends what was started on this folder, however the block ends."""
    try:
        yield
    finally:
        until = time.monotonic() + 20
        while (left := processes_in(folder)) and time.monotonic() < until:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5)


@contextlib.contextmanager
def poc_alone():
    """NVFlare's POC has one port for everybody on a machine: one test at a time."""
    with POC_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def environment(folder):
    """Of a run that leaves nothing outside its folder; POC starts what `python3` is on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    places = {"HOME": str(folder), "NVFLARE_POC_WORKSPACE": str(folder / "poc"), "PATH": path}
    # A server waits so long for the last word of a client that is gone before it calls the job completed.
    places["NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT"] = "10"
    return os.environ | places | {"OMP_NUM_THREADS": "1"}


def run_job(folder, *flags, timeout=400):
    """Run a job in NVFlare's simulator; returns what it printed, an error if it failed."""
    command = [sys.executable, "job.py", *map(str, flags)]
    with ending(folder):
        found = subprocess.run(
            command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=timeout
        )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-6000:]
    return found.stdout + found.stderr


@contextlib.contextmanager
def start_poc(folder, clients, *flags):
    """A job in POC: its process, whose output goes into out.txt."""
    command = [sys.executable, "-c", DRIVER, str(clients), str(folder / "poc"), "--env=poc", *map(str, flags)]
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(folder), stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def poc_federation(folder, clients):
    """A federation that POC has provisioned and started; nothing is submitted. It ends with the block."""
    program, env, log = Path(sys.executable).parent / "nvflare", environment(folder), folder / "poc.txt"
    with poc_alone(), ending(folder):
        # NVFlare's own wait for all to be ready has hung where the first try came too early.
        for command in (("prepare", "-n", str(clients)), ("start", "--no-wait")):
            with log.open("a") as out:  # a pipe would stay open for as long as the services run
                done = subprocess.run(
                    [program, "poc", *command],
                    cwd=folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=400,
                )
            assert done.returncode == 0, log.read_text()[-3000:]
        server = folder / "poc" / "example_project" / "prod_00" / "server" / "log.txt"

        def joined():
            return server.exists() and server.read_text().count("New client site-") >= clients

        assert wait_for(joined, 240), log.read_text()[-3000:]
        yield


def wait_for(condition, seconds):
    """Until it is true; whether it has become so."""
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def model_in(folder):
    """The model that a job has left in this folder, as arrays by name."""
    [file] = folder.rglob("FL_global_model.pt")
    return {name: value.numpy() for name, value in torch.load(file, weights_only=True)["model"].items()}


def rounds_in(text):
    """What the log says of each round: (number, asked, answered, used)."""
    found = re.findall(r"round (\d+): (\d+) asked, (\d+) answered, (\d+) used", text)
    return list(dict.fromkeys(tuple(map(int, row)) for row in found))
