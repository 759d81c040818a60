"""The slow, obvious twin of FedAvg: one client after another, torch's own layers, optimizers and clipping.

Nothing here is packed, replayed or shared with the simulator but the draws (who takes part, which batches)
and the learning rate.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import fedbatchnorm as fbn
from fedbatchnorm.simulation.recipe import learning_rate


class HybridNorm(nn.Module):
    """HBN as published: (1 - a) shared + a batch, in training; the shared statistics alone in evaluation."""

    def __init__(self, like):
        super().__init__()
        self.weight, self.bias, self.eps = like.weight, like.bias, like.eps
        self.mix = nn.Parameter(torch.zeros_like(like.running_mean))
        self.register_buffer("running_mean", like.running_mean.clone())
        self.register_buffer("running_var", like.running_var.clone())

    def forward(self, x):
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        mean, var = self.running_mean, self.running_var
        if self.training:
            a = torch.sigmoid(self.mix)
            mean = (1 - a) * mean + a * x.mean(dims)
            var = (1 - a) * var + a * x.var(dims, unbiased=False)
            self.used = mean.detach(), var.detach()
        y = (x - mean.view(shape)) / torch.sqrt(var.view(shape) + self.eps)
        return y * self.weight.view(shape) + self.bias.view(shape)


class BlendedNorm(HybridNorm):
    """A share of the batch and the rest of the shared statistics, by the law of total variance."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        dims, shape, a = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)], self.share
        u, s = x.mean(dims), x.var(dims, unbiased=False)
        mean = (1 - a) * self.running_mean + a * u
        second = (1 - a) * (self.running_var + self.running_mean**2) + a * (s + u**2)
        values = x.detach().movedim(1, 0).flatten(1)
        self.values = torch.cat([self.values, values], 1) if hasattr(self, "values") else values
        y = (x - mean.view(shape)) / torch.sqrt((second - mean**2).view(shape) + self.eps)
        return y * self.weight.view(shape) + self.bias.view(shape)


def variance(parts, population=None):
    """Unbiased variance of all clients' values, (c, k) each; of the population if that is larger."""
    values = torch.cat(parts, 1)
    if population is None or population <= len(parts):
        return values.var(1)
    weights = torch.tensor([part.shape[1] for part in parts]).double() / values.shape[1]
    means = torch.stack([part.mean(1) for part in parts])
    between = (weights[:, None] * (means - values.mean(1)).square()).sum(0)
    within = values.var(1, unbiased=False) - between
    q, n = weights.square().sum(), round(values.shape[1] * population / len(parts))
    factor = (1 - q * len(parts) / population) / (1 - q)
    return (within + factor * between) * n / (n - 1)


def merge_values(model, clients, beta, population=None):
    """The running update with the union of all values that the clients' layers saw."""
    for layer, *theirs in zip(norms(model), *(norms(client) for client in clients), strict=True):
        parts = [other.values for other in theirs]
        layer.running_mean.lerp_(torch.cat(parts, 1).mean(1), beta)
        layer.running_var.lerp_(variance(parts, population), beta)
        layer.num_batches_tracked += 1


def blended(layer, groups):
    new = BlendedNorm(layer)
    new.register_buffer("num_batches_tracked", layer.num_batches_tracked.clone())
    del new.mix
    return new


REPLACED = {
    "fbn_blend": blended,
    "groupnorm": lambda layer, groups: nn.GroupNorm(groups, layer.num_features, layer.eps).double(),
    "layernorm": lambda layer, groups: nn.GroupNorm(1, layer.num_features, layer.eps).double(),
    "none": lambda layer, groups: nn.Identity(),
    "hbn": lambda layer, groups: HybridNorm(layer),
}


def replaced(model, recipe):
    for name, layer in list(model.named_modules()):
        if isinstance(layer, _BatchNorm):
            layer.momentum = recipe.beta
            if recipe.scheme in REPLACED:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, REPLACED[recipe.scheme](layer, recipe.groups))
    return model


def norms(model):
    return [m for m in model.modules() if isinstance(m, (_BatchNorm, HybridNorm))]


class FedAvgTwin:
    def __init__(self, model, data, parts, recipe):
        self.model = replaced(copy.deepcopy(model).double(), recipe)
        self.data, self.parts, self.recipe = data.to(torch.device("cpu"), torch.float64), parts, recipe
        self.optimizers, self.own, self.server, self.step = {}, {}, None, 0
        self.start = copy.deepcopy(self.model.state_dict())

    def optimizer(self, client, model):
        r = self.recipe
        if r.optimizer == "adam":
            made = torch.optim.Adam(model.parameters(), lr=1.0, weight_decay=r.weight_decay)
        else:
            made = torch.optim.SGD(
                model.parameters(), lr=1.0, momentum=r.momentum, weight_decay=r.weight_decay
            )
            if r.momentum_kind == "dampened":
                made.param_groups[0]["dampening"] = r.momentum
                # From a momentum of 0, as the paper has it: torch takes the first gradient whole.
                for p in model.parameters():
                    made.state[p]["momentum_buffer"] = torch.zeros_like(p)
        if r.local_state == "keep" and client in self.optimizers:
            made.load_state_dict(self.optimizers[client])
        for group in made.param_groups:
            group["lr"] = learning_rate(r, self.step)
        return made

    def own_keys(self):
        layers = {name: layer for name, layer in self.model.named_modules() if layer in norms(self.model)}
        kinds = {
            "fedbn": ("weight", "bias", "running_mean", "running_var"),
            "silobn": ("running_mean", "running_var"),
            "hbn": ("mix",),
        }.get(self.recipe.scheme, ())
        return [f"{name}.{kind}" for name in layers for kind in kinds]

    def downloaded(self, client):
        model = copy.deepcopy(self.model)
        model.load_state_dict(
            model.state_dict() | self.own.get(client, {k: self.start[k] for k in self.own_keys()})
        )
        return model

    def local_loss(self, model, sent, index):
        x, y = self.data.inputs(self.data.train.x[index]), self.data.train.y[index]
        loss = F.cross_entropy(model(x), y)
        if self.recipe.prox:
            pairs = zip(model.parameters(), sent, strict=True)
            loss = loss + self.recipe.prox / 2 * sum((p - s).square().sum() for p, s in pairs)
        return loss

    def descend(self, model, optimizer, gradients=None):
        if gradients is not None:
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = g
        if self.recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.recipe.clip)
        optimizer.step()
        optimizer.zero_grad()

    def train(self, model, client, index, sizes, first=0, optimizer=None):
        frozen = self.recipe.scheme == "fixbn" and self.step >= self.recipe.switch_step()
        model.train()
        for layer in norms(model):
            layer.train(not frozen)
            layer.share = self.recipe.blend * learning_rate(self.recipe, self.step) / self.recipe.lr
        sent = [p.detach().clone() for p in self.downloaded(client).parameters()]
        optimizer = optimizer or self.optimizer(client, model)
        for chosen, size in zip(index[first:], sizes[first:], strict=True):
            if size:
                self.local_loss(model, sent, torch.from_numpy(chosen[:size])).backward()
                self.descend(model, optimizer)
        self.optimizers[client] = copy.deepcopy(optimizer.state_dict())
        return model

    def round(self, work, surveyed=None):
        r = self.recipe
        sizes = torch.tensor([len(self.parts[i]) for i in work.clients]).double()
        shares = (
            sizes / sizes.sum() if r.weighting == "size" else torch.ones(len(sizes)).double() / len(sizes)
        )
        statistics = self.survey(surveyed) if r.scheme == "hbn" else None
        models, first = {}, 0
        if r.scheme == "fedtan":
            models, optimizers = self.first_step(work)
            first = 1
        updates = []
        for i, client in enumerate(work.clients):
            model = models.get(client) or self.downloaded(client)
            if r.scheme == "fbn":
                model = fbn.convert(model, gradient=r.gradient)
                fbn.load_statistics(model, fbn.statistics(fbn.convert(copy.deepcopy(self.model))))
            optimizer = optimizers[client] if first else None
            self.train(model, client, work.index[i], work.sizes[i].tolist(), first, optimizer)
            if r.scheme == "fbn":
                updates.append(fbn.collect(model))
                model = fbn.revert(model)
            models[client] = model
        trained = [models[client] for client in work.clients]
        with torch.no_grad():
            mean = [
                sum(s * p for s, p in zip(shares, ps, strict=True))
                for ps in zip(*(m.parameters() for m in trained), strict=True)
            ]
            update = [new - old for new, old in zip(mean, self.model.parameters(), strict=True)]
            names = [name for name, _ in self.model.named_parameters()]
            moved = zip(names, self.model.parameters(), self.server_update(update), mean, strict=True)
            for name, p, u, average in moved:
                if name in self.own_keys():  # which nobody sends: the model as a whole has the mean
                    p.copy_(average)
                else:
                    p += r.server_lr * u
        for client, model in models.items():
            state = model.state_dict()
            self.own[client] = {k: state[k].clone() for k in self.own_keys()}
        self.share(trained, shares, updates, statistics, work)
        self.step += 1

    def server_update(self, update):
        r = self.recipe
        if r.server == "mean":
            return update
        if self.server is None:
            self.server = [[torch.zeros_like(u), torch.zeros_like(u)] for u in update]
        found = []
        for u, state in zip(update, self.server, strict=True):
            if r.server == "momentum":
                state[0] = r.server_momentum * state[0] + u
                found.append(state[0])
            else:
                state[0] = r.server_momentum * state[0] + (1 - r.server_momentum) * u
                state[1] = 0.99 * state[1] + 0.01 * u * u
                found.append(state[0] / (state[1].sqrt() + 1e-3))
        return found

    def share(self, trained, shares, updates, statistics, work):
        r = self.recipe
        seen = work.sizes.sum(1)
        steps = float((seen * (work.sizes > 0).sum(1)).sum() / seen.sum())
        if r.scheme == "fbn_blend":
            merge_values(self.model, trained, 1 - (1 - r.beta) ** steps, len(self.parts))
        elif r.scheme == "fbn":
            shared = fbn.statistics(fbn.convert(copy.deepcopy(self.model)))
            merged = fbn.merge(shared, updates, steps=steps, population=len(self.parts)).statistics
            for name, running in merged.items():
                layer = self.model.get_submodule(name)
                layer.running_mean.copy_(running.mean)
                layer.running_var.copy_(running.var)
        elif r.scheme == "hbn":
            for layer, (mean, var) in zip(norms(self.model), statistics, strict=True):
                layer.running_mean.mul_(0.998).add_(0.002 * mean)
                layer.running_var.mul_(0.998).add_(0.002 * var)
        elif not (r.scheme == "fixbn" and self.step >= r.switch_step()):
            for layer, *theirs in zip(norms(self.model), *(norms(m) for m in trained), strict=True):
                for name in ("running_mean", "running_var"):
                    rows = [s * getattr(other, name) for s, other in zip(shares, theirs, strict=True)]
                    getattr(layer, name).copy_(sum(rows))

    def survey(self, surveyed):
        """HBN's statistics: one pass of one batch on the downloaded model, total variance over images."""
        seen = []
        for client, batch in zip(*surveyed, strict=True):
            model = self.downloaded(client).train()
            with torch.no_grad():
                model(self.data.inputs(self.data.train.x[torch.from_numpy(batch)]))
            seen.append((len(batch), [layer.used for layer in norms(model)]))
        total = sum(n for n, _ in seen)
        found = []
        for k in range(len(norms(self.model))):
            mean = sum(n * used[k][0] for n, used in seen) / total
            var = sum(n * (used[k][1] + (used[k][0] - mean) ** 2) for n, used in seen) / (total - 1)
            found.append((mean, var))
        return found

    def first_step(self, work):
        """FedTAN: all clients' first batches through copies of the model in step, layer after layer."""
        copies = {client: self.downloaded(client).train() for client in work.clients}
        optimizers = {client: self.optimizer(client, copies[client]) for client in work.clients}
        index = [torch.from_numpy(i[0][: s[0]]) for i, s in zip(work.index, work.sizes, strict=True)]
        xs = [self.data.inputs(self.data.train.x[i]) for i in index]
        for layers in zip(*copies.values(), strict=True):  # a Sequential's
            if isinstance(layers[0], _BatchNorm):
                union, sizes = torch.cat(xs), [len(x) for x in xs]
                dims = [0, *range(2, union.dim())]
                shape = [1, -1, *[1] * (union.dim() - 2)]
                mean = union.mean(dims)
                var = (union - mean.view(shape)).square().mean(dims)
                y = (union - mean.view(shape)) / torch.sqrt(var.view(shape) + layers[0].eps)
                count = union.numel() // union.shape[1]
                xs = []
                for layer, part in zip(layers, y.split(sizes), strict=True):
                    xs.append(part * layer.weight.view(shape) + layer.bias.view(shape))
                    layer.running_mean.lerp_(mean.detach(), layer.momentum)
                    layer.running_var.lerp_(var.detach() * count / (count - 1), layer.momentum)
            else:
                xs = [layer(x) for layer, x in zip(layers, xs, strict=True)]
        losses = [F.cross_entropy(x, self.data.train.y[i]) for x, i in zip(xs, index, strict=True)]
        sum(losses).backward()
        for client, model in copies.items():
            self.descend(model, optimizers[client])
        return copies, optimizers
