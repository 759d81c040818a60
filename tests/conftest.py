"""Shared by all tests: a skipped test fails where `--no-skips` is given, unless it needs a GPU."""

import os

import pytest
import torch
from hypothesis import settings

collect_ignore = ["norm/client_with_two_devices.py"]  # a script, started by test_exchange.py

settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("default")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails, unless marked gpu")


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
    if node.config.getoption("--no-skips") and not node.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"{node.nodeid} was skipped, which --no-skips forbids: {report.longrepr}"
    return report


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
