"""How a federation trains, as data, and the seeds of all that it draws."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from ..aggregation.attacks import attack, plain_name
from ..aggregation.defenses import defense
from .schemes import SCHEMES

Precision = Literal["float32", "tf32", "bf16", "float64"]
_PRECISIONS = get_args(Precision)
_STREAMS = {"weights": 0, "partition": 1, "batches": 2, "dropout": 3, "attack": 4}
TARGETS = ("means", "variances", "gradients")
ADVERSARY = ("byzantine", "attack", "targets", "defense")  # the fields of a recipe about liars


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
    byzantine: int = 0
    """How many of the clients lie, f. They hold no data."""
    attack: str = "none"
    """What they send: see `fedbatchnorm list`; foe:10 and alie:3 give the factor."""
    targets: str = "usual"
    """What they lie about: means, variances, gradients, joined by +, or all; the attack's usual if not
    given. Gradients under attack go through the defense, too."""
    defense: str = "none"
    """The server's rule for what clients send: none is a plain mean; nnm+median, nnm+trimmed_mean, ..."""

    def __post_init__(self):
        check_fields(self)

    def honest(self) -> int:
        """How many clients hold data and tell the truth."""
        return self.clients - self.byzantine

    def is_plain(self) -> bool:
        """Whether nobody lies and the server expects nobody to."""
        return not self.byzantine and self.defense == "none"

    def targets_struck(self) -> tuple[str, ...]:
        """What the liars lie about: some of means, variances, gradients."""
        if not self.byzantine:
            return ()
        if self.targets == "usual":
            return attack(self.attack).targets
        return TARGETS if self.targets == "all" else tuple(t for t in TARGETS if t in self.targets.split("+"))

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
    "byzantine": (int, lambda v: v >= 0, "at least 0"),
    "attack": (str, lambda v: True, "none or a name that `fedbatchnorm list` shows"),
    "targets": (
        str,
        lambda v: v in ("usual", "all") or set(v.split("+")) <= set(TARGETS),
        f"usual, all, or some of {', '.join(TARGETS)}, joined by +",
    ),
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
    if isinstance(config, Recipe):
        _check_adversary(config)


def _check_adversary(recipe: Recipe) -> None:
    """Liars, attack, targets and defense must go together."""
    f, n = recipe.byzantine, recipe.clients
    if recipe.attack != "none":
        object.__setattr__(recipe, "attack", plain_name(recipe.attack))
    if recipe.defense != "none":
        defense(recipe.defense, f)
    if (f > 0) != (recipe.attack != "none"):
        raise ValueError(f"byzantine is {f} and attack is {recipe.attack!r}; give both, or neither")
    if f and 2 * f >= n:
        raise ValueError(f"byzantine is {f} of {n} clients; nothing helps against half of them or more")
    if not recipe.is_plain() and recipe.scheme == "centralized":
        raise ValueError(
            "scheme is 'centralized', which has no clients that could lie: choose another scheme"
        )
    if "gradients" in recipe.targets_struck() and recipe.weighting == "size":
        raise ValueError("weighting is 'size', but robust rules for gradients weigh all clients the same")


def stream(seed: int, what: str, step: int = 0, *more: int) -> np.random.Generator:
    """The generator of one purpose and one round, or a part of it."""
    return np.random.default_rng([seed, _STREAMS[what], step, *more])


def torch_seed(seed: int, what: str, step: int = 0, *more: int) -> int:
    """A seed for torch, for one purpose and one round, or a part of it."""
    return int(stream(seed, what, step, *more).integers(2**63))


def learning_rate(recipe: Recipe, step: int) -> float:
    """lr / (1 + floor(3 t / T)): the paper's 0.1, 0.05, 0.033, a third of the rounds each."""
    return recipe.lr / (1 + 3 * step // recipe.rounds)
