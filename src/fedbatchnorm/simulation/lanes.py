"""Lanes: in each, one client after another trains, side by side with the other lanes.

A lane has a model, an optimizer and statistics of its own. On a CPU there is one lane, and a client's steps
are calls. On a CUDA GPU there are several, each with a stream and with graphs of its steps: a client's data
is copied into the lane, and the host only says which graph to replay how often. So clients with different
numbers of steps run side by side.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..norm.moments import accumulator_dtype
from .device import Machine, capture, set_seed, weighted_loss
from .federation import Federation
from .optim import Local, local_step
from .packing import Packing
from .schemes import Phase
from .steps import fill_gradient, keep_seen

_UNROLLED = 25  # local steps in one graph, at most
_ALIGNED = 64  # values that rows of weights begin a multiple of apart: a GPU reads 16 bytes at a time


class Rows(NamedTuple):
    """What the clients of a round are sent and what they return: a row for each.

    weights: (M, d).
    sent: (M, d), the weights as they were sent, or (0, d) where they are not needed.
    state: (M, buffers, d) of the optimizer, or (0, ...) where it is reset in each round.
    taken: (M,) steps that the state has seen.
    statistics: (M, 2, C), mean and variance of all layers: running ones, or of what was seen.
    counts: (M, C), how many values were seen.
    losses: (M,), mean over the client's steps.
    """

    weights: Tensor
    sent: Tensor
    state: Tensor
    taken: Tensor
    statistics: Tensor
    counts: Tensor
    losses: Tensor


def new_rows(clients: int, size: int, channels: int, how: Local, keeps: bool, like: Tensor) -> Rows:
    """Rows for so many clients, all 0.

    Args:
        clients: M.
        size: d.
        channels: C.
        how: the clients' optimizer.
        keeps: whether its state has a place.
        like: for device and type.
    """
    exact = accumulator_dtype(like)
    filling = -size % _ALIGNED if like.is_cuda else 0
    weights = like.new_zeros(clients, size + filling)[:, :size]
    return Rows(
        weights,
        torch.zeros_like(weights[: clients if how.prox else 0]),
        like.new_zeros(clients if keeps else 0, how.buffers(), size),
        like.new_zeros(clients),
        like.new_zeros(clients, 2, channels, dtype=exact),
        like.new_zeros(clients, channels, dtype=exact),
        like.new_zeros(clients),
    )


class Batches(NamedTuple):
    """What the clients of a round train on, ready on the device.

    index: (M, steps, batch) on the device.
    sizes: (M, steps) on the host, how many samples of a step count.
    counts: the same on the device, or None where all batches are whole.
    """

    index: Tensor
    sizes: np.ndarray
    counts: Tensor | None


class Lane:
    """A model with its optimizer and statistics in flat vectors, trained by one client at a time."""

    def __init__(self, federation: Federation, machine: Machine, packing: Packing, rate: Tensor, steps: int):
        """Make a copy of the federation's model.

        Args:
            federation: model, data and recipe.
            machine: how steps run.
            packing: the layout of flat vectors.
            rate: the learning rate, read at every step.
            steps: the most that a client takes in a round.
        """
        recipe, device, dtype = federation.recipe, federation.device, federation.dtype
        self.federation, self.machine, self.rate, self.how = federation, machine, rate, Local.of(recipe)
        self.packing = packing
        self.model = copy.deepcopy(federation.model).train()
        self.layers = {name: self.model.get_submodule(name) for name in federation.layers}
        for layer in self.layers.values():
            layer.clients, layer.fused = 1, machine.fuses  # pyrefly: ignore

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        d, c = packing.size, sum(packing.channels)
        self.weights, self.sent, self.gradient = zeros(d), zeros(d if self.how.prox else 0), zeros(d)
        self.state, self.taken = zeros(self.how.buffers(), d), zeros()
        self.statistics = zeros(2, c)
        exact = accumulator_dtype(self.weights)
        self.kept, self.counts = zeros(2, c, dtype=exact), zeros(c, dtype=exact)
        self.loss = zeros()
        self.parameters = packing.adopt(self.model, self.weights, self.statistics)
        self.table = zeros(steps, recipe.batch, dtype=torch.int64)
        self.sizes, self.at = zeros(steps), zeros(1, dtype=torch.int64)
        self.whole = torch.full((recipe.batch,), 1 / recipe.batch, dtype=dtype, device=device)
        self.places = torch.arange(recipe.batch, device=device)
        self.own_statistics = "statistics" in federation.scheme.own
        self.queued = 0  # steps that the round has given to this lane so far
        if machine.replays:
            self.stream = torch.cuda.Stream(device)
            self._default = torch.cuda.default_generators[torch.cuda._get_device_index(device)]
            self._generator = self._default.clone_state()
            self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}

    def load(self, rows: Rows, i: int, fresh: bool, shared: Tensor) -> None:
        """Load what client i of the round was sent; `fresh` if it has taken no step yet.

        After its first step a client's row has what it has seen, and it normalizes with `shared`, (2, C).
        This is done for every client of a round, so it takes few calls.
        """
        self.weights.copy_(rows.weights[i])
        if self.how.prox:
            self.sent.copy_(rows.sent[i])
        zero = [self.counts, self.loss] if fresh else []
        if len(rows.state):
            self.state.copy_(rows.state[i])
            self.taken.copy_(rows.taken[i])
        else:
            zero += [self.state, self.taken]
        if self.statistics.numel():
            self.statistics.copy_(rows.statistics[i] if fresh else shared)
            self.kept.copy_(rows.statistics[i])
        if not fresh:
            self.counts.copy_(rows.counts[i])
            self.loss.copy_(rows.losses[i])
        if zero:
            torch._foreach_zero_(zero)

    def store(self, rows: Rows, i: int, steps: int) -> None:
        """Store the final state of client i of the round."""
        rows.weights[i].copy_(self.weights)
        if len(rows.state):
            rows.state[i].copy_(self.state)
            rows.taken[i].copy_(self.taken)
        if self.statistics.numel():
            rows.statistics[i].copy_(self.kept)
            rows.counts[i].copy_(self.counts)
        torch.div(self.loss, steps, out=rows.losses[i])

    def train(self, phase: Phase, batches: Batches, i: int, first: int, seed: int, unroll: int) -> None:
        """All steps of a client, from step `first` on.

        Args:
            phase: what it normalizes with, and what it keeps of what it saw.
            batches: what the clients of the round train on.
            i: which of them this is.
            first: steps that are done already.
            seed: of dropout and augmentation.
            unroll: how many whole steps one graph may hold.
        """
        sizes = batches.sizes[i]
        sizes = sizes[: int((sizes > 0).sum())]
        if not self.machine.replays:
            set_seed(self.federation.device, seed)
            chosen = batches.index[i, first : len(sizes)]
            for index, size in zip(chosen, sizes[first:].tolist(), strict=True):
                self.step(phase, index[:size])
            return
        self.table[: batches.index.shape[1]].copy_(batches.index[i])
        if batches.counts is not None:
            self.sizes[: batches.counts.shape[1]].copy_(batches.counts[i])
        self.at.fill_(first)
        self._generator.manual_seed(seed)
        for whole, length in runs(sizes[first:] == self.federation.recipe.batch):
            while length:
                steps = unroll if whole and length >= unroll else 1
                self._graph(phase, whole, steps).replay()
                length -= steps

    def capture(self, phase: Phase, kinds: Iterable[tuple[bool, int]]) -> None:
        """Capture the graphs (whole batches or not, steps) that a round will need, before any lane runs."""
        for whole, steps in kinds:
            self._graph(phase, whole, steps)

    def step(self, phase: Phase, index: Tensor, size: Tensor | None = None) -> None:
        """One step on a batch; `size` is how many of its samples count, if not all."""
        federation, machine = self.federation, self.machine
        if size is None and len(index) == 1:  # torch's BatchNorm refuses a single value, and we do not
            size = torch.ones_like(self.whole[:1])
        if size is None:
            keep, weights = None, self.whole
            if len(index) < len(self.whole):
                weights = torch.full_like(self.whole[: len(index)], 1 / len(index))
        else:
            keep = (self.places[: len(index)] < size).to(self.weights.dtype)
            weights = keep / size
        for layer, settings in zip(self.layers.values(), federation.settings(self.rate), strict=True):
            layer.start(phase, settings)  # pyrefly: ignore
            layer.keep = keep  # pyrefly: ignore
        x, y = machine.inputs(federation.data, federation.samples(index)), federation.data.train.y[index]
        loss = machine.call(weighted_loss, self.model, x, y, weights, machine.half)
        fill_gradient(self.packing, self.gradient, loss, self.parameters)
        with torch.no_grad():
            machine.call(
                local_step,
                self.weights,
                self.gradient,
                self.state,
                self.taken,
                self.sent,
                self.rate,
                self.how,
            )
            kept, beta = (self.counts[None], self.kept[None]), federation.recipe.beta
            keep_seen(self.layers, machine, phase, self.own_statistics, *kept, beta)  # pyrefly: ignore
            self.loss += loss.detach()

    def _graph(self, phase: Phase, whole: bool, steps: int) -> torch.cuda.CUDAGraph:
        key = id(phase), whole, steps
        if key not in self._graphs:
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None

            def one_step() -> None:
                index = self.table.index_select(0, self.at).view(-1)
                self.step(phase, index, None if whole else self.sizes.index_select(0, self.at))
                self.at.add_(1).remainder_(len(self.table))

            def work() -> Tensor:
                for _ in range(steps):
                    one_step()
                return self.loss

            place = {"pool": pool, "stream": self.stream}
            self._graphs[key] = self._with_generator(
                lambda: capture(work, self.federation.device, warm_up=one_step, times=2, **place)[0]
            )
        return self._graphs[key]

    def _with_generator(self, make: Callable[[], torch.cuda.CUDAGraph]) -> torch.cuda.CUDAGraph:
        """Capture with random numbers of the lane's own: lanes run at the same time."""
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._generator)
        try:
            return make()
        finally:
            self._default.graphsafe_set_state(before)


def runs(flags: np.ndarray) -> list[tuple[bool, int]]:
    """Lengths of stretches of equal values.

    Example:
        >>> runs(np.array([True, True, False, True]))
        [(True, 2), (False, 1), (True, 1)]
    """
    ends = [*(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(flags)] if len(flags) else []
    starts = [0, *ends][: len(ends)]
    return [(bool(flags[a]), b - a) for a, b in zip(starts, ends, strict=True)]


def kinds_of(sizes: np.ndarray, batch: int, first: int, unroll: int) -> list[tuple[bool, int]]:
    """The graphs (whole batches or not, steps) that clients with such steps need.

    Args:
        sizes: (M, steps), how many samples of a step count; 0 at the end where there are fewer steps.
        batch: samples in a whole batch.
        first: steps that are done already.
        unroll: how many whole steps one graph may hold.

    Example:
        >>> sizes = np.array([[8, 8, 8, 3], [8, 8, 0, 0]])
        >>> kinds_of(sizes, batch=8, first=0, unroll=2), kinds_of(sizes, batch=8, first=2, unroll=2)
        ([(True, 2), (True, 1), (False, 1)], [(True, 1), (False, 1)])
    """
    found = set()
    for row in np.unique(sizes, axis=0):
        for whole, length in runs(row[first : int((row > 0).sum())] == batch):
            if whole and length >= unroll:
                found.add((True, unroll))
            if not whole or length % unroll:
                found.add((whole, 1))
    return sorted(found, reverse=True)


def unrolled(steps: int) -> int:
    """How many steps of a client one graph should hold: a divisor of the steps, or eight.

    Example:
        >>> [unrolled(s) for s in (1, 10, 125, 97)]
        [1, 10, 25, 8]
    """
    best = max(d for d in range(1, _UNROLLED + 1) if steps % d == 0)
    return best if best >= min(steps, 5) else min(steps, 8)
