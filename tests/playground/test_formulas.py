"""The explanations' formulas, run in Chromium, against the library's: by numbers, to 1e-9."""

import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm.norm.moments import combine, measure, round_momentum, update_running
from fedbatchnorm.norm.moments import normalize as normalize_with
from fedbatchnorm.simulation.normalizers import with_own_batch
from fedbatchnorm.simulation.ring import separability
from fedbatchnorm.simulation.schemes import SCHEMES

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1] / "report")])
import chromium
import devtools

exact = functools.partial(torch.tensor, dtype=torch.float64)
PAGES = Path(__file__).parents[2] / "docs" / "playground"
STATES, EPS, NEAR = 1000, 1e-5, 1e-9

# What the page computes of a state; `f` are its formulas. The same fields as `expected` below.
COMPUTE = """(f) => (s) => {
  const seen = s.batches.map(f.measure);
  const even = s.even.map(f.measure);
  const union = f.combine(seen);
  const rows = s.batches.flat();
  const normalized = f.normalize(rows, s.running, s.eps);
  return {
    mean: seen.map((m) => m.mean), var: seen.map((m) => m.var),
    union_mean: union.mean, union_var: union.var, parts: union.within.map((w, c) => w + union.between[c]),
    round_momentum: f.roundMomentum(s.beta, s.steps),
    exact: f.mergeExactly(s.running, seen, s.beta, s.steps),
    updated: f.updateRunning(s.running, union, s.beta, s.steps),
    averaged: f.averageRunning(s.running, even, s.beta),
    fixed: f.fixRunning(s.running, even, s.beta, s.round, s.switch_round),
    normalized, own: f.normalizeByOwn(s.even, s.eps).flat(),
    gradient: f.inputGradient(s.g, s.batches[0], s.running, s.eps, s.share),
    separability: f.separability(normalized, s.labels),
    distance: f.meanDistance(rows, normalized),
  };
}"""


def random_state(rng):
    """Batches of several clients, far apart or not, shared statistics, and a round's settings."""
    n, c = int(rng.integers(2, 7)), int(rng.integers(1, 4))
    apart, wide = 10 ** rng.uniform(-2, 2), 10 ** rng.uniform(-1, 1)
    centers = apart * rng.normal(size=(n, c))
    counts = [int(k) for k in rng.integers(2, 16, size=n)]
    even = int(rng.integers(2, 10))
    batches = [centers[i] + wide * rng.normal(size=(k, c)) for i, k in enumerate(counts)]
    return {
        "batches": [b.tolist() for b in batches],
        "even": (centers[:, None] + wide * rng.normal(size=(n, even, c))).tolist(),
        "g": rng.normal(size=(counts[0], c)).tolist(),
        "running": {"mean": rng.normal(size=c).tolist(), "var": (10 ** rng.uniform(-1, 2, size=c)).tolist()},
        "beta": float(rng.choice([rng.uniform(0.01, 1), 1.0])),
        "steps": int(rng.integers(1, 21)),
        "share": float(rng.choice([0.0, 1.0, rng.uniform()])),
        "round": int(rng.integers(0, 10)),
        "switch_round": 5,
        "labels": [i for i, k in enumerate(counts) for _ in range(k)],
        "eps": EPS,
    }


def expected(state):
    """The library's numbers."""
    batches, even = ([exact(b) for b in state[name]] for name in ("batches", "even"))
    start = {name: exact(values) for name, values in state["running"].items()}
    running = fbn.Running(**start, momentum=state["beta"], eps=EPS)
    own = [measure(b) for b in batches]
    seen = fbn.Moments(
        torch.tensor([len(b) for b in batches]),
        torch.cat([m.mean for m in own]),
        torch.cat([m.var for m in own]),
    )
    union, together = combine(seen), torch.cat(even)
    updates = [{"layer": fbn.Moments(m.count, m.mean[0], m.var[0])} for m in own]
    merged = fbn.merge({"layer": running}, updates, steps=state["steps"]).statistics["layer"]
    updated = update_running(running, union, steps=state["steps"])
    shares = [
        SCHEMES["naive"].before.share,
        SCHEMES["fixbn"].phase(state["round"], state["switch_round"]).share,
    ]
    averaged, fixed = (
        running if share is None else share(running, measure(together, len(even))) for share in shares
    )
    rows = torch.cat(batches)
    normalized, _ = normalize_with(rows, running)
    x = batches[0].clone().requires_grad_()
    y, _ = normalize_with(x, running, gradient=state["share"])
    y.backward(exact(state["g"]))
    return {
        "mean": seen.mean,
        "var": seen.var,
        "union_mean": union.mean,
        "union_var": union.var,
        "parts": union.var,
        "round_momentum": round_momentum(state["beta"], 0, state["steps"]),
        **{
            name: {"mean": r.mean, "var": r.var}
            for name, r in (("exact", merged), ("updated", updated), ("averaged", averaged), ("fixed", fixed))
        },
        "normalized": normalized,
        "own": with_own_batch(together, running, clients=len(even))[0],
        "gradient": x.grad,
        "separability": separability(normalized, torch.tensor(state["labels"])),
        "distance": (rows - normalized).norm(dim=1).mean(),
    }


def far_off(theirs, ours, name=""):
    """Names of the numbers that differ by more than 1e-9, or 1e-9 of their size."""
    if isinstance(ours, dict):
        assert theirs.keys() == ours.keys()
        return {bad for key in ours for bad in far_off(theirs[key], ours[key], name or key)}
    theirs, ours = (torch.as_tensor(v, dtype=torch.float64) for v in (theirs, ours))
    assert theirs.shape == ours.shape, name
    return set() if bool(((theirs - ours).abs() <= NEAR * ours.abs().clamp(min=1)).all()) else {name}


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with devtools.tab(chromium, tmp_path_factory.mktemp("chromium")) as opened:
        opened.open(PAGES / "ring.html")
        yield opened


@pytest.fixture(scope="module")
def states():
    rng = np.random.default_rng(0)
    return [random_state(rng) for _ in range(STATES)]


def in_the_page(tab, states, formulas="fbnPlay.formulas"):
    return [
        row
        for i in range(0, len(states), 250)
        for row in tab.value(f"{json.dumps(states[i : i + 250])}.map(({COMPUTE})({formulas}))")
    ]


def test_a_thousand_states_come_out_as_in_python(tab, states):
    shown = in_the_page(tab, states)
    assert len(shown) == STATES
    wrong = {
        i: bad
        for i, (s, theirs) in enumerate(zip(states, shown, strict=True))
        if (bad := far_off(theirs, expected(s)))
    }
    assert not wrong


@pytest.mark.parametrize(
    ("formula", "broken", "shows"),
    [
        ("combine", "(m) => { const u = f.combine(m); return { ...u, var: u.within }; }", {"union_var"}),
        ("averageRunning", "(r, m, b) => f.mergeExactly(r, m, b)", {"averaged"}),
        ("roundMomentum", "(b, k) => b", {"round_momentum"}),
        ("inputGradient", "(g, x, r, e, s) => f.inputGradient(g, x, r, e, 1.000001 * s)", {"gradient"}),
        ("normalize", "(x, r, e) => f.normalize(x, r, e + 1e-7)", {"normalized", "distance"}),
    ],
)
def test_a_wrong_formula_is_noticed(tab, states, formula, broken, shows):
    formulas = f"(f => ({{...f, {formula}: {broken}}}))(fbnPlay.formulas)"
    found = set()
    for state, theirs in zip(states[:20], in_the_page(tab, states[:20], formulas), strict=True):
        found |= far_off(theirs, expected(state))
    assert shows <= found


@pytest.mark.parametrize("own", [0.0, 0.6, 1.0])
def test_the_ring_s_rounds_are_those_of_the_simulator_s_schemes(tab, own):
    """All 60 rounds of the four schemes, on the page's own points."""
    settings = f"{{own: {own}, beta: 0.1, round: 45, centers: fbnPlay.ringModel.centers()}}"
    shown = tab.value(f"fbnPlay.ringModel.simulate({settings})")
    rounds = tab.value(
        f"Array.from({{length: fbnPlay.ringModel.ROUNDS}}, (_, r) => fbnPlay.ringModel.batches({settings}, r)"
        ".map((client) => client.map((p) => p.x)))"
    )
    for name in ("centralized", "naive", "fixbn", "fbn"):
        running = fbn.Running(torch.zeros(2).double(), torch.ones(2).double())
        distances = []
        for step, points in enumerate(exact(rounds)):
            x = points.flatten(0, 1)
            phase = SCHEMES[name].phase(step, len(rounds) // 2)
            y, seen = phase.normalize(x, running, clients=1 if phase.union else len(points))
            target, _ = SCHEMES["centralized"].before.normalize(x, running)
            distances.append((y - target).norm(dim=1).mean())
            before, running = running, phase.share(running, seen) if phase.share and seen else running
            if step == 44:
                now = shown["schemes"][name]
                assert not far_off(now["training"]["out"], y, name)
                assert not far_off(sum(now["evaluation"]["parts"].values()), running.var.mean(), name)
                if name == "fbn":
                    assert not far_off(sum(now["training"]["parts"].values()), before.var.mean(), name)
        assert not far_off(shown["distances"][name], torch.stack(distances), name)


@pytest.mark.parametrize(("share", "own"), [(0.0, 1.0), (0.7, 0.7), (1.0, 0.0)])
def test_the_small_layer_trains_as_a_layer_of_the_library(tab, share, own):
    """Forty rounds of four clients: weights, merged statistics, accuracy."""
    tab.open(PAGES / "scale.html")
    shown = tab.value(f"fbnPlay.scaleModel.train({{share: {share}, own: {own}, rate: 0.1, steps: 5}})")
    data = tab.value(f"fbnPlay.scaleModel.clients({own})")
    xs = [exact([p["x"] for p in client]) for client in data]
    labels = [exact([p["label"] for p in client]) for client in data]
    w = exact(tab.value("fbnPlay.scaleModel.START"))
    layer = fbn.convert(nn.Sequential(nn.BatchNorm1d(1, affine=False).double()), gradient=share)
    merged = fbn.merge(fbn.statistics(layer), [{"0": moments(x @ w)} for x in xs], momentum=1.0).statistics
    for now in shown:
        assert not far_off(now["w"], w, "w")
        assert not far_off(now["variance"], merged["0"].var[0], "variance")
        right = [((x @ w > merged["0"].mean[0]) == (y > 0)).double() for x, y in zip(xs, labels, strict=True)]
        assert not far_off(now["accuracy"], torch.cat(right).mean(), "accuracy")
        ends, updates = [], []
        for x, y in zip(xs, labels, strict=True):
            own_w = w.clone().requires_grad_()
            fbn.load_statistics(layer, merged)
            optimizer = torch.optim.SGD([own_w], lr=0.1, momentum=0.9)
            for _ in range(5):
                optimizer.zero_grad()
                nn.functional.softplus(-y * layer((x @ own_w)[:, None])[:, 0]).mean().backward()
                optimizer.step()
            ends.append(own_w.detach())
            updates.append(fbn.collect(layer))
        w, merged = torch.stack(ends).mean(0), fbn.merge(merged, updates, steps=5).statistics


def moments(values):
    return fbn.Moments(len(values), values.mean().view(1), values.var(correction=0).view(1))
