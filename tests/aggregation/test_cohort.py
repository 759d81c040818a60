"""A cohort is not the population, and clients do not all take as many steps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedbatchnorm as fbn
from fedbatchnorm.aggregation.aggregators import mean as plain_mean
from fedbatchnorm.aggregation.cohort import between_clients, cohort_factor
from fedbatchnorm.data import datasets
from fedbatchnorm.norm.moments import Moments, Running

FRESH = {"bn": fbn.Running(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))}
counts = st.integers(1, 1000)
values = st.floats(-1e3, 1e3)


def moments(count, mean, var):
    one = lambda x: torch.as_tensor(x, dtype=torch.float64).reshape(-1)  # noqa: E731
    return {"bn": fbn.Moments(int(count), one(mean), one(var))}


def variance(clients, **options):
    return fbn.merge(FRESH, clients, momentum=1.0, **options).statistics["bn"].var


def one_class_clients(n=100):
    """Digits sorted by class on n clients: the moments of a random layer's outputs."""
    data = datasets.load("digits")
    order = data.train.y.argsort(stable=True)
    x = data.inputs(data.train.x).double()[order].flatten(1)
    layer = torch.randn(x.shape[1], 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = (x @ layer).tensor_split(n)
    shared = {"bn": fbn.Running(torch.zeros(16).double(), torch.ones(16).double())}
    return (
        shared,
        [{"bn": fbn.Moments(len(p), p.mean(0), p.var(0, correction=0))} for p in parts],
        torch.cat(parts),
    )


@pytest.mark.parametrize("m", [2, 5, 10])
def test_a_cohort_s_variance_is_the_population_s_in_expectation(m):
    """100 clients of one class each: within 2%, where it was .65 to .96 of the truth."""
    shared, clients, everything = one_class_clients()
    truth = everything.var(0)
    found = {None: [], 100: []}
    draw = torch.Generator().manual_seed(m)
    for _ in range(1500):
        cohort = [clients[i] for i in torch.randperm(100, generator=draw)[:m]]
        for population, kept in found.items():
            merged = fbn.merge(shared, cohort, momentum=1.0, population=population)
            kept.append(merged.statistics["bn"].var)
    ratio = {n: float((torch.stack(kept).mean(0) / truth).mean()) for n, kept in found.items()}
    assert ratio[None] < 1 - 0.3 / m
    assert abs(ratio[100] - 1) < 0.02, ratio


@pytest.mark.parametrize("values_each", [1, 3])
def test_the_noise_of_small_batches_is_not_counted_twice(values_each):
    """Clients that are all alike: a cohort has the variance of the data, also with one value each."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 2, values_each, 1, generator=draw, dtype=torch.float64)
    found = [
        variance([moments(values_each, c.mean(), c.var(correction=0)) for c in cohort], population=100)
        for cohort in x
    ]
    assert abs(float(torch.cat(found).mean()) - 1) < 0.06


def test_unequal_counts_in_expectation():
    """Cohorts of 3 of 60 clients with 1 to 40 values each, means that counts say nothing about."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 40, (60,), generator=draw)
    sums, plain, wanted = 0.0, 0.0, 0.0
    for _ in range(150):
        means = 3 * torch.randn(60, generator=draw, dtype=torch.float64)
        clients = [moments(k, u, 1.0) for k, u in zip(sizes, means, strict=True)]
        wanted += float(variance(clients))
        for _ in range(4):
            cohort = [clients[i] for i in torch.randperm(60, generator=draw)[:3]]
            sums += float(variance(cohort, population=60)) / 4
            plain += float(variance(cohort)) / 4
    assert plain < 0.75 * wanted
    assert abs(sums / wanted - 1) < 0.08, sums / wanted


def test_the_factor_for_equal_counts_and_by_channel():
    for m, n in ((2, 100), (5, 100), (10, 11), (3, 3)):
        wanted = m / (m - 1) * (n - 1) / n
        assert float(cohort_factor(torch.full((m,), 7), n)) == pytest.approx(wanted, rel=1e-14)
    assert float(cohort_factor(torch.tensor([1, 3]), 4)) == (1 - 0.625 * 2 / 4) / (1 - 0.625)
    by_channel = torch.tensor([[4, 1, 0], [4, 3, 9], [4, 8, 0]])
    found = cohort_factor(by_channel, 50)
    for c in range(2):
        column = by_channel[:, c]
        torch.testing.assert_close(found[c], cohort_factor(column, 50), rtol=0, atol=0)
    assert found[2] == 1  # one client alone
    assert found.dtype == torch.float64


clients_of = st.lists(st.tuples(counts, values, st.floats(0, 1e3)), min_size=1, max_size=8)


@given(clients_of, st.integers(0, 100))
def test_total_is_within_plus_factor_times_between(rows, more):
    n, k = len(rows) + more, torch.tensor([r[0] for r in rows])
    u, s = (torch.tensor([r[i] for r in rows], dtype=torch.float64) for i in (1, 2))
    found = variance([moments(*r) for r in rows], population=n)
    share = k.double() / k.sum()
    within, between = share @ s, share @ (u - share @ u).square()
    total = float(k.sum())
    if len(rows) > 1:
        total = round(total * n / len(rows))
    factor = cohort_factor(k, n)
    wanted = (within + factor * between) * total / (total - 1) if total > 1 else torch.tensor(1.0).double()
    torch.testing.assert_close(found[0], wanted, rtol=1e-11, atol=1e-9)
    assert factor >= 1 - 1e-12 or len(rows) == 1


@given(clients_of, st.booleans(), st.randoms(use_true_random=False))
def test_all_clients_need_no_correction_and_their_order_does_not_matter(rows, robust, random):
    clients = [moments(*r) for r in rows]
    rule = {"aggregator": plain_mean} if robust else {}
    assert torch.equal(variance(clients, population=len(rows), **rule), variance(clients, **rule))
    shuffled = random.sample(clients, len(clients))
    one, other = (variance(c, population=len(rows) + 9) for c in (clients, shuffled))
    assert torch.equal(one, other)


def test_a_robust_rule_takes_the_same_factor():
    """With the mean and equal counts it is the exact merge, also of a cohort."""
    clients = [moments(6, u, 1.0 + u) for u in (0.0, 1.0, 5.0)]
    exact, robust = (variance(clients, population=40, **rule) for rule in ({}, {"aggregator": plain_mean}))
    torch.testing.assert_close(robust, exact, rtol=1e-13, atol=0)
    assert robust > variance(clients) * 1.2
    spread = [variance(clients, population=n, aggregator=fbn.defense("median", 1)) for n in (3, 40)]
    assert spread[1] > spread[0]


def test_one_client_cannot_be_corrected_and_a_notice_says_so():
    result = fbn.merge(FRESH, [moments(6, 1.0, 2.0)], momentum=1.0, population=10)
    [notice] = result.notices
    assert (notice.layer, notice.reason) == ("bn", "cohort_of_one")
    assert "one client of 10" in notice.detail
    assert torch.equal(result.statistics["bn"].var, variance([moments(6, 1.0, 2.0)]))
    assert fbn.merge(FRESH, [moments(6, 1.0, 2.0)], population=1).notices == ()


def test_a_layer_that_some_clients_lack_is_as_rare_among_all():
    shared = FRESH | {"rare": FRESH["bn"]}
    nothing = fbn.Moments(0, torch.zeros(1).double(), torch.zeros(1).double())
    clients = [moments(5, u, 1.0) | {"rare": nothing} for u in (0.0, 3.0)]
    clients += [moments(5, u, 1.0) | {"rare": moments(5, u, 1.0)["bn"]} for u in (1.0, 7.0)]
    found = fbn.merge(shared, clients, momentum=1.0, population=40).statistics["rare"].var
    assert torch.equal(found, variance([moments(5, u, 1.0) for u in (1.0, 7.0)], population=20))


@pytest.mark.parametrize("population", [2, 0, -1, 2.5, True, math.nan])
def test_a_population_that_cannot_be_is_named(population):
    with pytest.raises(ValueError, match="population is"):
        fbn.merge(FRESH, [moments(2, u, 1.0) for u in (0.0, 1.0, 2.0)], population=population)


def test_steps_by_client_are_weighted_by_counts_or_their_median():
    clients = {"a": moments(30, 1.0, 1.0), "b": moments(10, 2.0, 1.0), "bad": moments(1, 2.0, -1.0)}
    steps = {"a": 1, "b": 5, "bad": 10**6, "absent": 7}
    by_client, one = (fbn.merge(FRESH, clients, steps=s).statistics["bn"] for s in (steps, 2.0))
    assert torch.equal(by_client.mean, one.mean)
    assert by_client.tracked == one.tracked == 2
    clients |= {"c": moments(10, 2.0, 1.0)}
    rule = fbn.defense("median", 1)
    by_client, one = (
        fbn.merge(FRESH, clients, steps=s, aggregator=rule).statistics["bn"]
        for s in (steps | {"c": 10**6}, 5)
    )
    assert torch.equal(by_client.mean, one.mean)
    assert fbn.merge(FRESH, {"bad": clients["bad"]}, steps=steps).updated is False


def test_steps_of_a_list_are_by_place():
    clients = [moments(10, 1.0, 1.0), moments(10, 2.0, 1.0)]
    found, wanted = (fbn.merge(FRESH, clients, steps=s).statistics["bn"] for s in ({0: 2, 1: 4}, 3))
    assert torch.equal(found.mean, wanted.mean)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ({"a": 1}, "client 'b' is missing"),
        ({"a": 1, "b": 0}, "steps of client 'b' is 0"),
        ({"a": math.nan, "b": 1}, "steps of client 'a' is nan"),
        ({"a": 1, "b": math.inf}, "steps of client 'b' is inf"),
        ({"a": 1, "b": "7"}, "steps of client 'b' is '7'"),
        ({"a": True, "b": 1}, "steps of client 'a' is True"),
    ],
)
def test_steps_that_are_missing_or_impossible_name_the_client(steps, message):
    with pytest.raises(ValueError, match=message):
        fbn.merge(FRESH, {"a": moments(3, 1.0, 1.0), "b": moments(3, 1.0, 1.0)}, steps=steps)


def part(seen, factor=1.0):
    """B / (W + B) by channel, in plain loops over what each client's values would be."""
    parts = []
    for c in range(seen.mean.shape[1]):
        n = [float(k) for k in seen.count]
        u = sum(k * m for k, m in zip(n, seen.mean[:, c].tolist(), strict=True)) / sum(n)
        between = sum(k * (m - u) ** 2 for k, m in zip(n, seen.mean[:, c].tolist(), strict=True)) / sum(n)
        within = sum(k * v for k, v in zip(n, seen.var[:, c].tolist(), strict=True)) / sum(n)
        parts.append(factor * between / (within + factor * between))
    return parts


def three_clients():
    torch.manual_seed(3)
    return Moments(torch.tensor([20, 7, 13]), torch.randn(3, 4).double(), torch.rand(3, 4).double())


def test_the_part_between_clients():
    seen = three_clients()
    assert between_clients(seen).tolist() == pytest.approx(part(seen))
    factor = float(cohort_factor(seen.count, 30))
    assert between_clients(seen, 30).tolist() == pytest.approx(part(seen, factor))
    by_channel = seen._replace(count=seen.count[:, None].expand(3, 4))
    assert between_clients(by_channel).tolist() == pytest.approx(part(seen))
    alike = seen._replace(mean=seen.mean[:1].expand(3, 4))
    assert between_clients(alike).max() < 1e-12


def test_the_part_between_clients_where_it_cannot_be_known():
    seen = three_clients()
    one = Moments(seen.count[:1], seen.mean[:1], seen.var[:1])
    assert between_clients(one, 30).tolist() == [1.0] * 4  # of several: it may be anything
    assert between_clients(one).tolist() == [0.0] * 4  # of one: there are no others
    nothing = Moments(torch.zeros(3), torch.zeros(3, 4), torch.zeros(3, 4))
    assert between_clients(nothing).tolist() == [1.0] * 4
    constant = Moments(torch.tensor([5, 5]), torch.zeros(2, 4), torch.zeros(2, 4))
    assert between_clients(constant).tolist() == [0.0] * 4


def test_merge_tells_the_part_between_clients():
    seen = three_clients()
    shared = {name: Running(torch.zeros(4), torch.ones(4)) for name in ("a", "b")}
    rows = zip(seen.count.tolist(), seen.mean, seen.var, strict=True)
    updates = [
        {"a": Moments(k, m, v), "b": Moments(k if i == 0 else 0, m, v)} for i, (k, m, v) in enumerate(rows)
    ]
    whole = fbn.merge(shared, updates).between
    assert whole["a"] == pytest.approx(sum(part(seen)) / 4)
    assert whole["b"] == 0.0  # the only client that has the layer
    cohort = fbn.merge(shared, updates, population=30).between
    assert cohort == {"a": pytest.approx(sum(part(seen, float(cohort_factor(seen.count, 30)))) / 4)}
    assert fbn.merge(shared, updates, aggregator=fbn.defense("median", f=1)).between == {}
    assert fbn.merge(shared, updates, quorum=4).between == {}
