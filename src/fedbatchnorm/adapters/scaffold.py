"""Writes a small app for an engine, complete and ready to run."""

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import torch

APPS = {"flower-app": "flower_app", "nvflare-app": "nvflare_app"}


def write_app(kind: str, folder: Path) -> list[Path]:
    """Write the app of this kind into a new folder; returns the files.

    Torch is pinned to the version that is installed here.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and is not an empty folder: choose another")
    return _copy(resources.files("fedbatchnorm") / "templates" / APPS[kind], folder)


def _copy(source: Traversable, into: Path) -> list[Path]:
    into.mkdir(parents=True, exist_ok=True)
    written = []
    for entry in sorted(source.iterdir(), key=lambda e: e.name):
        if entry.name == "__pycache__":
            continue
        name = entry.name.removesuffix(".in")
        if entry.is_dir():
            written += _copy(entry, into / name)
        else:
            text = entry.read_text(encoding="utf-8").replace("@TORCH@", torch.__version__.partition("+")[0])
            (into / name).write_text(text, encoding="utf-8")
            written.append(into / name)
    return written
