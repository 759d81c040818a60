"""What only a GPU can show: run with a CUDA device, skipped elsewhere."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import fedbatchnorm as fbn
from fedbatchnorm.norm.moments import measure

pytestmark = pytest.mark.gpu


def net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
    return fbn.convert(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 5)))


def images(n=6, seed=0):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def assert_close(one, other, rtol=1e-5, atol=1e-5):
    for name in other:
        assert one[name].count == other[name].count
        torch.testing.assert_close(one[name].mean, other[name].mean, rtol=rtol, atol=atol)
        torch.testing.assert_close(one[name].var, other[name].var, rtol=rtol, atol=atol)


def seen_by(model, *batches):
    for x in batches:
        model(x)
    return fbn.collect(model)


@pytest.fixture(autouse=True)
def no_tf32():
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def test_the_same_as_on_the_cpu():
    cpu, cuda = net(), net().cuda()
    assert_close(
        seen_by(cuda, images().cuda(), images(seed=1).cuda()), seen_by(cpu, images(), images(seed=1))
    )


def test_moving_takes_what_was_seen_along():
    model = net()
    model(images())
    model.cuda()
    model(images(seed=1).cuda())
    model.cpu()
    assert_close(fbn.collect(model), seen_by(net(), images(), images(seed=1)))


@pytest.mark.parametrize(
    ("dtype", "offset"),
    # At 1e4, half-precision numbers are so far apart that hardly any value differs from the mean.
    [(d, o) for d in (torch.float16, torch.bfloat16, torch.float32) for o in (0.0, 30.0, 1e3)]
    + [(torch.float32, 1e4)],
)
@pytest.mark.parametrize("clients", [1, 5])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_precision(dtype, offset, clients, layout):
    x = (torch.randn(500, 16, 24, 24, device="cuda") + offset).to(dtype).contiguous(memory_format=layout)
    reference = x.double().unflatten(0, (clients, -1))
    mean, var = reference.mean((1, 3, 4)), reference.var((1, 3, 4), correction=0)
    seen = measure(x, clients)
    assert seen.mean.dtype == torch.float32
    torch.testing.assert_close(seen.mean.double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(seen.var.double(), var, rtol=1e-4, atol=1e-12)


def test_a_loss_scaler_that_skips_a_step():
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    for seed, blow_up in ((0, False), (1, True), (2, False)):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(images(seed=seed).cuda()).square().mean() * (1e30 if blow_up else 1.0)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped = scaler.get_scale() < before
        assert skipped == blow_up
        if skipped:
            fbn.discard_step(model)
    expected = seen_by(net(), images(seed=0), images(seed=2))
    assert_close(fbn.collect(model), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode):
    model = net().cuda()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for seed in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(images(seed=seed).cuda()).square().mean().backward()
        compiled.zero_grad()
        assert_close(fbn.collect(compiled), seen_by(eager, images(seed=seed).cuda()), rtol=1e-4, atol=1e-4)
        shared = fbn.statistics(compiled)
        fbn.load_statistics(compiled, shared)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_compiled_precision(layout, offset):
    layer = fbn.FederatedBatchNorm2d(16).cuda()
    x = (torch.randn(500, 16, 24, 24, device="cuda") + offset).contiguous(memory_format=layout)
    torch.compile(layer)(x)
    seen = fbn.collect(layer)[""]
    torch.testing.assert_close(seen.mean, x.double().mean((0, 2, 3)).cpu(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(seen.var, x.double().var((0, 2, 3), correction=0).cpu(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_discard_step_drops_one_step(fused):
    model = net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    for step in range(10):
        for _ in range(2):
            model(images(seed=step).cuda()).square().mean().backward()
        if step == 9:
            fbn.discard_step(model)
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert fbn.collect(model)["2"].count == 9 * 2 * 6 * 36


def test_per_sample_gradients():
    model = net().cuda()
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(parameters, x):
        return functional_call(model, parameters, (x.unsqueeze(0),)).square().mean()

    vmap(grad(loss), (None, 0))(parameters, images().cuda())
    assert_close(fbn.collect(model), seen_by(model, images().cuda()))


def test_statistics_may_live_on_the_device():
    model = net().cuda()
    shared = fbn.statistics(model)
    update = seen_by(model, images().cuda())
    expected = fbn.merge(shared, [update]).statistics
    there = {n: r._replace(mean=r.mean.cuda(), var=r.var.cuda()) for n, r in shared.items()}
    after = fbn.merge(there, [update]).statistics
    for name in shared:
        assert after[name].mean.is_cuda
        torch.testing.assert_close(after[name].mean.cpu(), expected[name].mean)


@pytest.mark.parametrize("gradient", [0.0, 0.7])
def test_a_round_of_a_client_waits_for_the_device_once(gradient):
    model = net().cuda()
    fbn.set_gradient(model, gradient)
    shared, x = fbn.statistics(model), images().cuda()
    waits = []
    try:
        with warnings.catch_warnings():  # torch says that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("warn")
        for work in (
            lambda: fbn.load_statistics(model, shared),
            lambda: model(x).square().mean().backward(),
            lambda: fbn.collect(model),
        ):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                work()
            waits.append(sum("synchronizing" in str(w.message) for w in found))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == [0, 0, 1]
