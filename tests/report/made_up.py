"""Results that nobody ran: every number is given, so that each side of a rule can be tried."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from fedbatchnorm.experiments.catalogue import FIGURES
from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.results import Result
from fedbatchnorm.simulation.ring import Ring

ROUNDS = (1000, 1500, 3000)  # the second is the last before FixBN's switch


def result(run, curve, rounds=ROUNDS, **summary):
    """A finished run with this accuracy at these rounds."""
    rows = [{"round": t, "accuracy": a} for t, a in zip(rounds, curve, strict=True)]
    summary = {"accuracy": curve[-1], "best_accuracy": max(curve)} | summary
    name = f"{run.scheme}-{run.heterogeneity()}-{run.attack}-{run.defense}-{run.seed}"
    return Result(Path(name), run, rows, summary, [{"device": "none"}], None)


def curve_of(run):
    """What the paper says that a run of figure 3, 4, 6, 8 or 10 does; else plausible numbers."""
    scheme, gamma = run.scheme, run.gamma
    calm = {
        "fixbn": {1.0: 0.79, 0.5: 0.79, 0.3: 0.79, 0.1: 0.785},
        "naive": {1.0: 0.79, 0.5: 0.79, 0.3: 0.78, 0.1: 0.7},
    }
    special = {
        ("fixbn", 0.01): (0.3, 0.6, 0.78),
        ("fixbn", 0.0): (0.1, 0.6, 0.75),
        ("naive", 0.01): (0.3, 0.3, 0.35),  # the paper says 40% in section 4, at most 30% in section 5
        ("naive", 0.0): (0.1, 0.17, 0.15),
    }
    if run.is_plain():
        return special.get((scheme, gamma), (0.5, 0.7, calm.get(scheme, {}).get(gamma, 0.8)))
    return under_attack(run)


def under_attack(run):
    """The same for the runs with Byzantine clients."""
    if run.scheme == "fbn":
        if run.defense != "none":
            return 0.5, 0.7, 0.8
        return (0.5, 0.7, 0.3) if run.gamma == 0.0 else (0.5, 0.7, 0.5)
    if run.defense == "none":
        return 0.1, 0.1, 0.1
    if run.gamma > 0.01:
        return 0.5, 0.6, 0.7
    if run.attack == "sf":
        return (0.3, 0.3, 0.35) if run.gamma else (0.1, 0.17, 0.15)
    return (0.1, 0.1, 0.2) if run.gamma else (0.02, 0.02, 0.02)


def figures(*names, changed=None, seeds=1, scale="full"):
    """The runs of these figures, as the paper says; `changed(run)` gives another curve, or None."""
    found = {}
    for name in names:
        for run in FIGURES[name].runs(scale, seeds):
            if isinstance(run, Run):
                found[run] = result(run, (changed and changed(run)) or curve_of(run))
    return list(found.values())


def ring(folder, scale=None, **distances):
    """The runs of figures 1 and 2. scale: scheme -> the scale of its points at gamma 0, or "heap"."""
    angle = torch.arange(10) * 2 * torch.pi / 10
    circle = torch.stack([angle.cos(), angle.sin()], -1).unsqueeze(1).repeat(1, 3, 1)
    heap = torch.randn(10, 3, 2, generator=torch.Generator().manual_seed(0)) * 0.01
    labels = torch.arange(10).unsqueeze(1).repeat(1, 3)
    usual = {"centralized": 1.0, "fbn": 1.05, "fixbn": 7.0, "naive": "heap"} | (scale or {})
    wanted = {"fbn": (0.2, 0.2, 0.25, 0.25), "fixbn": (0.1, 0.5, 1.0, 5.0), "naive": (0.2, 0.5, 0.6, 0.7)}
    wanted |= {"centralized": (0.0, 0.0, 0.0, 0.0)} | distances
    found = []
    for run in dict.fromkeys(r for name in ("fig1", "fig2") for r in FIGURES[name].runs("full", 1)):
        path = folder / f"{run.scheme}-{run.gamma}"
        path.mkdir()
        by = usual[run.scheme]
        points = heap if by == "heap" else circle * by
        data = {"normalised": points, "centralised": circle, "points": 10 * circle, "labels": labels}
        save_file(data, path / "model.safetensors")
        distance = wanted[run.scheme][(1.0, 0.3, 0.1, 0.0).index(run.gamma)]
        rows = [{"round": t + 1, "distance": distance} for t in range(run.rounds)]
        found.append(Result(path, run, rows, {"distance": distance}, [{"device": "none"}], None))
    assert all(isinstance(one.config, Ring) for one in found)
    return found
