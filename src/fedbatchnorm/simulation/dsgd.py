"""Distributed SGD: every client sends one gradient a round, all of them in one pass or a few.

All clients of a round share the same parameters, so their batches are folded into one. Where gradients have
to be known one by one (Byzantine clients, clipping), `vmap` runs over the clients.
"""

import torch
from torch import Tensor

from ..aggregation.cohort import between_clients
from .byzantine import client_gradients, needs_host, server_rule, share_robustly, with_lies
from .device import Machine, Replay, set_seed, weighted_loss
from .federation import Federation, copy_state
from .fold import load_all
from .optim import clipped
from .recipe import learning_rate, torch_seed
from .schemes import Phase
from .sharing import share_side_by_side

_PASS_BYTES = 2**22  # on a CPU the largest activation of a pass stays in the cache if below this


class DistributedSGD:
    """A round of distributed SGD with client momentum (the paper's algorithm)."""

    def __init__(self, federation: Federation, machine: Machine, chunk: int | None):
        """Set up momentum, and the number of clients in a pass.

        Args:
            federation: model, clients and recipe.
            machine: how rounds run.
            chunk: clients in one pass. By default all of them on a GPU; on a CPU as many as fit into the
                cache, which is faster. For `centralized` always all.
        """
        self.federation, self.machine, self.recipe = federation, machine, federation.recipe
        recipe, device = self.recipe, federation.device
        if machine.replays:
            why = needs_host(recipe)
            federation.model.to(memory_format=torch.channels_last)  # pyrefly: ignore
            if why:
                machine.go_eager(why)
        assert recipe.momentum is not None
        self._momentum, self._dampened = recipe.momentum, recipe.momentum_kind == "dampened"
        lied_about = "gradients" in recipe.targets_struck()
        self.one_by_one = lied_about or (recipe.clip is not None and not recipe.the_scheme().before.union)
        for layer in federation.layers.values():
            layer.fused = machine.fuses and not self.one_by_one
        parameters = federation.parameters
        self.velocity = [torch.zeros_like(p) for p in parameters]
        if lied_about:  # then no mean stands for the clients' momenta
            size = sum(p.numel() for p in parameters)
            self.velocity = [torch.zeros(recipe.honest(), size, device=device, dtype=federation.dtype)]
        weights = torch.from_numpy(federation.shares() / recipe.batch).to(device, federation.dtype)
        self._weights = weights.repeat_interleave(recipe.batch)
        fitting = _PASS_BYTES // federation.largest
        whole = recipe.honest() if device.type != "cpu" else fitting // recipe.batch
        self._chunk = chunk or max(1, min(recipe.honest(), whole))
        self._replay = Replay(self._work, self.state) if machine.replays else None
        self._rate = torch.zeros((), device=device, dtype=federation.dtype)
        self.step = 0

    def round(self, step: int) -> Tensor:
        """One round of all clients; returns the mean training loss, without waiting for the device."""
        self.step = step
        recipe, machine = self.recipe, self.machine
        index = torch.from_numpy(self.federation.batches(step).ravel())
        index = index.pin_memory() if machine.device.type == "cuda" else index
        phase = self.federation.scheme.phase(step, recipe.switch_step())
        rate: float | Tensor = learning_rate(recipe, step)
        if machine.replays and recipe.schedule in ("cosine", "exponential"):
            rate = self._rate.fill_(rate)  # one graph for all rounds

        def seed() -> None:
            set_seed(machine.device, torch_seed(recipe.seed, "dropout", step))

        if machine.replays and self._replay is not None:
            try:
                return self._replay(phase, rate, index=index, seed=seed)
            except Exception as error:
                machine.go_eager(error)
                for p in self.federation.model.parameters():
                    p.grad = None
        seed()
        return self._work(phase, rate, index.to(machine.device, non_blocking=True))

    def state(self) -> dict[str, Tensor]:
        """Everything that the next round depends on: weights, statistics, momentum."""
        velocity = {f"velocity.{i}": v for i, v in enumerate(self.velocity)}
        state = {f"model.{k}": v for k, v in self.federation.model.state_dict().items()}
        return state | velocity | self.federation.own_state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over a `state`."""
        copy_state(self.state(), state)

    def _work(self, phase: Phase, rate: float | Tensor, index: Tensor) -> Tensor:
        """What a round does on the device: the clients' passes, the server's step, the statistics."""
        recipe, layers = self.recipe, self.federation.layers
        for layer, settings in zip(layers.values(), self.federation.settings(rate), strict=True):
            layer.start(phase, settings)
        if self.one_by_one:
            passes, total = 1, self._learn_each(index, rate)
        else:
            size = (recipe.clients if phase.union else self._chunk) * recipe.batch
            parts = list(zip(index.split(size), self._weights.split(size), strict=True))
            passes = len(parts)
            total = sum((self._learn(*part) for part in parts), self._weights.new_zeros(()))
            parameters = self.federation.parameters
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            self._descend(gradients, rate)
        self._share(phase, passes)
        return total

    def _learn(self, chosen: Tensor, weights: Tensor) -> Tensor:
        """Add the gradient of one pass; returns its part of the loss."""
        federation, machine = self.federation, self.machine
        for layer in federation.layers.values():
            layer.clients = len(chosen) // self.recipe.batch
        x = machine.inputs(federation.data, federation.samples(chosen))
        y = federation.data.train.y[chosen]
        loss = machine.call(weighted_loss, federation.model, x, y, weights, machine.half)
        loss.backward()
        return loss.detach()

    def _learn_each(self, index: Tensor, rate: float | Tensor) -> Tensor:
        """Every client's own gradient, clipped; with Byzantine clients their momenta and the server's
        rule."""
        recipe, federation, machine = self.recipe, self.federation, self.machine
        shape = (recipe.honest(), recipe.batch)
        x = machine.inputs(federation.data, federation.samples(index)).unflatten(0, shape)
        y = federation.data.train.y[index].unflatten(0, shape)
        rows, losses = machine.call(
            client_gradients, federation.model, federation.layers, x, y, self._chunk, machine.half
        )
        if recipe.clip is not None:
            rows = clipped(rows, recipe.clip)
        sizes = [p.numel() for p in federation.parameters]
        shares = self._weights[:: recipe.batch] * recipe.batch
        if "gradients" not in recipe.targets_struck():
            mean = (shares @ rows).split(sizes)
            parameters = federation.parameters
            self._descend([g.view_as(p) for g, p in zip(mean, parameters, strict=True)], rate)
            return shares @ losses
        if recipe.weight_decay:
            flat = torch.cat([p.detach().flatten() for p in federation.parameters])
            rows = rows + recipe.weight_decay * flat
        share = 1 - self._momentum if self._dampened else 1.0
        momenta = self.velocity[0].mul_(self._momentum).add_(rows, alpha=share)
        fine = momenta.isfinite().all()  # else training has diverged, and no rule can help
        rule, sent = server_rule(recipe), torch.where(fine, momenta, 0)
        direction = rule(with_lies(sent, recipe, "gradients", rule, self.step))
        direction = torch.where(fine, direction, torch.nan)
        with torch.no_grad():
            for p, part in zip(federation.parameters, direction.split(sizes), strict=True):
                if isinstance(rate, Tensor):
                    p.sub_(rate * part.view_as(p))
                else:
                    p.sub_(part.view_as(p), alpha=rate)
        return losses.mean()

    def _descend(self, gradients: list[Tensor], rate: float | Tensor) -> None:
        """Client momentum, then the server's step. The mean of the clients' momenta is the momentum of the
        mean gradient, so that one buffer stands for all clients."""
        recipe = self.recipe
        parameters: list[Tensor] = list(self.federation.parameters)
        with torch.no_grad():
            if recipe.clip is not None and not self.one_by_one:  # one machine has one gradient
                whole = torch.stack(torch._foreach_norm(gradients)).norm()  # pyrefly: ignore
                torch._foreach_mul_(gradients, (recipe.clip / (whole + 1e-6)).clamp(max=1.0))
            if recipe.weight_decay:
                gradients = list(torch._foreach_add(gradients, parameters, alpha=recipe.weight_decay))
            if self._dampened:
                torch._foreach_lerp_(self.velocity, gradients, 1 - self._momentum)
            else:
                torch._foreach_mul_(self.velocity, self._momentum)
                torch._foreach_add_(self.velocity, gradients)
            if isinstance(rate, Tensor):
                torch._foreach_sub_(parameters, list(torch._foreach_mul(self.velocity, rate)))
            else:
                torch._foreach_add_(parameters, self.velocity, alpha=-rate)
        for p in parameters:
            p.grad = None

    def _share(self, phase: Phase, passes: int) -> None:
        """The server's part of a round: the statistics that all clients continue with."""
        layers = self.federation.layers
        rows = {name: layer.rows(name, passes) for name, layer in layers.items()}
        seen = {name: (layers[name].running(), r) for name, r in rows.items() if r is not None}
        if not seen:
            return
        if self.recipe.is_plain():
            assert phase.share is not None
            after = share_side_by_side(phase.share, seen, self.machine.call)
        else:
            after = share_robustly(phase, seen, self.recipe, self.step)
        before = [layers[name].running() for name in after]
        between: list[Tensor] = []
        if self.federation.follows and self.recipe.is_plain() and len(seen) == len(layers):
            between = [between_clients(moments) for _, moments in seen.values()]
        means = [r.mean for r in after.values()]
        self.federation.follow_drift(before, means, self.recipe.beta, steps=1, between=between)
        load_all(layers, after)
