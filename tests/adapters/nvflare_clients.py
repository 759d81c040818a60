"""Clients and runs that the tests of the NVFlare adapter share: without its processes.

What travels goes through NVFlare's own serialization, conversion of formats and difference.
"""

import numpy as np
import torch
import torch.nn.functional as F
from nvflare.app_common.abstract.fl_model import ParamsType
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.client.config import ExchangeFormat
from nvflare.client.converter_utils import convert_params
from nvflare.client.utils import numerical_params_diff
from nvflare.fuel.utils import fobs
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm.adapters.nvflare import (
    FederatedBatchNormAggregator,
    calibrate,
    load,
    reply,
    wants_calibration,
)

NUMPY, TENSORS = ExchangeFormat.NUMPY, ExchangeFormat.PYTORCH


def cnn():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 8)]
    return nn.Sequential(*layers, nn.BatchNorm1d(8, momentum=0.3), nn.Linear(8, 3))


def batch(client, step, size):
    generator = torch.Generator().manual_seed(1000 * client + step)
    x = torch.randn(size, 1, 8, 8, generator=generator) * (1 + client) + client
    return x, torch.full((size,), client % 3)


def over_the_wire(model):
    """What arrives of a model that is sent."""
    common_decomposers.register()
    fobs.register(TensorDecomposer)
    return FLModelUtils.from_shareable(fobs.loads(fobs.dumps(FLModelUtils.to_shareable(model))))


class Clients:
    """Clients that train `steps` steps on batches of their own; `seen` gets what every layer saw."""

    def __init__(self, count=4, size=lambda c: 6, steps=1, lr=0.05, transfer="FULL", form=NUMPY, make=cnn):
        self.count, self.size, self.steps, self.lr = count, size, steps, lr
        self.transfer, self.form, self.make = transfer, form, make
        self.seen, self.at = {}, {}

    @property
    def names(self):
        return [f"site-{i + 1}" for i in range(self.count)]

    def answer(self, client, sent):
        """What the server gets of client number `client`, in answer to what it sent."""
        state = {}
        received = over_the_wire(sent)
        received.params = convert_params(received.params, self.form, TENSORS, state)
        model = fbn.convert(self.make())
        if wants_calibration(received):
            found = calibrate(model, received, [batch(client, 0, self.size(client))[0]])
        else:
            load(model, received)
            loss, steps = self.train(client, model)
            found = reply(model, received, {"loss": loss}, steps=steps)
        if self.transfer == "DIFF":
            found.params = numerical_params_diff(received.params, found.params)
            found.params_type = ParamsType.DIFF
        found.params = convert_params(found.params, TENSORS, self.form, state)
        found = over_the_wire(found)
        found.meta["client_name"] = self.names[client]
        return found

    def train(self, client, model):
        model.train()
        for name, layer in model.named_modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                into = self.seen.setdefault(name, [])
                layer.register_forward_pre_hook(lambda m, x, into=into: into.append(x[0].detach()))
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        for _ in range(self.steps):
            at = self.at[client] = self.at.get(client, -1) + 1
            x, y = batch(client, at, self.size(client))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return loss.item(), self.steps


def aggregator_of(make=cnn, calibrate=False, **options):
    return FederatedBatchNormAggregator(model=make(), calibrate=calibrate, **options)


def begun(aggregator, clients, rounds=None):
    """The aggregator, with the model in the kind that these clients exchange."""
    params = clients.make().state_dict()
    numpy = {name: value.numpy() for name, value in params.items()}
    aggregator.start(numpy if clients.form == NUMPY else params, rounds)
    return aggregator


def one_round(aggregator, clients, spoil=None, order=None):
    """A round: every client answers, in this order; `spoil` changes, or takes away (None), what one sends."""
    aggregator.reset_stats()
    aggregator.ask(clients.names)
    sent = aggregator.request()
    for client in order or range(clients.count):
        found = clients.answer(client, sent)
        found = spoil(client, found) if spoil else found
        for model in found if isinstance(found, list) else [found] if found else []:
            aggregator.accept_model(model)
    return aggregator.aggregate_model()


def run(clients, rounds=3, spoil=None, **options):
    """A run: the aggregator, and the whole model as it came out."""
    aggregator = begun(aggregator_of(clients.make, **options), clients, rounds)
    found = None
    for _ in range(rounds + bool(options.get("calibrate"))):
        found = one_round(aggregator, clients, spoil)
    return aggregator, as_arrays(found.params)


def as_arrays(params):
    return {
        name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in params.items()
    }


def change(answer, layer="2", **fields):
    """The answer with an update in which some of a layer's moments are changed."""
    update = fbn.from_bytes(answer.meta["fedbatchnorm"]["update"])
    layers = dict(update.layers) | {layer: update[layer]._replace(**fields)}
    changed = fbn.Update(layers, update.round, update.skipped, update.id)
    answer.meta["fedbatchnorm"]["update"] = fbn.to_bytes(changed)
    return answer


def told(answer, **values):
    """The answer with other values beside the update."""
    answer.meta["fedbatchnorm"] |= values
    return answer


def with_params(answer, **params):
    """The answer with other parameters; None takes one away."""
    changed = {k.replace("_", ".", 1): v for k, v in params.items()}
    found = dict(answer.params) | changed
    answer.params = {name: value for name, value in found.items() if value is not None}
    return answer


def exact_statistics(clients, rounds, count=None):
    """What float64 BatchNorm makes of the union of all clients' inputs, round by round, by layer."""
    found, count = {}, count or clients.count
    for name, momentum in (("2", 0.1), ("5", 0.3)):
        inputs = clients.seen[name]
        kind = nn.BatchNorm2d if name == "2" else nn.BatchNorm1d
        plain = kind(inputs[0].shape[1], momentum=momentum).double()
        for step in range(rounds):
            plain(torch.cat([x.double() for x in inputs[count * step : count * (step + 1)]]))
        found[name] = plain
    return found


def assert_statistics(params, wanted, tolerance=1e-6):
    for name, plain in wanted.items():
        for field in ("running_mean", "running_var"):
            ours = torch.from_numpy(np.asarray(params[f"{name}.{field}"])).double()
            torch.testing.assert_close(ours, getattr(plain, field), rtol=tolerance, atol=tolerance)
