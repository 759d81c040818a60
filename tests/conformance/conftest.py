"""Writes down what the suite has found: FEDBATCHNORM_CONFORMANCE=FILE pytest tests/conformance."""

import importlib.metadata
import json
import os
import platform
from pathlib import Path

FOUND = {}
collect_ignore = ["cases.py", "engines.py", "flower_job", "nvflare_job"]  # what the test imports, and apps


def pytest_configure(config):
    config.addinivalue_line("markers", "property(name): the row of the table in docs/engines.md")


def pytest_runtest_logreport(report):
    found = dict(report.user_properties)
    if report.when == "call" and "property" in found:
        row = FOUND.setdefault(found["property"], {})
        row[found["engine"]] = report.passed and row.get(found["engine"], True)
    elif report.failed and "property" in found:
        FOUND.setdefault(found["property"], {})[found["engine"]] = False


def pytest_runtest_setup(item):
    mark = item.get_closest_marker("property")
    if mark:
        item.user_properties += [
            ("property", mark.args[0]),
            ("engine", item.callspec.params["engine"].__name__),
        ]


def pytest_sessionfinish(session):
    """What was found for the engines of this session takes the place of what the file had for them."""
    file = os.environ.get("FEDBATCHNORM_CONFORMANCE")
    if not (file and FOUND):
        return
    import torch

    from fedbatchnorm.experiments.environment import commit, describe_device

    versions = {name: importlib.metadata.version(name) for name in ("torch", "flwr", "nvflare")}
    facts = {"commit": commit() or "unknown", "machine": describe_device(torch.device("cpu"))}
    facts |= {"python": platform.python_version(), "versions": versions}
    path = Path(file)
    content = json.loads(path.read_text()) if path.exists() else {"engines": {}, "found": {}}
    for engine in sorted({engine for row in FOUND.values() for engine in row}):
        content["engines"][engine] = facts
        for row in content["found"].values():
            row.pop(engine, None)
    for name, row in FOUND.items():
        content["found"].setdefault(name, {}).update(row)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
