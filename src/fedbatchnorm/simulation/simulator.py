"""Distributed SGD with client momentum, all clients of a round in one pass or a few.

A round is a function of the state before it, the recipe and the round's number: every random draw comes
from a generator seeded by (seed, what for, round). So a run can stop anywhere and go on to the same result.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.utils._triton import has_triton

from ..data.datasets import Dataset, Split
from .byzantine import client_gradients, server_rule, share_robustly, with_lies
from .device import Replay, arithmetic, compiled, own_random_state, set_seed, without_speed
from .fold import fold, load_all
from .recipe import Recipe, learning_rate, stream, torch_seed
from .schemes import SCHEMES, Phase, share_side_by_side

_PASS_BYTES = 2**22  # on a CPU the largest activation of a pass stays in the cache if below this
_EVALUATION_BATCH = 1000
_NEEDS_HOST = ("gaussian", "spike", "geometric_median")  # attacks and rules that a CUDA graph cannot hold
Engine = Literal["auto", "eager", "compiled"]


class Evaluation(NamedTuple):
    """Accuracy on the test set, between 0 and 1, and mean loss."""

    accuracy: float
    loss: float


def draw(parts: list[np.ndarray], batch: int, rng: np.random.Generator) -> np.ndarray:
    """Indices of one batch for each client, (n, batch).

    Without replacement within a batch; a client with fewer samples than that draws with replacement.
    """
    return np.stack([part[rng.choice(len(part), batch, replace=len(part) < batch)] for part in parts])


def weighted_loss(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor, half: bool) -> Tensor:
    """The sum of the samples' losses, each with its weight."""
    return F.cross_entropy(class_scores(model, x, weights.dtype, half), y, reduction="none") @ weights


def class_scores(model: nn.Module, x: Tensor, dtype: torch.dtype, half: bool) -> Tensor:
    """The model's output, (N, classes); `half` computes in bfloat16 where that does no harm."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        return model(x).to(dtype)


def model_inputs(data: Dataset, x: Tensor, channels_last: bool) -> Tensor:
    """What the model is fed for stored samples."""
    x = data.inputs(x)
    return x.to(memory_format=torch.channels_last) if channels_last else x


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
        engine: Engine = "auto",
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
            engine: `compiled` compiles the passes, and on a CUDA GPU replays rounds as CUDA graphs; `eager`
                runs one operation after another; `auto` is `compiled` on a CUDA GPU and `eager` elsewhere.
                Where compiling fails, a warning says so, and rounds are eager.
        """
        if engine not in get_args(Engine):
            raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(get_args(Engine))}")
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
        on_gpu = self.device.type == "cuda"
        self._compile = engine == "compiled" or (engine == "auto" and on_gpu)
        self._replay: Replay | None = None
        if self._compile and on_gpu:
            self.model = self.model.to(memory_format=torch.channels_last)  # pyrefly: ignore
            if set(_NEEDS_HOST) & {recipe.attack, *recipe.defense.split("+")}:
                self._go_eager(f"{recipe.attack} against {recipe.defense} needs the host in every round")
            else:
                self._replay = Replay(self._work, self.state)
        self.data = data.to(self.device, dtype)
        self.layers = fold(self.model, recipe.beta)
        fused = self._compile and on_gpu and has_triton() and "gradients" not in recipe.targets_struck()
        for layer in self.layers.values():
            layer.fused = fused
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
        recipe = self.recipe
        index = draw(self.parts, recipe.batch, stream(recipe.seed, "batches", self.step))
        index = torch.from_numpy(index.ravel())
        index = index.pin_memory() if self.device.type == "cuda" else index
        setting = self.scheme.phase(self.step, recipe.switch_step()), learning_rate(recipe, self.step)
        self.model.train()
        with own_random_state(self.device), arithmetic(self.device, recipe.precision):
            total = self._run(*setting, index)
        self.step += 1
        return total

    @property
    def engine(self) -> str:
        """How rounds run: eager, compiled, or as CUDA graphs."""
        return "CUDA graphs" if self._replay else "compiled" if self._compile else "eager"

    def evaluate(self, split: Split | None = None) -> Evaluation:
        """Accuracy and loss on the test set (or another split), with the running statistics."""
        try:
            return self._evaluate(*(split or self.data.test))
        except Exception as error:
            if not self._compile:
                raise
            self._go_eager(_one_line(error))
            return self._evaluate(*(split or self.data.test))

    def _evaluate(self, x: Tensor, y: Tensor) -> Evaluation:
        self.model.eval()
        right, loss = self._weights.new_zeros(2)
        with torch.no_grad(), arithmetic(self.device, self.recipe.precision):
            for xs, ys in zip(x.split(self._samples), y.split(self._samples), strict=True):
                scores = self._call(class_scores, self.model, self._inputs(xs), loss.dtype, self._half())
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

    def _run(self, phase: Phase, rate: float, index: Tensor) -> Tensor:
        """The round's work on the device, replayed where it can be."""

        def seed() -> None:
            set_seed(self.device, torch_seed(self.recipe.seed, "dropout", self.step))

        if self._replay is not None:
            try:
                return self._replay(phase, rate, index=index, seed=seed)
            except Exception as error:
                self._go_eager(_one_line(error))
        seed()
        return self._work(phase, rate, index.to(self.device, non_blocking=True))

    def _work(self, phase: Phase, rate: float, index: Tensor) -> Tensor:
        """All that a round does on the device: every client's pass, the server's step, the statistics."""
        for layer in self.layers.values():
            layer.start(phase)
        if "gradients" in self.recipe.targets_struck():
            passes, total = 1, self._learn_each(index, rate)
        else:
            size = (self.recipe.clients if phase.union else self._chunk) * self.recipe.batch
            parts = list(zip(index.split(size), self._weights.split(size), strict=True))
            passes = len(parts)
            total = sum((self._learn(*part) for part in parts), self._weights.new_zeros(()))
            self._descend(rate)
        self._share(phase, passes)
        return total

    def _learn(self, chosen: Tensor, weights: Tensor) -> Tensor:
        """Add the gradient of one pass; returns its part of the loss."""
        clients = len(chosen) // self.recipe.batch
        for layer in self.layers.values():
            layer.clients = clients
        x, y = self._inputs(self.data.train.x[chosen]), self.data.train.y[chosen]
        loss = self._call(weighted_loss, self.model, x, y, weights, self._half())
        loss.backward()
        return loss.detach()

    def _learn_each(self, index: Tensor, rate: float) -> Tensor:
        """Robust-DSGD: every client's own gradient and momentum, the liars', and the server's rule."""
        recipe = self.recipe
        x, y = self._inputs(self.data.train.x[index]), self.data.train.y[index]
        shape = (recipe.honest(), recipe.batch)
        x, y = x.unflatten(0, shape), y.unflatten(0, shape)
        rows, losses = self._call(client_gradients, self.model, self.layers, x, y, self._chunk, self._half())
        momenta = self.velocity[0].mul_(recipe.momentum).add_(rows, alpha=1 - recipe.momentum)
        fine = momenta.isfinite().all()  # else training has diverged, and no rule can help
        rule, sent = server_rule(recipe), torch.where(fine, momenta, 0)
        direction = rule(with_lies(sent, recipe, "gradients", rule, self.step))
        direction = torch.where(fine, direction, torch.nan)
        with torch.no_grad():
            sizes = [p.numel() for p in self.parameters]
            for p, part in zip(self.parameters, direction.split(sizes), strict=True):
                p.sub_(part.view_as(p), alpha=rate)
        return losses.mean()

    def _share(self, phase: Phase, passes: int) -> None:
        """The server's part of a round: the statistics that all clients go on with."""
        rows = {name: layer.rows(name, passes) for name, layer in self.layers.items()}
        seen = {name: (self.layers[name].running(), r) for name, r in rows.items() if r is not None}
        if not seen:
            return
        if self.recipe.is_plain():
            after = share_side_by_side(phase, seen, self._call)
        else:
            after = share_robustly(phase, seen, self.recipe, self.step)
        load_all(self.layers, after)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return compiled(function)(*args) if self._compile else function(*args)

    def _inputs(self, x: Tensor) -> Tensor:
        return self._call(model_inputs, self.data, x, self._compile and x.dim() == 4)

    def _half(self) -> bool:
        return self.recipe.precision == "bf16"

    def _go_eager(self, why: str) -> None:
        self._compile, self._replay = False, None
        for p in self.model.parameters():
            p.grad = None
        without_speed(why)

    def _descend(self, rate: float) -> None:
        """Client momentum, then the server's step. The mean of the clients' momenta is the momentum of
        the mean gradient, so that one buffer stands for all clients."""
        keep = self.recipe.momentum
        parameters: list[Tensor] = list(self.parameters)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        with torch.no_grad():
            torch._foreach_lerp_(self.velocity, gradients, 1 - keep)
            torch._foreach_add_(parameters, self.velocity, alpha=-rate)
        for p in parameters:
            p.grad = None

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


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
