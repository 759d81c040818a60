import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedbatchnorm as fbn


class Renamed(nn.BatchNorm2d):
    """A user's subclass without a forward of its own."""

    def describe(self):
        return f"{self.num_features} channels"


class Scaled(nn.BatchNorm2d):
    def forward(self, input):
        return F.batch_norm(2 * input, self.running_mean, self.running_var, training=self.training)


class Block(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.bn(self.conv(x)).relu()


def nested():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(Block(), Block()), nn.Flatten())


def names(model):
    return [finding.layer for finding in fbn.inspect(model)]


def test_everything_but_the_class_stays():
    model = nested().double()
    model[1].eval()
    model[1].extra = "kept"
    calls = []
    handle = model[2][0].bn.register_forward_hook(lambda *_: calls.append(1))
    before = [*model.parameters(), *model.buffers(), *model.modules()]
    state = copy.deepcopy(model.state_dict())
    assert fbn.convert(model) is model
    after = [*model.parameters(), *model.buffers(), *model.modules()]
    assert len(before) == len(after)
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert list(model.state_dict()) == list(state)
    assert not model[1].training
    assert model[1].extra == "kept"
    assert type(model[1]) is fbn.FederatedBatchNorm2d
    model(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert calls == [1]
    handle.remove()
    attributes = set(nested()[1].__dict__) | {"extra"}
    assert fbn.revert(model) is model
    assert type(model[1]) is nn.BatchNorm2d
    assert set(model[1].__dict__) == attributes
    assert all(
        one is other
        for one, other in zip(before, model.modules(), strict=False)
        if isinstance(one, nn.Module)
    )


def test_the_converted_model_evaluates_as_before():
    model = nested()
    model(torch.randn(8, 3, 8, 8))
    x = torch.randn(2, 3, 8, 8)
    expected = model.eval()(x)
    assert torch.equal(fbn.convert(model)(x), expected)
    assert torch.equal(fbn.revert(model)(x), expected)


def test_a_layer_at_the_root():
    layer = nn.BatchNorm1d(3)
    assert fbn.convert(layer) is layer
    assert isinstance(layer, fbn.FederatedBatchNorm1d)
    assert list(fbn.statistics(layer)) == [""]


def test_a_layer_under_several_names_is_one_layer():
    shared = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.BatchNorm1d(3)})
    fbn.convert(model)
    assert isinstance(model["b"][0], fbn.FederatedBatchNorm1d)
    assert model["a"] is model["b"][0]
    assert list(fbn.statistics(model)) == ["a", "c"]
    fbn.revert(model)
    assert type(shared) is nn.BatchNorm1d


def test_converting_twice_changes_nothing_and_loses_nothing():
    model = fbn.convert(nested())
    model(torch.randn(2, 3, 8, 8))
    fbn.convert(model)
    assert fbn.collect(model)["1"].count == 2 * 36


@pytest.mark.parametrize("kwargs", [{"affine": False}, {"momentum": None}, {"eps": 1e-3, "momentum": 0.5}])
def test_settings_are_kept(kwargs):
    model = fbn.convert(nn.Sequential(nn.BatchNorm1d(3, **kwargs)))
    for key, value in kwargs.items():
        assert getattr(model[0], key) == value
    model(torch.randn(4, 3))
    shared = fbn.statistics(model)["0"]
    assert (shared.momentum, shared.eps) == (model[0].momentum, model[0].eps)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 2, 2), (4, 3, 2, 2, 2)])
def test_sync_batch_norm_has_any_number_of_dimensions(shape):
    model = fbn.convert(nn.Sequential(nn.SyncBatchNorm(3)))
    assert isinstance(model[0], fbn.FederatedSyncBatchNorm)
    model(torch.randn(shape))
    assert fbn.collect(model)["0"].count == torch.Size(shape).numel() // 3
    fbn.revert(model)
    assert type(model[0]) is nn.SyncBatchNorm
    assert model.eval()(torch.randn(shape)).shape == shape


def test_a_subclass_keeps_its_methods_and_can_be_saved():
    model = fbn.convert(nn.Sequential(Renamed(3)))
    assert isinstance(model[0], Renamed)
    assert model[0].describe() == "3 channels"
    model(torch.randn(2, 3, 2, 2))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert type(loaded[0]) is type(model[0])
    assert fbn.collect(copy.deepcopy(loaded))["0"].count == 8
    assert type(fbn.revert(model)[0]) is Renamed


def patched():
    layer = nn.BatchNorm2d(3)
    layer.forward = lambda x: x
    return layer


REFUSED = [
    (lambda: nn.BatchNorm2d(3, track_running_stats=False), "track_running_stats"),
    (nn.LazyBatchNorm2d, "run the model once"),
    (lambda: Scaled(3), "Scaled has its own forward"),
    (patched, "put on this very layer"),
    (lambda: nn.BatchNorm2d(3, momentum=0.0), "momentum is 0.0"),
    (lambda: nn.BatchNorm2d(3, momentum=1.5), "momentum is 1.5"),
    (lambda: nn.BatchNorm2d(3, eps=0.0), "eps is 0.0"),
    (lambda: torch.jit.script(nn.BatchNorm2d(3)), "before torch.jit"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_a_refusal_names_the_layer_and_changes_nothing(make, message):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.ReLU(), make()))
    types = [type(m) for m in model.modules()]
    with pytest.raises(fbn.ConversionError, match=rf"(?s)nothing was changed.*1\.1: .*{message}"):
        fbn.convert(model)
    assert [type(m) for m in model.modules()] == types
    finding = fbn.inspect(model)[1]
    assert finding.layer == "1.1"
    assert finding.becomes is None
    assert message in finding.problem


def test_all_refusals_come_at_once():
    model = nn.Sequential(nn.BatchNorm1d(3, eps=0.0), nn.BatchNorm1d(3, momentum=0.0))
    with pytest.raises(fbn.ConversionError, match=r"(?s)0: eps.*1: momentum"):
        fbn.convert(model)


def test_a_lazy_layer_is_taken_once_it_has_channels():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    model(torch.randn(2, 3, 2, 2))
    assert isinstance(fbn.convert(model)[0], fbn.FederatedBatchNorm2d)


def test_a_model_without_batch_norm_gets_a_warning():
    with pytest.warns(UserWarning, match="no BatchNorm"):
        fbn.convert(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2), nn.InstanceNorm2d(2, affine=True)))


def test_inspect_changes_nothing():
    model = nested()
    assert names(model) == ["1", "2.0.bn", "2.1.bn"]
    assert {f.becomes for f in fbn.inspect(model)} == {"FederatedBatchNorm2d"}
    assert type(model[1]) is nn.BatchNorm2d


def test_wrappers_leave_no_trace_in_names():
    plain = names(nested())
    assert names(nn.DataParallel(nested())) == plain
    assert names(torch.optim.swa_utils.AveragedModel(nested())) == plain
    assert names(torch.compile(nested())) == plain
    assert names(nn.Sequential(torch.compile(nn.DataParallel(nested())))) == [f"0.{n}" for n in plain]
    # A module that a user calls `module` is no wrapper.
    assert names(nn.ModuleDict({"module": nested()})) == [f"module.{n}" for n in plain]


@pytest.mark.parametrize("call", [fbn.statistics, fbn.collect, fbn.discard_step])
def test_a_plain_layer_is_named(call):
    with pytest.raises(ValueError, match=r"layer '1' is a plain BatchNorm2d: call convert"):
        call(nested())
