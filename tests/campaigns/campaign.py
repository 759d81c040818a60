"""Everything that could go wrong, many times: python tests/campaigns/campaign.py [--scale 1] [--json FILE].

Each campaign has a seed and a count, and stops at the first wrong answer, traceback or loss. The large one is
`make campaign`; its figures go to results/reliability/, and from there into docs/reliability.md. With
`--only` one campaign's figures take the place of those that the file has.
"""

import argparse
import json
import platform
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import federations
import processes
import readers

# Name -> (function (count, rng, folder) -> figures, how many in CI, how many in the large campaign).
CAMPAIGNS = {
    "messages": (readers.messages, 1000, 40_000),
    "run folders": (readers.run_folders, 500, 25_000),
    "files of runs": (readers.archives, 300, 15_000),
    "checkpoints of runs": (readers.run_checkpoints, 300, 15_000),
    "checkpoints of servers": (readers.server_checkpoints, 300, 15_000),
    "merges": (readers.merges, 300, 10_000),
    "kills of runs": (processes.kills, 8, 220),
    "kills of collecting": (processes.killed_collects, 10, 500),
    "kills of servers": (federations.server_kills, 4, 60),
    "kills of a federation": (federations.federation_kills, 1, 20),
    "full disks": (processes.full_disks, 5, 150),
    "closed streams": (processes.closed_streams, 12, 400),
}


def run(name, count, seed):
    """The figures of a campaign; an error that says how to repeat it."""
    rng = random.Random(f"{name} {seed}")
    torch.set_num_threads(1)
    start = time.monotonic()
    memory = processes.here(None)
    with tempfile.TemporaryDirectory(dir=memory) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = CAMPAIGNS[name][0](count, rng, Path(folder))
        except BaseException as error:
            error.add_note(f"campaign {name!r}, count {count}, seed {seed}")
            raise
    return {"count": count, "seed": seed, "seconds": round(time.monotonic() - start, 1)} | dict(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the large counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=CAMPAIGNS, action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from fedbatchnorm.experiments.environment import commit

    signal.signal(signal.SIGINT, signal.default_int_handler)
    figures = {}
    for name in args.only or CAMPAIGNS:
        count = max(1, round(args.scale * CAMPAIGNS[name][2]))
        figures[name] = run(name, count, args.seed) | {"commit": commit()}
        print(f"{name}: {figures[name]}", flush=True)
        if args.json:
            _keep(args.json, figures)


def _keep(file, figures):
    """Write the figures beside those of other campaigns that the file has."""
    old = json.loads(file.read_text()) if file.exists() else {"campaigns": {}}
    before = {name: {"commit": old.get("commit")} | found for name, found in old["campaigns"].items()}
    result = {
        "machine": {"python": platform.python_version(), "torch": torch.__version__},
        "campaigns": {name: figures.get(name, before.get(name)) for name in CAMPAIGNS},
    }
    result["campaigns"] = {name: found for name, found in result["campaigns"].items() if found}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
