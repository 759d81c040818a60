"""What determines a run, as frozen dataclasses; a run's folder is named after the hash of it."""

import hashlib
import importlib.util
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..data.datasets import DATASETS
from ..data.partition import PARTITIONS
from ..simulation.models import MODELS
from ..simulation.recipe import ADVERSARY, LATER, Recipe, check_fields, usual
from ..simulation.ring import Ring
from ..simulation.schemes import SCHEMES

_FORMAT = 1  # raised when the same configuration would no longer give the same result

# What is used for a dataset unless something else is asked for: the paper's settings, and the demo's.
USUAL: dict[str, dict[str, Any]] = {
    "gaussian_ring": {"model": "mlp", "batch": 30, "rounds": 100},
    "digits": {"model": "mlp", "batch": 10, "rounds": 300},
    "cifar10": {"model": "cnn", "batch": 50, "rounds": 3000},
    "mnist": {"model": "cnn", "batch": 50, "rounds": 3000},
    "fashion_mnist": {"model": "cnn", "batch": 50, "rounds": 3000},
}
_FEDAVG_ROUNDS = 10  # fedavg's rounds hold many steps: a run has this many times fewer of them


@dataclass(frozen=True, kw_only=True)
class Run(Recipe):
    """A federation's training from the first round to the last.

    Example:
        >>> run = Run(dataset="digits", scheme="fbn", gamma=0)
        >>> run.model, run.rounds, run.evaluate_every
        ('mlp', 300, 10)
    """

    dataset: str = "digits"
    """What is learned: see `fedbatchnorm list`."""
    model: str | None = None
    """cnn, cnn16, mlp, resnet20, resnet18, or a function of your own as package.module:function; the
    dataset's usual one if not given."""
    partition: str = "gamma"
    """How the data is split among the clients: iid, gamma, dirichlet."""
    gamma: float = 0.0
    """For the gamma partition: the share of data that is alike, from 0 (each client its own classes)
    to 1 (iid)."""
    alpha: float = 0.1
    """For the dirichlet partition: the smaller, the more heterogeneous."""
    batch: int | None = None  # pyrefly: ignore
    """Samples of a client in a step; the dataset's usual number if not given."""
    rounds: int | None = None  # pyrefly: ignore
    """How many rounds; the dataset's usual number if not given, a tenth of it under fedavg."""
    evaluate_every: int | None = None
    """Rounds between evaluations; a thirtieth of all if not given."""

    def __post_init__(self):
        for name, table in (("dataset", DATASETS), ("partition", PARTITIONS)):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in table:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(table)}")
        for name, value in USUAL.get(self.dataset, {}).items():
            if getattr(self, name) is None:
                if name == "rounds" and self.algorithm == "fedavg":
                    value //= _FEDAVG_ROUNDS
                object.__setattr__(self, name, value)
        if not isinstance(self.model, str) or not (self.model in MODELS or _names_own(self.model)):
            raise ValueError(
                f"model is {self.model!r}; it must be one of {', '.join(MODELS)}, "
                "or a function of your own as package.module:function"
            )
        check_fields(self)
        if self.evaluate_every is None:
            object.__setattr__(self, "evaluate_every", max(1, self.rounds // 30))  # pyrefly: ignore

    def heterogeneity(self) -> tuple[str | None, float | None]:
        """The name and the value of the partition's parameter: ("gamma", 0.1), or (None, None)."""
        name = PARTITIONS[self.partition].parameter
        return name, None if name is None else getattr(self, name)

    def identity(self) -> dict[str, object]:
        """The fields that determine the result: what this partition and scheme do not use is left out."""
        unused = {p.parameter for p in PARTITIONS.values()} - {self.heterogeneity()[0]}
        unused |= {name for name in LATER if getattr(self, name) == usual(self, name)}
        uses = {
            "decay": self.schedule == "exponential",
            "groups": self.scheme == "groupnorm",
            "server_momentum": self.server != "mean",
            "calibrate": SCHEMES[self.scheme].replace is None,
            "recalibrate": SCHEMES[self.scheme].replace is None,
        }
        uses |= {
            name: name in SCHEMES[self.scheme].before.settings for name in ("gradient", "limit", "blend")
        }
        if self.algorithm == "fedavg":
            moving = self.optimizer == "sgd" and self.momentum != 0
            uses |= {"momentum": self.optimizer == "sgd", "momentum_kind": moving}
            uses |= {"local_state": moving or self.optimizer == "adam"}
            uses |= {
                "beta": SCHEMES[self.scheme].replace is None and SCHEMES[self.scheme].before.survey is None
            }
        unused |= {name for name, used in uses.items() if not used}
        found = asdict(self) | {"switch": self.switch_step() if self.scheme == "fixbn" else None}
        if self.is_plain():
            unused |= {*ADVERSARY}
        else:
            found["targets"] = "+".join(self.targets_struck())
        return {k: v for k, v in found.items() if k not in unused}


def _names_own(model: str) -> bool:
    """Whether it is package.module:function, in characters that can be written."""
    return ":" in model and not any("\ud800" <= character <= "\udfff" for character in model)


def source_digest(model: str) -> str | None:
    """A hash of the file that defines a user's own model; None if it cannot be found."""
    try:
        spec = importlib.util.find_spec(model.partition(":")[0])
    except (Exception, SystemExit):  # of the package around it; whoever trains the model is told
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]


KINDS: dict[str, type[Run] | type[Ring]] = {"training": Run, "ring": Ring}


def kind_of(config: Run | Ring) -> str:
    """The name of a configuration's kind."""
    return next(name for name, kind in KINDS.items() if type(config) is kind)


def digest(config: Run | Ring) -> str:
    """The name of a run: a hash of what determines its result, not of paths or devices.

    Example:
        >>> digest(Run(gamma=0)) == digest(Run(gamma=0.0, alpha=3.0)) != digest(Run(gamma=0.5))
        True
    """
    return name_of(config, source_of(config))


def source_of(config: Run | Ring) -> str | None:
    """The hash of the source of a run's model as it is now, if the model is the user's own."""
    return source_digest(config.model or "") if isinstance(config, Run) and _own_model(config) else None


def name_of(config: Run | Ring, source: str | None) -> str:
    """The name of a run, whose model, if it is the user's own, had this source. Nothing is imported."""
    content = {"format": _FORMAT, "kind": kind_of(config), **config.identity()}
    if _own_model(config):
        content["source"] = source  # changed code is another model
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _own_model(config: Run | Ring) -> bool:
    return isinstance(config, Run) and ":" in (config.model or "")


def to_json(config: Run | Ring, source: str | None = None) -> dict[str, Any]:
    """All fields and the kind, as they go into `config.json`; the source of a model, where there is one."""
    return {"kind": kind_of(config), **asdict(config)} | ({"source": source} if _own_model(config) else {})


def from_json(content: Any) -> Run | Ring:
    """The configuration in a `config.json`; an unknown or impossible field is an error."""
    return read_config(content)[0]


def read_config(content: Any) -> tuple[Run | Ring, str | None]:
    """The configuration in a `config.json`, and the hash of its model's source. Nothing is imported."""
    kind = content.get("kind") if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"not a configuration: its kind must be one of {', '.join(KINDS)}")
    source = content.get("source")
    if source is not None and not (isinstance(source, str) and re.fullmatch("[0-9a-f]{16}", source)):
        raise ValueError("source must be a hash of 16 characters")
    given = {k: v for k, v in content.items() if k not in ("kind", "source")}
    unknown = sorted(given.keys() - {f.name for f in fields(KINDS[kind])})
    if unknown:
        raise ValueError(f"unknown fields in a configuration: {', '.join(map(ascii, unknown[:5]))}")
    return KINDS[kind](**given), source


def local_work(run: Run) -> str:
    """Who does how much in a round of fedavg, in words.

    Example:
        >>> local_work(Run(algorithm="fedavg", clients=100, cohort=10, local_steps=5))
        'fedavg, 10 of 100 clients x 5 steps'
    """
    count, what = (run.local_epochs, "epoch") if run.local_steps is None else (run.local_steps, "step")
    some = "all" if run.cohort is None else f"{run.cohort} of {run.clients}"
    return f"fedavg, {some} clients x {count} {what}{'' if count == 1 else 's'}"


def describe(config: Run | Ring) -> str:
    """A configuration in a few words, for progress bars and lists."""
    if isinstance(config, Ring):
        return f"ring, {config.scheme}, gamma {config.gamma:g}, seed {config.seed}"
    name, value = config.heterogeneity()
    split = config.partition if name is None else f"{name} {value:g}"
    if config.algorithm == "fedavg":
        split += f", {local_work(config)}"
    liars = f", {config.byzantine} x {config.attack}" if config.byzantine else ""
    rule = f", {config.defense}" if config.defense != "none" else ""
    held = f" with gradient {config.gradient}" if config.gradient else ""
    return f"{config.dataset}, {config.scheme}{held}, {split}{liars}{rule}, seed {config.seed}"
