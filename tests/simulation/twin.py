"""The slow, obvious twin of the simulator: one client after another, with torch's own BatchNorm.

Every client has its own copy of the model, its own momentum and its own running statistics; the server
averages momenta and takes a step. Nothing here is folded, batched or shared with the simulator but the
draws of batches and the learning rate.
"""

import copy

import torch
import torch.nn.functional as F
from fedavg_twin import merge_values, norms, replaced
from torch.nn.modules.batchnorm import _BatchNorm

import fedbatchnorm as fbn
from fedbatchnorm.simulation.federation import draw
from fedbatchnorm.simulation.recipe import learning_rate, stream


def batch_norms(model):
    return [m for m in model.modules() if isinstance(m, _BatchNorm)]


def gradient(model, data, index):
    model.zero_grad(set_to_none=True)
    scores = model(data.inputs(data.train.x[index]))
    F.cross_entropy(scores, data.train.y[index]).backward()
    return [p.grad.clone() for p in model.parameters()]


class Twin:
    def __init__(self, model, data, parts, recipe, device="cpu"):
        self.model = replaced(copy.deepcopy(model).double().to(device), recipe)
        self.parts, self.recipe = parts, recipe
        self.data = data.to(torch.device(device), torch.float64)
        sizes = torch.tensor([len(part) for part in parts]).double()
        self.shares = (
            sizes / sizes.sum()
            if recipe.weighting == "size"
            else torch.ones(len(parts)).double() / len(parts)
        )
        self.momenta = [[torch.zeros_like(p) for p in self.model.parameters()] for _ in parts]
        self.step = 0

    def round(self):
        index = torch.from_numpy(
            draw(self.parts, self.recipe.batch, stream(self.recipe.seed, "batches", self.step))
        )
        gradients = getattr(self, self.recipe.scheme)(index)
        dampened = self.recipe.momentum_kind == "dampened"
        for momentum, grads in zip(self.momenta, gradients, strict=True):
            if self.recipe.clip is not None:
                length = torch.cat([g.flatten() for g in grads]).norm()
                grads = [g * min(1.0, self.recipe.clip / (length + 1e-6)) for g in grads]
            for m, g, p in zip(momentum, grads, self.model.parameters(), strict=True):
                g = g + self.recipe.weight_decay * p.detach()
                m.mul_(self.recipe.momentum).add_(g, alpha=1 - self.recipe.momentum if dampened else 1)
        rate = learning_rate(self.recipe, self.step)
        with torch.no_grad():
            for p, *momenta in zip(self.model.parameters(), *self.momenta, strict=True):
                for share, m in zip(self.shares, momenta, strict=True):
                    p -= rate * share * m
        self.step += 1

    def centralized(self, index):
        """One machine with all data; its gradient is what every client is said to have sent."""
        assert self.recipe.weighting == "equal"
        self.model.train()
        whole = gradient(self.model, self.data, index.flatten())
        return [whole] * len(self.parts)

    def naive(self, index):
        gradients, running = [], []
        for batch in index:
            client = copy.deepcopy(self.model).train()
            gradients.append(gradient(client, self.data, batch))
            running.append([(b.running_mean, b.running_var) for b in batch_norms(client)])
        for layer, *statistics in zip(batch_norms(self.model), *running, strict=True):
            layer.running_mean.copy_(torch.stack([m for m, _ in statistics]).mean(0))
            layer.running_var.copy_(torch.stack([v for _, v in statistics]).mean(0))
            layer.num_batches_tracked += 1
        return gradients

    def fixbn(self, index):
        if self.step < self.recipe.switch_step():
            return self.naive(index)
        gradients = []
        for batch in index:
            client = copy.deepcopy(self.model).train()
            for layer in batch_norms(client):
                layer.eval()
            gradients.append(gradient(client, self.data, batch))
        return gradients

    def fbn_blend(self, index):
        gradients, clients = [], []
        for batch in index:
            client = copy.deepcopy(self.model).train()
            for layer in norms(client):
                layer.share = self.recipe.blend * learning_rate(self.recipe, self.step) / self.recipe.lr
            gradients.append(gradient(client, self.data, batch))
            clients.append(client)
        merge_values(self.model, clients, self.recipe.beta)
        return gradients

    def groupnorm(self, index):
        """Nothing is shared but the weights, as in every scheme that replaces the layers."""
        return [gradient(self.model, self.data, batch) for batch in index]

    layernorm = none = groupnorm

    def fbn(self, index):
        shared = fbn.statistics(fbn.convert(copy.deepcopy(self.model)))
        gradients, updates = [], []
        for batch in index:
            client = fbn.convert(copy.deepcopy(self.model), gradient=self.recipe.gradient).train()
            fbn.load_statistics(client, shared)
            gradients.append(gradient(client, self.data, batch))
            updates.append(fbn.collect(client))
        for name, running in fbn.merge(shared, updates).statistics.items():
            layer = self.model.get_submodule(name)
            layer.running_mean.copy_(running.mean)
            layer.running_var.copy_(running.var)
            layer.num_batches_tracked += 1
        return gradients
