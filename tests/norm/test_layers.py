"""The life of a layer: everything that may happen to a module between two rounds."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import fedbatchnorm as fbn

CLASSES = [
    (fbn.FederatedBatchNorm1d, nn.BatchNorm1d, (6, 4)),
    (fbn.FederatedBatchNorm1d, nn.BatchNorm1d, (6, 4, 3)),
    (fbn.FederatedBatchNorm2d, nn.BatchNorm2d, (6, 4, 3, 3)),
    (fbn.FederatedBatchNorm3d, nn.BatchNorm3d, (6, 4, 2, 3, 3)),
]
every_class = pytest.mark.parametrize(("federated", "plain", "shape"), CLASSES)


def net(**kwargs):
    torch.manual_seed(0)
    return fbn.convert(
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **kwargs), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
        )
    )


def images(n=6, seed=0):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def assert_same(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].count == other[name].count
        torch.testing.assert_close(one[name].mean, other[name].mean, **tolerance)
        torch.testing.assert_close(one[name].var, other[name].var, **tolerance)


def seen_by(model, *batches):
    for x in batches:
        model(x)
    return fbn.collect(model)


@every_class
def test_training_measures_and_leaves_the_statistics_alone(federated, plain, shape):
    layer = federated(4)
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(shape) + 3
    assert isinstance(layer, plain)
    torch.testing.assert_close(layer(x), x / (1 + 1e-5) ** 0.5)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), key
    seen = fbn.collect(layer)[""]
    assert seen.count == x.numel() // 4
    dims = [d for d in range(x.dim()) if d != 1]
    rounding = {"rtol": 1e-6, "atol": 1e-6}  # what is measured is float32
    torch.testing.assert_close(seen.mean, x.double().mean(dims), **rounding)
    torch.testing.assert_close(seen.var, x.double().var(dims, correction=0), **rounding)


@every_class
def test_evaluation_is_torch_s_own(federated, plain, shape):
    layer, twin = federated(4), plain(4)
    twin.running_mean.uniform_(-1, 1), twin.running_var.uniform_(0.5, 2)
    layer.load_state_dict(twin.state_dict())
    x = torch.randn(shape)
    assert torch.equal(layer.eval()(x), twin.eval()(x))
    assert fbn.collect(layer)[""].count == 0


@every_class
def test_checkpoints_load_both_ways(federated, plain, shape):
    layer, twin = federated(4), plain(4)
    assert list(layer.state_dict()) == list(twin.state_dict())
    layer(torch.randn(shape))
    twin.load_state_dict(layer.state_dict(), strict=True)
    layer.load_state_dict(twin.state_dict(), strict=True)


@every_class
def test_a_wrong_number_of_dimensions_is_torch_s_error(federated, plain, shape):
    with pytest.raises(ValueError, match=r"expected .* input"):
        federated(4)(torch.randn(4))


@pytest.mark.parametrize("momentum", [0.0, -0.1, 1.0001, float("nan"), float("inf")])
def test_momentum_outside_its_range_is_refused(momentum):
    with pytest.raises(ValueError, match="momentum"):
        fbn.FederatedBatchNorm1d(3, momentum=momentum)


@pytest.mark.parametrize("momentum", [1e-9, 0.5, 1.0, None])
def test_momentum_inside_its_range_is_taken(momentum):
    assert fbn.FederatedBatchNorm1d(3, momentum=momentum).momentum == momentum


@pytest.mark.parametrize("eps", [0.0, -1e-5, float("nan"), float("inf")])
def test_eps_must_be_positive(eps):
    with pytest.raises(ValueError, match="eps"):
        fbn.FederatedBatchNorm2d(3, eps=eps)


def test_track_running_stats_is_needed():
    with pytest.raises(ValueError, match="track_running_stats"):
        fbn.FederatedBatchNorm2d(3, track_running_stats=False)


def test_a_frozen_layer_reports_zero():
    model = fbn.convert(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    model[0].eval()
    update = seen_by(model, torch.randn(5, 3))
    assert [update[name].count for name in ("0", "1")] == [0, 5]
    shared = fbn.statistics(model)
    after = fbn.merge(shared, [update]).statistics
    assert after["0"].tracked == 0
    assert torch.equal(after["0"].mean, shared["0"].mean)
    assert after["1"].tracked == 1


def test_a_fine_tuned_layer_with_frozen_parameters_still_measures():
    model = net().requires_grad_(False)
    assert seen_by(model, images())["1"].count == 6 * 36


def test_steps_and_micro_batches_add_up_to_their_union():
    model = net()
    parts = seen_by(model, *images().chunk(3))
    assert_same(parts, seen_by(model, images()), rtol=1e-6, atol=1e-7)


def test_collect_clears():
    model = net()
    seen_by(model, images())
    assert fbn.collect(model)["1"].count == 0


def test_without_gradients_it_measures_too():
    model = net()
    with torch.no_grad():
        model(images())
    with torch.inference_mode():
        model(images())
    assert fbn.collect(model)["1"].count == 2 * 6 * 36


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_counts_once(reentrant):
    model = net()
    x = images().requires_grad_()
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert x.grad is not None
    assert_same(fbn.collect(model), seen_by(model, images()))


def test_accumulators_are_in_no_state_dict_and_keep_their_precision():
    model = net()
    model(images())
    assert not [key for key in model.state_dict() if "seen" in key or "count" in key]
    assert not [name for name, _ in model.named_buffers() if "seen" in name or "count" in name]
    expected = seen_by(copy.deepcopy(model))
    assert_same(fbn.collect(model.half()), expected, rtol=0, atol=0)
    assert model[1].running_mean.dtype == torch.float16
    assert fbn.collect(model)["1"].mean.dtype == torch.float64


def test_a_deep_copy_has_its_own_accumulators():
    model = net()
    model(images())
    twin = copy.deepcopy(model)
    twin(images(seed=1))
    assert fbn.collect(model)["1"].count == 6 * 36
    assert fbn.collect(twin)["1"].count == 2 * 6 * 36


def test_a_saved_model_keeps_what_it_has_seen():
    model = net()
    model(images())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert_same(fbn.collect(loaded), fbn.collect(model), rtol=0, atol=0)


@pytest.mark.parametrize("how", ["load_statistics", "load_state_dict", "assign", "reset"])
def test_loading_discards_what_was_not_collected(how):
    model = net()
    model(images())
    if how == "load_statistics":
        fbn.load_statistics(model, fbn.statistics(model))
    elif how == "reset":
        model[1].reset_running_stats()
    else:
        model.load_state_dict(net().state_dict(), assign=how == "assign")
    assert fbn.collect(model)["1"].count == 0


def test_moving_to_another_device_takes_the_accumulators_along():
    with torch.device("meta"):
        model = net()
    assert model[1]._seen.is_meta
    model.to_empty(device="cpu")
    for name, value in net().state_dict().items():
        model.state_dict()[name].copy_(value)
    assert seen_by(model, images())["1"].count == 6 * 36


def test_an_empty_batch_and_a_batch_of_one():
    layer = fbn.FederatedBatchNorm1d(3)
    assert layer(torch.zeros(0, 3)).shape == (0, 3)
    assert fbn.collect(layer)[""].count == 0
    layer(torch.full((1, 3), 2.0))
    seen = fbn.collect(layer)[""]
    assert (seen.count, seen.mean.tolist(), seen.var.tolist()) == (1, [2.0] * 3, [0.0] * 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_batch_that_is_not_finite_is_refused_and_counted(bad):
    model = net()
    broken = images(seed=1)
    broken[0, 0, 0, 0] = bad
    update = seen_by(model, images(), broken, broken)
    assert update.skipped == {"1": 2}
    assert_same(update, seen_by(model, images()), rtol=0, atol=0)
    assert not fbn.collect(model).skipped


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # steps, but changes no value

    def step(self, *batches, skip=False):
        for x in batches:
            self.model(x).square().mean().backward()
        if skip:
            fbn.discard_step(self.model)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()


def test_discard_step_drops_all_micro_batches_of_the_last_step():
    model = net()
    trainer = Trainer(model)
    trainer.step(images(seed=0), images(seed=1))
    trainer.step(images(seed=2), images(seed=3), skip=True)
    trainer.step(images(seed=4))
    assert_same(
        fbn.collect(model), seen_by(model, *(images(seed=s) for s in (0, 1, 4))), rtol=1e-14, atol=1e-16
    )


def test_discarding_twice_drops_one_step_and_nothing_after_a_collect():
    model = net()
    trainer = Trainer(model)
    trainer.step(images(seed=0))
    trainer.step(images(seed=1), skip=True)
    fbn.discard_step(model)
    assert fbn.collect(model)["1"].count == 6 * 36
    trainer.step(images(seed=0))
    fbn.collect(model)
    fbn.discard_step(model)
    assert fbn.collect(model)["1"].count == 0


def test_discarding_keeps_the_count_of_refused_batches():
    model = net()
    model(images() * float("nan"))
    fbn.discard_step(model)
    assert fbn.collect(model).skipped == {"1": 1}


def test_without_a_trainable_weight_a_step_is_a_pass():
    model = net(affine=False)
    Trainer(model).step(images(seed=0), images(seed=1), skip=True)
    assert fbn.collect(model)["1"].count == 6 * 36


def test_a_layer_called_twice_in_a_pass_sees_both():
    layer = fbn.FederatedBatchNorm1d(3)
    layer(layer(torch.randn(5, 3)))
    assert fbn.collect(layer)[""].count == 10


class InPlaceOnData(torch.optim.Optimizer):
    """As old optimizers do it: autograd does not see the change."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "in place on data": lambda p: InPlaceOnData(p, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_discard_step_drops_one_step_whatever_the_optimizer(optimizer, micro_batches):
    model = net()
    trainer = Trainer(model)
    trainer.optimizer = OPTIMIZERS[optimizer](model.parameters())
    for step in range(100):
        trainer.step(*[images(2, seed=step)] * micro_batches, skip=step == 99)
    assert fbn.collect(model)["1"].count == 99 * micro_batches * 2 * 36


def test_a_layer_that_the_last_step_did_not_run_keeps_what_it_has():
    model = fbn.convert(nn.ModuleDict({"a": nn.BatchNorm1d(3), "b": nn.BatchNorm1d(3)}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model["a"](torch.randn(8, 3)).sum() + model["b"](torch.randn(8, 3)).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    model["a"](torch.randn(5, 3)).sum().backward()
    for _ in range(2):
        fbn.discard_step(model)
    update = fbn.collect(model)
    assert [update[name].count for name in "ab"] == [8, 8]


def test_a_step_that_was_taken_can_be_dropped_too():
    model = net()
    trainer = Trainer(model)
    trainer.step(images(seed=0))
    trainer.step(images(seed=1))
    fbn.discard_step(model)
    assert_same(fbn.collect(model), seen_by(model, images(seed=0)), rtol=0, atol=0)


@pytest.mark.parametrize("steps", ["none", "one"])
def test_a_round_of_many_passes_stays_small(steps):
    layer = fbn.FederatedBatchNorm1d(3)
    for i in range(1000):
        y = layer(torch.full((2, 3), float(i)))
        if steps == "one":
            y.sum().backward()  # gradients pile up: all one step
        assert len(layer._pending) <= 64
    if steps == "one":
        fbn.discard_step(layer)
        assert fbn.collect(layer)[""].count == 0
    else:
        assert fbn.collect(layer)[""].mean.tolist() == pytest.approx([499.5] * 3)


def test_data_parallel_replicas_say_what_to_use():
    replica = fbn.FederatedBatchNorm1d(3)._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match="use DistributedDataParallel"):
        replica(torch.randn(4, 3))


def test_converted_in_inference_mode_it_still_trains():
    layer = nn.BatchNorm1d(3)
    with torch.inference_mode():
        fbn.convert(layer)
    for _ in range(2):
        layer(torch.randn(4, 3))
        assert fbn.collect(layer)[""].count == 4


def test_per_sample_gradients_see_every_sample_once():
    model = net()
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(parameters, x):
        return functional_call(model, parameters, (x.unsqueeze(0),)).square().mean()

    gradients = vmap(grad(loss), (None, 0))(parameters, images())
    mapped = fbn.collect(model)
    loop = [grad(loss)(parameters, x) for x in images()]
    for name in gradients:
        torch.testing.assert_close(
            gradients[name], torch.stack([g[name] for g in loop]), rtol=1e-4, atol=1e-6
        )
    assert_same(fbn.collect(model), mapped, rtol=1e-6, atol=1e-7)
    assert_same(mapped, seen_by(model, images()), rtol=1e-6, atol=1e-7)


def test_stacked_clients_with_their_own_parameters_under_vmap():
    model = net()
    stacked = {k: torch.stack([v.detach(), 2 * v.detach()]) for k, v in model.named_parameters()}

    def loss(parameters, x):
        return functional_call(model, parameters, (x,)).square().mean()

    vmap(grad(loss))(stacked, images().unflatten(0, (2, 3)))
    mapped = fbn.collect(model)
    for i, x in enumerate(images().chunk(2)):
        functional_call(model, {k: v[i] for k, v in stacked.items()}, (x,))
    assert_same(mapped, fbn.collect(model), rtol=1e-6, atol=1e-7)


def test_forward_mode_differentiation():
    model, x = net(), images()
    _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    assert tangent.isfinite().all()
    assert fbn.collect(model)["1"].count == 6 * 36


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    model = net()
    with torch.autocast("cpu", dtype=dtype):
        out = model(images())
        out.float().square().mean().backward()
    assert out.dtype == dtype
    update = fbn.collect(model)
    assert update["1"].mean.dtype == torch.float64
    assert_same(update, seen_by(model, images()), rtol=0.05, atol=0.01)


def test_channels_last_is_kept():
    model = net().to(memory_format=torch.channels_last)
    x = images().to(memory_format=torch.channels_last)
    y = model[1](model[0](x))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_same(fbn.collect(model), seen_by(model, images()), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_compiled_in_one_graph_and_never_again():
    model = net()
    compiled = torch.compile(model, fullgraph=True)
    eager = copy.deepcopy(model)
    x = images()
    compiled(x).square().mean().backward()
    eager(x).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad, eager[0].weight.grad, rtol=1e-4, atol=1e-6)
    first = fbn.collect(compiled)  # by the wrapper: names carry no _orig_mod
    assert_same(first, fbn.collect(eager), rtol=1e-5, atol=1e-6)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            fbn.load_statistics(compiled, fbn.statistics(compiled))
            compiled(images(seed=seed))
            compiled(images(seed=9) * float("nan"))
            update = fbn.collect(compiled)
            assert update.skipped == {"1": 1}
            assert_same(update, seen_by(eager, images(seed=seed)), rtol=1e-5, atol=1e-6)
        compiled(images(seed=1))
        compiled(images(seed=2))
        fbn.discard_step(compiled)
        assert_same(fbn.collect(compiled), seen_by(eager, images(seed=1)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_compiled_precision_survives_offsets(layout):
    layer = fbn.FederatedBatchNorm2d(8)
    x = (torch.randn(64, 8, 32, 32) + 1e4).contiguous(memory_format=layout)
    torch.compile(layer)(x)
    seen = fbn.collect(layer)[""]
    torch.testing.assert_close(seen.mean, x.double().mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(seen.var, x.double().var((0, 2, 3), correction=0), rtol=1e-4, atol=0)


@pytest.mark.slow
def test_a_step_is_dropped_where_compiled_and_eager_passes_mix():
    layer = fbn.FederatedBatchNorm1d(3)
    compiled = torch.compile(layer)
    compiled(torch.randn(8, 3))
    layer(torch.randn(6, 3))
    compiled(torch.randn(5, 3))
    fbn.discard_step(layer)
    assert fbn.collect(layer)[""].count == 14


@pytest.mark.slow
def test_checkpointing_inside_a_compiled_model_counts_once():
    model = net()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    outer = Checkpointed()
    torch.compile(outer, fullgraph=True)(images().requires_grad_()).sum().backward()
    assert fbn.collect(outer)["inner.1"].count == 6 * 36


@pytest.mark.slow
def test_a_reverted_model_exports():
    model = net()
    fbn.load_statistics(model, fbn.merge(fbn.statistics(model), [seen_by(model, images())]).statistics)
    expected = model.eval()(images())
    exported = torch.export.export(fbn.revert(model), (images(),))
    torch.testing.assert_close(exported.module()(images()), expected)


@pytest.mark.parametrize("how", ["copied", "saved", "as it is"])
def test_what_a_compiled_pass_added_is_neither_lost_nor_kept_too_long(how):
    """A compiled pass, then an eager one, on a copy of the layer, too; then the next round."""
    layer = fbn.FederatedBatchNorm1d(2)
    layer._refused.add_(0)  # the version of a tensor that was copied is 1
    layer._note_clean()
    first, second = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(0)).unbind()
    torch.compile(layer, backend="aot_eager")(first)
    if how == "copied":
        layer = copy.deepcopy(layer)
    if how == "saved":
        torch.save(layer, file := io.BytesIO())
        file.seek(0)
        layer = torch.load(file, weights_only=False)
    layer(second)
    seen = layer.seen()[0]
    both = torch.cat([first, second]).double()
    assert seen.count == 10
    torch.testing.assert_close(seen.mean, both.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(seen.var, both.var(0, correction=0), rtol=1e-6, atol=1e-6)
    layer.start_round()
    layer(second)
    assert layer.seen()[0].count == 5
