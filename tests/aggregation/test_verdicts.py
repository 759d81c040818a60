"""faults.md, row by row: what a bad update gets, and that the others' result is untouched by it."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm import Moments, Running, Update, merge

SHARED = {
    "a": Running(torch.zeros(3).double(), torch.ones(3).double()),
    "b": Running(torch.zeros(2).double(), torch.ones(2).double()),
}


def honest(n=4):
    g = torch.Generator().manual_seed(0)

    def moments(c):
        return Moments(5, torch.randn(c, generator=g).double(), torch.rand(c, generator=g).double())

    return [Update({"a": moments(3), "b": moments(2)}, round=0, id=i + 1) for i in range(n)]


def changed(update, layer="b", **fields):
    layers = dict(update)
    layers[layer] = layers[layer]._replace(**fields)
    return Update(layers, round=update.round, id=update.id)


def poisoned(tensor, value, at=0):
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


def assert_left_out(updates, bad, reason, **kwargs):
    """Those in `bad` are left out for the reason; the result is that of the others, bit for bit."""
    result = merge(SHARED, updates, **kwargs)
    for client, verdict in result.verdicts.items():
        assert verdict.used == (client not in bad)
        assert verdict.reason == (reason if client in bad else None)
    others = merge(SHARED, [u for i, u in enumerate(updates) if i not in bad], **kwargs).statistics
    for name in SHARED:
        assert torch.equal(result.statistics[name].mean, others[name].mean)
        assert torch.equal(result.statistics[name].var, others[name].var)
        assert result.statistics[name].tracked == 1
    return [result.verdicts[client] for client in bad]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["count", "mean", "var"])
@pytest.mark.parametrize("layer", ["a", "b"])
@pytest.mark.parametrize("liars", [1, 2, 3])
def test_1_what_is_not_finite_is_left_out(value, field, layer, liars):
    updates = honest()
    for i in range(liars):
        old = getattr(updates[i][layer], field)
        updates[i] = changed(
            updates[i], layer, **{field: value if field == "count" else poisoned(old, value, 1)}
        )
    verdicts = assert_left_out(updates, range(liars), "non_finite")
    assert {v.layer for v in verdicts} == {layer}
    assert all(field in v.detail for v in verdicts)


@pytest.mark.parametrize("field", ["mean", "var"])
def test_1_what_would_overflow_is_left_out_too(field):
    shared = {n: r._replace(mean=r.mean.float(), var=r.var.float()) for n, r in SHARED.items()}
    updates = honest()
    updates[0] = changed(updates[0], **{field: torch.full((2,), 1e38).double()})
    result = merge(shared, updates)
    assert result.verdicts[0].reason == "non_finite"
    assert "too large for torch.float32" in result.verdicts[0].detail or field == "var"
    assert result.statistics["b"].var.isfinite().all()


MISSHAPEN = [
    {"mean": torch.zeros(1).double()},
    {"var": torch.zeros(1).double()},
    {"mean": torch.zeros(3).double()},
    {"mean": torch.zeros(2, 1).double()},
    {"mean": torch.zeros(()).double()},
    {"mean": torch.zeros(2, dtype=torch.int64)},
    {"mean": torch.zeros(2, dtype=torch.complex64)},
    {"mean": torch.zeros(2).to(torch.float8_e4m3fn)},
    {"var": torch.zeros(2).double().to_sparse()},
    {"var": torch.zeros(2, device="meta")},
    {"mean": [0.0, 0.0]},
    {"var": None},
    {"count": 5.0},
    {"count": "5"},
    {"count": None},
    {"count": True},
    {"count": torch.tensor([5, 5])},
]


@pytest.mark.parametrize("fields", MISSHAPEN)
def test_2_a_wrong_shape_or_type_is_left_out(fields):
    updates = honest()
    updates[2] = changed(updates[2], **fields)
    assert assert_left_out(updates, [2], "schema")[0].layer == "b"


@pytest.mark.parametrize(
    "update",
    [
        None,
        [],
        "update",
        {},
        {"a": honest()[0]["a"]},
        {**honest()[0], "c": honest()[0]["a"]},
        {"a": honest()[0]["a"], "b": None},
        {"a": honest()[0]["a"], "b": (1, 2)},
        {"a": honest()[0]["a"], "b": (5, torch.zeros(2), torch.ones(2))},
        honest()[0]["a"],
        Update(None),
        Update([]),
        Update(dict(honest()[0]), round=0, id=[9]),
        Update(dict(honest()[0]), round="0", id=9),
        Update(dict(honest()[0]), round=0, id=9, format=2),
    ],
)
def test_2_what_is_no_update_of_this_model_is_left_out(update):
    updates = honest()
    updates[1] = update
    assert_left_out(updates, [1], "schema")


def test_2_a_count_may_be_a_tensor_or_numpy_s():
    updates = honest()
    updates[0] = changed(updates[0], count=torch.tensor(5))
    updates[1] = changed(updates[1], count=np.int64(5))
    assert [v.used for v in merge(SHARED, updates).verdicts.values()] == [True] * 4


def test_3_a_negative_variance_is_left_out():
    updates = honest()
    updates[3] = changed(updates[3], var=poisoned(updates[3]["b"].var, -1e-12))
    assert "-1e-12" in assert_left_out(updates, [3], "impossible_moments")[0].detail


@pytest.mark.parametrize("limit", [50, {"a": 50, "b": 50}])
def test_5_a_huge_count_is_left_out(limit):
    updates = [changed(changed(u, "a", count=50), "b", count=50) for u in honest(10)]
    updates[4] = changed(updates[4], "b", count=10**6)
    verdict = assert_left_out(updates, [4], "count_out_of_range", max_count=limit)[0]
    assert (verdict.layer, verdict.detail) == ("b", "count is 1000000, allowed are 0 to 50")


@pytest.mark.parametrize("count", [-1, 2**53 + 1, 10**30])
def test_5_counts_that_cannot_be_are_left_out_without_a_limit(count):
    updates = honest()
    updates[0] = changed(updates[0], count=count)
    assert_left_out(updates, [0], "count_out_of_range")


def test_8_a_stale_update_is_left_out():
    updates = honest()
    updates[0] = Update(dict(updates[0]), round=3, id=1)
    assert assert_left_out(updates, [0], "stale_round")[0].detail == "round 3, expected 0"


def test_8_a_message_that_came_twice_counts_once():
    updates = honest()
    updates.insert(3, fbn.from_bytes(fbn.to_bytes(updates[1])))
    assert "client 1" in assert_left_out(updates, [3], "duplicate")[0].detail


def test_8_two_different_messages_under_one_id_are_both_left_out():
    updates = honest()
    updates[3] = Update(dict(updates[3]), round=0, id=updates[1].id)
    assert_left_out(updates, [1, 3], "duplicate")


def test_8_equal_data_at_two_clients_is_no_duplicate():
    one = honest()[0]
    result = merge(SHARED, [one, Update(dict(one), round=0, id=99), dict(one)])
    assert all(v.used for v in result.verdicts.values())


def test_8_every_message_of_a_recorded_run_replayed_is_left_out():
    model = fbn.convert(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3)).double())
    shared, recorded = fbn.statistics(model), []
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        fbn.load_statistics(model, shared)
        updates = {}
        for client in range(3):
            model(torch.randn(4, 3, generator=g, dtype=torch.float64))
            updates[client] = fbn.collect(model)
        expected = merge(shared, updates).statistics
        replays = {f"replay {i}": update for i, update in enumerate(recorded)}
        again = {f"again {client}": update for client, update in updates.items()}
        result = merge(shared, {**updates, **replays, **again})
        assert all(result.verdicts[client].used for client in updates)
        assert {result.verdicts[c].reason for c in replays} <= {"stale_round"}
        assert {result.verdicts[c].reason for c in again} == {"duplicate"}
        for name in shared:
            assert torch.equal(result.statistics[name].mean, expected[name].mean)
            assert torch.equal(result.statistics[name].var, expected[name].var)
        recorded += updates.values()
        shared = expected


def test_8_a_replay_is_seen_where_a_pretrained_layer_is_frozen():
    model = fbn.convert(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)))
    model[0].num_batches_tracked.fill_(5000)
    model[0].eval()
    shared, old = fbn.statistics(model), None
    for _ in range(3):
        fbn.load_statistics(model, shared)
        model(torch.randn(4, 2))
        new = fbn.collect(model)
        result = merge(shared, {"new": new, "replay": old or new})
        assert result.verdicts["new"].used
        assert result.verdicts["replay"].reason == ("stale_round" if old else "duplicate")
        shared, old = result.statistics, old or new


@pytest.mark.parametrize(
    ("mean", "var", "reason"),
    [(math.nan, 1.0, "non_finite"), (1e30, 1.0, "non_finite"), (0.0, -1.0, "impossible_moments")],
)
def test_10_a_layer_without_values_is_judged_as_every_other(mean, var, reason):
    shared = {name: Running(torch.zeros(2), torch.ones(2)) for name in "ab"}
    seen = Moments(4, torch.ones(2), torch.ones(2))
    odd = {"a": seen, "b": Moments(0, torch.full((2,), mean), torch.full((2,), var))}
    verdict = fbn.merge(shared, {"good": {"a": seen, "b": seen}, "odd": odd}).verdicts["odd"]
    assert (verdict.reason, verdict.layer) == (reason, "b")


def test_10_a_client_without_values_is_left_out():
    updates = honest()
    nothing = {
        n: Moments(0, torch.zeros(len(r.mean)).double(), torch.zeros(len(r.mean)).double())
        for n, r in SHARED.items()
    }
    updates[2] = Update(nothing, round=0, id=77)
    assert_left_out(updates, [2], "empty")


def test_clients_are_named_as_the_server_names_them():
    updates = dict(zip(["x", ("y", 1), 7, None], honest(), strict=True))
    assert list(merge(SHARED, updates).verdicts) == ["x", ("y", 1), 7, None]


def test_nobody_usable_leaves_the_statistics():
    result = merge(SHARED, [None, {}, "x"])
    assert not result.updated
    assert result.statistics["a"] is SHARED["a"]
    assert {v.reason for v in result.verdicts.values()} == {"schema"}


def test_a_negative_mean_where_nothing_is_below_0():
    updates = honest()
    positive = [changed(u, mean=u["b"].mean.abs()) for u in updates]
    liar = changed(positive[1], mean=poisoned(positive[1]["b"].mean, -0.1))
    sent = [positive[0], liar, *positive[2:]]
    result = merge(SHARED, sent, nonnegative=["b"])
    assert [v.used for v in result.verdicts.values()] == [True, False, True, True]
    verdict = result.verdicts[1]
    assert (verdict.reason, verdict.layer) == ("impossible_moments", "b")
    assert "-0.1" in verdict.detail
    alone = merge(SHARED, [positive[0], *positive[2:]]).statistics
    assert all(torch.equal(result.statistics[k].mean, alone[k].mean) for k in SHARED)
    assert all(v.used for v in merge(SHARED, sent).verdicts.values())  # nothing was declared


BAD = {
    "stale_round": lambda u: Update(dict(u), round=7, id=u.id),
    "non_finite": lambda u: changed(u, mean=poisoned(u["b"].mean, math.nan)),
    "impossible_moments": lambda u: changed(u, var=poisoned(u["b"].var, -1.0)),
    "count_out_of_range": lambda u: changed(u, count=99),
    "duplicate": lambda u: Update(dict(u), round=u.round, id=2),
}


@pytest.mark.parametrize("reason", BAD)
def test_each_verdict_is_a_switch(reason):
    from fedbatchnorm.aggregation.verdicts import CHECKS

    assert set(BAD) == set(CHECKS)
    updates = honest()
    sent = [BAD[reason](updates[0]), *updates[1:]]
    assert merge(SHARED, sent, max_count=50).verdicts[0].reason == reason
    others = [check for check in CHECKS if check != reason]
    assert merge(SHARED, sent, max_count=50, checks=others).verdicts[0].used


@pytest.mark.parametrize("count", [math.nan, math.inf, 10**30, 2**62, -5])
def test_a_count_that_cannot_be_merged_is_never_used(count):
    """Whatever is checked: nothing could be computed with it."""
    updates = honest()
    bad = Update(
        {name: m._replace(count=count) for name, m in updates[0].items()}, updates[0].round, updates[0].id
    )
    result = merge(SHARED, [bad, *updates[1:]], checks=[])
    assert result.verdicts[0].reason == "schema"
    alone = merge(SHARED, updates[1:]).statistics
    assert all(torch.equal(result.statistics[k].var, alone[k].var) for k in SHARED)


def test_the_schema_is_always_checked():
    updates = [changed(u, mean=torch.zeros(5)) if i == 0 else u for i, u in enumerate(honest())]
    assert merge(SHARED, updates, checks=[]).verdicts[0].reason == "schema"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checks": ["schemas"]}, "checks is .'schemas'."),
        ({"checks": "duplicate"}, "checks is 'duplicate'"),
        ({"nonnegative": ["c"]}, "nonnegative is .'c'.; it must be a collection of some of 'a', 'b'"),
    ],
)
def test_unknown_checks_and_layers_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        merge(SHARED, honest(), **arguments)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "nnm+median", "nnm+trimmed_mean", "multi_krum"])
@pytest.mark.parametrize("field", ["mean", "var"])
def test_one_liar_moves_a_defended_merge_by_little(rule, field):
    updates = honest(7)
    calm = merge(SHARED, updates, aggregator=fbn.defense(rule, 2)).statistics
    sent = [changed(updates[0], **{field: poisoned(getattr(updates[0]["b"], field), 1e6)}), *updates[1:]]
    found = merge(SHARED, sent, aggregator=fbn.defense(rule, 2)).statistics
    plain = merge(SHARED, sent).statistics
    for name in SHARED:
        assert (found[name].mean - calm[name].mean).abs().max() < 0.2
        assert (found[name].var - calm[name].var).abs().max() < 2
    assert (plain["b"].var - calm["b"].var).abs().max() > 1e3
