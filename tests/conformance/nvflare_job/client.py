"""The suite's clients on NVFlare: a script that receives and sends."""

import sys
from pathlib import Path

import nvflare.client as flare

from fedbatchnorm.adapters.nvflare_client import load, reply

place, case, dies = sys.argv[1:4]
sys.path.insert(0, place)
import cases  # noqa: E402

case = cases.read_case(Path(case))
flare.init()
index = int(flare.get_site_name().rpartition("-")[2]) - 1
while flare.is_running():
    received = flare.receive()
    flare.send(
        cases.turn(
            case,
            index,
            received.current_round,
            lambda model, got=received: load(model, got),
            lambda model, metrics, steps, got=received: reply(model, got, metrics, steps=steps),
            cases.hang if dies == "hang" else None,
        )
    )
