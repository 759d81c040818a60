"""What happens to a converted model behind its back: nothing of it goes unnoticed."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import fedbatchnorm as fbn


def plain(momentum=0.1, kind=nn.BatchNorm1d):
    torch.manual_seed(0)
    layers = nn.Linear(4, 3), kind(3, momentum=momentum), nn.ReLU(), nn.Linear(3, 3), kind(3, momentum=0.3)
    return nn.Sequential(*layers).double()


def batches(n=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [2 + 3 * torch.randn(5 + i, 4, generator=generator, dtype=torch.float64) for i in range(n)]


def counts(model):
    return [m.count for m in fbn.collect(model).values()]


def same_state(model, twin):
    for key, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


# --- update_bn ---


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_update_bn_gives_what_a_plain_model_gets(momentum, kind):
    twin, model = plain(momentum, kind), fbn.convert(plain(momentum, kind))
    model(batches()[0])
    update_bn(batches(), twin)
    update_bn(batches(), model)
    same_state(model, twin)
    assert model[1].running_mean.any()
    assert [model[1].momentum, model[4].momentum] == [momentum, 0.3]
    assert counts(model) == [0, 0]  # neither what was seen before nor what update_bn ran
    model(batches()[1])  # and from here on all is as ever
    assert counts(model) == [6, 6]
    same_state(model, twin)
    update_bn(batches(2, seed=5), twin)
    update_bn(batches(2, seed=5), model)
    same_state(model, twin)


def test_update_bn_on_averaged_and_compiled_models():
    twin, model = AveragedModel(plain()), AveragedModel(fbn.convert(plain()))
    update_bn(batches(), twin)
    update_bn(batches(), model)
    same_state(model, twin)
    twin, model = plain(), fbn.convert(plain())
    compiled = torch.compile(model, backend="eager")
    compiled(batches()[0])
    assert counts(compiled) == [5, 5]
    update_bn(batches(), twin)
    update_bn(batches(), compiled)
    same_state(model, twin)
    compiled(batches()[0])
    assert counts(compiled) == [5, 5]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_lightning_s_stochastic_weight_averaging(momentum):
    """The calls of its callback, in its order."""

    def epoch_of(model):
        momenta = {}
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean = torch.zeros_like(module.running_mean)
                module.running_var = torch.ones_like(module.running_var)
                momenta[module] = module.momentum
                module.momentum = None
                module.num_batches_tracked *= 0
        for x in batches():
            model(x)
        for module, value in momenta.items():
            module.momentum = value

    twin, model = plain(momentum), fbn.convert(plain(momentum))
    model(batches()[0])
    for layer in (model[1], model[4], twin[1], twin[4]):
        layer.num_batches_tracked.fill_(7)
    epoch_of(twin)
    epoch_of(model)
    same_state(model, twin)
    assert counts(model) == [0, 0]
    model(batches()[0])
    assert counts(model) == [5, 5]
    epoch_of(twin)
    epoch_of(model)
    same_state(model, twin)


def test_momentum_none_alone_is_a_setting_like_any():
    for model in (fbn.convert(plain(None)), fbn.convert(plain())):
        before = copy.deepcopy(model.state_dict())
        for layer in (model[1], model[4]):
            layer.momentum = None
        model(batches()[0])
        for key, value in model.state_dict().items():
            assert torch.equal(before[key], value), key
        assert counts(model) == [5, 5]
    layer = fbn.FederatedBatchNorm1d(4)
    layer.momentum = None
    layer(batches()[0].float())
    assert layer.seen()[0].count == 5


@pytest.mark.parametrize("between", ["load", "state", "parameters", "pass"])
def test_a_reset_long_ago_is_no_beginning(between):
    model = fbn.convert(plain())
    shared, state = fbn.statistics(model), model.state_dict()
    model[1].reset_running_stats()
    if between == "load":
        fbn.load_statistics(model, shared)
    elif between == "state":
        model.load_state_dict(state)
    elif between == "parameters":
        model[1].reset_parameters()
    else:
        model(batches()[0])
    model[1].momentum = None
    model(batches()[0])
    assert counts(model)[0] == (10 if between == "pass" else 5)


def test_an_update_bn_that_broke_off_is_named():
    model = fbn.convert(plain())
    with pytest.raises(TypeError):
        update_bn([batches()[0], None], model)
    for call in (fbn.collect, lambda m: fbn.load_statistics(m, fbn.statistics(m))):
        with pytest.raises(
            ValueError, match=r"layer '1' averages its statistics .* set momentum to what it was"
        ):
            call(model)
    for layer in (model[1], model[4]):
        layer.momentum = 0.1
    model(batches()[0])
    assert counts(model) == [5, 5]


def test_averaging_survives_copies():
    model = fbn.convert(plain())
    model[1].reset_running_stats()
    model[1].momentum = None
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        other(batches()[0])
        assert other[1].running_mean.any()
        other[1].momentum = 0.2
        assert counts(other) == [0, 5]


def test_a_converted_layer_has_its_momentum_where_torch_has_it():
    model = fbn.convert(plain(0.25))
    assert (model[1].momentum, vars(model[1])["momentum"]) == (0.25, 0.25)
    assert "momentum=0.25" in repr(model[1])
    model[1].momentum = 0.5
    assert fbn.statistics(model)["1"].momentum == 0.5
    assert fbn.revert(model)[1].momentum == 0.5
    assert not hasattr(fbn.FederatedBatchNorm1d.__new__(fbn.FederatedBatchNorm1d), "momentum")


# --- batch_norm with a layer's buffers ---


class Behind(nn.Module):
    """A parent that does the layer's work itself."""

    def __init__(self, training=True):
        super().__init__()
        self.bn, self.other, self.mode = nn.BatchNorm1d(4), nn.BatchNorm1d(4), training

    def forward(self, x):
        x = F.batch_norm(x, self.bn.running_mean, self.bn.running_var, training=self.mode)
        return self.other(x)


def quiet(call, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*args)


def test_batch_norm_with_a_layer_s_buffers_is_noticed():
    model = fbn.convert(nn.Sequential(Behind(), Behind()).double())
    model(batches()[0])
    with pytest.warns(
        UserWarning, match=r"2 x FederatedBatchNorm1d: 0.bn, 1.bn: not by load_statistics.*F.batch_norm"
    ) as caught:
        assert counts(model) == [0, 5, 0, 5]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    quiet(fbn.collect, model)  # said once for each change
    model(batches()[1])
    with pytest.warns(UserWarning, match="0.bn"):
        fbn.collect(model)
    fbn.load_statistics(model, fbn.statistics(model))
    quiet(fbn.collect, model)


def test_the_same_in_copies_and_pickles():
    model = fbn.convert(Behind().double())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False), model.float().double()):
        quiet(fbn.collect, other)
        other(batches()[0])
        with pytest.warns(UserWarning, match="bn"):
            fbn.collect(copy.deepcopy(other))


def test_moving_a_model_does_not_hide_it():
    model = fbn.convert(Behind().double())
    model(batches()[0])
    with pytest.warns(UserWarning, match="bn"):
        fbn.collect(model.float())


def load(model):
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


def load_into_half(model):
    shared = fbn.statistics(model)
    shared = {k: r._replace(mean=r.mean + 1 / 3, var=r.var * 1.1) for k, r in shared.items()}
    fbn.load_statistics(model.half(), shared)
    model.double()


def written_again(model):
    """As DistributedDataParallel does in every step."""
    for buffer in model.buffers():
        buffer.copy_(buffer.clone())


def set_to_nan_by_load(model):
    model.load_state_dict({k: v * float("nan") for k, v in model.state_dict().items()}, strict=False)


LEGITIMATE = {
    "load_state_dict": load,
    "load_statistics": load_into_half,
    "cast": lambda m: m.half().float().bfloat16().double(),
    "written again": written_again,
    "update_bn": lambda m: update_bn(batches(), m),
    "reset": lambda m: m[1].reset_running_stats(),
    "reset_parameters": lambda m: m[1].reset_parameters(),
    "shared memory": lambda m: m.share_memory(),
    "empty": lambda m: (m.to("meta").to_empty(device="cpu"), m.load_state_dict(plain().state_dict())),
    "assign": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True),
    "calibrating": lambda m: fbn.calibrating(m).__enter__()(batches()[0]),
    "evaluation": lambda m: m.eval()(batches()[0]),
    "nothing": lambda m: m(batches()[0]),
}


@pytest.mark.parametrize("what", LEGITIMATE)
def test_what_is_legitimate_is_not_warned_of(what):
    model = plain()
    model(batches()[2])
    model = fbn.convert(model)
    with torch.no_grad():
        LEGITIMATE[what](model)
    quiet(fbn.collect, model)
    with torch.inference_mode():
        fbn.load_statistics(model, fbn.statistics(model))
    quiet(fbn.collect, model)


def test_skipped_layers_may_be_used_so():
    model = fbn.convert(Behind().double(), skip="bn")
    model(batches()[0])
    assert list(quiet(fbn.collect, model)) == ["other"]


# --- convert_sync_batchnorm after convert ---


@pytest.mark.parametrize("call", [fbn.statistics, fbn.collect, lambda m: fbn.load_statistics(m, {})])
def test_convert_sync_batchnorm_after_convert_is_explained(call):
    model = fbn.convert(plain())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    with pytest.raises(ValueError, match="convert_sync_batchnorm came after it and replaced") as error:
        call(model)
    for advice in ("layer '1' is a plain SyncBatchNorm", "call it before convert", "convert again now"):
        assert advice in str(error.value)
    assert list(fbn.statistics(fbn.convert(model))) == ["1", "4"]
    assert type(model[1]) is fbn.FederatedSyncBatchNorm
