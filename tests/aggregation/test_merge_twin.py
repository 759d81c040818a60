"""The merge of all layers side by side against its slow, obvious twin: a layer and a client at a time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbatchnorm import Moments, Running, merge
from fedbatchnorm.aggregation.cohort import cohort_factor, population_count
from fedbatchnorm.norm.moments import combine, update_running

SIZES = {"a": 3, "b": 1, "empty": 0, "c": 2500}  # more channels than are taken at a time


def drawn(seed, n, absent, spread):
    """Statistics, and updates in which a client may have seen nothing of a layer."""
    g = torch.Generator().manual_seed(seed)

    def normal(c):
        return torch.randn(c, generator=g, dtype=torch.float64)

    shared = {k: Running(normal(c), normal(c).square() + 0.1, 4, 0.1) for k, c in SIZES.items()}
    updates = []
    for _ in range(n):
        there = {k: torch.rand(1, generator=g).item() >= absent for k in SIZES}
        counts = {k: int(torch.randint(1, 50, (), generator=g)) if there[k] else 0 for k in SIZES}
        layers = {k: Moments(counts[k], spread * normal(c), normal(c).square()) for k, c in SIZES.items()}
        updates.append(layers)
    return shared, updates


def by_loops(shared, updates, population, used):
    after = {}
    for name, running in shared.items():
        rows = [u[name] for u in updates if u[name].count]
        if not rows:
            after[name] = running
            continue
        counts = torch.tensor([m.count for m in rows])
        stacked = Moments(counts, torch.stack([m.mean for m in rows]), torch.stack([m.var for m in rows]))
        seen = combine(stacked)
        everyone = len(rows) * (population or used) / used
        if 1 < len(rows) < everyone:
            between = combine(stacked._replace(var=torch.zeros_like(stacked.var))).var
            total = round(float(population_count(float(seen.count), len(rows), everyone)))
            factor = cohort_factor(counts, everyone)
            seen = Moments(total, seen.mean, seen.var + (factor - 1) * between)
        after[name] = update_running(running, seen)
    return after


cases = st.tuples(
    st.integers(0, 2**32), st.integers(1, 20), st.sampled_from([0.0, 0.3, 0.8]), st.sampled_from([1.0, 1e4])
)


@settings(max_examples=20)
@given(cases, st.booleans())
def test_a_merge_is_what_loops_over_layers_and_clients_give(case, larger):
    shared, updates = drawn(*case)
    population = 3 * len(updates) if larger else None
    result = merge(shared, updates, population=population)
    used = sum(v.used for v in result.verdicts.values())
    for name, wanted in by_loops(shared, updates, population, used).items():
        found = result.statistics[name]
        assert found.tracked == wanted.tracked
        scale = wanted.mean.abs().clamp(min=1) * case[3]
        assert ((found.mean - wanted.mean).abs() <= 1e-13 * scale).all()
        torch.testing.assert_close(found.var, wanted.var, rtol=1e-12, atol=0)


@settings(max_examples=20)
@given(cases, st.booleans(), st.randoms())
def test_order_and_what_unseen_layers_hold_change_no_bit(case, larger, random):
    shared, updates = drawn(*case)
    population = 3 * len(updates) if larger else None
    expected = merge(shared, updates, population=population).statistics
    shuffled = [
        {k: m if m.count else m._replace(mean=m.mean * 7 - 1, var=m.var + 2) for k, m in u.items()}
        for u in updates
    ]
    random.shuffle(shuffled)
    found = merge(shared, shuffled, population=population).statistics
    for name in SIZES:
        assert torch.equal(found[name].mean, expected[name].mean)
        assert torch.equal(found[name].var, expected[name].var)


@settings(max_examples=20)
@given(cases)
def test_a_layer_alone_is_merged_as_beside_others(case):
    shared, updates = drawn(*case)
    together = merge(shared, updates).statistics
    for name in SIZES:
        alone = merge({name: shared[name]}, [{name: u[name]} for u in updates if u[name].count]).statistics
        assert torch.equal(together[name].mean, alone[name].mean)
        assert torch.equal(together[name].var, alone[name].var)
