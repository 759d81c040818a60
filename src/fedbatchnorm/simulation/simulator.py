"""Distributed SGD with client momentum, all clients of a round in one pass or a few.

A round is a function of the state before it, the recipe and the round's number: every random draw comes
from a generator seeded by (seed, what for, round). So a run can stop anywhere and go on to the same result.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from ..data.datasets import Dataset, Split
from .byzantine import client_gradients, server_rule, share_robustly, with_lies
from .fold import fold
from .recipe import Recipe, learning_rate, stream, torch_seed
from .schemes import SCHEMES, Phase

_PASS_BYTES = 2**22  # on a CPU the largest activation of a pass stays in the cache if below this
_EVALUATION_BATCH = 1000


class Evaluation(NamedTuple):
    """Accuracy on the test set, between 0 and 1, and mean loss."""

    accuracy: float
    loss: float


def draw(parts: list[np.ndarray], batch: int, rng: np.random.Generator) -> np.ndarray:
    """Indices of one batch for each client, (n, batch).

    Without replacement within a batch; a client with fewer samples than that draws with replacement.
    """
    return np.stack([part[rng.choice(len(part), batch, replace=len(part) < batch)] for part in parts])


class Simulation:
    """A federation in one process: a model, who holds what, and how they train.

    Example:
        >>> from fedbatchnorm.data import datasets, partition
        >>> from fedbatchnorm.simulation import models
        >>> ring = datasets.load("gaussian_ring")
        >>> parts = partition.iid(ring.train.y.numpy(), 4, stream(0, "partition"))
        >>> recipe = Recipe(scheme="fbn", clients=4, batch=8, rounds=3)
        >>> simulation = Simulation(models.build("mlp", (2,), 10, seed=0), ring, parts, recipe)
        >>> while simulation.step < recipe.rounds:
        ...     loss = simulation.round()
        >>> 0 < simulation.evaluate().accuracy < 1
        True
    """

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        parts: Sequence[ArrayLike],
        recipe: Recipe,
        *,
        device: torch.device | str = "cpu",
        chunk: int | None = None,
    ):
        """Set up a federation before its first round.

        Args:
            model: trained in place; its BatchNorm layers become `FoldedNorm`.
            data: the dataset, which is moved to the device as a whole.
            parts: for each client the indices of its training samples.
            recipe: how to train.
            device: where.
            chunk: clients in one pass. All of them, unless on a CPU, where passes whose activations
                stay in the cache are faster; for `centralized` always all.
        """
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk is {chunk}; it must be at least 1")
        if len(parts) != recipe.honest():
            raise ValueError(f"{recipe.honest()} clients hold data, but it is split into {len(parts)} parts")
        self.recipe, self.device = recipe, torch.device(device)
        self.parts = [np.asarray(part) for part in parts]
        empty = [i for i, part in enumerate(self.parts) if not len(part)]
        if empty:
            raise ValueError(f"client {empty[0]} holds no data")
        self.scheme = SCHEMES[recipe.scheme]
        dtype = torch.float64 if recipe.precision == "float64" else torch.float32
        self.model = model.to(self.device, dtype)
        self.data = data.to(self.device, dtype)
        self.layers = fold(self.model, recipe.beta)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.velocity = [torch.zeros_like(p) for p in self.parameters]
        if "gradients" in recipe.targets_struck():  # then no mean stands for the clients' momenta
            size = sum(p.numel() for p in self.parameters)
            self.velocity = [torch.zeros(recipe.honest(), size, device=self.device, dtype=dtype)]
        self.step = 0
        sizes = np.array([len(part) for part in self.parts], float)
        share = sizes / sizes.sum() if recipe.weighting == "size" else np.full(len(parts), 1 / len(parts))
        weights = torch.from_numpy(share / recipe.batch).to(self.device, dtype)
        self._weights = weights.repeat_interleave(recipe.batch)
        largest = self._try_model()
        fitting = _PASS_BYTES // largest if self.device.type == "cpu" else _EVALUATION_BATCH
        self._samples = min(_EVALUATION_BATCH, 4 * fitting + 1)  # without gradients there is more room
        whole = recipe.honest() if self.device.type != "cpu" else fitting // recipe.batch
        self._chunk = chunk or max(1, min(recipe.honest(), whole))

    def round(self) -> Tensor:
        """One round of all clients; returns the mean training loss, without waiting for the device."""
        recipe, batch = self.recipe, self.recipe.batch
        phase = self.scheme.phase(self.step, recipe.switch_step())
        index = draw(self.parts, batch, stream(recipe.seed, "batches", self.step))
        index = torch.from_numpy(index.ravel()).to(self.device, non_blocking=True)
        for layer in self.layers.values():
            layer.start(phase)
        self.model.train()
        with self._random("dropout"), self._arithmetic():
            if "gradients" in recipe.targets_struck():
                passes, total = 1, self._learn_each(index)
            else:
                size = (recipe.clients if phase.union else self._chunk) * batch
                parts = list(zip(index.split(size), self._weights.split(size), strict=True))
                passes, total = (
                    len(parts),
                    sum((self._learn(*part) for part in parts), self._weights.new_zeros(())),
                )
                self._descend()
        self._share(phase, passes)
        self.step += 1
        return total

    def evaluate(self, split: Split | None = None) -> Evaluation:
        """Accuracy and loss on the test set (or another split), with the running statistics."""
        x, y = split or self.data.test
        self.model.eval()
        right, loss = self._weights.new_zeros(2)
        with torch.no_grad(), self._arithmetic():
            for xs, ys in zip(x.split(self._samples), y.split(self._samples), strict=True):
                scores = self._forward(xs)
                right += (scores.argmax(1) == ys).sum()
                loss += F.cross_entropy(scores, ys, reduction="sum")
        return Evaluation(right.item() / len(y), loss.item() / len(y))

    def state(self) -> dict[str, Tensor]:
        """All that the next round depends on, besides the recipe: weights, statistics, momentum."""
        velocity = {f"velocity.{i}": v for i, v in enumerate(self.velocity)}
        return {f"model.{k}": v for k, v in self.model.state_dict().items()} | velocity

    def load_state(self, state: dict[str, Tensor], step: int) -> None:
        """Go on from a `state` that was taken after `step` rounds."""
        prefix = "model."
        model = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        try:
            self.model.load_state_dict(model)
            for i, velocity in enumerate(self.velocity):
                velocity.copy_(state[f"velocity.{i}"])
        except (RuntimeError, KeyError) as error:
            raise ValueError(f"the state is that of another model: {error}") from error
        self.step = step

    def _learn(self, chosen: Tensor, weights: Tensor) -> Tensor:
        """Add the gradient of one pass; returns its part of the loss."""
        clients = len(chosen) // self.recipe.batch
        for layer in self.layers.values():
            layer.clients = clients
        scores = self._forward(self.data.train.x[chosen])
        loss = F.cross_entropy(scores, self.data.train.y[chosen], reduction="none") @ weights
        loss.backward()
        return loss.detach()

    def _learn_each(self, index: Tensor) -> Tensor:
        """Robust-DSGD: every client's own gradient and momentum, the liars', and the server's rule."""
        recipe = self.recipe
        x, y = self.data.inputs(self.data.train.x[index]), self.data.train.y[index]
        shape = (recipe.honest(), recipe.batch)
        rows, losses = client_gradients(
            self.model, self.layers, x.unflatten(0, shape), y.unflatten(0, shape), self._chunk
        )
        momenta = self.velocity[0].mul_(recipe.momentum).add_(rows, alpha=1 - recipe.momentum)
        rule = server_rule(recipe) if bool(momenta.isfinite().all()) else lambda rows: rows.mean(0)
        direction = rule(with_lies(momenta, recipe, "gradients", rule, self.step))
        with torch.no_grad():
            sizes = [p.numel() for p in self.parameters]
            for p, part in zip(self.parameters, direction.split(sizes), strict=True):
                p.sub_(part.view_as(p), alpha=learning_rate(recipe, self.step))
        return losses.mean()

    def _share(self, phase: Phase, passes: int) -> None:
        """The server's part of a round: the statistics that all clients go on with."""
        rows = {name: layer.rows(name, passes) for name, layer in self.layers.items()}
        seen = {name: (self.layers[name].running(self.step), r) for name, r in rows.items() if r is not None}
        if self.recipe.is_plain():
            after = {name: phase.share(*pair) for name, pair in seen.items()} if phase.share else {}
        else:
            after = share_robustly(phase, seen, self.recipe, self.step) if seen else {}
        for name, running in after.items():
            self.layers[name].load(running)

    def _forward(self, x: Tensor) -> Tensor:
        half = self.recipe.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            return self.model(self.data.inputs(x)).to(self._weights.dtype)

    def _descend(self) -> None:
        """Client momentum, then the server's step. The mean of the clients' momenta is the momentum of
        the mean gradient, so that one buffer stands for all clients."""
        keep, rate = self.recipe.momentum, learning_rate(self.recipe, self.step)
        parameters: list[Tensor] = list(self.parameters)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        with torch.no_grad():
            torch._foreach_mul_(self.velocity, keep)
            torch._foreach_add_(self.velocity, gradients, alpha=1 - keep)
            torch._foreach_add_(parameters, self.velocity, alpha=-rate)
        for p in parameters:
            p.grad = None

    @contextlib.contextmanager
    def _random(self, what: str) -> Iterator[None]:
        """Seed what modules such as dropout draw from, and give the caller's state back."""
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cuda):
            seed = torch_seed(self.recipe.seed, what, self.step)
            torch.default_generator.manual_seed(seed)
            if cuda:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(seed)
            mps = torch.mps.get_rng_state() if self.device.type == "mps" else None
            if mps is not None:
                torch.mps.manual_seed(seed)
            try:
                yield
            finally:
                if mps is not None:
                    torch.mps.set_rng_state(mps)

    @contextlib.contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """TF32 on or off on a GPU, as the recipe says, and as it was before when done."""
        if self.device.type != "cuda":
            yield
            return
        switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # pyrefly: ignore
        before = [switch.fp32_precision for switch in switches]
        try:
            for switch in switches:
                switch.fp32_precision = "ieee" if self.recipe.precision in ("float32", "float64") else "tf32"
            yield
        finally:
            for switch, value in zip(switches, before, strict=True):
                switch.fp32_precision = value

    def _try_model(self) -> int:
        """Run one sample through the model; returns the size of the largest activation, in bytes.

        An error says what is wrong with a model that cannot be trained here.
        """
        sizes = [1]

        def look(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor):
                sizes.append(output.numel() * output.element_size())

        shape, classes = tuple(self.data.train.x.shape[1:]), len(self.data.classes)
        hooks = [m.register_forward_hook(look) for m in self.model.modules()]
        try:
            self.model.eval()
            with torch.no_grad():
                scores = self.model(self.data.inputs(self.data.train.x[:1]))
        except Exception as error:
            why = str(error).partition("\n")[0]
            raise ValueError(f"the model failed on an input of shape (1, *{shape}): {why}") from error
        finally:
            for hook in hooks:
                hook.remove()
        if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[1] < classes:
            found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"the model returned {found}; it must be a score for each of {classes} classes")
        if not self.parameters:
            raise ValueError("the model has no parameter to train")
        return max(sizes)
