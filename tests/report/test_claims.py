"""The claims: each can come out either way, and says nothing where the runs are missing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.results import Result
from fedbatchnorm.report.claims import ACCURACY_CLAIMS, RING_CLAIMS, judge_comparison, judge_rings
from fedbatchnorm.report.groups import ALONE, NO_ATTACK, Spread, comparisons, rings, sieges
from fedbatchnorm.report.liars import LIAR_CLAIMS, judge_siege
from fedbatchnorm.simulation.ring import Ring

# (scheme, gamma) -> accuracy over the run's thirds, as in the paper and as in a world where it is wrong.
PAPER = {
    ("centralized", 1.0): (0.5, 0.7, 0.8),
    ("fbn", 1.0): (0.5, 0.7, 0.8),
    ("fixbn", 1.0): (0.5, 0.7, 0.79),
    ("naive", 1.0): (0.5, 0.7, 0.79),
    ("centralized", 0.01): (0.5, 0.7, 0.8),
    ("fbn", 0.01): (0.5, 0.7, 0.8),
    ("fixbn", 0.01): (0.3, 0.6, 0.78),
    ("naive", 0.01): (0.3, 0.3, 0.4),
    ("centralized", 0.0): (0.5, 0.7, 0.8),
    ("fbn", 0.0): (0.5, 0.7, 0.8),
    ("fixbn", 0.0): (0.1, 0.6, 0.75),
    ("naive", 0.0): (0.1, 0.17, 0.15),
}
WRONG = {
    (scheme, gamma): {
        "fbn": (0.1, 0.3, 0.5),
        "fixbn": (0.5, 0.7, 0.4 if gamma else 0.8),
        "naive": (0.5, 0.7, 0.8),
    }.get(scheme, (0.5, 0.7, 0.8))
    for scheme, gamma in PAPER
}


def results(world, seeds=2):
    found = []
    for (scheme, gamma), curve in world.items():
        for seed in range(seeds):
            run = Run(scheme=scheme, gamma=gamma, seed=seed)
            rows = [{"round": 100 * (i + 1), "accuracy": a} for i, a in enumerate(curve)]
            summary = {"accuracy": curve[-1], "best_accuracy": max(curve)}
            found.append(Result(Path(f"{scheme}-{gamma}-{seed}"), run, rows, summary, [{}], None))
    return found


def test_the_paper_s_numbers_agree_with_its_claims():
    (group,) = comparisons(results(PAPER))
    findings = judge_comparison(group)
    assert len(findings) == len(ACCURACY_CLAIMS)
    assert [f.claim.says for f in findings if f.agrees is not True] == []


def test_other_numbers_do_not():
    (group,) = comparisons(results(WRONG))
    findings = judge_comparison(group)
    assert [f.claim.says for f in findings if f.agrees is not False] == []


def test_missing_runs_are_said_to_be_missing():
    (group,) = comparisons(results({("fbn", 0.1): (0.1, 0.2, 0.3)}))
    assert {(f.measured, f.agrees) for f in judge_comparison(group)} == {("not run", None)}
    assert {(f.measured, f.agrees) for f in judge_rings({}, "figure")} == {("not run", None)}


def ring_results(folder, right):
    """Ten classes on a circle, and what each scheme makes of it: as in the paper, or the other way round."""
    angle = torch.arange(10) * 2 * torch.pi / 10
    circle = torch.stack([angle.cos(), angle.sin()], -1).unsqueeze(1).repeat(1, 3, 1)
    heap = torch.randn(10, 3, 2, generator=torch.Generator().manual_seed(0)) * 0.01
    labels = torch.arange(10).unsqueeze(1).repeat(1, 3)
    found = []
    for scheme in ("centralized", "fbn", "fixbn", "naive"):
        for gamma in (1.0, 0.0):
            apart = (scheme != "naive") == right
            points = (circle if apart else heap) * (7 if scheme == "fixbn" and right else 1)
            path = folder / f"{scheme}{gamma}{right}"
            path.mkdir()
            save_file(
                {"normalised": points, "centralised": circle, "labels": labels}, path / "model.safetensors"
            )
            grows = (scheme != "fbn") == right
            distance = 1.0 if grows and gamma == 0 else 0.2
            found.append(
                Result(path, Ring(scheme=scheme, gamma=gamma), [], {"distance": distance}, [{}], None)
            )
    return found


@pytest.mark.parametrize("right", [True, False])
def test_claims_on_the_ring_come_out_either_way(tmp_path, right):
    (ring,) = rings(ring_results(tmp_path, right))
    findings = judge_rings(ring, "figure 1") + judge_rings(ring, "figure 2")
    assert len(findings) == len(RING_CLAIMS)
    assert {f.agrees for f in findings} == {right}


def test_a_spread_is_mean_and_sample_deviation():
    assert Spread.of([0.1, 0.3]) == pytest.approx((0.2, 0.1414213562, 2))
    assert Spread.of([0.5]).percent() == "50.0"
    assert Spread.of([0.9, 0.92]).percent() == "91.0 ± 1.4"


def test_runs_are_compared_only_with_their_like():
    mixed = [*results(PAPER)]
    other = Run(scheme="fbn", gamma=0.0, lr=0.2)
    mixed.append(Result(Path("x"), other, [], {"accuracy": 0.1, "best_accuracy": 0.1}, [{}], None))
    groups = comparisons(mixed)
    assert {g.title().endswith("lr 0.2") for g in groups} == {True, False}
    assert sorted(sum(map(len, g.cells.values())) for g in groups) == [1, len(PAPER) * 2]


# (scheme, defended or not or undisturbed) -> (accuracy on the way, in the end), as the paper says of
# sign flipping and of the stronger attacks, and as in a world where it is wrong.
LIARS = {
    ("fbn", "calm"): (0.7, 0.8),
    ("fbn", "none"): (0.7, 0.3),
    ("fbn", "nnm+median"): (0.7, 0.8),
    ("naive", "calm"): (0.3, 0.2),
    ("naive", "none"): (0.12, 0.1),
    ("naive", "nnm+median"): (0.3, 0.2),
}
STRONGER = LIARS | {("naive", "calm"): (0.3, 0.4)}
HARMLESS = dict.fromkeys(LIARS, (0.85, 0.85)) | {("fbn", "nnm+median"): (0.6, 0.7)}


def siege_results(world, attack, **heterogeneity):
    found = []
    for (scheme, kind), curve in world.items():
        lies = {"byzantine": 3, "attack": attack, "defense": kind}
        lies = {"calm": {}, "alone": {"clients": 7}}.get(kind, lies)
        run = Run(scheme=scheme, **{"gamma": 0.0} | heterogeneity | lies)
        rows = [{"round": 150 * (i + 1), "accuracy": a} for i, a in enumerate(curve)]
        summary = {"accuracy": curve[-1], "best_accuracy": max(curve)}
        found.append(Result(Path(f"{scheme}-{kind}"), run, rows, summary, [{}], None))
    return found


@pytest.mark.parametrize(("attack", "world"), [("sf", LIARS), ("foe", STRONGER), ("alie", STRONGER)])
def test_the_paper_s_numbers_agree_with_its_claims_on_liars(attack, world):
    (siege,) = sieges(siege_results(world, attack))
    findings = judge_siege(siege)
    assert len(findings) == sum(attack in row.attacks for row in LIAR_CLAIMS)
    assert [f.claim.says for f in findings if f.agrees is not True] == []


@pytest.mark.parametrize("attack", ["sf", "foe", "alie"])
def test_harmless_liars_and_a_poor_defense_do_not(attack):
    (siege,) = sieges(siege_results(HARMLESS, attack))
    alike = "Defended naive is like naive without attack: both poor."
    assert [f.claim.says for f in judge_siege(siege) if f.agrees] == ([alike] if attack == "sf" else [])


@pytest.mark.parametrize("rule", ["nnm+median", "nnm+trimmed_mean"])
def test_the_appendix_is_held_against_what_is_said_of_all_alone(rule):
    world = {(scheme, rule if "nnm" in kind else kind): curve for (scheme, kind), curve in LIARS.items()}
    (siege,) = sieges(siege_results(world, "sf", partition="dirichlet", gamma=0.5, alpha=0.1))
    findings = judge_siege(siege)
    assert [f.claim.where for f in findings] == ["section 5", "introduction"]
    assert [f.agrees for f in findings] == [True, True]


def test_as_many_clients_without_liars_stand_beside_and_decide_nothing():
    world = LIARS | {("naive", "nnm+median"): (0.3, 0.4), ("naive", "alone"): (0.3, 0.41)}
    found = siege_results(world, "sf")
    (siege,) = sieges(found)
    assert (("Naive BN", ALONE)) in siege.lines()
    assert siege.spread("Naive BN", NO_ATTACK, 0.0).mean == 0.2
    (finding,) = [f for f in judge_siege(siege) if f.claim.says.startswith("Defended naive is like")]
    assert finding == finding._replace(
        measured="gamma 0: defended 40.0, undisturbed 20.0, the honest alone 41.0", agrees=False
    )
    assert sorted(g.unusual_clients() for g in comparisons(found)) == ["", "7 clients"]


def test_claims_on_liars_say_nothing_where_runs_are_missing():
    world = {("fbn", "nnm+median"): (0.7, 0.8)}
    (siege,) = sieges(siege_results(world, "sf"))
    assert {f.agrees for f in judge_siege(siege)} == {None}
