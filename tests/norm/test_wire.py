import contextlib
import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedbatchnorm as fbn
from fedbatchnorm import FormatError, Moments, Running, Update

NAMES = ["stem.bn", "", "<script>", "l\u00e4yer\n\x1b[31m", "="]


def an_update():
    layers = {n: Moments(i, torch.randn(3).double(), torch.rand(3).double()) for i, n in enumerate(NAMES)}
    return Update(layers, round=7, skipped={"=": 2}, id=2**48 - 1)


def some_statistics():
    dtypes = (torch.float32, torch.float64)
    return {
        n: Running(torch.randn(i + 1).to(dtypes[i % 2]), torch.rand(i + 1).to(dtypes[i % 2]), i, m, 1e-5)
        for i, (n, m) in enumerate(zip(NAMES, [0.1, None, 1.0, 0.5, 1], strict=True))
    }


def test_an_update_survives_the_wire():
    update = an_update()
    other = fbn.from_bytes(fbn.to_bytes(update))
    assert isinstance(other, Update)
    assert (other.round, dict(other.skipped), other.id, other.format) == (7, {"=": 2}, 2**48 - 1, 1)
    assert list(other) == NAMES
    for name in NAMES:
        assert other[name].count == update[name].count
        assert torch.equal(other[name].mean, update[name].mean)
        assert torch.equal(other[name].var, update[name].var)


def test_statistics_survive_the_wire():
    shared = some_statistics()
    other = fbn.from_bytes(fbn.to_bytes(shared))
    assert list(other) == NAMES
    for name in NAMES:
        assert other[name].mean.dtype == shared[name].mean.dtype
        assert torch.equal(other[name].mean, shared[name].mean)
        assert torch.equal(other[name].var, shared[name].var)
        assert other[name][2:] == shared[name][2:]


def test_an_update_that_lies_comes_through_to_its_verdict():
    shared = {"bn": Running(torch.zeros(1), torch.ones(1))}
    lie = Update({"bn": Moments(3, torch.tensor([float("nan")]), torch.tensor([-1.0]))}, round=0, id=1)
    result = fbn.merge(shared, [fbn.from_bytes(fbn.to_bytes(lie))])
    assert result.verdicts[0].reason == "non_finite"


def test_statistics_that_lie_are_refused_on_both_sides():
    bad = {"bn": Running(torch.zeros(1), torch.tensor([-1.0]))}
    with pytest.raises(ValueError, match="layer 'bn': var is negative"):
        fbn.to_bytes(bad)
    good = fbn.to_bytes({"bn": Running(torch.zeros(1), torch.ones(1))})
    lie = good.replace(struct.pack("<f", 1.0), struct.pack("<f", -1.0))
    assert lie != good
    with pytest.raises(FormatError, match="layer 'bn': var is negative"):
        fbn.from_bytes(lie)


def crafted(header, blob=b"", size=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if size is None else size) + raw + blob


def message(inner, tensors=None, blob=b""):
    return crafted({"__metadata__": {"fedbatchnorm": json.dumps(inner)}, **(tensors or {})}, blob)


UPDATE = {"kind": "update", "format": 1, "round": 0, "id": 1, "layers": [], "count": [], "skipped": []}
STATISTICS = {"kind": "statistics", "format": 1, "layers": [], "tracked": [], "momentum": [], "eps": []}
HOSTILE = {
    "nothing": b"",
    "short": b"\x00\x00\x00",
    "huge header": crafted(b"{}", size=2**63),
    "header past the end": crafted(b"{}", size=3),
    "a header of 100 MB claimed": crafted(b"{}", size=10**8),
    "not json": crafted(b"{]"),
    "not utf-8": crafted(b"\xff\xfe\xfd\xfc"),
    "deep json": crafted(b"[" * 200_000),
    "deep json inside": crafted({"__metadata__": {"fedbatchnorm": "[" * 200_000}}),
    "endless number": crafted({"__metadata__": {"fedbatchnorm": '{"format": ' + "9" * 10_000 + "}"}}),
    "a list": crafted(b"[]"),
    "no metadata": crafted({}),
    "a large header": crafted({"__metadata__": {"fedbatchnorm": "[" + "[]," * 2**20 + "[]]"}}),
    "metadata of another": crafted({"__metadata__": {"format": "pt"}}),
    "metadata a string": crafted({"__metadata__": "x"}),
    "inner list": crafted({"__metadata__": {"fedbatchnorm": "[]"}}),
    "kind": message(UPDATE | {"kind": "model"}),
    "format": message(UPDATE | {"format": 2}),
    "no layers": message({k: v for k, v in UPDATE.items() if k != "layers"}),
    "layers a number": message(UPDATE | {"layers": 3}),
    "layer names twice": message(UPDATE | {"layers": ["a", "a"], "count": [1, 1], "skipped": [0, 0]}),
    "layers not strings": message(UPDATE | {"layers": [1], "count": [1], "skipped": [0]}),
    "tensors missing": message(UPDATE | {"layers": ["a"], "count": [1], "skipped": [0]}),
    "count a float": message(UPDATE | {"layers": [], "count": [1.5]}),
    "count a bool": message(UPDATE | {"count": [True]}),
    "round a string": message(UPDATE | {"round": "0"}),
    "id a list": message(UPDATE | {"id": [1]}),
    "a huge tensor": message(
        UPDATE, {"0.mean": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}, b"1234"
    ),
    "an overflowing tensor": message(
        UPDATE, {"0.mean": {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}
    ),
    "a negative shape": message(
        UPDATE, {"0.mean": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"
    ),
    "an unknown type": message(
        UPDATE, {"0.mean": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]}}, b"1234"
    ),
    "offsets past the end": message(
        UPDATE, {"0.mean": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ),
    "statistics without settings": message({k: v for k, v in STATISTICS.items() if k != "eps"}),
    "tracked too long": message(STATISTICS | {"tracked": [1]}),
    "eps a string": message(STATISTICS | {"eps": ["1"]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_give_a_typed_error(name):
    with pytest.raises(FormatError):
        fbn.from_bytes(HOSTILE[name])


@pytest.mark.parametrize("value", ["text", None, 3, {"a": 1}])
def test_what_is_not_bytes_gives_a_typed_error(value):
    with pytest.raises(FormatError, match="expected bytes"):
        fbn.from_bytes(value)


def test_types_that_no_client_measures_in_are_refused():
    tiny = torch.zeros(2).to(torch.float8_e4m3fn)
    data = fbn.to_bytes(Update({"a": Moments(5, tiny, tiny)}, round=0, id=9))
    with pytest.raises(FormatError, match="shape or type"):
        fbn.from_bytes(data)


def test_whole_numbers_as_settings_survive():
    shared = {"bn": Running(torch.zeros(1), torch.ones(1), momentum=1, eps=1)}
    assert fbn.from_bytes(fbn.to_bytes(shared))["bn"][2:] == (0, 1, 1.0)


def test_tensors_must_be_one_dimensional_floats():
    for dtype, shape in (("I32", [1]), ("F32", [1, 1])):
        tensor = {"dtype": dtype, "shape": shape}
        tensors = {
            f"0.{w}": tensor | {"data_offsets": [4 * i, 4 * i + 4]} for i, w in enumerate(("mean", "var"))
        }
        data = message(UPDATE | {"layers": ["a"], "count": [1], "skipped": [0]}, tensors, b"\0" * 8)
        with pytest.raises(FormatError, match="shape or type"):
            fbn.from_bytes(data)


@given(st.binary(max_size=300))
def test_random_bytes_never_crash(data):
    with pytest.raises(FormatError):
        fbn.from_bytes(data)


@given(st.data())
def test_damaged_messages_never_crash(data):
    whole = bytearray(fbn.to_bytes(an_update() if data.draw(st.booleans()) else some_statistics()))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))]) if data.draw(st.booleans()) else bytes(whole)
    with contextlib.suppress(FormatError):  # and damage inside a number cannot be seen here
        assert isinstance(fbn.from_bytes(cut), Update | dict)
