"""The federation on one machine: whatever ends it, no process and no key is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "flower" / "federation.py"


def those_of(folder):
    """The processes whose environment or command line names a folder."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            number = int(entry.name)
            text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            if str(folder).encode() in text:
                found[number] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at its start", "in a run"])
def test_a_federation_that_is_told_to_stop_leaves_nothing_behind(when, tmp_path):
    """SIGTERM, as a scheduler or a container sends it."""
    place = tmp_path / "tmp"
    place.mkdir()
    env = os.environ | {"TMPDIR": str(place)}
    command = [sys.executable, SCRIPT, SCRIPT.parent / "app", "--nodes", "2", "--run-config", "rounds=500"]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
    until, running = time.monotonic() + 120, "superlink" if when == "at its start" else "flwr-serverapp"
    while not any(running in text for text in those_of(place).values()):
        assert time.monotonic() < until, (tmp_path / "out").read_text()
        assert process.poll() is None, (tmp_path / "out").read_text()
        time.sleep(0.05)
    assert list(place.rglob("server.key"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    assert "stopped by SIGTERM" in (tmp_path / "out").read_text()
    until = time.monotonic() + 5
    while those_of(place) and time.monotonic() < until:  # the dead are still being buried
        time.sleep(0.1)
    assert those_of(place) == {}
    assert [p for p in place.iterdir() if not p.name.startswith("pymp-")] == []
