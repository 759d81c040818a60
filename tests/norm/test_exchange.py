import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fedbatchnorm as fbn


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return fbn.convert(
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3)).to(dtype)
    )


def batch(n=6, seed=0, dtype=torch.float64):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_statistics_are_copies():
    model = net()
    shared = fbn.statistics(model)
    shared["1"].mean.fill_(7)
    assert model[1].running_mean.abs().sum() == 0
    assert list(shared) == ["1", "3"]
    assert (type(shared["1"].tracked), shared["1"].tracked) == (int, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_a_short_model_are_float32(dtype):
    model = net(dtype)
    shared = fbn.statistics(model)
    assert shared["1"].mean.dtype == torch.float32
    fbn.load_statistics(model, shared)
    assert model[1].running_mean.dtype == dtype


def test_load_then_read_gives_the_same():
    model, twin = net(), net()
    model(batch())
    shared = fbn.merge(fbn.statistics(model), [fbn.collect(model)]).statistics
    fbn.load_statistics(twin, shared)
    for name, running in fbn.statistics(twin).items():
        assert torch.equal(running.mean, shared[name].mean)
        assert torch.equal(running.var, shared[name].var)
        assert running[2:] == shared[name][2:]
    assert twin[1].num_batches_tracked.dtype == torch.int64
    assert int(twin[1].num_batches_tracked) == 1


BROKEN = [
    ({"mean": torch.zeros(2)}, "mean has 2 channels"),
    ({"var": torch.zeros(1)}, "var has 1 channels"),
    ({"mean": torch.zeros(1, 3)}, "mean must be"),
    ({"mean": torch.zeros(3, dtype=torch.int64)}, "mean must be"),
    ({"mean": [0.0, 0.0, 0.0]}, "mean must be"),
    ({"mean": torch.tensor([0.0, math.nan, 0.0])}, "mean is not finite"),
    ({"var": torch.tensor([1.0, math.inf, 1.0])}, "var is not finite"),
    ({"var": torch.tensor([1.0, -1.0, 1.0])}, "var is negative"),
    ({"tracked": 1.5}, "tracked"),
    ({"tracked": -1}, "tracked"),
    ({"tracked": 2**63}, "tracked"),
    ({"momentum": 0.0}, "momentum"),
    ({"momentum": math.nan}, "momentum"),
    ({"eps": 0.0}, "eps"),
    ({"eps": 1e-3}, "eps is 1e-05 in the model"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_unusable_statistics_name_the_layer_and_leave_the_model_alone(change, message):
    model = net()
    model(batch())
    shared = fbn.statistics(model)
    shared["1"] = shared["1"]._replace(mean=torch.ones(3))
    shared["3"] = shared["3"]._replace(**change)
    with pytest.raises(ValueError, match=f"layer '3'.*{message}"):
        fbn.load_statistics(model, shared)
    assert model[1].running_mean.abs().sum() == 0
    assert fbn.collect(model)["1"].count == 6


def test_statistics_that_a_short_model_cannot_hold_are_refused():
    model = net(torch.float16)
    shared = fbn.statistics(model)
    shared["3"] = shared["3"]._replace(var=torch.full((3,), 1e5))
    with pytest.raises(ValueError, match=r"layer '3': var is too large for torch.float16"):
        fbn.load_statistics(model, shared)


def test_statistics_of_another_model_are_refused():
    shared = fbn.statistics(net())
    shared["other"] = shared.pop("3")
    with pytest.raises(ValueError, match=r"missing \['3'\], unexpected \['other'\]"):
        fbn.load_statistics(net(), shared)


def test_an_update_knows_its_round_even_if_only_weights_were_loaded():
    server, client = net(), net()
    shared = fbn.statistics(server)
    for expected in range(3):
        client.load_state_dict(server.state_dict())
        client(batch(seed=expected))
        update = fbn.collect(client)
        assert update.round == 2 * expected  # two layers, a step each
        result = fbn.merge(shared, [update])
        assert result.updated
        shared = result.statistics
        fbn.load_statistics(server, shared)


def test_updates_have_ids_of_their_own():
    model = net()
    assert len({fbn.collect(model).id for _ in range(100)}) == 100


def test_collect_many_passes_equals_one():
    model = net()
    for x in batch(200).split(1):  # more passes than are kept pending
        model(x)
    many = fbn.collect(model)
    model(batch(200))
    one = fbn.collect(model)
    for name in one:
        assert many[name].count == one[name].count == 200
        torch.testing.assert_close(many[name].mean, one[name].mean, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(many[name].var, one[name].var, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_a_client_with_several_devices_brings_its_moments_together(tmp_path):
    script = Path(__file__).parent / "client_with_two_devices.py"
    processes = [subprocess.Popen([sys.executable, script, str(rank), tmp_path]) for rank in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    updates = [fbn.from_bytes((tmp_path / str(rank)).read_bytes()) for rank in range(2)]
    model = net()
    for step in range(2):
        for rank in range(2):
            model(batch(5 + rank, seed=10 * step + rank))
    expected = fbn.collect(model)
    assert updates[0].id == updates[1].id
    for update in updates:
        assert list(update) == ["1", "3"]
        for name in expected:
            assert update[name].count == expected[name].count == 22
            torch.testing.assert_close(update[name].mean, expected[name].mean, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(update[name].var, expected[name].var, rtol=1e-12, atol=1e-14)
    verdicts = fbn.merge(fbn.statistics(model), updates).verdicts
    assert [verdicts[0].used, verdicts[1].reason] == [True, "duplicate"]
