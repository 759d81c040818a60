"""The environment of a run: versions, device, commit."""

import functools
import os
import platform
import re
import subprocess
import time
from pathlib import Path

import numpy
import torch

from .. import __version__


def choose_device(name: str = "auto") -> torch.device:
    """The device of this name; `auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("nothing here is written for it")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0][:80]
        raise ValueError(f"device {name!r} cannot be used ({why}); choose auto, cpu, cuda or mps") from None
    return device


def describe_device(device: torch.device) -> str:
    """A description of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", cpu.read_text()) if cpu.exists() else []
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores" if device.type == "cpu" else f"{name}, {device.type}"


def environment(device: torch.device) -> dict[str, object]:
    """Versions, device, threads and commit, as stored with a run."""
    return {
        "fedbatchnorm": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": describe_device(device),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@functools.cache
def commit() -> str | None:
    """The commit of this code, marked if there are uncommitted changes; None outside a repository.

    For a copy of the code without its repository, $FEDBATCHNORM_COMMIT says it.
    """
    if os.environ.get("FEDBATCHNORM_COMMIT"):
        return os.environ["FEDBATCHNORM_COMMIT"]
    package = Path(__file__).parents[1]
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")  # another repository may be around us
        changed = "-changed" if _git(package, "status", "--porcelain", "--", ".") else ""
        return _git(package, "rev-parse", "HEAD")[:12] + changed
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout.strip()
