"""Whatever is in an update becomes a verdict, whatever is in an argument a ValueError that names it."""

import math
import warnings
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbatchnorm as fbn
from fedbatchnorm import Moments, Running, Update, merge

SHARED = {"a": Running(torch.zeros(3), torch.ones(3)), "b": Running(torch.zeros(2), torch.ones(2))}


def honest(n=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        Update(
            {
                name: Moments(
                    5 + i,
                    torch.randn(len(r.mean), generator=g).double(),
                    torch.rand(len(r.mean), generator=g).double(),
                )
                for name, r in SHARED.items()
            },
            round=0,
            id=i,
        )
        for i in range(n)
    ]


def with_layer(moments):
    return Update({"a": honest()[0]["a"], "b": moments}, round=0, id=99)


class Raises(Mapping):
    def __init__(self, error, names=("a", "b")):
        self.error, self.names = error, names

    def __getitem__(self, name):
        raise self.error

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return 2


class RaisesInIteration(Raises):
    def __iter__(self):
        raise self.error


class NoRepr(int):
    def __repr__(self):
        raise ArithmeticError

    __str__ = __repr__


ZEROS, ONES = torch.zeros(2), torch.ones(2)
with warnings.catch_warnings():  # that such tensors are a prototype, or on their way out
    warnings.simplefilter("ignore")
    QUANTIZED = torch.quantize_per_tensor(ONES, 0.1, 0, torch.qint8)
    NESTED = torch.nested.nested_tensor([ONES, ONES])
    JAGGED = torch.nested.nested_tensor([ONES, ONES], layout=torch.jagged)
    CSR = torch.eye(2).to_sparse_csr()
TENSORS = {
    "meta": ONES.to("meta"),
    "nested": NESTED,
    "jagged": JAGGED,
    "sparse": ONES.to_sparse(),
    "csr": CSR,
    "quantized": QUANTIZED,
    "complex": ONES.to(torch.complex64),
    "integers": ONES.long(),
    "string": "mean",
    "list": [1.0, 1.0],
    "none": None,
    "scalar": torch.tensor(1.0),
    "longer": torch.ones(3),
    "class": torch.Tensor,
}
COUNTS = {
    "huge": (10**5000, "count_out_of_range"),
    "hugely negative": (-(10**5000), "count_out_of_range"),
    "meta": (torch.ones((), device="meta", dtype=torch.int64), "schema"),
    "nested": (NESTED, "schema"),
    "sparse": (torch.tensor(5).to_sparse(), None),
    "no repr": (NoRepr(-3), "count_out_of_range"),
    "string": ("5", "schema"),
    "list": ([5], "schema"),
    "complex": (5j, "schema"),
    "nan": (math.nan, "non_finite"),
}
UPDATES = {
    "round 10**5000": Update(dict(honest()[0]), round=10**5000, id=7),
    "id 10**5000": Update({**honest()[0], "b": None}, round=0, id=10**5000),
    "format 10**5000": Update(dict(honest()[0]), round=0, id=7, format=10**5000),
    "format tensor": Update(dict(honest()[0]), round=0, id=7, format=torch.ones(2)),
    "raises KeyError": Raises(KeyError("b")),
    "raises RecursionError": Raises(RecursionError()),
    "raises its own": Raises(type("Own", (Exception,), {})()),
    "layers raise": Update(Raises(ZeroDivisionError()), round=0, id=3),
    "iteration raises": RaisesInIteration(ValueError("no")),
    "names that cannot be hashed": Raises(ValueError(), names=([], {})),
    "names that are no strings": Raises(ValueError(), names=(1, None)),
    "a string": "update",
    "a tensor": ONES,
    "layers are strings": {"a": "x", "b": "y"},
    "moments of strings": {"a": honest()[0]["a"], "b": Moments("1", "2", "3")},
    "too few fields": {"a": honest()[0]["a"], "b": tuple.__new__(Moments, (1,))},
}


def assert_alone(bad, updates=None, **kwargs):
    """A bad update gets its verdict, and the result is that of the others, bit for bit."""
    updates = honest() if updates is None else updates
    result = merge(SHARED, [updates[0], bad, *updates[1:]], **kwargs)
    alone = merge(SHARED, updates, **kwargs)
    verdict = result.verdicts[1]
    assert not verdict.used
    assert len(verdict.detail) < 300
    for name in SHARED:
        for what in ("mean", "var"):
            found = getattr(result.statistics[name], what)
            assert torch.equal(found, getattr(alone.statistics[name], what))
            assert not found.requires_grad
    assert result.steps == alone.steps
    return verdict


@pytest.mark.parametrize("field", ["mean", "var"])
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("aggregator", [None, fbn.defense("median", 1)])
def test_a_field_that_is_no_ordinary_tensor(kind, field, aggregator):
    moments = Moments(5, ZEROS, ONES)._replace(**{field: TENSORS[kind]})
    verdict = assert_alone(with_layer(moments), aggregator=aggregator)
    assert (verdict.reason, verdict.layer) == ("schema", "b")


@pytest.mark.parametrize("kind", COUNTS)
def test_a_count_that_is_no_count(kind):
    count, reason = COUNTS[kind]
    update = with_layer(Moments(count, ZEROS, ONES))
    if reason is None:  # of an odd form, but a number
        assert merge(SHARED, [update]).verdicts[0].used
        return
    verdict = assert_alone(update)
    assert (verdict.reason, verdict.layer) == (reason, "b")


@pytest.mark.parametrize("kind", UPDATES)
def test_an_update_that_is_none(kind):
    verdict = assert_alone(UPDATES[kind])
    assert verdict.reason == ("stale_round" if kind == "round 10**5000" else "schema")


def test_gradients_do_not_leak():
    updates = honest()
    plain = merge(SHARED, updates).statistics
    b = updates[1]["b"]
    tracked = b._replace(mean=b.mean.clone().requires_grad_(), var=b.var.clone().requires_grad_())
    updates[1] = Update({**updates[1], "b": tracked}, round=0, id=1)
    shared = dict(SHARED)
    shared["a"] = shared["a"]._replace(mean=torch.zeros(3, requires_grad=True))
    for aggregator in (None, lambda rows: rows.mean(0)):
        result = merge(shared, updates, aggregator=aggregator)
        assert all(v.used for v in result.verdicts.values())
        for running in result.statistics.values():
            assert not running.mean.requires_grad
            assert not running.var.requires_grad
    assert torch.equal(merge(shared, updates).statistics["b"].var, plain["b"].var)


def test_counts_beyond_64_bits_add_up():
    """1024 clients with 2^53 values each: 2^63 does not fit an int64, and made the mean 32."""
    shared = {"a": Running(torch.zeros(1).double(), torch.ones(1).double(), momentum=1.0)}
    updates = [{"a": Moments(2**53, torch.full((1,), 3.0), torch.full((1,), 2.0))}] * 1024
    after = merge(shared, updates).statistics["a"]
    assert (after.mean.item(), after.var.item()) == (3.0, 2.0)


def test_a_momentum_that_a_robust_rule_cannot_divide_by_is_named():
    with pytest.raises(ValueError, match=r"momentum is 5e-324 in layer 'a': too small"):
        merge(SHARED, honest(), momentum=5e-324, aggregator=lambda rows: rows.mean(0))
    shared = {name: r._replace(momentum=5e-324) for name, r in SHARED.items()}
    with pytest.raises(ValueError, match="momentum is 5e-324"):
        merge(shared, honest(), aggregator=lambda rows: rows.mean(0))
    assert merge(shared, honest()).statistics["a"].var.isfinite().all()
    small = merge(SHARED, honest(), momentum=1e-150, aggregator=lambda rows: rows.mean(0)).statistics
    assert all(r.mean.isfinite().all() and r.var.isfinite().all() for r in small.values())


@pytest.mark.parametrize("aggregator", [None, fbn.defense("median", 1)])
def test_a_layer_without_channels(aggregator):
    nothing = Running(torch.zeros(0), torch.zeros(0))
    empty = Moments(5, torch.zeros(0), torch.zeros(0))
    for names in (["a", "none"], ["none", "a"], ["none"]):
        shared = {n: nothing if n == "none" else SHARED[n] for n in names}
        updates = [{n: empty if n == "none" else u[n] for n in names} for u in honest()]
        after = merge(shared, updates, aggregator=aggregator).statistics
        assert after["none"].mean.shape == (0,)
        assert after["none"].tracked == 1
        if "a" in names:
            alone = merge({"a": SHARED["a"]}, [{"a": u["a"]} for u in honest()], aggregator=aggregator)
            assert torch.equal(after["a"].mean, alone.statistics["a"].mean)


def breaks_off():
    yield honest()[0]
    raise OSError("the connection is gone")


WRONG = [
    ("shared", None),
    ("shared", [1, 2]),
    ("shared", {1: SHARED["a"]}),
    ("shared", {"a": "x"}),
    ("updates", 7),
    ("updates", torch.tensor(1.0)),
    ("updates", torch.ones(2, 2)),
    ("updates", breaks_off()),
    ("momentum", "0.1"),
    ("momentum", [0.1]),
    ("momentum", 10**5000),
    ("momentum", torch.ones(2)),
    ("steps", "1"),
    ("steps", None),
    ("steps", 1e30),
    ("steps", 10**5000),
    ("steps", torch.ones(2)),
    ("steps", {0: 1, 1: "x", 2: 1, 3: 1}),
    ("population", "5"),
    ("population", 10**5000),
    ("population", 5.0),
    ("aggregator", "median"),
    ("aggregator", lambda rows: "median"),
    ("aggregator", lambda rows: object()),
    ("aggregator", lambda rows: 10**400),
    ("quorum", "1"),
    ("quorum", None),
    ("quorum", 10**5000 * -1),
    ("max_count", "9"),
    ("max_count", [9]),
    ("max_count", math.nan),
    ("max_count", {"a": 1}),
    ("max_count", -(10**5000)),
    ("nonnegative", None),
    ("nonnegative", 5),
    ("nonnegative", [["a"]]),
    ("checks", None),
    ("checks", 3),
    ("checks", [{}]),
    ("checks", [np.zeros(2)]),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=range(len(WRONG)))
def test_an_argument_of_a_wrong_type_is_named(name, value):
    arguments = {"shared": SHARED, "updates": honest()} | {name: value}
    with pytest.raises(ValueError, match="layer 'a'" if value == {"a": "x"} else name):
        merge(arguments.pop("shared"), arguments.pop("updates"), **arguments)


@pytest.mark.parametrize("kind", ["meta", "nested", "sparse", "quantized", "string", "integers"])
def test_statistics_that_are_no_ordinary_tensors_are_named(kind):
    with pytest.raises(ValueError, match="layer 'b': var must be"):
        merge(SHARED | {"b": Running(torch.zeros(2), TENSORS[kind])}, honest())
    with pytest.raises(ValueError, match=r"layer 'b': eps is an integer of \d+ bits"):
        merge(SHARED | {"b": SHARED["b"]._replace(eps=10**5000)}, honest())


def test_a_counter_that_is_full_is_named():
    shared = SHARED | {"b": SHARED["b"]._replace(tracked=2**63 - 3)}
    with pytest.raises(ValueError, match="steps is 5: the counter of layer 'b'"):
        merge(shared, [{n: u[n] for n in "ab"} for u in honest()], steps=5)


odd = st.one_of(
    st.sampled_from([*TENSORS.values(), *(count for count, _ in COUNTS.values())]),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.none(),
    st.floats(width=32).map(lambda x: torch.full((2,), x)),
)
moments = st.one_of(odd, st.builds(Moments, odd, odd, odd))
layers = st.dictionaries(st.sampled_from(["a", "b", "c"]), moments, max_size=3)
update = st.one_of(
    st.sampled_from(list(UPDATES.values())),
    layers,
    st.builds(Update, st.one_of(layers, odd), odd, st.just({}), odd, st.one_of(st.just(1), odd)),
    moments.map(lambda m: {"a": honest()[0]["a"], "b": m}),
    moments.map(with_layer),
)


@settings(max_examples=60)
@given(st.lists(update, min_size=1, max_size=4), st.integers(0, 4), st.booleans())
def test_nothing_that_is_sent_raises_or_moves_the_others(bad, at, robust):
    aggregator = (lambda rows: rows.median(0).values) if robust else None
    good = honest()
    sent = [*good[:at], *bad, *good[at:]]
    result = merge(SHARED, sent, aggregator=aggregator)
    verdicts = list(result.verdicts.values())
    used = [update for update, verdict in zip(sent, verdicts, strict=True) if verdict.used]
    ids = {update.id for update in bad if isinstance(update, Update) and type(update.id) is int}
    assert all(update in used for update in good if update.id not in ids)
    alone = merge(SHARED, used, aggregator=aggregator)
    for name in SHARED:
        assert torch.equal(result.statistics[name].mean, alone.statistics[name].mean)
        assert torch.equal(result.statistics[name].var, alone.statistics[name].var)
        assert result.statistics[name].var.isfinite().all()
