"""What determines a run, as frozen dataclasses; a run's folder is named after the hash of it.

`simulation` may only need torch and numpy, so its `Recipe` is an ordinary dataclass with its bounds in the
annotations, which a plain function checks. Here pydantic reads the same annotations, so each rule is written
once.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from ..aggregation.attacks import plain_name
from ..data.partition import PARTITIONS
from ..simulation.recipe import ADVERSARY, LATER, Recipe, check_together, completed, usual
from ..simulation.ring import Ring
from ..simulation.rules import Must, annotations, refusal
from ..simulation.schemes import SCHEMES
from ..storage.values import shown
from .parts import KINDS as PARTS
from .parts import SCHEME_SETTINGS, Kind, Part, as_part, is_known, names_of, row_of, scheme_uses
from .sources import file_hash, module_file

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


_FALLBACK: dict[str, Any] = {"model": "mlp", "batch": 32, "rounds": 300}  # a dataset of the user's own
_Gamma = Annotated[float, Must("between 0 (each client its own classes) and 1 (iid)", ge=0, le=1)]
_POSITIVE = Must("positive (0.1 is strongly heterogeneous, 10 nearly iid)", gt=0, lt=math.inf)
_Count = Annotated[int, Must("at least 1", ge=1)]
_STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


_Class = TypeVar("_Class", bound=type)


def _in_plain_words(kind: _Class) -> _Class:
    """Make the errors of a pydantic dataclass one line that names the field."""
    make = kind.__init__

    @functools.wraps(make)
    def __init__(self: Any, **given: Any) -> None:  # noqa: N807
        try:
            make(self, **given)
        except ValidationError as error:
            raise ValueError(_refusal(error)) from None

    kind.__init__ = __init__  # pyrefly: ignore
    return kind


def _refusal(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = first["loc"]
    if not place or place[0] not in annotations(Run):
        cause = first.get("ctx", {}).get("error")
        return str(cause) if cause is not None else f"{'.'.join(map(str, place))}: {first['msg']}"
    name = str(place[0])
    return refusal(name, annotations(Run)[name], first["input"])


@_in_plain_words
@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Run(Recipe):
    """A federation's training from the first round to the last.

    Scheme, dataset, partition, model, attack and defense are names, or objects of your own: `scheme(...)`,
    `dataset(...)`, `partition(...)`, `model(...)`, `attack(...)`, `rule(...)`. Except for schemes and
    datasets, a function with a name works, too.

    Example:
        >>> run = Run(dataset="digits", scheme="fbn", gamma=0)
        >>> run.model, run.rounds, run.evaluate_every
        ('mlp', 300, 10)
    """

    scheme: str = "fbn"
    """What clients normalize with, and what they share: see `fedbatchnorm list`."""
    attack: str = "none"
    """What Byzantine clients send: see `fedbatchnorm list`; foe:10 and alie:3 give the factor."""
    defense: str = "none"
    """The server's rule for what clients send: none is a plain mean; nnm+median, nnm+trimmed_mean, ..."""
    dataset: str = "digits"
    """The dataset: see `fedbatchnorm list`."""
    model: str | None = None
    """The network: see `fedbatchnorm list`; a function of your own as package.module:function; the dataset's
    usual one if not given."""
    partition: str = "gamma"
    """How the data is split among the clients: see `fedbatchnorm list`."""
    gamma: _Gamma = 0.0
    """For the gamma partition: the share of the data that is dealt out at random, from 0 (each client has its
    own classes) to 1 (iid).
    """
    alpha: Annotated[float, _POSITIVE] = 0.1
    """For the dirichlet partition: the smaller, the more heterogeneous."""
    batch: _Count = None  # pyrefly: ignore
    """Samples that a client uses in a step; the dataset's usual number if not given."""
    rounds: _Count = None  # pyrefly: ignore
    """How many rounds; the dataset's usual number if not given, a tenth of it under fedavg."""
    evaluate_every: _Count = None  # pyrefly: ignore
    """Rounds between evaluations; a thirtieth of all if not given."""
    own: tuple[Part, ...] = ()
    """The user's own parts, filled in from the fields above."""

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, data: ArgsKwargs) -> dict[str, Any]:
        """Turn objects into named parts, and fill in usual values."""
        given = dict(data.kwargs or {})
        kept = {part.kind: part for part in given.get("own") or ()}
        for kind in PARTS:
            value = given.get(kind)
            if value is not None and not isinstance(value, str | int | float | list | dict):
                kept[kind] = as_part(kind, value)
                given[kind] = kept[kind].name
            elif isinstance(value, str) and kind in kept and kept[kind].name != value:
                del kept[kind]  # another was chosen since
            if isinstance(given.get(kind), str) and kind not in kept:
                row = row_of(kind, given[kind])
                kept |= {} if row is None else {kind: row}
        given["own"] = tuple(kept[kind] for kind in PARTS if kind in kept)
        return _usual_settings(given)

    def __post_init__(self):
        for kind in PARTS:
            _check_name(self, kind)
        if not any(part.value is None for part in self.own):  # else it was read, and others checked it
            check_together(self)

    def part(self, kind: Kind) -> Part | None:
        """The user's own scheme, dataset, ..., or None if it is the package's."""
        return next((part for part in self.own if part.kind == kind), None)

    def used(self, kind: Kind) -> Any:
        """The scheme, dataset, ... to use: a name, or the user's own object."""
        part = self.part(kind)
        if part is None:
            return getattr(self, kind)
        if part.value is None:
            raise ValueError(
                f"{kind} {part.name!r} is known by its name alone, from a result: to run it, give the object"
            )
        return functools.partial(part.value, **dict(part.parameters)) if part.parameters else part.value

    def title(self, kind: Kind = "scheme") -> str:
        """The title of the scheme, dataset, ... in figures: as recorded, as in the table, or its name."""
        part, name = self.part(kind), getattr(self, kind)
        if part is not None:
            return part.title or name
        return SCHEMES[name].title if kind == "scheme" and name in SCHEMES else name

    def heterogeneity(self) -> tuple[str | None, float | None]:
        """The name and the value of the partition's parameter: ("gamma", 0.1), or (None, None)."""
        part = self.part("partition")
        if part is not None and part.parameters:
            name, value = part.parameters[0]
            return (name, float(value)) if isinstance(value, int | float) else (None, None)
        found = (part.uses or ()) if part is not None else ()
        name = found[0] if found else None if part is not None else PARTITIONS[self.partition].parameter
        return (name, getattr(self, name)) if name in ("gamma", "alpha") else (None, None)

    def targets_struck(self) -> tuple[str, ...]:
        """What Byzantine clients attack: a subset of means, variances, gradients."""
        part = self.part("attack")
        if self.byzantine and self.targets == "usual" and part is not None:
            return part.uses or ()
        return super().targets_struck()

    def unused(self) -> set[str]:
        """The fields that have no effect with this scheme, partition, schedule, ...

        Example:
            >>> sorted(Run(scheme="groupnorm").unused() & {"alpha", "gradient", "groups"})
            ['alpha', 'gradient']
        """
        split, part = self.part("partition"), self.part("scheme")
        known = split is None or split.uses is not None
        found = {"gamma", "alpha"} - {self.heterogeneity()[0]} if known else set()
        takes = scheme_uses(SCHEMES[self.scheme], self.scheme) if part is None else part.uses
        found |= set() if takes is None else {*SCHEME_SETTINGS} - {*takes}
        uses = {"decay": self.schedule == "exponential", "server_momentum": self.server != "mean"}
        if self.algorithm == "fedavg":
            moving = self.optimizer == "sgd" and self.momentum != 0
            uses |= {"momentum": self.optimizer == "sgd", "momentum_kind": moving}
            uses |= {"local_state": moving or self.optimizer == "adam"}
        found |= {name for name, used in uses.items() if not used}
        return found | ({*ADVERSARY} if self.is_plain() else set())

    def identity(self) -> dict[str, object]:
        """The fields that determine the result, without those that have no effect or are as usual."""
        unused, split = self.unused(), self.part("partition")
        left_out = unused | {"own"} | {name for name in LATER if getattr(self, name) == usual(self, name)}
        left_out -= {"switch"} | (
            {"beta"} if self.algorithm == "dsgd" else set()
        )  # these were in names always
        found: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        found["switch"] = None if "switch" in unused else self.switch_step()
        if not self.is_plain():
            found["targets"] = "+".join(self.targets_struck())
        kept = {name: value for name, value in found.items() if name not in left_out}
        return kept | dict(split.parameters if split else ())


def _usual_settings(given: dict[str, Any]) -> dict[str, Any]:
    """The given settings, with usual values for the rest."""
    dataset, algorithm = given.get("dataset", "digits"), given.get("algorithm", "dsgd")
    table = USUAL.get(dataset, _FALLBACK) if isinstance(dataset, str) else _FALLBACK
    for name, value in table.items():
        if given.get(name) is None:
            fewer = name == "rounds" and algorithm == "fedavg"
            given[name] = value // _FEDAVG_ROUNDS if fewer else value
    if given.get("evaluate_every") is None:
        rounds = given["rounds"]
        given["evaluate_every"] = max(1, rounds // 30) if type(rounds) is int else 1
    if algorithm == "fedavg" and given.get("cohort") == given.get("clients", 10):
        given["cohort"] = None  # all of them
    own = {part.kind for part in given["own"]}
    if isinstance(given.get("attack"), str) and given["attack"] != "none" and "attack" not in own:
        given["attack"] = plain_name(given["attack"])
    return completed(given)


def _check_name(run: Run, kind: Kind) -> None:
    """Check that a name is valid and in a table, or that a part has it."""
    name = getattr(run, kind)
    if isinstance(name, str) and any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"{kind} is {name!r}; it must be a text that can be written")
    if run.part(kind) is not None or kind in ("attack", "defense"):  # these are checked with the rest
        return
    if kind == "model" and name is not None and ":" in name:
        return
    if name is None or not is_known(kind, name):
        more = ", or a function of your own as package.module:function" if kind == "model" else ""
        raise ValueError(f"{kind} is {name!r}; it must be one of {', '.join(names_of(kind))}{more}")


def source_digest(model: str) -> str | None:
    """A hash of the file that defines a user's own model; None if it cannot be found."""
    file = module_file(model.partition(":")[0])
    return None if file is None else file_hash(file)


KINDS: dict[str, type[Run] | type[Ring]] = {"training": Run, "ring": Ring}


def kind_of(config: Run | Ring) -> str:
    """The kind of a configuration, by name."""
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
    content: dict[str, Any] = {"format": _FORMAT, "kind": kind_of(config), **config.identity()}
    if _own_model(config):
        content["source"] = source  # changed code is another model
    own = {part.kind: part.source for part in _own(config) if part.source is not None}
    content |= {"own": own} if own else {}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _own(config: Run | Ring) -> tuple[Part, ...]:
    return config.own if isinstance(config, Run) else ()


def _own_model(config: Run | Ring) -> bool:
    return isinstance(config, Run) and config.part("model") is None and ":" in (config.model or "")


def to_json(config: Run | Ring, source: str | None = None) -> dict[str, Any]:
    """All fields and the kind, for `config.json`, with the source of a user's own model and other parts."""
    found = {"kind": kind_of(config)}
    found |= {f.name: getattr(config, f.name) for f in fields(config) if f.name != "own"}
    own = {part.kind: part.record() for part in _own(config)}
    return found | ({"source": source} if _own_model(config) else {}) | ({"own": own} if own else {})


def from_json(content: Any) -> Run | Ring:
    """The configuration in a `config.json`; an unknown or impossible field is an error."""
    return read_config(content)[0]


def read_config(content: Any) -> tuple[Run | Ring, str | None]:
    """The configuration in a `config.json`, and the hash of its model's source. Nothing is imported.

    A scheme, dataset, ... that this process does not know has a name only.
    """
    kind = content.get("kind") if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"not a configuration: its kind must be one of {', '.join(KINDS)}")
    source = content.get("source")
    if source is not None and not (isinstance(source, str) and re.fullmatch("[0-9a-f]{16}", source)):
        raise ValueError("source must be a hash of 16 characters")
    given = {k: v for k, v in content.items() if k not in ("kind", "source", "own")}
    unknown = sorted(given.keys() - {f.name for f in fields(KINDS[kind])})
    unknown += ["own"] if kind == "ring" and "own" in content else []
    if unknown:
        raise ValueError(f"unknown fields in a configuration: {', '.join(map(ascii, unknown[:5]))}")
    if kind == "training":
        given["own"] = tuple(_recorded(given, content.get("own", {})))
    return KINDS[kind](**given), source


def _recorded(given: dict[str, Any], records: Any) -> Iterator[Part]:
    """The parts that a `config.json` records, and those that are unknown here."""
    if not isinstance(records, dict) or not records.keys() <= {*PARTS}:
        raise ValueError(f"own must be an object with some of {', '.join(PARTS)}")
    for kind in PARTS:
        name, record = given.get(kind), records.get(kind)
        if record is None:
            string_model = kind == "model" and isinstance(name, str) and ":" in name
            if isinstance(name, str) and not is_known(kind, name) and not string_model and name.isprintable():
                yield Part(kind=kind, name=name)
            continue
        if not isinstance(record, dict) or not isinstance(name, str) or {"kind", "name", "value"} & {*record}:
            raise ValueError(f"own: {kind} is {shown(record)}; it must be what is known of {shown(name)}")
        parameters = record.get("parameters", {})
        if not isinstance(parameters, dict):
            raise ValueError(f"own: parameters of {kind} are {shown(parameters)}; they must be an object")
        try:
            yield Part(**(record | {"kind": kind, "name": name, "parameters": tuple(parameters.items())}))
        except (ValidationError, TypeError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise ValueError(f"own: {kind}: {why}") from None


def local_work(run: Run) -> str:
    """The clients and local work in a round of fedavg, as text.

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
    attackers = f", {config.byzantine} x {config.attack}" if config.byzantine else ""
    rule = f", {config.defense}" if config.defense != "none" else ""
    held = f" with gradient {config.gradient}" if config.gradient else ""
    return f"{config.dataset}, {config.scheme}{held}, {split}{attackers}{rule}, seed {config.seed}"
