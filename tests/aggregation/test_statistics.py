import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm import Moments, Notice, Running, merge

PLAIN = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
FEDERATED = {1: fbn.FederatedBatchNorm1d, 2: fbn.FederatedBatchNorm2d, 3: fbn.FederatedBatchNorm3d}


def assert_running_equal(ours, theirs, rtol=1e-12):
    """Variances relative to themselves, means relative to max(|mean|, sd)."""
    scale = torch.maximum(theirs.running_mean.abs(), theirs.running_var.sqrt())
    assert ((ours.mean - theirs.running_mean).abs() / scale).max() <= rtol
    assert ((ours.var - theirs.running_var).abs() / theirs.running_var).max() <= rtol
    assert ours.tracked == int(theirs.num_batches_tracked)


def random_batches(g, clients, dims, offset):
    """Batches of unequal size and place; their common offset is up to 1e3 standard deviations."""

    def integer(low, high):
        return int(torch.randint(low, high + 1, (), generator=g))

    space = [integer(1, 3) for _ in range(dims if dims > 1 else integer(0, 1))]
    scale = torch.logspace(-2, 2, 4, dtype=torch.float64).view(1, -1, *[1] * len(space))
    return [
        scale
        * (
            torch.randn(integer(1, 5), 4, *space, generator=g, dtype=torch.float64)
            + torch.randn(1, generator=g, dtype=torch.float64)
            + offset
        )
        for _ in range(clients)
    ]


@settings(max_examples=5)
@given(
    seed=st.integers(0, 2**32),
    dims=st.sampled_from([1, 2, 3]),
    offset=st.sampled_from([0.0, 1.0, -30.0, 1e3]),
    momentum=st.sampled_from([0.1, 0.01, 1.0, None]),
)
def test_200_rounds_equal_batch_norm_on_the_union(seed, dims, offset, momentum):
    g = torch.Generator().manual_seed(seed)
    ours = FEDERATED[dims](4, momentum=momentum).double()
    theirs = PLAIN[dims](4, momentum=momentum).double()
    shared = fbn.statistics(ours)
    for _ in range(200):
        batches = random_batches(g, int(torch.randint(1, 33, (), generator=g)), dims, offset)
        if sum(b.numel() for b in batches) <= 4:
            continue  # torch refuses a single value per channel
        fbn.load_statistics(ours, shared)
        updates = []
        with torch.no_grad():
            for batch in batches:
                ours(batch)
                updates.append(fbn.collect(ours))
            theirs(torch.cat(batches))
        shared = merge(shared, updates).statistics
    assert_running_equal(shared[""], theirs)


def deep_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 16, 6),
        nn.BatchNorm1d(6),
        nn.Linear(6, 4),
    ).double()


def test_inside_a_deep_network_n_clients_equal_one_folded_batch():
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(k, 3, 6, 6, generator=g, dtype=torch.float64) + k for k in (3, 5, 1, 8)]
    labels = [torch.randint(4, (len(b),), generator=g) for b in batches]
    model = fbn.convert(deep_net(), gradient=0)
    shared = fbn.statistics(model)
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in shared}
    for name in shared:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, x, n=name: inputs[n].append(x[0].detach())
        )

    for _ in range(4):  # rounds: statistics change in between, so later layers see other inputs
        for recorded in inputs.values():
            recorded.clear()
        fbn.load_statistics(model, shared)
        updates, losses = [], []
        for x, y in zip(batches, labels, strict=True):
            losses.append(nn.functional.cross_entropy(model(x), y, reduction="sum"))
            updates.append(fbn.collect(model))
        looped = torch.autograd.grad(sum(losses), list(model.parameters()))
        recorded = {name: list(batches) for name, batches in inputs.items()}
        folded_loss = nn.functional.cross_entropy(
            model(torch.cat(batches)), torch.cat(labels), reduction="sum"
        )
        folded = torch.autograd.grad(folded_loss, list(model.parameters()))
        folded_update = fbn.collect(model)
        torch.testing.assert_close(looped, folded, rtol=1e-10, atol=1e-12)

        after = merge(shared, updates).statistics
        from_fold = merge(shared, [folded_update]).statistics
        for name in shared:
            reference = PLAIN[1 if name == "8" else 2](len(shared[name].mean)).double()
            reference.running_mean.copy_(shared[name].mean)
            reference.running_var.copy_(shared[name].var)
            reference.num_batches_tracked.fill_(shared[name].tracked)
            reference(torch.cat(recorded[name]))
            assert_running_equal(after[name], reference, rtol=1e-10)
            assert_running_equal(from_fold[name], reference, rtol=1e-10)
        shared = after


def one_layer(channels=3, dtype=torch.float64, **kwargs):
    return {"bn": Running(torch.zeros(channels, dtype=dtype), torch.ones(channels, dtype=dtype), **kwargs)}


def random_updates(seed, n, channels=3, equal=False):
    g = torch.Generator().manual_seed(seed)
    updates = []
    for _ in range(n):
        k = 8 if equal else int(torch.randint(1, 20, (), generator=g))
        x = torch.randn(k, channels, generator=g, dtype=torch.float64) * 2 + torch.randn(
            channels, generator=g
        )
        updates.append({"bn": Moments(k, x.mean(0), x.var(0, correction=0))})
    return updates


seeds = st.integers(0, 2**32)


@given(seeds, st.integers(1, 12), st.randoms())
def test_the_order_of_clients_does_not_matter_to_the_last_bit(seed, n, random):
    updates = dict(enumerate(random_updates(seed, n)))
    expected = merge(one_layer(), updates).statistics["bn"]
    keys = list(updates)
    random.shuffle(keys)
    result = merge(one_layer(), {k: updates[k] for k in keys}).statistics["bn"]
    assert torch.equal(result.mean, expected.mean)
    assert torch.equal(result.var, expected.var)


@given(seeds, st.integers(1, 6), st.integers(1, 19))
def test_splitting_one_client_in_two_changes_nothing(seed, n, cut):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 3, generator=g, dtype=torch.float64)
    others = random_updates(seed, n)

    def seen(part):
        return {"bn": Moments(len(part), part.mean(0), part.var(0, correction=0))}

    whole = merge(one_layer(), [*others, seen(x)]).statistics["bn"]
    halves = merge(one_layer(), [*others, seen(x[:cut]), seen(x[cut:])]).statistics["bn"]
    torch.testing.assert_close(halves.mean, whole.mean, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(halves.var, whole.var, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("steps", [1, 2, 5, 2.5])
def test_several_steps_weigh_as_one_update_on_all_that_the_round_saw(steps):
    updates = random_updates(0, 4)
    shared = one_layer(tracked=10)
    beta = 1 - 0.9**steps
    k = torch.tensor([u["bn"].count for u in updates], dtype=torch.float64)
    mean = sum(w * u["bn"].mean for w, u in zip(k, updates, strict=True)) / k.sum()
    within = sum(w * (u["bn"].var + (u["bn"].mean - mean) ** 2) for w, u in zip(k, updates, strict=True))
    after = merge(shared, updates, steps=steps).statistics["bn"]
    torch.testing.assert_close(after.mean, beta * mean)
    torch.testing.assert_close(after.var, (1 - beta) + beta * within / (k.sum() - 1))
    assert after.tracked == 10 + round(steps)


def test_the_paper_s_form_with_running_statistics_gives_the_same():
    """Algorithm 2 as printed, clients sending running statistics, for equal counts."""
    beta, n, k = 0.1, 5, 8
    updates = random_updates(1, n, equal=True)
    shared = one_layer()["bn"]
    means = torch.stack([(1 - beta) * shared.mean + beta * u["bn"].mean for u in updates])
    bessel = k * n / (k * n - 1)
    variances = torch.stack([(1 - beta) * shared.var + beta * bessel * u["bn"].var for u in updates])
    mean = means.mean(0)
    var = variances.mean(0) + bessel / beta * (means - mean).square().mean(0)
    after = merge({"bn": shared}, updates).statistics["bn"]
    torch.testing.assert_close(after.mean, mean, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(after.var, var, rtol=1e-12, atol=0)


def test_momentum_one_takes_the_round_as_it_is():
    updates = random_updates(2, 3)
    after = merge(one_layer(momentum=None), updates, momentum=1).statistics["bn"]
    doubled = merge(one_layer(), updates, momentum=1, steps=3).statistics["bn"]
    assert torch.equal(after.mean, doubled.mean)
    total = sum(u["bn"].count for u in updates)
    torch.testing.assert_close(after.mean, sum(u["bn"].count * u["bn"].mean for u in updates) / total)


def test_a_plain_average_counts_its_steps():
    shared = one_layer(channels=1, momentum=None)
    for round_, value in enumerate((3.0, 5.0, 10.0)):
        result = merge(shared, [{"bn": Moments(2, torch.tensor([value]), torch.zeros(1))}])
        shared = result.statistics
        assert shared["bn"].tracked == round_ + 1
    assert shared["bn"].mean.item() == pytest.approx(6.0)


def test_the_type_of_the_statistics_is_kept():
    after = merge(one_layer(dtype=torch.float32), random_updates(0, 3)).statistics["bn"]
    assert after.mean.dtype == after.var.dtype == torch.float32
    assert type(after.tracked) is int


def test_merge_changes_nothing_it_was_given():
    shared, updates = one_layer(), random_updates(0, 3)
    before = [t.clone() for t in (shared["bn"].mean, shared["bn"].var, updates[0]["bn"].mean)]
    merge(shared, updates)
    merge(shared, updates, aggregator=lambda rows: rows.mul_(2).mean(0))
    for t, b in zip((shared["bn"].mean, shared["bn"].var, updates[0]["bn"].mean), before, strict=True):
        assert torch.equal(t, b)


def test_a_single_value_updates_the_mean_alone():
    for aggregator in (None, lambda rows: rows.mean(0)):
        update = {"bn": Moments(1, torch.full((3,), 5.0), torch.zeros(3))}
        result = merge(one_layer(), [update], aggregator=aggregator)
        after = result.statistics["bn"]
        assert after.mean.tolist() == [0.5] * 3
        assert after.var.tolist() == [1.0] * 3
        assert [n.reason for n in result.notices] == ["insufficient_count"]


@pytest.mark.parametrize("counts", [(2,), (1, 1), (1, 0, 5), (0, 0, 3)])
def test_small_counts_are_exact(counts):
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(k, 3, generator=g, dtype=torch.float64) for k in counts]
    layer, theirs = fbn.FederatedBatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    shared, updates = fbn.statistics(layer), []
    for batch in batches:
        layer(batch)
        updates.append(fbn.collect(layer))
    theirs(torch.cat(batches))
    result = merge(shared, updates)
    assert_running_equal(result.statistics[""], theirs)
    assert [v.reason for v in result.verdicts.values()] == ["empty" if k == 0 else None for k in counts]


def test_count_zero_in_one_layer_leaves_the_client_out_of_that_layer_only():
    shared = one_layer() | {"frozen": one_layer()["bn"]}
    updates = [u | {"frozen": u["bn"]} for u in random_updates(0, 3)]
    updates[1]["frozen"] = Moments(0, torch.zeros(3), torch.zeros(3))
    for aggregator in (None, lambda rows: rows.median(0).values):
        after = merge(shared, updates, aggregator=aggregator).statistics
        others = merge(
            {"frozen": shared["frozen"]},
            [{"frozen": updates[i]["frozen"]} for i in (0, 2)],
            aggregator=aggregator,
        ).statistics
        assert torch.equal(after["frozen"].mean, others["frozen"].mean)
        assert torch.equal(after["frozen"].var, others["frozen"].var)
        everyone = merge(one_layer(), [{"bn": u["bn"]} for u in updates], aggregator=aggregator).statistics
        assert torch.equal(after["bn"].mean, everyone["bn"].mean)


def test_a_layer_that_nobody_saw_stays_and_says_so():
    shared = one_layer() | {"frozen": one_layer()["bn"]}
    nothing = Moments(0, torch.zeros(3), torch.zeros(3))
    result = merge(shared, [u | {"frozen": nothing} for u in random_updates(0, 2)])
    assert result.statistics["frozen"] is shared["frozen"]
    assert result.statistics["bn"].tracked == 1
    assert [n[:2] for n in result.notices] == [("frozen", "empty")]


def test_below_the_quorum_the_statistics_stay():
    shared = one_layer()
    result = merge(shared, random_updates(0, 3), quorum=4)
    assert not result.updated
    assert result.statistics["bn"] is shared["bn"]
    assert all(v.used for v in result.verdicts.values())
    assert [n[:2] for n in result.notices] == [("bn", "below_quorum")]
    assert merge(shared, random_updates(0, 4), quorum=4).updated
    assert not merge(shared, []).updated


def test_a_layer_below_the_quorum_stays():
    shared = one_layer() | {"rare": one_layer()["bn"]}
    nothing = Moments(0, torch.zeros(3), torch.zeros(3))
    updates = [u | {"rare": u["bn"] if i == 0 else nothing} for i, u in enumerate(random_updates(0, 3))]
    result = merge(shared, updates, quorum=2)
    assert result.updated
    assert result.statistics["rare"] is shared["rare"]
    assert [n[:2] for n in result.notices] == [("rare", "below_quorum")]


def test_clients_that_drop_out_leave_the_survivors_batch_norm():
    g = torch.Generator().manual_seed(0)
    layer, theirs = fbn.FederatedBatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    shared = fbn.statistics(layer)
    for round_ in range(20):
        batches = {f"c{i}": torch.randn(4 + i, 3, generator=g, dtype=torch.float64) + i for i in range(5)}
        updates = {}
        fbn.load_statistics(layer, shared)
        for client, batch in batches.items():
            layer(batch)
            updates[client] = fbn.collect(layer)
        lost = {f"c{round_ % 5}", f"c{(round_ * 3 + 1) % 5}"}
        shared = merge(shared, {c: u for c, u in updates.items() if c not in lost}).statistics
        theirs(torch.cat([b for c, b in batches.items() if c not in lost]))
    assert_running_equal(shared[""], theirs)


def test_dead_and_constant_channels_stay_finite_for_ever():
    shared = one_layer(channels=2, dtype=torch.float32)
    update = {"bn": Moments(50, torch.tensor([0.0, 3.0]), torch.zeros(2))}
    for _ in range(10_000):
        result = merge(shared, [update])
        shared = result.statistics
    after = shared["bn"]
    assert result.notices == (Notice("bn", "constant", "2 of 2 channels had the same value everywhere"),)
    assert after.var.isfinite().all()
    assert (after.var >= 0).all()
    assert after.mean.tolist() == pytest.approx([0.0, 3.0])
    assert after.tracked == 10_000


def mean(rows):
    return rows.mean(0)


def median(rows):
    middle = rows.sort(0).values
    n = len(rows)
    return (middle[(n - 1) // 2] + middle[n // 2]) / 2


@given(seeds, st.integers(1, 8), st.sampled_from([1, 3]))
def test_the_robust_form_with_the_mean_and_equal_counts_is_the_exact_one(seed, n, steps):
    updates = random_updates(seed, n, equal=True)
    exact = merge(one_layer(), updates, steps=steps).statistics["bn"]
    robust = merge(one_layer(), updates, steps=steps, aggregator=mean).statistics["bn"]
    torch.testing.assert_close(robust.mean, exact.mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(robust.var, exact.var, rtol=1e-12, atol=1e-14)
    assert robust.tracked == exact.tracked


@pytest.mark.parametrize("lie", [1e6, -1e6, 1e12])
def test_one_liar_does_not_move_the_robust_statistics(lie):
    honest = random_updates(0, 9, equal=True)
    expected = merge(one_layer(), honest, aggregator=median).statistics["bn"]
    liar = {"bn": Moments(8, torch.full((3,), lie).double(), torch.full((3,), abs(lie)).double())}
    after = merge(one_layer(), [*honest, liar], aggregator=median).statistics["bn"]
    torch.testing.assert_close(after.mean, expected.mean, rtol=0, atol=0.2)
    torch.testing.assert_close(after.var, expected.var, rtol=0.5, atol=0)
    plain = merge(one_layer(), [*honest, liar]).statistics["bn"]
    assert plain.var.min() > 1e3 * expected.var.max()


sent = st.floats(-1e100, 1e100, allow_nan=False)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
@given(seed=seeds, lies=st.lists(st.tuples(sent, sent.map(abs)), min_size=1, max_size=3))
@settings(max_examples=40)
def test_each_term_stays_inside_the_honest_hull_whatever_is_sent(rule, seed, lies):
    """Means, variances and what lies between clients: each goes through the rule, and is the honest ones'."""
    terms, f = [], len(lies)

    def recorded(rows):
        out = fbn.defense(rule, f)(rows)
        terms.append(out)
        honest = rows[:7]
        slack = 1e-12 * (1 + honest.abs().max())
        assert bool((honest.min(0).values - slack <= out).all())
        assert bool((out <= honest.max(0).values + slack).all())
        return out

    liars = [{"bn": Moments(8, *(torch.full((3,), x, dtype=torch.float64) for x in lie))} for lie in lies]
    updates = [*random_updates(seed, 7, equal=True), *liars]
    after = merge(one_layer(), updates, aggregator=recorded).statistics["bn"]
    mean, between, of_variances = terms
    total = 8 * len(updates)
    assert torch.equal(after.mean, mean)
    torch.testing.assert_close(after.var, of_variances + total / ((total - 1) * 0.1) * between)


def test_the_aggregator_gets_float64_rows_of_all_layers():
    shared = one_layer(dtype=torch.float32) | {"other": Running(torch.zeros(2), torch.ones(2))}
    updates = [u | {"other": Moments(4, torch.ones(2), torch.ones(2))} for u in random_updates(0, 4)]
    seen = []

    def aggregator(rows):
        seen.append((tuple(rows.shape), rows.dtype))
        return rows.mean(0)

    after = merge(shared, updates, aggregator=aggregator).statistics
    assert seen == [((4, 5), torch.float64)] * 3
    assert after["other"].mean.dtype == torch.float32


def test_the_robust_variance_has_a_floor_and_warns():
    """Few clients activate a channel: the median says it is dead, the plain merge does not."""
    shared = {"bn": Running(torch.zeros(2).double(), torch.full((2,), 1e-3).double(), momentum=1.0)}
    quiet = Moments(10, torch.tensor([0.0, 1.0]).double(), torch.tensor([0.0, 1.0]).double())
    loud = quiet._replace(mean=torch.tensor([9.0, 1.0]).double(), var=torch.tensor([4.0, 1.0]).double())
    result = merge(shared, [{"bn": m} for m in (quiet, quiet, quiet, quiet, loud)], aggregator=median)
    assert result.statistics["bn"].var[0].item() == 1e-5
    assert result.notices == (
        Notice("bn", "robust_collapse", "1 of 2 channels: variance far from that of the plain merge"),
    )


@pytest.mark.parametrize(
    ("aggregator", "message"),
    [
        (lambda rows: rows, r"aggregator: returned shape \(3, 3\)"),
        (lambda rows: rows.mean(), r"aggregator: returned shape \(\)"),
        (lambda rows: rows.mean(0) * math.nan, "aggregator: returned a value that is not finite"),
    ],
)
def test_an_aggregator_that_misbehaves_is_named(aggregator, message):
    with pytest.raises(ValueError, match=message):
        merge(one_layer(), random_updates(0, 3), aggregator=aggregator)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"momentum": 0.0}, "momentum is 0.0"),
        ({"momentum": 1.1}, "momentum is 1.1"),
        ({"momentum": math.nan}, "momentum is nan"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": math.inf}, "steps is inf"),
        ({"quorum": 0}, "quorum is 0"),
        ({"quorum": 1.5}, "quorum is 1.5"),
        ({"max_count": 0}, "max_count is 0"),
        ({"max_count": "9"}, "max_count is '9'"),
        ({"max_count": {"other": 3}}, "max_count: layer 'bn' is missing"),
    ],
)
def test_unusable_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        merge(one_layer(), random_updates(0, 2), **kwargs)


def test_no_updates_at_all_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="updates: expected a list"):
        merge(one_layer(), None)


def test_one_update_is_not_a_list_of_updates():
    update = random_updates(0, 1)[0]
    for one in (update, fbn.Update(update)):
        with pytest.raises(ValueError, match="this is one update"):
            merge(one_layer(), one)


@pytest.mark.parametrize(
    "bad",
    [{"var": torch.tensor([-1.0, 1.0, 1.0])}, {"mean": torch.zeros(2)}, {"momentum": 2.0}, {"eps": -1.0}],
)
def test_unusable_statistics_are_named(bad):
    with pytest.raises(ValueError, match="layer 'bn'") as error:
        merge({"bn": one_layer()["bn"]._replace(**bad)}, random_updates(0, 2))
    assert "None" not in str(error.value).replace("or None", "")


def drawn(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {k: Moments(8, torch.randn(2, generator=generator), torch.rand(2, generator=generator)) for k in "ab"}
        for _ in range(n)
    ]


ZEROS_AND_ONES = {k: Running(torch.zeros(2), torch.ones(2)) for k in "ab"}


@pytest.mark.parametrize("caught", [1, 2, 3])
@pytest.mark.parametrize("rule", ["median", "nnm+median", "trimmed_mean", "nnm+krum"])
def test_a_caught_liar_is_one_fewer_to_expect(rule, caught):
    """Who is left out by a verdict cannot make the rule refuse the rest: 7 clients, 3 of them liars."""
    updates = drawn(7)
    for i in range(caught):
        updates[i]["a"] = updates[i]["a"]._replace(mean=torch.full((2,), math.nan))
    result = merge(ZEROS_AND_ONES, updates, aggregator=fbn.defense(rule, 3))
    alone = merge(ZEROS_AND_ONES, updates[caught:], aggregator=fbn.defense(rule, 3 - caught)).statistics
    assert result.updated
    assert all(torch.equal(result.statistics[k].var, alone[k].var) for k in "ab")


def test_too_few_clients_for_a_rule_leave_the_statistics_as_they_were():
    updates = drawn(7)
    updates[0]["b"] = updates[0]["b"]._replace(count=0)  # not caught: it just has not seen this layer
    result = merge(ZEROS_AND_ONES, updates, aggregator=fbn.defense("nnm+median", 3))
    assert torch.equal(result.statistics["b"].mean, torch.zeros(2))
    assert not torch.equal(result.statistics["a"].mean, torch.zeros(2))
    notices = [(n.layer, n.reason, n.detail) for n in result.notices]
    assert ("b", "below_quorum", "6 of the required 7 clients: the statistics stay") in notices


def test_an_aggregator_that_returns_nothing_is_named():
    with pytest.raises(ValueError, match="aggregator: returned None"):
        merge(ZEROS_AND_ONES, drawn(5), aggregator=lambda rows: None)
