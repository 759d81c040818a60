"""What the benchmarks share: arguments, the machine in words, and a steady allocator."""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from fedbatchnorm.experiments.environment import commit, describe_device

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**31), "MALLOC_TRIM_THRESHOLD_": str(2**33)}


def keep_memory():
    """Start again with a C library that keeps freed memory: faulting it in anew would drown the rest."""
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)  # noqa: S606


def arguments(text, rounds):
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="times that every contender takes its turn"
    )
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    return args


def clock(device="cpu"):
    """With one thread on a CPU, the time that the process itself had: others on the machine take the rest."""
    alone = device == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def ratio(times, name, base):
    return statistics.median(times[name]) / statistics.median(times[base])


def result(args, device):
    """What goes with every result: commit and machine."""
    machine = {
        "name": describe_device(torch.device(device)),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    return {"commit": args.commit or commit() or "unknown", "machine": machine}


def write(args, results):
    """Write results with machine and commit, if a file was asked for."""
    if args.json:
        content = result(args, args.device) | results
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n")
