"""One pass with plain BatchNorm: layers measure what plain layers get, and are as they were afterwards."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm.norm.convert import federated_layers

BATCH_NORM = nn.modules.batchnorm._BatchNorm


class Net(nn.Module):
    """Convolutions, a layer that is used twice, one in evaluation, and a dense part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)
        self.again, self.frozen = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)
        self.dense, self.last = nn.Linear(6 * 16, 5), nn.BatchNorm1d(5, affine=False)
        nn.init.uniform_(self.bn.weight)
        nn.init.uniform_(self.bn.bias)

    def forward(self, x):
        x = self.bn(self.conv(x)).relu()
        x = self.frozen(self.bn(self.again(x))).relu()
        return self.last(self.dense(x.flatten(1)))


def images(size=6, seed=0):
    return 3 + 2 * torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def new(convert=True):
    model = Net().train()
    model.frozen.eval()
    return fbn.convert(model) if convert else model


def inputs_of(model, batches):
    """What the BatchNorm layers of a plain model get, by layer."""
    seen, hooks = {}, []
    for name, layer in model.named_modules():
        if isinstance(layer, BATCH_NORM) and layer.training:
            into = seen.setdefault(name, [])
            keep = lambda m, x, into=into: into.append(x[0].detach())  # noqa: E731
            hooks.append(layer.register_forward_pre_hook(keep))
    with torch.no_grad():
        for x in batches:
            model(x)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat([x.transpose(0, 1).flatten(1) for x in xs], 1) for name, xs in seen.items()}


def state_of(model):
    return {k: v.clone() for k, v in model.state_dict().items()}, {
        k: type(m) for k, m in model.named_modules()
    }


def calibrate(model, batches):
    with torch.no_grad(), fbn.calibrating(model):
        outputs = [model(x) for x in batches]
    return outputs, fbn.collect(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_are_those_of_the_inputs_that_plain_batch_norm_layers_get(dtype):
    batches = [images(6).to(dtype), images(4, seed=1).to(dtype)]
    plain, model = new(convert=False).to(dtype), new().to(dtype)
    wanted, before = inputs_of(copy.deepcopy(plain), batches), state_of(model)
    outputs, update = calibrate(model, batches)
    with torch.no_grad():
        for x, y in zip(batches, outputs, strict=True):
            assert torch.equal(y, plain(x))  # the forward is BatchNorm's own, to the bit
    assert update["frozen"].count == 0
    for name, x in wanted.items():
        assert update[name].count == x.shape[1]
        x = x.double()
        torch.testing.assert_close(update[name].mean, x.mean(1), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(update[name].var, x.var(1, correction=0), rtol=1e-6, atol=1e-7)
    after = state_of(model)
    assert before[1] == after[1]
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())


def test_a_merge_with_momentum_1_starts_from_the_data_in_one_round():
    """Then the model that normalizes with shared statistics does nearly what plain BatchNorm does."""
    model, clients = new(), [images(12, seed=s) * (1 + s) for s in range(3)]
    shared = fbn.statistics(model)
    updates = []
    for x in clients:
        fbn.load_statistics(model, shared)
        updates.append(calibrate(model, [x])[1])
    calibrated = fbn.merge(shared, updates, momentum=1.0).statistics
    assert torch.equal(calibrated["frozen"].var, shared["frozen"].var)
    union = model.conv(torch.cat(clients)).detach().transpose(0, 1).flatten(1)
    first = fbn.convert(nn.Sequential(Net().conv, nn.BatchNorm2d(6)))
    fresh = fbn.statistics(first)
    seen = [calibrate(first, [x])[1] for x in clients]
    found = fbn.merge(fresh, seen, momentum=1.0).statistics["1"]
    torch.testing.assert_close(found.mean, union.mean(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.var, union.var(1), rtol=1e-4, atol=1e-5)


def test_all_is_as_it_was_after_an_exception_and_nesting_is_refused():
    model = new()
    before = state_of(model)
    with pytest.raises(ZeroDivisionError), fbn.calibrating(model):
        1 / 0  # noqa: B018
    assert state_of(model)[1] == before[1]
    refused = pytest.raises(RuntimeError, match="layer 'bn' is calibrating already")
    with fbn.calibrating(model), refused, fbn.calibrating(model):
        pass
    assert state_of(model)[1] == before[1]
    x = images()
    y = model(x)
    with fbn.calibrating(model):
        inside = model(x)
    assert not torch.equal(inside, y)
    assert torch.equal(model(x), y)
    with fbn.calibrating(model):
        fbn.revert(model)
    assert type(model.bn) is nn.BatchNorm2d
    with pytest.raises(ValueError, match="call convert"), fbn.calibrating(new(convert=False)):
        pass


def test_a_single_value_per_channel_becomes_zero_and_none_stays_none():
    model = fbn.convert(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)))
    nn.init.uniform_(model[0].bias)
    with fbn.calibrating(model):
        x = torch.tensor([[1.0, 5.0, -7.0]], requires_grad=True)
        y = model[0](x)
        y.sum().backward()
        assert torch.equal(y.detach(), model[0].bias.detach()[None])
        assert torch.equal(x.grad, torch.zeros(1, 3))
        assert torch.equal(model[1](x), torch.zeros(1, 3))
        assert model(torch.empty(0, 3)).shape == (0, 3)
        half = fbn.convert(nn.BatchNorm1d(3))
        with fbn.calibrating(half):
            assert torch.equal(half(torch.ones(1, 3).bfloat16()), torch.zeros(1, 3).bfloat16())
    assert fbn.collect(model)["0"].mean.tolist() == [1.0, 5.0, -7.0]


def test_a_subclass_of_the_user_s_and_a_layer_that_is_the_model():
    class Mine(nn.BatchNorm2d):
        pass

    layer = fbn.convert(Mine(1))
    kind = type(layer)
    y, update = calibrate(layer, [images()])
    assert type(layer) is kind
    assert abs(float(y[0].mean())) < 1e-6
    assert update[""].count == 6 * 64


def test_gradients_inside_are_batch_norm_s():
    model, plain = new(), new(convert=False)
    x = images()
    with fbn.calibrating(model):
        model(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert torch.equal(model.conv.weight.grad, plain.conv.weight.grad)


def test_under_autocast():
    model, plain = new(), new(convert=False)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = inputs_of(plain, [images()])
        _, update = calibrate(model, [images()])
    for name, x in wanted.items():
        torch.testing.assert_close(update[name].mean, x.double().mean(1), rtol=1e-4, atol=1e-4)


def test_in_inference_mode():
    model = new()
    with torch.inference_mode(), fbn.calibrating(model):
        model(images())
    again = calibrate(new(), [images()])[1]
    assert torch.equal(fbn.collect(model)["bn"].mean, again["bn"].mean)


@pytest.mark.slow
def test_compiled_models_calibrate_and_are_as_they_were():
    model = new()
    compiled = torch.compile(model, fullgraph=True)
    x = images()
    with torch.no_grad():
        before = compiled(x)
        fbn.collect(compiled)
        _, update = calibrate(compiled, [x])
        wanted = calibrate(new(), [x])[1]
        for name in wanted:
            torch.testing.assert_close(update[name].var, wanted[name].var, rtol=1e-4, atol=1e-6)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(compiled(x), before)
            calibrate(compiled, [x])  # and calibrating again is not compiled again


SCRIPT = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from test_calibrate import calibrate, images, new
import fedbatchnorm as fbn
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(new())
with torch.no_grad(), fbn.calibrating(model):
    model(images(4 + rank, seed=rank))
(folder / str(rank)).write_bytes(fbn.to_bytes(fbn.collect(model, group=dist.group.WORLD)))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_client_with_several_devices(tmp_path):
    here = Path(__file__).parent
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)], cwd=here)
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    wanted = calibrate(new(), [images(4 + rank, seed=rank) for rank in range(2)])[1]
    for rank in range(2):
        found = fbn.from_bytes((tmp_path / str(rank)).read_bytes())
        for name in federated_layers(new()):
            assert found[name].count == wanted[name].count
            torch.testing.assert_close(found[name].var, wanted[name].var, rtol=1e-6, atol=1e-9)
