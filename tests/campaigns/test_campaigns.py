"""Every campaign with a small count; `make campaign` runs them with a large one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = [
    "messages",
    "run folders",
    "files of runs",
    "checkpoints of runs",
    "checkpoints of servers",
    "merges",
]
NAMES += ["kills of runs", "kills of collecting", "kills of servers", "kills of a federation"]
NAMES += ["full disks", "closed streams"]
SCRIPT = Path(__file__).with_name("campaign.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_small_campaign(name):
    """In a process of its own, which forks: the one that runs the tests has threads."""
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import campaign;"
        f"print(campaign.run({name!r}, campaign.CAMPAIGNS[{name!r}][1], 1))"
    )
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # with two threads sums may round otherwise
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'count': " in done.stdout


def test_every_campaign_is_among_these():
    text = SCRIPT.read_text()
    assert all(f'"{name}": (' in text for name in NAMES)
    assert sum(text.count(f": ({room}.") for room in ("readers", "processes", "federations")) == len(NAMES)
