"""Robust rules: by value against byzfl, by their properties, and against slow twins."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbatchnorm.aggregation import attacks as lies
from fedbatchnorm.aggregation.aggregators import (
    AGGREGATORS,
    centred_clipping,
    distances,
    geometric_median,
    mean,
    median,
    trimmed_mean,
)
from fedbatchnorm.aggregation.attacks import ATTACKS, attack, plain_name
from fedbatchnorm.aggregation.defenses import defense
from fedbatchnorm.aggregation.mixing import MIXING, bucketing, clipping, nearest_neighbors

ORACLE = np.load(Path(__file__).parent / "byzfl-0.0.11.npz")
CASES = sorted({key.partition("/")[0] for key in ORACLE.files})
ROBUST = [name for name in AGGREGATORS if name != "mean"]


def oracle(case):
    found = {
        k.partition("/")[2]: torch.from_numpy(ORACLE[k]) for k in ORACLE.files if k.startswith(case + "/")
    }
    return found, int(case.split("_")[1][1:])


@pytest.mark.parametrize("case", CASES)
def test_equal_to_byzfl_by_value(case):
    expected, f = oracle(case)
    rows, honest = expected.pop("input"), expected.pop("honest")
    rule = defense("nnm+trimmed_mean", f)
    ours = {
        "median": AGGREGATORS["median"](rows, f),
        "trimmed_mean": AGGREGATORS["trimmed_mean"](rows, f),
        "krum": AGGREGATORS["krum"](rows, f),
        "multi_krum": AGGREGATORS["multi_krum"](rows, f),
        "nnm": MIXING["nnm"](rows, f),
        "arc": MIXING["arc"](rows, f),
        "static_clipping": clipping(rows, radius=2.0),
        "sign_flipping": lies.sign_flipping(honest),
        "fall_of_empires_tau2": lies.fall_of_empires(honest, 2.0),
        "a_little_is_enough_tau1_5": lies.a_little_is_enough(honest, 1.5),
        "mimic_0": lies.mimic(honest, 0),
        "optimal_fall_of_empires_nnm_trimmed_mean": lies.optimized(lies.fall_of_empires, honest, f, rule),
        "optimal_a_little_is_enough_nnm_trimmed_mean": lies.optimized(
            lies.a_little_is_enough, honest, f, rule
        ),
    }
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def sample(n, d, seed=0, dtype=torch.float64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


RULES = {**AGGREGATORS, **MIXING}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RULES)
def test_type_is_kept_and_the_caller_s_rows_are_left_alone(name, dtype):
    rows = sample(9, 5, dtype=dtype)
    before = rows.clone()
    out = RULES[name](rows, 2)
    assert out.dtype == dtype
    assert torch.equal(rows, before)
    assert out.data_ptr() != rows.data_ptr()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("n", "f"), [(4, 2), (3, 2), (2, 1), (1, 1), (5, -1)])
def test_too_many_liars_are_an_error(name, n, f):
    with pytest.raises(ValueError, match=rf"f is {f} of {n} clients; robust rules need 0 <= 2f < n"):
        RULES[name](sample(n, 3), f)


@pytest.mark.parametrize("name", RULES)
def test_rows_must_be_rows(name):
    for bad in (torch.zeros(3), torch.zeros(0, 3), torch.zeros(3, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="rows must be"):
            RULES[name](bad, 0)


@pytest.mark.parametrize("name", AGGREGATORS)
@given(n=st.integers(1, 9), d=st.integers(1, 6), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=25)
def test_the_order_of_clients_does_not_matter(name, n, d, seed, data):
    f = data.draw(st.integers(0, (n - 1) // 2))
    rows = sample(n, d, seed)
    order = data.draw(st.permutations(range(n)))
    torch.testing.assert_close(
        AGGREGATORS[name](rows, f), AGGREGATORS[name](rows[list(order)], f), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", ["nnm", "arc", "clipping"])
def test_mixing_moves_with_its_rows(name):
    rows, order = sample(8, 4), [3, 1, 7, 0, 2, 6, 5, 4]
    torch.testing.assert_close(MIXING[name](rows, 2)[order], MIXING[name](rows[order], 2))


anything = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([1e308, -1e308, 0.0]))


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
@given(n=st.integers(1, 11), d=st.integers(1, 4), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=60)
def test_inside_the_honest_hull_whatever_is_sent(name, n, d, seed, data):
    f = data.draw(st.integers(0, (n - 1) // 2))
    honest = sample(n - f, d, seed)
    sent = data.draw(st.lists(st.lists(anything, min_size=d, max_size=d), min_size=f, max_size=f))
    rows = torch.cat([honest, torch.tensor(sent, dtype=torch.float64).view(f, d)])
    out = AGGREGATORS[name](rows[torch.randperm(n, generator=torch.Generator().manual_seed(seed))], f)
    slack = 1e-12
    assert bool((out >= honest.min(0).values - slack).all())
    assert bool((out <= honest.max(0).values + slack).all())


@pytest.mark.parametrize("f", [1, 2, 3])
def test_trimmed_mean_breaks_at_f_plus_1_liars_and_not_before(f):
    honest = sample(10, 3)
    far = torch.full((f + 1, 3), 1e12, dtype=torch.float64)
    assert trimmed_mean(torch.cat([honest[f:], far[:f]]), f).abs().max() < 5
    assert trimmed_mean(torch.cat([honest[f + 1 :], far]), f).abs().max() > 1e10


@pytest.mark.parametrize("n", [9, 10])
def test_median_breaks_at_half_of_n_and_not_before(n):
    honest = sample(n, 3)
    far = torch.full((n, 3), 1e12, dtype=torch.float64)
    most = (n - 1) // 2
    assert median(torch.cat([honest[most:], far[:most]]), most).abs().max() < 5
    half = math.ceil(n / 2)
    assert median(torch.cat([honest[half:], far[:half]]), most).abs().max() > 1e10


@pytest.mark.parametrize("name", ["trimmed_mean", "multi_krum"])
def test_without_liars_it_is_the_mean(name):
    rows = sample(7, 4)
    torch.testing.assert_close(AGGREGATORS[name](rows, 0), rows.mean(0))


def test_mixing_without_liars():
    rows = sample(7, 4)
    torch.testing.assert_close(MIXING["nnm"](rows, 0), rows.mean(0).expand(7, -1))
    torch.testing.assert_close(MIXING["arc"](rows, 0), rows)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", [*ROBUST, *MIXING, "nnm+median", "nnm+trimmed_mean", "nnm+geometric_median", "arc+krum"]
)
def test_nothing_but_numbers_comes_out(name, value):
    f = 2
    rule = defense(name, f) if name not in MIXING else lambda rows: MIXING[name](rows, f)
    for where in ((slice(None),), (0,), (2,)):
        rows = sample(7, 3)
        rows[(slice(0, f), *where)] = value
        out = rule(rows)
        assert bool(out.isfinite().all())
        assert out.abs().max() < 10


@pytest.mark.parametrize("name", ["krum", "multi_krum", "geometric_median", "centred_clipping", "nnm", "arc"])
def test_more_rows_that_are_not_finite_than_liars_are_an_error(name):
    rows = sample(7, 3)
    rows[:3, 0] = math.nan
    with pytest.raises(ValueError, match="3 of 7 rows are not finite, and only f = 2"):
        RULES[name](rows, 2)


def test_mean_refuses_what_is_not_finite():
    rows = sample(5, 2)
    rows[1, 1] = math.inf
    with pytest.raises(ValueError, match="use a robust rule"):
        mean(rows, 1)


def slow_neighbors(rows, f):
    out = []
    for x in rows:
        ranked = sorted(rows, key=lambda y, x=x: float((x - y).square().sum()))
        out.append(torch.stack(ranked[: len(rows) - f]).mean(0))
    return torch.stack(out)


@pytest.mark.parametrize(("n", "f", "d"), [(1, 0, 3), (5, 2, 4), (10, 3, 40), (21, 9, 7)])
@pytest.mark.parametrize("block", [None, 1, 8, 50])
def test_nearest_neighbors_equal_a_plain_loop(n, f, d, block, monkeypatch):
    if block is not None:
        monkeypatch.setattr("fedbatchnorm.aggregation.aggregators._BLOCK", block)
    rows = sample(n, d, seed=n)
    torch.testing.assert_close(nearest_neighbors(rows, f), slow_neighbors(rows, f))


def test_nearest_neighbors_need_no_memory_to_speak_of():
    """Beyond input and output: a matrix (n, n) and a block, however long the rows are."""
    code = """
import resource, torch
from fedbatchnorm.aggregation.mixing import nearest_neighbors
torch.set_num_threads(1)
nearest_neighbors(torch.randn(20, 1000), 5)
rows = torch.randn(20, 1_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = nearest_neighbors(rows, 5)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 / (rows.numel() * rows.element_size()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.3  # in sizes of the input: the output, and little more


def test_a_far_liar_does_not_take_the_digits_from_the_others():
    rows = sample(9, 6) * 1e-3 + 5
    exact = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    for size in (1e6, 1e12):
        found = distances(torch.cat([rows, torch.full((1, 6), size, dtype=torch.float64)]))[:9, :9]
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-18)


def test_the_geometric_median_is_one():
    from scipy.optimize import minimize

    for seed in range(3):
        rows = sample(8, 3, seed)
        rows[0] *= 1e3
        start = rows.median(0).values.numpy()
        best = minimize(
            lambda p, r=rows: np.linalg.norm(r.numpy() - p, axis=1).sum(),
            start,
            tol=1e-14,
            method="Nelder-Mead",
            options={"maxiter": 20_000, "fatol": 1e-14, "xatol": 1e-12},
        )
        torch.testing.assert_close(geometric_median(rows, 1), torch.from_numpy(best.x), rtol=0, atol=1e-5)


def test_the_geometric_median_of_rows_that_are_all_alike():
    rows = torch.full((5, 2), 3.0, dtype=torch.float64)
    assert torch.equal(geometric_median(rows, 1), rows[0])


def test_centred_clipping_by_hand():
    rows = torch.tensor([[3.0, 4.0], [0.0, 50.0], [0.0, 0.0]], dtype=torch.float64)
    clipped = torch.tensor([[3.0, 4.0], [0.0, 10.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(centred_clipping(rows, 1, radius=10.0), clipped.mean(0))
    center = torch.tensor([0.0, 50.0], dtype=torch.float64)
    moved = centred_clipping(rows, 1, center=center, radius=1e9)
    torch.testing.assert_close(moved, rows.mean(0))


def test_bucketing_is_means_of_random_groups():
    rows = sample(6, 3)
    one, two = (bucketing(rows, size=2, generator=torch.Generator().manual_seed(s)) for s in (0, 0))
    assert torch.equal(one, two)
    assert one.shape == (3, 3)
    torch.testing.assert_close(one.mean(0), rows.mean(0))
    assert bucketing(rows, size=4, generator=torch.Generator()).shape == (2, 3)
    with pytest.raises(ValueError, match="size is 0"):
        bucketing(rows, size=0, generator=torch.Generator())


@pytest.mark.parametrize("name", ["median+nnm", "mode", "nnm+", "", "nnm++median", "krum+median"])
def test_an_unknown_defense_gets_the_list(name):
    with pytest.raises(ValueError, match=r"one of mean, median, .* after any of nnm, arc, clipping"):
        defense(name, 1)


def test_an_attack_may_have_a_factor():
    honest = torch.tensor([[1.0, -2.0], [3.0, -6.0]], dtype=torch.float64)
    sent = {tau: attack(f"foe:{tau}").lie(honest, 1, None, None) for tau in (10, 0.5)}
    assert {tau: t.tolist() for tau, t in sent.items()} == {10: [-20.0, 40.0], 0.5: [-1.0, 2.0]}
    assert attack("alie:0").lie(honest, 1, None, None).tolist() == [2.0, -4.0]
    assert attack("alie:3").targets == ATTACKS["alie"].targets


@pytest.mark.parametrize(
    "name", ["", "foe:", "foe:x", "foe:nan", "foe:inf", "sf:2", "opt_foe:2", "foe:1:2", "f"]
)
def test_an_unknown_attack_is_named(name):
    with pytest.raises(ValueError, match=f"attack '{name}' is not known: it is one of sf, foe"):
        attack(name)


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_is_one_vector_made_from_the_honest_ones(name):
    honest = sample(7, 5)
    before = honest.clone()
    made = [
        ATTACKS[name].lie(honest, 3, defense("nnm+median", 3), torch.Generator().manual_seed(0))
        for _ in range(2)
    ]
    assert made[0].shape == (5,)
    assert made[0].dtype == torch.float64
    assert torch.equal(made[0].nan_to_num(7.0), made[1].nan_to_num(7.0))
    assert torch.equal(honest, before)
    assert set(ATTACKS[name].targets) <= {"means", "variances"}


def test_sign_flipping_strikes_the_means_alone_as_in_the_paper():
    assert ATTACKS["sf"].targets == ("means",)


@pytest.mark.parametrize(
    ("plain", "best"), [(lies.fall_of_empires, "opt_foe"), (lies.a_little_is_enough, "opt_alie")]
)
def test_the_search_finds_no_weaker_attack(plain, best):
    for seed in range(5):
        honest = sample(7, 6, seed) + 1
        rule = defense("trimmed_mean", 3)

        def damage(vector, honest=honest, rule=rule):
            return (rule(torch.cat([honest, vector.expand(3, -1)])) - honest.mean(0)).norm().item()

        found = ATTACKS[best].lie(honest, 3, rule, torch.Generator())
        assert damage(found) >= damage(plain(honest, 0.0)) - 1e-12
        assert damage(found) >= damage(plain(honest, 10.0)) - 1e-12


def test_one_honest_client_has_no_deviation():
    assert torch.equal(lies.a_little_is_enough(torch.tensor([[1.0, 2.0]])), torch.tensor([1.0, 2.0]))


HUGE = {torch.float64: (1e200, 1.7e308, -1.7e308), torch.float32: (1e20, 1e37, -3e38)}


@pytest.mark.parametrize(("dtype", "value"), [(t, v) for t, vs in HUGE.items() for v in vs])
@pytest.mark.parametrize(
    "name", [*ROBUST, "nnm+krum", "nnm+median", "arc+trimmed_mean", "nnm+geometric_median"]
)
def test_huge_numbers_are_no_better_a_lie_than_infinity(name, dtype, value):
    honest = torch.randn(7, 40, dtype=dtype, generator=torch.Generator().manual_seed(0))
    found = defense(name, 3)(torch.cat([honest, torch.full((3, 40), value, dtype=dtype)]))
    assert found.isfinite().all()
    assert found.abs().max() < 10


@pytest.mark.parametrize("lie", [-1.0, -1.02, 1.01, 3.0])
def test_a_liar_of_any_length_takes_no_digits_from_the_others(lie):
    """Sign flipping has the honest length: distances about the liar's row would lose all digits."""
    honest = 1e6 + 1e-3 * torch.randn(6, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([honest, lie * honest.mean(0, keepdim=True)])
    found = distances(rows)[:6, :6]
    want = torch.cdist(honest, honest, compute_mode="donot_use_mm_for_euclid_dist").square()
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0)


TIED = [torch.eye(5), torch.arange(5.0).view(5, 1), 2 * torch.eye(5)[[0, 0, 1, 2, 2]] - 1]


@pytest.mark.parametrize("name", [*ROBUST, "nnm+median", "nnm+trimmed_mean", "arc+multi_krum"])
@pytest.mark.parametrize("rows", TIED)
def test_ties_are_not_decided_by_who_comes_first(name, rows):
    rule = defense(name, 2)
    rows = rows.double()
    for order in itertools.permutations(range(5)):
        torch.testing.assert_close(rule(rows[list(order)]), rule(rows), rtol=1e-9, atol=1e-12)


def test_the_geometric_median_does_not_stay_at_a_row():
    rows = torch.tensor([[-2.0, 0.0], [-2.0, -1.0], [0.0, -2.0]], dtype=torch.float64)

    def cost(point):
        return (rows - point).norm(dim=1).sum().item()

    found = geometric_median(rows)
    nearby = [found + 1e-4 * torch.randn(2, dtype=torch.float64) for _ in range(200)]
    assert cost(found) < cost(torch.tensor([-2.0, -1.0])) - 1e-3
    assert cost(found) <= min(map(cost, nearby)) + 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", [*AGGREGATORS, "nnm+median"])
def test_half_types_are_refused(name, dtype):
    with pytest.raises(ValueError, match=r"rows must be .n, d. in float32 or float64"):
        defense(name, 1)(torch.ones(5, 3).to(dtype))


def test_infinities_of_either_sign_come_out_as_infinity():
    inf = math.inf
    assert median(torch.tensor([[1.0], [inf], [inf], [inf]]), 1).item() == inf
    assert median(torch.tensor([[-inf], [inf]])).item() == inf
    assert trimmed_mean(torch.tensor([[1.0], [-inf], [inf]]), 0).item() == inf
    rows = torch.tensor([[math.nan], [2.0], [1.0]])
    assert not bucketing(rows, 1, generator=torch.Generator().manual_seed(0)).isnan().any()


@pytest.mark.parametrize("wrong", [1.0, "1", math.nan])
def test_f_is_a_whole_number(wrong):
    with pytest.raises(ValueError, match=r"f is .*; it must be a whole number"):
        trimmed_mean(torch.ones(5, 2), wrong)
    with pytest.raises(ValueError, match=r"f is .*; it must be a whole number"):
        defense("median", wrong)


def test_a_radius_can_be_given_and_must_be_positive():
    rows = torch.tensor([[30.0, 40.0], [3.0, 4.0], [0.3, 0.4]])
    assert defense("clipping:20+mean", 0)(rows).tolist() == pytest.approx([5.1, 6.8])
    assert defense("clipping+mean", 0)(rows).tolist() == pytest.approx([0.9, 1.2])
    for name in ("clipping:0+median", "clipping:-1+median", "clipping:nan+median", "centred_clipping:0"):
        with pytest.raises(ValueError, match=r"radius is .*; it must be positive"):
            defense(name, 0)(rows)
    for name in ("median:3", "nnm:2+median", "clipping:x+median", "clipping:3"):
        with pytest.raises(ValueError, match="is not known"):
            defense(name, 0)


def test_large_float32_rows_are_clipped_to_the_radius():
    rows = torch.tensor([[1e20, 0.0], [1.0, 1.0]])
    torch.testing.assert_close(clipping(rows, radius=2.0), torch.tensor([[2.0, 0.0], [1.0, 1.0]]))


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("foe:2", "foe"),
        ("foe:2.0", "foe"),
        ("foe:1e1", "foe:10"),
        ("alie:1.5", "alie"),
        ("foe:0.123456789", "foe:0.123456789"),
    ],
)
def test_an_attack_has_one_name(name, plain):
    assert plain_name(name) == plain
    assert plain_name(plain) == plain
