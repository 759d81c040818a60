"""What every field of a description of a run must be, and the names that fields may take."""

import dataclasses
import math
from typing import Any, Literal, get_args

from .schemes import SCHEMES

Precision = Literal["float32", "tf32", "bf16", "float64"]
Algorithm = Literal["dsgd", "fedavg"]
Schedule = Literal["constant", "step", "cosine", "exponential"]
Optimizer = Literal["sgd", "adam"]
Server = Literal["mean", "momentum", "adam"]
TARGETS = ("means", "variances", "gradients")


def _one_of(names: Any) -> tuple[type, Any, str]:
    return str, lambda v: v in get_args(names), f"one of {', '.join(get_args(names))}"


# Field -> (type, whether a value is fine, what it must be).
RULES: dict[str, tuple[Any, Any, str]] = {
    "scheme": (str, lambda v: v in SCHEMES, f"one of {', '.join(SCHEMES)}"),
    "clients": (int, lambda v: v >= 1, "at least 1"),
    "batch": (int, lambda v: v >= 1, "at least 1"),
    "points": (int, lambda v: v >= 2, "at least 2"),
    "rounds": (int, lambda v: v >= 1, "at least 1"),
    "lr": (float, lambda v: 0 < v < math.inf, "positive"),
    "algorithm": _one_of(Algorithm),
    "local_steps": (int, lambda v: v >= 1, "at least 1"),
    "local_epochs": (int, lambda v: v >= 1, "at least 1"),
    "cohort": (int, lambda v: v >= 1, "at least 1"),
    "optimizer": _one_of(Optimizer),
    "momentum_kind": (str, lambda v: v in ("ordinary", "dampened"), "ordinary or dampened"),
    "local_state": (str, lambda v: v in ("reset", "keep"), "reset or keep"),
    "clip": (float, lambda v: 0 < v < math.inf, "positive, or nothing for no clipping"),
    "weight_decay": (float, lambda v: 0 <= v < math.inf, "at least 0"),
    "prox": (float, lambda v: 0 <= v < math.inf, "at least 0"),
    "schedule": _one_of(Schedule),
    "decay": (float, lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "server": _one_of(Server),
    "server_lr": (float, lambda v: 0 < v < math.inf, "positive"),
    "server_momentum": (float, lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "calibrate": (bool, lambda v: True, "true or false"),
    "recalibrate": (bool, lambda v: True, "true or false"),
    "augment": (bool, lambda v: True, "true or false"),
    "groups": (int, lambda v: v >= 1, "at least 1"),
    "gradient": (
        (float, str),
        lambda v: v == "auto" if isinstance(v, str) else 0 <= v <= 1,
        "auto, or between 0 (the paper's FBN) and 1 (BatchNorm's gradient)",
    ),
    "limit": (
        (float, str),
        lambda v: v == "auto" if isinstance(v, str) else 1 <= v < math.inf,
        "auto, at least 1, or nothing for no limit",
    ),
    "blend": (float, lambda v: 0 <= v <= 1, "between 0 (shared statistics) and 1 (the batch's own)"),
    "momentum": (float, lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "beta": (float, lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "gamma": (float, lambda v: 0 <= v <= 1, "between 0 (each client its own classes) and 1 (iid)"),
    "alpha": (float, lambda v: 0 < v < math.inf, "positive (0.1 is strongly heterogeneous, 10 nearly iid)"),
    "switch": (int, lambda v: v >= 0, "a step from 0 on, or nothing for half of the rounds"),
    "weighting": (str, lambda v: v in ("equal", "size"), "equal or size"),
    "precision": _one_of(Precision),
    "seed": (int, lambda v: 0 <= v < 2**63, "a whole number from 0 on"),
    "evaluate_every": (int, lambda v: v >= 1, "at least 1"),
    "byzantine": (int, lambda v: v >= 0, "at least 0"),
    "attack": (str, lambda v: True, "none or a name that `fedbatchnorm list` shows"),
    "targets": (
        str,
        lambda v: v in ("usual", "all") or set(v.split("+")) <= set(TARGETS),
        f"usual, all, or some of {', '.join(TARGETS)}, joined by +",
    ),
    "defense": (str, lambda v: True, "none or a rule that `fedbatchnorm list` shows"),
}
_LARGEST = 2**63  # whole numbers stay below it


def check_values(config: Any) -> None:
    """Check every field that has a rule; an error names the field and says what it must be.

    Whole numbers given for a field of numbers become floats, so that 0 and 0.0 are the same setting.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in RULES or (value is None and field.default is None):
            continue
        kind, fine, wanted = RULES[field.name]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(value) is int and abs(value) >= _LARGEST:
            raise ValueError(f"{field.name} is a number of many digits; it must be {wanted}, and below 2^63")
        if float in kinds and type(value) is int:
            value = float(value)
            object.__setattr__(config, field.name, value)
        if type(value) not in kinds or not fine(value):
            raise ValueError(f"{field.name} is {value!r}; it must be {wanted}")
