"""Shared by all tests. Where `--no-skips` is given, a skipped test fails, unless it needs what is rare."""

import os

import pytest
import torch
from hypothesis import settings

from fedbatchnorm.data import cifar10

# Markers of tests that need what not every machine has.
NEEDS = {
    "gpu": (torch.cuda.is_available, "needs a CUDA device"),
    "cifar10": (cifar10.find, "needs CIFAR-10: set FEDBATCHNORM_DATA to the folder that holds it"),
}
collect_ignore = ["norm/client_with_two_devices.py"]  # a script, started by test_exchange.py

settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("default")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


def pytest_addoption(parser):
    parser.addoption(
        "--no-skips", action="store_true", help="a skipped test fails, unless marked gpu or cifar10"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        return _refuse_skip(item, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    return _refuse_skip(collector, report) if report.skipped else report


def _refuse_skip(node, report):
    if node.config.getoption("--no-skips") and not any(map(node.get_closest_marker, NEEDS)):
        report.outcome = "failed"
        report.longrepr = f"{node.nodeid} was skipped, which --no-skips forbids: {report.longrepr}"
    return report


def pytest_collection_modifyitems(items):
    for name, (there, reason) in NEEDS.items():
        if not there():
            for item in items:
                if item.get_closest_marker(name):
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
