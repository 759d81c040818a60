"""Classes that do more than BatchNorm: registered, by calling super's forward, or federated by hand."""

import copy
import io
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import update_bn

import fedbatchnorm as fbn
from fedbatchnorm.norm.registry import _ENTRIES, _drop_and_act


@pytest.fixture(autouse=True)
def _entries():
    """What a test registers ends with it."""
    before = dict(_ENTRIES)
    yield
    _ENTRIES.clear()
    _ENTRIES.update(before)


class Pasted(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: torch's forward once more, then dropout and an activation in place."""

    def __init__(self, channels, drop=None, act=None):
        super().__init__(channels)
        self.drop = nn.Identity() if drop is None else drop
        self.act = nn.ReLU(inplace=True) if act is None else act

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        by = (1 / float(self.num_batches_tracked)) if self.momentum is None else self.momentum
        running = self.running_mean, self.running_var
        x = F.batch_norm(x, *running, self.weight, self.bias, self.training, by, self.eps)
        return self.act(self.drop(x))


class Heir(Pasted):
    def describe(self):
        return "an heir"


class Shifted(nn.BatchNorm2d):
    """Its forward calls super's once."""

    def __init__(self, channels):
        super().__init__(channels)
        self.shift = nn.Parameter(torch.full((1, channels, 1, 1), 0.5))

    def forward(self, x, scale: float = 2.0):
        """Twice batch_norm, shifted."""
        with torch.autocast("cpu", enabled=False):
            y = super().forward(x.double() * 3)
        if self.training:
            y = y + 0
        return scale * self._tail(y)

    def _tail(self, y):
        return (y + self.shift).tanh()


class OldSuper(nn.BatchNorm2d):
    def forward(self, input):
        return F.relu(super(OldSuper, self).forward(input))  # noqa: UP008


class Twice(Shifted):
    def forward(self, x):
        return super().forward(x) ** 2


class Synced(nn.SyncBatchNorm):
    def forward(self, input):
        return -super().forward(input)


class OverPasted(Pasted):
    def forward(self, x):
        return -super().forward(x)


class Mixin:
    def forward(self, x):
        return super().forward(x).abs()


class Mixed(Mixin, nn.BatchNorm2d):
    pass


class Bare(nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, input):
        pass

    def forward(self, input):
        return super().forward(input).abs()


class ByHand(fbn.FederatedBatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


AFTER = {
    Shifted: lambda layer, y: 2 * (y + layer.shift).tanh(),
    OldSuper: lambda layer, y: y.relu(),
    Twice: lambda layer, y: (2 * (y + layer.shift).tanh()) ** 2,
    Synced: lambda layer, y: -y,
    Mixed: lambda layer, y: y.abs(),
    Bare: lambda layer, y: y.abs(),
    Pasted: lambda layer, y: y.relu(),
    Heir: lambda layer, y: y.relu(),
    OverPasted: lambda layer, y: -y.relu(),
}
BEFORE = {Shifted: 3.0, Twice: 3.0}
CALLING = [Shifted, OldSuper, Twice, Synced, Mixed, Bare]
ALL = [*CALLING, Pasted, Heir, OverPasted]


def net(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), kind(3), nn.Conv2d(3, 3, 1), kind(3)).double()
    for layer in (model[1], model[3]):
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.uniform_(layer.bias)
        layer.running_mean.uniform_(-0.2, 0.2)
        layer.running_var.uniform_(0.5, 1.5)
    model.load_state_dict(model.state_dict())  # so that a class federated by hand knows of it
    return model


def images(seed=0, size=4):
    generator = torch.Generator().manual_seed(seed)
    return 1 + 2 * torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64)


def register_pasted():
    fbn.register(Pasted, lambda layer, y: layer.act(layer.drop(y)))


@pytest.mark.parametrize("gradient", [0.0, 0.7])
@pytest.mark.parametrize("kind", ALL)
def test_training_is_the_federated_layer_and_what_the_class_adds(kind, gradient):
    """Against a plain FederatedBatchNorm2d with the rest written behind it."""
    register_pasted()
    model = fbn.convert(net(kind), gradient=gradient)
    twin = net(kind)
    for at in (1, 3):
        plain = nn.BatchNorm2d(3).double()
        plain.load_state_dict({k: v for k, v in twin[at].state_dict().items() if k != "shift"})
        twin[at] = nn.Sequential(plain)
        twin[at].shift = getattr(model[at], "shift", None)
    fbn.convert(twin, gradient=gradient)

    def reference(x):
        for module in twin:
            x = module(x) if isinstance(module, nn.Conv2d) else written_out(module, x)
        return x

    def written_out(module, x):
        return AFTER[kind](module, module[0](x * BEFORE.get(kind, 1.0)))

    x, other = (images().requires_grad_() for _ in "12")
    y, expected = model(x), reference(other)
    torch.testing.assert_close(y, expected)
    y.square().mean().backward()
    expected.square().mean().backward()
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(model[1].weight.grad, twin[1][0].weight.grad)
    seen, should = fbn.collect(model), fbn.collect(twin)
    for name in ("1", "3"):
        for one, two in zip(seen[name], should[f"{name}.0"], strict=True):
            torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(two))
    assert seen["1"].count == 4 * 16


@pytest.mark.parametrize("kind", ALL)
def test_evaluation_is_the_class_s_own_and_revert_gives_everything_back(kind):
    register_pasted()
    plain, model = net(kind), net(kind)
    before = [*model.parameters(), *model.buffers(), *model.modules()]
    keys, attributes = list(model.state_dict()), set(model[1].__dict__)
    hooked = []
    model[1].register_forward_hook(lambda *_: hooked.append(1))
    fbn.convert(model)
    assert isinstance(model[1], kind)
    assert isinstance(model[1], fbn.norm.layers.FederatedBatchNorm)
    after = [*model.parameters(), *model.buffers(), *model.modules()]
    assert all(one is two for one, two in zip(before, after, strict=True))
    assert list(model.state_dict()) == keys
    assert torch.equal(model.eval()(images()), plain.eval()(images()))
    assert hooked == [1]
    fbn.revert(model)
    assert type(model[1]) is kind
    assert set(model[1].__dict__) == attributes
    assert torch.equal(model(images()), plain(images()))


def test_what_comes_after_is_not_done_twice_in_evaluation():
    fbn.register(Pasted, lambda layer, y: layer.act(layer.drop(y)) + 1)
    model = fbn.convert(nn.Sequential(Pasted(2, act=nn.Tanh()))).double()
    x = images()
    training, evaluation = model(x), model.eval()(x)
    torch.testing.assert_close(training, evaluation + 1)


@pytest.mark.parametrize("kind", ALL)
def test_calibrating_is_the_plain_class_in_training(kind):
    register_pasted()
    plain, model = net(kind), fbn.convert(net(kind))
    with torch.no_grad(), fbn.calibrating(model):
        y = model(images())
        assert [f.problem for f in fbn.inspect(model)] == [None, None]
    torch.testing.assert_close(y, plain(images()))
    assert fbn.collect(model)["1"].count == 4 * 16


@pytest.mark.parametrize("kind", ALL)
def test_copies_and_pickles_go_on(kind):
    register_pasted()
    model = fbn.convert(net(kind))
    model(images())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert type(other[1]) is type(model[1])
        assert torch.equal(other(images(1)), model(images(1)))
        fbn.discard_step(other)
        assert fbn.collect(other)["3"].count == 4 * 16
        fbn.collect(model)
        model(images())
        assert type(fbn.revert(other)[1]) is kind


@pytest.mark.parametrize("kind", [Shifted, Twice, Pasted, OverPasted, ByHand])
def test_compiled_in_one_graph(kind):
    register_pasted()
    model = net(kind) if kind is ByHand else fbn.convert(net(kind))
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images()), other(images()))
    compiled(images(1)).square().mean().backward()
    assert fbn.collect(compiled)["1"].count == 2 * 4 * 16
    torch.testing.assert_close(compiled.eval()(images()), other.eval()(images()))


@pytest.mark.parametrize("kind", ALL)
def test_update_bn_is_that_of_the_plain_class(kind):
    register_pasted()
    loader = [images(seed) for seed in range(3)]
    plain, model = net(kind), fbn.convert(net(kind))
    update_bn(loader, plain)
    update_bn(loader, model)
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


# --- what stays refused ---


class CallsTwice(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + super().forward(-x)


class CallsInItself(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(super().forward(x))


class CallsNever(nn.BatchNorm2d):
    def forward(self, x):
        return x


class CallsIf(nn.BatchNorm2d):
    def forward(self, x):
        if x.numel() > 5:
            x = super().forward(x)
        return x


class CallsUnless(nn.BatchNorm2d):
    def forward(self, x):
        if x.numel() < 5:
            return x
        return super().forward(x)


class CallsOr(nn.BatchNorm2d):
    def forward(self, x):
        return x if self.training else super().forward(x)


class CallsInLoop(nn.BatchNorm2d):
    def forward(self, x):
        for _ in range(2):
            x = super().forward(x)
        return x


class CallsLater(nn.BatchNorm2d):
    def forward(self, x):
        def inner():
            return super(CallsLater, self).forward(x)

        return inner()


class CallsInLambda(nn.BatchNorm2d):
    def forward(self, x):
        return (lambda: super(CallsInLambda, self).forward(x))()


class CallsTrying(nn.BatchNorm2d):
    def forward(self, x):
        try:
            return super().forward(x)
        except ValueError:
            return x


class CallsBase(nn.BatchNorm2d):
    def forward(self, x):
        return nn.BatchNorm2d.forward(self, x)


class KeepsSuper(nn.BatchNorm2d):
    def forward(self, x):
        above = super()
        return above.forward(super().forward(x))


class Normalizes(nn.BatchNorm2d):
    def forward(self, x):
        y = super().forward(x)
        return y + F.batch_norm(x, None, None, training=True)


class LooksUp(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) - getattr(self, "running_mean").mean()  # noqa: B009


class Reads(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x - self.running_mean.view(1, -1, 1, 1))


class SetsMomentum(nn.BatchNorm2d):
    def forward(self, x):
        self.momentum = 0.5
        return super().forward(x)


class SetsMode(nn.BatchNorm2d):
    def forward(self, x):
        self.training = False
        return super().forward(x)


class CallsEval(nn.BatchNorm2d):
    def forward(self, x):
        self.eval()
        return super().forward(x)


class HandsOn(nn.BatchNorm2d):
    def forward(self, x):
        return whatever(self, super().forward(x))


class InHelper(nn.BatchNorm2d):
    def forward(self, x):
        return self.helper(super().forward(x))

    def helper(self, y):
        self.running_mean.mul_(0.5)
        return y


class InProperty(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + self.mean

    @property
    def mean(self):
        return self.running_mean.mean()


class InSuperOfHelper(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(self.helper(x))

    def helper(self, x):
        return super().forward(x)


def whatever(layer, y):
    return y


class Decorated(nn.BatchNorm2d):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class Lambda(nn.BatchNorm2d):
    forward = lambda self, x: super().forward(x)  # noqa: E731


class HeirOfTwo(CallsTwice):
    def forward(self, x):
        return super().forward(x)


def without_source():
    space = {"nn": nn}
    code = "class NoSource(nn.BatchNorm2d):\n    def forward(self, x):\n        return super().forward(x)\n"
    exec(code, space)
    return space["NoSource"]


REFUSED = {
    CallsTwice: "calls super().forward 2 times",
    CallsInItself: "calls super().forward 2 times",
    CallsNever: "does not call super().forward",
    CallsIf: "may not call",
    CallsUnless: "may return before",
    CallsOr: "may not call",
    CallsInLoop: "may not call",
    CallsLater: "may not call",
    CallsInLambda: "may not call",
    CallsTrying: "may not call",
    CallsBase: "does not call super().forward",
    KeepsSuper: "more than a call",
    Normalizes: "uses batch_norm",
    LooksUp: "hands self on",
    Reads: "uses running_mean",
    SetsMomentum: "uses momentum",
    SetsMode: "sets self.training",
    CallsEval: "uses self.eval",
    HandsOn: "hands self on",
    InHelper: "uses running_mean",
    InProperty: "uses running_mean",
    InSuperOfHelper: "calls super().forward in helper",
    Decorated: "plain function",
    Lambda: "source cannot be read",
    HeirOfTwo: "CallsTwice has its own forward, and it calls super().forward 2 times",
    without_source(): "source cannot be read",
    Pasted: "does not call super().forward",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_cannot_be_told_is_refused_with_what_to_do(kind):
    model = nn.Sequential(kind(3), nn.BatchNorm2d(3))
    with pytest.raises(fbn.ConversionError) as error:
        fbn.convert(model)
    assert REFUSED[kind] in str(error.value)
    assert f"fbn.register({kind.__name__}, lambda layer, y: ...)" in str(error.value)
    assert "skip=[...]" in str(error.value)
    assert [type(m) for m in model] == [kind, nn.BatchNorm2d]


# --- the registry ---


def test_a_registration_by_name_needs_no_import():
    fbn.register(f"{__name__}.Pasted", lambda layer, y: y.relu())
    assert isinstance(fbn.convert(net(Heir))[1], Heir)


def test_none_after_says_that_a_forward_only_normalizes():
    fbn.register(Pasted)
    model = fbn.convert(net(Pasted))
    assert model(images()).min() < 0


def test_registering_once_more_is_for_what_is_converted_then():
    register_pasted()
    first = fbn.convert(net(Pasted))
    fbn.register(Pasted, lambda layer, y: -1 - y.relu())
    second = fbn.convert(net(Pasted))
    assert first(images()).min() >= 0
    assert second(images()).max() <= -1


@pytest.mark.parametrize("kind", [nn.ReLU, nn.Module, 3, "Pasted", "a b.C", nn.BatchNorm2d, None])
def test_only_classes_of_batch_norm_can_be_registered(kind):
    with pytest.raises(ValueError, match=r"BatchNorm|full name"):
        fbn.register(kind, lambda layer, y: y)


def test_what_comes_after_is_a_function():
    with pytest.raises(ValueError, match="after is 3"):
        fbn.register(Pasted, 3)


def test_any_callable_may_come_after():
    class Scale:
        def __call__(self, layer, y):
            return layer.eps * y

    fbn.register(Pasted, Scale())
    assert fbn.convert(net(Pasted))(images()).abs().max() < 1e-3


class Splits(nn.BatchNorm2d):
    """As timm's SplitBatchNorm2d: which call it makes depends, but it makes one."""

    def __init__(self, channels):
        super().__init__(channels)
        self.aux_bn = nn.BatchNorm2d(channels)

    def forward(self, x):
        if self.training:
            one, two = x.chunk(2)
            return torch.cat([super().forward(one), self.aux_bn(two)])
        return super().forward(x)


def test_classes_that_are_known_to_call_super_once_need_not_look_like_it():
    _ENTRIES[f"{__name__}.Splits"] = _ENTRIES["timm.layers.split_batchnorm.SplitBatchNorm2d"]
    plain, model = net(Splits), fbn.convert(net(Splits))
    model(images())
    assert {name: m.count for name, m in fbn.collect(model).items()} == dict.fromkeys(
        ["1", "1.aux_bn", "3", "3.aux_bn"], 2 * 16
    )
    assert torch.equal(model.eval()(images()), plain.eval()(images()))
    assert type(fbn.revert(model)[1]) is Splits


class WithLimit(nn.BatchNorm2d):
    limit = 6.0

    def forward(self, x):
        return super().forward(x).clamp(max=self.limit)


class WithSeen(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.seen = nn.Identity()


@pytest.mark.parametrize(("kind", "name"), [(WithLimit, "limit"), (WithSeen, "seen")])
def test_an_attribute_that_a_federated_layer_needs_is_a_refusal(kind, name):
    with pytest.raises(fbn.ConversionError, match=f"1 x {kind.__name__}: 0: it has an attribute '{name}'"):
        fbn.convert(nn.Sequential(kind(2)))


@pytest.mark.parametrize("module", ["timm.layers.norm_act", "timm.models.layers.norm_act"])
def test_timm_s_layers_are_known_from_the_start(module, monkeypatch):
    made = types.ModuleType(module)
    kind = type("BatchNormAct2d", (Pasted,), {"__module__": module, "forward": Pasted.forward})
    made.BatchNormAct2d = kind
    monkeypatch.setitem(sys.modules, module, made)
    model = fbn.convert(net(kind))
    assert model(images()).min() == 0


def test_timm_s_old_layers_have_no_dropout_and_none_for_no_activation():
    fbn.register(Pasted, _drop_and_act)
    model = fbn.convert(net(Pasted))
    del model[1].drop, model[3].drop
    model[3].act = None
    assert model(images()).min() < 0


# --- by hand ---


def test_a_class_that_was_federated_by_hand_is_accepted():
    model = net(ByHand)
    assert [f.becomes for f in fbn.inspect(model)] == ["ByHand", "ByHand"]
    assert type(fbn.convert(model)[1]) is ByHand
    shared = fbn.statistics(model)
    fbn.load_statistics(model, shared)
    assert model(images()).min() == 0
    assert fbn.collect(model)["1"].count == 4 * 16
    with torch.no_grad(), fbn.calibrating(model):
        assert model(images()).min() == 0
    assert type(model[1]) is ByHand
    with pytest.warns(UserWarning, match="2 x ByHand: 1, 3: it was written as a federated class"):
        fbn.revert(model)
    assert type(model[1]) is ByHand


def test_by_hand_and_plain_together():
    model = nn.Sequential(ByHand(2), nn.BatchNorm2d(2))
    assert list(fbn.statistics(fbn.convert(model))) == ["0", "1"]


def test_a_simulation_does_not_leave_out_what_comes_after():
    from fedbatchnorm.simulation.fold import fold

    for kind in (Shifted, Pasted):
        register_pasted()
        with pytest.raises(ValueError, match=f"layer '1': {kind.__name__} does more than normalize"):
            fold(net(kind), 0.1)
