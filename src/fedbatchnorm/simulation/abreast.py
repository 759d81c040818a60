"""Clients abreast: many clients take a local step in one pass, each with its own weights.

The batches of all clients are concatenated, and the model's parameters have a leading client axis
(`stacked`). One forward and backward pass and one optimizer step do a step of all clients. On a CUDA GPU
several steps are one CUDA graph. All batches must have the same length; the rest of a round is done in lanes.
"""

import torch
from torch import Tensor

from .byzantine import client_gradients
from .device import Machine, capture, client_losses, set_seed
from .federation import Federation
from .lanes import Batches, Rows
from .optim import Local, local_step
from .packing import Packing
from .schemes import Phase
from .stacked import stacked
from .steps import fill_gradient, keep_seen


class Abreast:
    """A model of many clients, with their optimizers and statistics as the rows of matrices."""

    def __init__(
        self, federation: Federation, machine: Machine, packing: Packing, rate: Tensor, steps: int, rows: Rows
    ):
        """Make a copy of the federation's model.

        Args:
            federation: model, data and recipe.
            machine: how steps run.
            packing: the layout of flat vectors.
            rate: the learning rate, read at every step.
            steps: the most that a client takes in a round.
            rows: of the clients that go into one pass; their place for good.
        """
        recipe, device = federation.recipe, federation.device
        self.federation, self.machine, self.rate, self.rows = federation, machine, rate, rows
        self.packing = packing
        self.how, self.clients = Local.of(recipe), len(rows.weights)
        self.model = stacked(federation.model, machine.half).train()
        self.layers = {name: self.model.get_submodule(name) for name in federation.layers}
        for layer in self.layers.values():
            layer.clients, layer.fused = self.clients, machine.fuses  # pyrefly: ignore
        self.statistics = rows.weights.new_zeros(2, sum(packing.channels))  # which all clients share
        self.parameters = packing.adopt(self.model, rows.weights, self.statistics)
        self.gradient = torch.zeros_like(rows.weights)
        self.table = torch.zeros(steps, self.clients * recipe.batch, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.whole = rows.weights.new_full((recipe.batch,), 1 / recipe.batch)
        self.own_statistics = "statistics" in federation.scheme.own
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def capture(self, phase: Phase, steps: int, unroll: int) -> None:
        """Capture the graphs for this number of steps; the content of the rows is lost."""
        if self.machine.replays and steps >= unroll:
            self._graph(phase, unroll)
        if self.machine.replays and steps % unroll:
            self._graph(phase, 1)

    def train(
        self, rows: Rows, batches: Batches, phase: Phase, first: int, steps: int, seed: int, unroll: int
    ) -> None:
        """Train on the whole batches of all clients of a round, in as many passes as needed; changes the
        rows.

        Args:
            rows: what the clients of the round were sent; losses are sums over steps here.
            batches: what they train on.
            phase: what they normalize with, and what they keep of what they saw.
            first: steps that are done already.
            steps: how many steps are done in the end.
            seed: of dropout and augmentation, of all clients.
            unroll: how many steps one graph may hold.
        """
        set_seed(self.federation.device, seed)
        self.statistics.copy_(rows.statistics[0])
        for start in range(0, len(rows.weights), self.clients):
            index = batches.index[start : start + self.clients, first:steps].movedim(1, 0).flatten(1)
            self.table[: steps - first, : index.shape[1]].copy_(index)
            self._copy(rows, start, back=False)
            self._steps(phase, steps - first, unroll)
            self._copy(rows, start, back=True)

    def _copy(self, rows: Rows, start: int, back: bool) -> None:
        """Clients of the round from `start` on: into the pass, or back.

        The last pass may have unused places; they are trained, too, and ignored.
        """
        if self.rows is rows:
            return
        for theirs, ours in zip(rows, self.rows, strict=True):
            part = theirs[start : start + self.clients]
            if back:
                part.copy_(ours[: len(part)])
            else:
                ours[: len(part)].copy_(part)

    def _steps(self, phase: Phase, steps: int, unroll: int) -> None:
        if not self.machine.replays:
            for index in self.table[:steps]:
                self._step(phase, index)
            return
        self.at.zero_()
        while steps:
            count = unroll if steps >= unroll else 1
            self._graph(phase, count).replay()
            steps -= count

    def _step(self, phase: Phase, index: Tensor) -> None:
        """One step of every client, on samples (clients * batch,)."""
        federation, machine, rows = self.federation, self.machine, self.rows
        for layer, settings in zip(self.layers.values(), federation.settings(self.rate), strict=True):
            layer.start(phase, settings)  # pyrefly: ignore
        x, y = machine.inputs(federation.data, federation.samples(index)), federation.data.train.y[index]
        losses = machine.call(client_losses, self.model, x, y, self.whole, machine.half)
        fill_gradient(self.packing, self.gradient, losses, self.parameters)
        with torch.no_grad():
            optimizer = rows.state, rows.taken, rows.sent, self.rate, self.how
            machine.call(local_step, rows.weights, self.gradient, *optimizer)
            kept, beta = (rows.counts, rows.statistics), federation.recipe.beta
            keep_seen(self.layers, machine, phase, self.own_statistics, *kept, beta)  # pyrefly: ignore
            rows.losses.add_(losses.detach())

    def _graph(self, phase: Phase, steps: int) -> torch.cuda.CUDAGraph:
        key = id(phase), steps
        if key not in self._graphs:

            def one_step() -> None:
                self._step(phase, self.table.index_select(0, self.at).view(-1))
                self.at.add_(1).remainder_(len(self.table))

            def work() -> Tensor:
                for _ in range(steps):
                    one_step()
                return self.rows.losses

            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            device = self.federation.device
            self._graphs[key], _ = capture(work, device, pool=pool, warm_up=one_step, times=2)
        return self._graphs[key]


def clients_in_a_pass(clients: int, most: int) -> int:
    """How many clients go into one pass, so that passes are about equally full.

    Example:
        >>> clients_in_a_pass(50, 20), clients_in_a_pass(10, 20)
        (17, 10)
    """
    passes = -(-clients // max(1, most))
    return -(-clients // passes)


def first_step_abreast(
    federation: Federation,
    machine: Machine,
    packing: Packing,
    rows: Rows,
    batches: Batches,
    phase: Phase,
    rate: Tensor,
) -> None:
    """Take the first local step of every client, by `vmap` over the clients; changes the rows.

    Args:
        federation: model, data and recipe.
        machine: where; the step is always eager.
        packing: the layout of the rows.
        rows: what the clients were sent.
        batches: what they train on.
        phase: what the step normalizes with, and what clients keep of what they saw.
        rate: the learning rate.
    """
    recipe, layers = federation.recipe, federation.layers
    assert phase.first is not None
    sizes = machine.upload(batches.sizes[:, :1])
    keep = torch.arange(recipe.batch, device=sizes.device) < sizes
    chosen = batches.index[:, 0]
    x = federation.data.inputs(federation.samples(chosen.flatten())).unflatten(0, chosen.shape)
    federation.model.train()
    for layer in layers.values():
        layer.start(phase._replace(normalize=phase.first, settings=()))
    stacked = dict(zip(packing.names, packing.views(rows.weights), strict=True))
    weights = keep / sizes.to(rows.weights.dtype)
    arguments = x, federation.data.train.y[chosen], len(x), machine.half, stacked, weights
    gradients, losses = client_gradients(federation.model, layers, *arguments)
    flat, how = torch.zeros_like(rows.weights), Local.of(recipe)
    flat[:, packing.order] = gradients
    for i, row in enumerate(rows.weights):
        local_step(row, flat[i], rows.state[i], rows.taken[i], row.clone(), rate, how)
    keep_seen(layers, machine, phase, False, rows.counts, rows.statistics, recipe.beta)
    rows.losses.copy_(losses)
