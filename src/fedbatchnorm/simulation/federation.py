"""A federation: a model, the clients' data and weights, and who takes part in a round.

Every random draw comes from a generator seeded by (seed, purpose, round), so a round is a function of the
previous state, the recipe and the round's number.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from ..aggregation.drift import FIRST_SHARE, drift, next_share
from ..data.augment import random_augment
from ..data.datasets import Dataset
from ..norm.gradient import share_by_layer
from ..norm.moments import Running
from .device import own_random_state
from .fold import fold
from .recipe import Recipe, stream
from .schemes import Phase, Setting


def draw(parts: Sequence[np.ndarray], batch: int, rng: np.random.Generator) -> np.ndarray:
    """Indices of one batch for each client, (n, batch).

    Without replacement within a batch; a client with fewer samples than that draws with replacement.
    """
    return np.stack([part[rng.choice(len(part), batch, replace=len(part) < batch)] for part in parts])


def copy_state(own: Mapping[str, Tensor], state: Mapping[str, Tensor], skip: Iterable[str] = ()) -> None:
    """Write a state's values into tensors of the same names; an error if they are those of another model."""
    if own.keys() != state.keys():
        raise KeyError(*sorted(own.keys() ^ state.keys()))
    for name, value in own.items():
        if value.shape != state[name].shape:
            raise RuntimeError(f"{name} is {tuple(state[name].shape)}, not {tuple(value.shape)}")
    with torch.no_grad():
        for name in own.keys() - set(skip):
            own[name].copy_(state[name])


def refuse_other_buffers(federation: "Federation") -> None:
    """An error for a model with buffers, besides BatchNorm's, that a client's training changes.

    FedAvg here averages parameters and BatchNorm's statistics only, so nothing would average them.
    """
    known = {
        f"{name}.{kind}" for name, layer in federation.layers.items() for kind, _ in layer.named_buffers()
    }
    before = {name: b for name, b in federation.model.named_buffers() if name not in known}
    if not before:
        return
    model = copy.deepcopy(federation.model).train()
    for name in federation.layers:
        layer = model.get_submodule(name)
        layer.start(federation.scheme.before, federation.recipe.settings())  # pyrefly: ignore
        layer.clients = 1  # pyrefly: ignore
    with torch.no_grad(), own_random_state(federation.device):
        model(federation.data.inputs(federation.data.train.x[:4]))
    for name, value in model.named_buffers():
        if name in before and not torch.equal(value, before[name]):
            raise ValueError(
                f"buffer {name!r} of the model changes while a client trains, and FedAvg here shares "
                "parameters and BatchNorm's statistics alone: take its layer out, or use algorithm dsgd"
            )


class Work(NamedTuple):
    """What the clients of a round train on.

    clients: (M,), their numbers.
    index: (M, steps, batch), the samples of each step; a shorter batch is padded with its first sample.
    sizes: (M, steps), how many samples of a step count; 0 where a client has no such step.
    """

    clients: np.ndarray
    index: np.ndarray
    sizes: np.ndarray

    def steps(self) -> np.ndarray:
        """How many steps each client takes, (M,)."""
        return (self.sizes > 0).sum(1)


class Federation:
    """A model, the clients' data, and the recipe that they train by."""

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        parts: Sequence[ArrayLike],
        recipe: Recipe,
        device: torch.device,
    ):
        """Move everything to the device, and give the model the scheme's layers; an error says what is wrong.

        Args:
            model: trained in place; its BatchNorm layers become `FoldedNorm`, or what the scheme replaces
                them by.
            data: the dataset, which is moved to the device as a whole.
            parts: for each honest client the indices of its training samples.
            recipe: how to train.
            device: where.
        """
        if len(parts) != recipe.honest():
            raise ValueError(f"{recipe.honest()} clients hold data, but it is split into {len(parts)} parts")
        self.recipe, self.device, self.scheme = recipe, device, recipe.the_scheme()
        self.parts = [np.asarray(part) for part in parts]
        self.sizes = np.array([len(part) for part in self.parts])
        if not self.sizes.all():
            raise ValueError(f"client {int(np.argmin(self.sizes))} holds no data")
        if recipe.augment and data.train.x.dim() != 4:
            raise ValueError("augment is for images; these samples have no height and width")
        self.dtype = torch.float64 if recipe.precision == "float64" else torch.float32
        self.model = model.to(device, self.dtype)
        self.data = data.to(device, self.dtype)
        self.layers = fold(self.model, recipe.beta, self.scheme, recipe.groups)
        self.model.to(device, self.dtype)  # what the scheme has added, too
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.largest = self._try_model()
        # The share of BatchNorm's gradient that the next round takes; a tensor, so that graphs may read it.
        held = "gradient" in self.scheme.before.settings and recipe.gradient
        first = FIRST_SHARE if recipe.gradient == "auto" else recipe.gradient
        self.follows = bool(held) and recipe.gradient == "auto"
        self.share = torch.full((), first, device=device, dtype=self.dtype) if held else None
        # What part of each layer's variance lies between clients, as far as it is known.
        self.between = torch.ones(len(self.layers), device=device, dtype=self.dtype)

    def own_state(self) -> dict[str, Tensor]:
        """The state of a federation that changes from round to round, besides the model."""
        return {"share": self.share, "between": self.between} if self.follows else {}  # pyrefly: ignore

    def settings(self, rate: float | Tensor) -> list[dict[str, Setting]]:
        """The settings of each layer's normalizer in a round, at a learning rate."""
        share = share_by_layer(self.share, self.between) if self.follows else self.share  # pyrefly: ignore
        found = self.recipe.settings(rate, share)
        columns = [
            value.unbind() if isinstance(value, Tensor) and value.dim() else [value] * len(self.layers)
            for value in found.values()
        ]
        return [dict(zip(found, own, strict=True)) for own in zip(*columns, strict=True)]

    def follow_drift(
        self,
        before: Sequence[Running],
        after: Sequence[Tensor],
        beta: float,
        steps: float,
        between: Sequence[Tensor] = (),
    ) -> None:
        """Set the next round's share by how far the means of all layers have moved in this one, and each
        layer's own by the part of its variance between clients, by channel (none under a robust rule)."""
        if self.follows:
            assert self.share is not None
            self.share.copy_(next_share(self.share, drift(before, after, beta), steps))
            if between:
                self.between.copy_(torch.stack([part.mean() for part in between]))

    def shares(self, clients: np.ndarray | None = None) -> np.ndarray:
        """The weight of each of these clients in a mean, adding up to 1; of all honest clients if none are
        named.
        """
        sizes = self.sizes if clients is None else self.sizes[clients]
        sizes = sizes if self.recipe.weighting == "size" else np.ones(len(sizes))
        return sizes / sizes.sum()

    def cohort(self, step: int) -> np.ndarray:
        """The honest clients that take part in a round, (M,), in ascending order."""
        honest, _ = self.recipe.shares_of_cohort()
        if honest == len(self.parts):
            return np.arange(honest)
        rng = stream(self.recipe.seed, "cohort", step)
        return np.sort(rng.choice(len(self.parts), honest, replace=False))

    def population(self, phase: Phase) -> int | None:
        """How many clients a cohort represents, if the phase corrects for those that are not in it."""
        everybody = len(self.parts)
        return everybody if phase.population and self.recipe.shares_of_cohort()[0] < everybody else None

    def batches(self, step: int) -> np.ndarray:
        """Distributed SGD: indices of one batch for each client, (n, batch)."""
        return draw(self.parts, self.recipe.batch, stream(self.recipe.seed, "batches", step))

    def local_steps(self) -> np.ndarray:
        """FedAvg: how many steps each client takes in a round that it takes part in, (n,)."""
        if self.recipe.local_steps is not None:
            return np.full(len(self.parts), self.recipe.local_steps)
        assert self.recipe.local_epochs is not None
        return self.recipe.local_epochs * -(-self.sizes // self.recipe.batch)

    def work(self, step: int) -> Work:
        """FedAvg: who takes part in a round, and what each trains on, step by step."""
        recipe, clients = self.recipe, self.cohort(step)
        parts = [self.parts[i] for i in clients]
        if recipe.local_steps is not None:
            draws = []
            for s in range(recipe.local_steps):
                more = (s,) if s else ()  # the first draw is that of distributed SGD
                draws.append(draw(parts, recipe.batch, stream(recipe.seed, "batches", step, *more)))
            index = np.stack(draws, axis=1)
            return Work(clients, index, np.full(index.shape[:2], recipe.batch))
        assert recipe.local_epochs is not None
        rng = stream(recipe.seed, "batches", step)
        each = -(-self.sizes[clients] // recipe.batch)
        shape = len(clients), recipe.local_epochs * int(each.max())
        index, sizes = np.zeros((*shape, recipe.batch), np.int64), np.zeros(shape, np.int64)
        for i, (part, count) in enumerate(zip(parts, each, strict=True)):
            missing = count * recipe.batch - len(part)
            for first in range(0, recipe.local_epochs * count, count):
                order = rng.permutation(part)
                filled = np.append(order, np.full(missing, order[(count - 1) * recipe.batch]))
                index[i, first : first + count] = filled.reshape(count, recipe.batch)
                sizes[i, first : first + count] = recipe.batch
                sizes[i, first + count - 1] -= missing
        return Work(clients, index, sizes)

    def survey_batches(self, step: int, images: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Who takes part in a round, and for each a batch for a pass that only measures."""
        clients, rng = self.cohort(step), stream(self.recipe.seed, "survey", step)
        return clients, [
            self.parts[i][rng.choice(self.sizes[i], min(images, self.sizes[i]), replace=False)]
            for i in clients
        ]

    def samples(self, index: Tensor) -> Tensor:
        """Stored training samples, cropped and flipped if the recipe says so."""
        x = self.data.train.x[index]
        return random_augment(x) if self.recipe.augment else x

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
