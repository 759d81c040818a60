"""What converting does to real models: exact statistics, keys that fit both ways, and all of it undone."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from zoo import MODELS

import fedbatchnorm as fbn

CLIENTS, ROUNDS, LOCAL_STEPS = 3, 3, 2
EXACT = 1e-6  # of the deviation defined in `deviation`


def built(name):
    """A model and its row, the same weights whenever it is called."""
    torch.manual_seed(0)
    return MODELS[name].build(), MODELS[name]


def call(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def tensors(output):
    """All floating-point tensors of what a model returns."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    return (
        [tensor for value in output for tensor in tensors(value)] if isinstance(output, (list, tuple)) else []
    )


def total(output):
    return sum(tensor.square().mean() for tensor in tensors(output))


def after_normalizing(layer, y):
    """What the classes of this zoo do behind BatchNorm: timm's have dropout and an activation."""
    return layer.act(layer.drop(y)) if hasattr(layer, "act") else y


class Recorder:
    """Keeps what every federated layer gets, and checks what it makes of it."""

    def __init__(self, model):
        self.inputs = {name: [] for name in fbn.statistics(model)}
        self.checking = True
        for name in self.inputs:
            layer = model.get_submodule(name)
            layer.register_forward_pre_hook(functools.partial(self.before, name))
            layer.register_forward_hook(functools.partial(self.after, name))

    def before(self, name, layer, args):
        self.inputs[name].append(args[0].detach().clone())

    def after(self, name, layer, args, y):
        """In training: normalized with the shared statistics, then what comes after it."""
        if not self.checking:
            return
        x, shared = self.inputs[name][-1], (layer.running_mean, layer.running_var)
        with torch.no_grad():
            normalized = F.batch_norm(x, *shared, layer.weight, layer.bias, training=False, eps=layer.eps)
            expected = after_normalizing(layer, normalized)
        torch.testing.assert_close(y.detach(), expected, rtol=1e-4, atol=1e-4, msg=lambda m: f"{name}: {m}")

    def take(self):
        """Layer -> all values per channel since the last call, (channels, values), in float64."""
        rows = {
            name: torch.cat([x.double().movedim(1, 0).flatten(1) for x in seen], 1)
            for name, seen in self.inputs.items()
        }
        for seen in self.inputs.values():
            seen.clear()
        return rows


def reference(shared, values, momentum, steps):
    """BatchNorm's own update on the union of what all clients fed to a layer, in float64."""
    weight = 1 - (1 - momentum) ** steps
    mean = (1 - weight) * shared.mean.double() + weight * values.mean(1)
    return mean, (1 - weight) * shared.var.double() + weight * values.var(1, unbiased=True)


def deviation(found, mean, var):
    """The most that any channel's statistics are off, relative to what a layer of this eps makes of them.

    max(|m' - m| / sqrt(m^2 + v + eps), |v' - v| / (v + eps)), with (m, v) the reference.
    """
    of_mean = (found.mean.double() - mean).abs() / (mean.square() + var + found.eps).sqrt()
    of_var = (found.var.double() - var).abs() / (var + found.eps)
    return torch.cat([of_mean, of_var]).max().item()  # NaN, if there is one


@pytest.mark.parametrize("name", MODELS)
def test_three_clients_share_the_statistics_of_the_union_of_their_data(name):
    model, row = built(name)
    fbn.convert(model)
    recorder, generator = Recorder(model), torch.Generator().manual_seed(1)
    shared, weights = fbn.statistics(model), copy.deepcopy(model.state_dict())
    for number in range(1 + ROUNDS):
        calibration = number == 0
        recorder.checking = not calibration
        steps, momentum = (1, 1.0) if calibration else (LOCAL_STEPS, None)
        updates, states = [], []
        for client in range(CLIENTS):
            model.load_state_dict(weights)
            fbn.load_statistics(model, shared)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            for _ in range(steps):
                batch = row.batch(generator, client)
                if calibration:
                    with torch.no_grad(), fbn.calibrating(model):
                        call(model, batch)
                else:
                    optimizer.zero_grad()
                    total(call(model, batch)).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
            updates.append(fbn.collect(model))
            assert not updates[-1].skipped
            states.append(copy.deepcopy(model.state_dict()))
        values = recorder.take()
        result = fbn.merge(shared, updates, steps=steps, momentum=momentum)
        assert all(verdict.used for verdict in result.verdicts.values())
        for layer, before in shared.items():
            mean, var = reference(before, values[layer], momentum or before.momentum, steps)
            off = deviation(result.statistics[layer], mean, var)
            assert off < EXACT, f"{layer}, round {number}: off by {off:.1e}"
        shared = result.statistics
        weights = {key: sum(state[key] for state in states) / CLIENTS for key in weights}


def trained(name):
    """A converted model after a step and a round of its own, and the plain model that it was."""
    model, row = built(name)
    plain = copy.deepcopy(model)
    fbn.convert(model)
    generator = torch.Generator().manual_seed(2)
    total(call(model, row.batch(generator, 1))).backward()
    torch.optim.SGD(model.parameters(), lr=1e-4).step()
    model.zero_grad()
    fbn.load_statistics(model, fbn.merge(fbn.statistics(model), [fbn.collect(model)]).statistics)
    return model, plain, row.batch(generator, 0)


def evaluated(model, batch):
    with torch.no_grad():
        return tensors(call(model.eval(), batch))


def same(one, other):
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", MODELS)
def test_keys_fit_both_ways_and_revert_gives_the_plain_model_bit_for_bit(name):
    model, plain, batch = trained(name)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)
    converted = evaluated(model, batch)
    assert same(converted, evaluated(plain, batch))

    fresh = fbn.convert(built(name)[0])
    fresh.load_state_dict(plain.state_dict(), strict=True)
    assert same(converted, evaluated(fresh, batch))

    fbn.revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert [set(m.__dict__) for m in model.modules()] == [set(m.__dict__) for m in plain.modules()]
    assert same(converted, evaluated(model, batch))

    outputs = []
    for each in (model, plain):  # in training too it is BatchNorm again
        torch.manual_seed(3)
        outputs.append(tensors(call(each.train(), batch)))
    assert same(*outputs)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize("name", MODELS)
def test_a_reverted_model_can_be_exported(name):
    model, _, batch = trained(name)
    fbn.revert(model)
    expected = evaluated(model, batch)
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs)
        found = tensors(program.module()(*args, **kwargs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_wrong_merge_would_be_seen():
    """The yardstick itself: the means of the clients' variances are not the variance of the union."""
    generator = torch.Generator().manual_seed(0)
    clients = [torch.randn(5, 20, generator=generator) + i for i in range(CLIENTS)]
    shared = fbn.Running(torch.zeros(5), torch.ones(5))
    mean, var = reference(shared, torch.cat(clients, 1), 0.1, 1)
    assert deviation(fbn.Running(mean, var), mean, var) == 0
    naive = torch.stack([reference(shared, x, 0.1, 1)[1] for x in clients]).mean(0)
    assert deviation(fbn.Running(mean, naive), mean, var) > 1e-2
