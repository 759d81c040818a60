"""A page in a real browser: what it shows, what it complains about, and what it asks the network for."""

import json
import re
import shutil
import subprocess

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--window-size=1100,3000",
]


def browser():
    """The path of Chromium, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def visit(page, folder):
    """Open a file; returns its document, the console's messages, the addresses asked for, and a picture."""
    log, picture = folder / "net.json", folder / "page.png"
    command = [browser(), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr"]
    shown = subprocess.run(
        [*command, f"--log-net-log={log}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=120)
    console = re.findall(r"CONSOLE[^\]]*\] (.*)", shown.stderr)
    text = log.read_text()
    try:
        events = json.loads(text)["events"]
    except ValueError:  # it is torn if the browser did not end in time
        events = json.loads(text.rstrip().rstrip(",") + "]}")["events"]
    # What the browser asks for on its own behalf (its updates, the time) has no origin.
    asked = [e["params"] for e in events if "initiator" in e.get("params", {})]
    addresses = {p["url"] for p in asked if p["initiator"] != "not an origin"}
    return shown.stdout, console, sorted(a for a in addresses if a.startswith(("http", "ws", "ftp"))), picture
