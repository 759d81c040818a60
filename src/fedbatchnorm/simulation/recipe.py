"""How a federation trains, as data, and the seeds of all that it draws."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from .schemes import SCHEMES

Precision = Literal["float32", "tf32", "bf16", "float64"]
_PRECISIONS = get_args(Precision)
_STREAMS = {"weights": 0, "partition": 1, "batches": 2, "dropout": 3}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a federation trains. The defaults are the paper's (appendix, table 2)."""

    scheme: str = "fbn"
    """What clients normalise with, and what they share: see `fedbatchnorm list`."""
    clients: int = 10
    """How many clients, n."""
    batch: int = 50
    """Samples a client draws in a round."""
    rounds: int = 3000
    """How many rounds, T."""
    lr: float = 0.1
    """Learning rate of the first third; the second has a half of it, the last a third."""
    momentum: float = 0.99
    """Client momentum, dampened: g <- momentum g + (1 - momentum) gradient."""
    beta: float = 0.1
    """Momentum of BatchNorm's running statistics."""
    switch: int | None = None
    """The step at which FixBN freezes its statistics; half of the rounds if not given."""
    weighting: Literal["equal", "size"] = "equal"
    """Whether clients weigh the same, or by how much data they hold."""
    precision: Precision = "tf32"
    """Arithmetic: float32, tf32 (float32, on a GPU's TF32 cores where it has them), bf16, float64."""
    seed: int = 0
    """Of everything that is drawn: weights, partition, batches, dropout."""

    def __post_init__(self):
        check_fields(self)

    def switch_step(self) -> int:
        """The step at which FixBN freezes its statistics."""
        return self.rounds // 2 if self.switch is None else self.switch


# Field -> (type, whether a value is fine, what it must be).
_RULES: dict[str, tuple[type, Any, str]] = {
    "scheme": (str, lambda v: v in SCHEMES, f"one of {', '.join(SCHEMES)}"),
    "clients": (int, lambda v: v >= 1, "at least 1"),
    "batch": (int, lambda v: v >= 1, "at least 1"),
    "points": (int, lambda v: v >= 2, "at least 2"),
    "rounds": (int, lambda v: v >= 1, "at least 1"),
    "lr": (float, lambda v: 0 < v < math.inf, "positive"),
    "momentum": (float, lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "beta": (float, lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "gamma": (float, lambda v: 0 <= v <= 1, "between 0 (each client its own classes) and 1 (iid)"),
    "alpha": (float, lambda v: 0 < v < math.inf, "positive (0.1 is strongly heterogeneous, 10 nearly iid)"),
    "switch": (int, lambda v: v >= 0, "a step from 0 on, or nothing for half of the rounds"),
    "weighting": (str, lambda v: v in ("equal", "size"), "equal or size"),
    "precision": (str, lambda v: v in _PRECISIONS, f"one of {', '.join(_PRECISIONS)}"),
    "seed": (int, lambda v: 0 <= v < 2**63, "a whole number from 0 on"),
    "evaluate_every": (int, lambda v: v >= 1, "at least 1"),
}


def check_fields(config: Any) -> None:
    """Check every field that has a rule; an error names the field and says what it must be.

    Whole numbers given for a field of numbers become floats, so that 0 and 0.0 are the same setting.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _RULES or (value is None and field.default is None):
            continue
        kind, fine, wanted = _RULES[field.name]
        if kind is float and type(value) is int:
            value = float(value)
            object.__setattr__(config, field.name, value)
        if type(value) is not kind or not fine(value):
            raise ValueError(f"{field.name} is {value!r}; it must be {wanted}")


def stream(seed: int, what: str, step: int = 0) -> np.random.Generator:
    """The generator of one purpose and one round."""
    return np.random.default_rng([seed, _STREAMS[what], step])


def torch_seed(seed: int, what: str, step: int = 0) -> int:
    """A seed for torch, for one purpose and one round."""
    return int(stream(seed, what, step).integers(2**63))


def learning_rate(recipe: Recipe, step: int) -> float:
    """lr / (1 + floor(3 t / T)): the paper's 0.1, 0.05, 0.033, a third of the rounds each."""
    return recipe.lr / (1 + 3 * step // recipe.rounds)
