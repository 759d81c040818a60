"""A federation in one process: a model, the clients' data, and how they train.

A round is a function of the previous state, the recipe and the round's number: every random draw comes from a
generator seeded by (seed, purpose, round). So a run can stop after any round and continue with the same
result.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from ..data.datasets import Dataset, Split
from ..data.partition import holdings, test_parts
from .device import Engine as Engine
from .device import Machine, arithmetic, class_scores, own_random_state
from .dsgd import DistributedSGD
from .fedavg import FedAvg
from .federation import Federation
from .federation import draw as draw
from .recipe import Recipe, stream
from .survey import calibrate, calibrated

_CPU_BYTES = 2**24  # on a CPU the largest activation of an evaluation's batch stays below this
_EVALUATION_BATCH = 1000
_EVALUATED_CLIENTS = 100  # at most, where each client is evaluated with its own model

# An algorithm is a class (federation, machine, chunk) with round(step), state() and load_state(state); it may
# have as_client(i), for schemes whose clients have models of their own, and evaluating(step).
ALGORITHMS: dict[str, Any] = {"dsgd": DistributedSGD, "fedavg": FedAvg}


class Evaluation(NamedTuple):
    """Accuracy on the test set, between 0 and 1, and mean loss."""

    accuracy: float
    loss: float


class Simulation:
    """A federation in one process: `round`, `evaluate`, `state`.

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
        abreast: bool | None = None,
    ):
        """Set up a federation before its first round.

        Args:
            model: trained in place; its BatchNorm layers become what the scheme needs.
            data: the dataset, which is moved to the device as a whole.
            parts: for each client the indices of its training samples.
            recipe: how to train.
            device: where.
            chunk: clients side by side: in one pass, or, under FedAvg on a GPU, in lanes. By default it
                depends on the device.
            engine: `compiled` compiles the passes, and on a CUDA GPU replays rounds as CUDA graphs; `eager`
                runs one operation after another; `auto` is `compiled` on a CUDA GPU and `eager` elsewhere.
                If compiling fails, a warning says so, and rounds are eager.
            abreast: whether FedAvg's clients go through one pass, each with its own weights. With True, an
                error if the model does not allow it. By default they do on a CUDA GPU in TF32 and bf16, and
                on a CPU if batches are small, unless the model or the scheme does not allow it.
        """
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk is {chunk}; it must be at least 1")
        self.recipe, self.device = recipe, torch.zeros(0, device=device).device  # with its number
        self.machine = Machine(self.device, engine, recipe.precision, abreast)
        self.federation = Federation(model, data, parts, recipe, self.device)
        self.algorithm = ALGORITHMS[recipe.algorithm](self.federation, self.machine, chunk)
        self.model, self.data, self.layers = model, self.federation.data, self.federation.layers
        self.parts = self.federation.parts
        self.step = 0
        fitting = (
            _CPU_BYTES // self.federation.largest + 1 if self.device.type == "cpu" else _EVALUATION_BATCH
        )
        self._samples = min(_EVALUATION_BATCH, fitting)
        self._tests: dict[int, Split] = {}

    def round(self) -> Tensor:
        """One round; returns the mean training loss, without waiting for the device."""
        self.model.train()
        with own_random_state(self.device), arithmetic(self.device, self.recipe.precision):
            if self.step == 0 and self.recipe.calibrate:
                calibrate(self.federation, self.machine)
            total = self.algorithm.round(self.step)
        self.step += 1
        return total

    @property
    def engine(self) -> str:
        """How rounds run: eager, compiled, or as CUDA graphs."""
        return self.machine.engine

    def evaluate(self, split: Split | None = None) -> Evaluation:
        """Accuracy and loss of the server's model on the test set (or another split)."""
        prepared = getattr(self.algorithm, "evaluating", lambda step: contextlib.nullcontext())
        if self.recipe.recalibrate and self.step:
            prepared = lambda step: calibrated(self.federation, self.machine, step - 1)  # noqa: E731
        with (
            own_random_state(self.device),
            arithmetic(self.device, self.recipe.precision),
            prepared(self.step),
        ):
            return self._evaluate(split or self.data.test)

    def evaluate_clients(self) -> Evaluation | None:
        """The mean over clients, each with its own model on test data with its own proportions of classes.

        None if clients keep nothing local that evaluation uses. At most a hundred clients are evaluated.
        """
        scheme = self.federation.scheme
        if not set(scheme.own) - set(scheme.before.learned):
            return None
        found = []
        for client, split in self._client_tests().items():
            with self.algorithm.as_client(client):
                found.append(self._evaluate(split))
        return Evaluation(*(float(np.mean(column)) for column in zip(*found, strict=True)))

    def _client_tests(self) -> dict[int, Split]:
        """Test data of the clients that are evaluated: spread evenly over all of them."""
        if not self._tests:
            chosen = np.unique(np.linspace(0, len(self.parts) - 1, _EVALUATED_CLIENTS).astype(int))
            held = holdings(
                self.data.train.y.cpu().numpy(), [self.parts[i] for i in chosen], len(self.data.classes)
            )
            rng = stream(self.recipe.seed, "client tests")
            tests = test_parts(self.data.test.y.cpu().numpy(), held, rng)
            for client, part in zip(chosen, tests, strict=True):
                index = torch.from_numpy(part).to(self.device)
                self._tests[int(client)] = Split(self.data.test.x[index], self.data.test.y[index])
        return self._tests

    def _evaluate(self, split: Split) -> Evaluation:
        try:
            return self._measure(*split)
        except Exception as error:
            if not self.machine.compiles:
                raise
            self.machine.go_eager(error)
            return self._measure(*split)

    def _measure(self, x: Tensor, y: Tensor) -> Evaluation:
        self.model.eval()
        right, loss = torch.zeros(2, device=self.device, dtype=self.federation.dtype)
        with torch.no_grad(), arithmetic(self.device, self.recipe.precision):
            for xs, ys in zip(x.split(self._samples), y.split(self._samples), strict=True):
                inputs = self.machine.inputs(self.data, xs)
                scores = self.machine.call(class_scores, self.model, inputs, loss.dtype, self.machine.half)
                right += (scores.argmax(1) == ys).sum()
                loss += F.cross_entropy(scores, ys, reduction="sum")
        return Evaluation(right.item() / len(y), loss.item() / len(y))

    def state(self) -> dict[str, Tensor]:
        """Everything that the next round depends on, besides the recipe: weights, statistics, momentum."""
        return self.algorithm.state()

    def load_state(self, state: dict[str, Tensor], step: int) -> None:
        """Continue from a `state` that was taken after `step` rounds."""
        try:
            self.algorithm.load_state(state)
        except (RuntimeError, KeyError) as error:
            raise ValueError(f"the state is that of another model: {error}") from error
        self.step = step
