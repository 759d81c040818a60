"""The exchange takes as many operations for 100 layers as for 10, and waits for the device as often."""

import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedbatchnorm as fbn

FREE = ("detach", "view", "empty", "promote_types", "ones_like", "alias")
WAITING = ("_local_scalar_dense", "item", "_to_copy", "copy_")


class Count(TorchDispatchMode):
    """Counts what reaches the dispatcher, by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def client(layers, dtype=torch.float32):
    torch.manual_seed(0)
    return fbn.convert(nn.Sequential(*(nn.BatchNorm1d(3 + i % 5) for i in range(layers))).to(dtype))


def trained(layers, passes=1):
    model = client(layers)
    for i in range(passes):
        for layer in model:
            layer(torch.randn(4 + i, layer.num_features))
    return model


def operations(work):
    with Count() as count:
        work()
    return count.found


def exchange(model, shared):
    fbn.collect(model)
    fbn.load_statistics(model, shared)


@pytest.mark.parametrize("passes", [1, 3])
def test_collect_and_load_take_the_same_operations_for_10_and_for_100_layers(passes):
    counts = []
    for layers in (10, 100):
        model = trained(layers, passes)
        shared = fbn.statistics(model)
        counts.append(operations(lambda model=model, shared=shared: exchange(model, shared)))
    assert counts[0] == counts[1]
    assert sum(counts[1].values()) <= 35 + 20 * passes  # there were 64 for each layer
    assert sum(counts[1][name] for name in WAITING) <= 7


@pytest.mark.parametrize(("gradient", "calls"), [(0.0, 1), (0.7, 6)])
def test_a_small_layer_takes_few_calls(gradient, calls):
    """On a GPU, and for a small layer anywhere, calls are what a pass costs."""
    layer = fbn.convert(nn.BatchNorm2d(5), gradient=gradient)
    x = torch.randn(8, 5, 4, 4, requires_grad=True)
    found = []
    y = None

    def forward():
        nonlocal y
        y = layer(x)

    for work in (forward, lambda: y.backward(torch.ones_like(y))):  # pyrefly: ignore
        counts = operations(work)
        found.append(sum(n for name, n in counts.items() if name not in FREE))
    assert found[0] <= 2  # to measure and to normalize
    assert found[1] <= calls


def test_reading_statistics_takes_the_same_operations_for_10_and_for_100_layers():
    counts = [operations(partial(fbn.statistics, trained(layers))) for layers in (10, 100)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("more", [{}, {"population": 500}, {"aggregator": lambda rows: rows.mean(0)}])
def test_a_merge_takes_the_same_operations_for_10_and_for_100_layers(more):
    counts = []
    for layers in (10, 100):
        shared = fbn.statistics(client(layers))
        updates = [fbn.collect(trained(layers)) for _ in range(5)]
        counts.append(operations(lambda s=shared, u=updates: fbn.merge(s, u, **more)))
    assert counts[0] == counts[1]


def test_layers_with_different_histories_are_told_apart():
    """Some in evaluation, some called twice: as many groups as there are histories, each as if alone."""
    model = trained(12)
    for layer in model[:4]:
        layer(torch.randn(9, layer.num_features))
    model[5].eval()
    model[5].start_round()
    expected = [layer.seen() for layer in model]
    update = fbn.collect(model)
    for (moments, _), found in zip(expected, update.values(), strict=True):
        assert found.count == moments.count
        assert torch.equal(found.mean, moments.mean)
        assert torch.equal(found.var, moments.var)
    assert [m.count for m in update.values()] == [13] * 4 + [4, 0] + [4] * 6
    assert all(m.count == 0 for m in fbn.collect(model).values())


def test_what_an_update_holds_is_not_what_the_model_holds():
    model = trained(3)
    update = fbn.collect(model)
    before = [m.mean.clone() for m in update.values()]
    for layer in model:
        layer(torch.randn(8, layer.num_features) + 50)
    fbn.collect(model)
    assert all(torch.equal(m.mean, b) for m, b in zip(update.values(), before, strict=True))


@pytest.mark.parametrize("kinds", [[torch.float32], [torch.float32, torch.float64]])
def test_what_is_pickled_is_each_layer_s_own(kinds):
    """Multiprocessing and Ray pickle: a view of all layers' values would come along with each layer."""
    model = trained(100)
    for i, layer in enumerate(model):
        layer.to(kinds[i % len(kinds)])
    plain = len(pickle.dumps(fbn.revert(trained(100))))
    shared = fbn.statistics(model)
    fbn.load_statistics(model, shared)
    for layer in model:
        layer(torch.randn(4, layer.num_features, dtype=layer.weight.dtype))
    update = fbn.collect(model)
    merged = fbn.merge(shared, [update]).statistics
    assert len(pickle.dumps(model)) < 8 * plain
    for held in (shared, update.layers, merged):
        tensors = [t for of_layer in held.values() for t in (of_layer.mean, of_layer.var)]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    noted = [layer._noted.values for layer in model]
    assert all(values.untyped_storage().nbytes() == values.nbytes for values in noted)
