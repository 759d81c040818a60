"""Schemes, datasets, partitions, models, attacks and rules of the user's own.

A `Part` is such an object with its name and the hash of its source. Both are stored with a run and determine
its folder's name. Reading the run needs this record only, not the code.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..aggregation.aggregators import AGGREGATORS
from ..aggregation.attacks import ATTACKS, Attack
from ..aggregation.mixing import MIXING
from ..aggregation.statistics import robust_update
from ..data.datasets import DATASETS, of_tensors
from ..data.partition import PARTITIONS
from ..simulation.models import MODELS, Factory
from ..simulation.recipe import Recipe
from ..simulation.schemes import SCHEMES, Normalize, Phase, Scheme
from ..simulation.sharing import MOMENTS, average, average_rows, merge_exactly
from .sources import source_hash

Kind = Literal["scheme", "dataset", "partition", "model", "attack", "defense"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Value = bool | int | float | str

_TABLES: dict[Kind, tuple[Mapping[str, Any], ...]] = {
    "scheme": (SCHEMES,),
    "dataset": (DATASETS,),
    "partition": (PARTITIONS,),
    "model": (MODELS,),
    "attack": (ATTACKS,),
    "defense": (MIXING, AGGREGATORS),
}
# What the package has: a row that somebody adds at run time is theirs.
_SHIPPED = {kind: frozenset(name for table in tables for name in table) for kind, tables in _TABLES.items()}
# The fields of a run that not every scheme takes.
SCHEME_SETTINGS = ("beta", "blend", "calibrate", "gradient", "groups", "limit", "recalibrate", "switch")
# What goes with the package's ways to share.
_AS_SHARED: dict[Any, dict[str, Any]] = {
    average: {"merge_rows": average_rows, "pooled": False},
    merge_exactly: {"merge_rows": robust_update, "kept": MOMENTS, "population": True},
}
_NAME = r"^[A-Za-z_][A-Za-z0-9_.-]{0,59}$"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class Part:
    """A scheme, dataset, partition, model, attack or rule that is not the package's: its name and its source.

    kind, name: what it is, and what it is called in results.
    title: for figures and tables; the name if there is none.
    source: a hash of what it is made of; None where nobody recorded it.
    uses: of a scheme, the settings that it takes; of a partition, gamma or alpha; of an attack, what it
        strikes. None where nobody recorded it.
    parameters: of a partition: names and values, the level of heterogeneity first.
    value: the object itself; None where the part was read from a result.
    """

    kind: Kind
    name: Annotated[str, Field(min_length=1, max_length=400)]
    title: Annotated[str, Field(max_length=400)] = ""
    source: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    uses: Annotated[tuple[str, ...], Field(max_length=20)] | None = None
    parameters: Annotated[tuple[tuple[str, Value], ...], Field(max_length=20)] = ()
    value: Annotated[Any, Field(repr=False)] = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and self._known() == other._known()

    def __hash__(self) -> int:
        return hash(self._known())

    def __call__(self, **parameters: Value) -> "Part":
        """The same partition with other parameters."""
        given = dict(self.parameters)
        unknown = sorted(parameters.keys() - given.keys())
        if unknown:
            known = ", ".join(given) or "none"
            raise ValueError(f"{self.kind} {self.name!r} has no parameter {unknown[0]!r}; it has {known}")
        return replace(self, parameters=tuple((given | parameters).items()))

    def record(self) -> dict[str, Any]:
        """What goes beside a run, besides the name."""
        found = {"title": self.title, "source": self.source, "uses": self.uses}
        found |= {"parameters": dict(self.parameters)}
        return {key: value for key, value in found.items() if value not in (None, "", {})}

    def _known(self) -> tuple[Any, ...]:
        return self.kind, self.name, self.title, self.source, self.uses, self.parameters


def scheme(
    name: str,
    normalize: Normalize | Phase,
    share: Callable[..., Any] | None = None,
    *,
    title: str = "",
    summary: str = "",
    after: Phase | None = None,
    algorithms: tuple[str, ...] = ("dsgd", "fedavg"),
    replace: Callable[[_BatchNorm, int], nn.Module] | None = None,
    own: tuple[str, ...] = (),
    **phase: Any,
) -> Part:
    """A scheme of your own: what clients normalize with in training, and what is shared after a round.

    Args:
        name: what it is called in results.
        normalize: (x, running, clients=, weight=, bias=, keep=) -> (y, Moments); or a whole `Phase`.
        share: (running, Moments (n, c)) -> the next running statistics; None leaves them as they are.
        title: for figures; the name if not given.
        summary: a line of explanation.
        after: the phase from the switch step on, if it is different.
        algorithms: the algorithms that the scheme supports.
        replace: (BatchNorm layer, groups) -> the layer that replaces it.
        own: the parts of a layer that each client keeps local: weight, bias, statistics.
        phase: more fields of `Phase`, such as settings, or merge_rows for an own `share` under attack.

    Example:
        >>> from fedbatchnorm.experiments import Run, merge_exactly, scheme, with_own_batch
        >>> mine = scheme("pooled", with_own_batch, merge_exactly, title="Naive, merged exactly")
        >>> Run(scheme=mine).scheme
        'pooled'
    """
    phase = _AS_SHARED.get(share, {}) | phase  # pyrefly: ignore
    before = normalize if isinstance(normalize, Phase) else Phase(normalize, share, **phase)
    row = Scheme(title or name, summary, before, after or before, tuple(algorithms), replace, own)
    return _part("scheme", name, row, title=title or name, uses=scheme_uses(row))


def dataset(
    name: str,
    train: tuple[Any, Any],
    test: tuple[Any, Any] | None = None,
    *,
    classes: tuple[str, ...] | None = None,
    title: str = "",
) -> Part:
    """A dataset of your own: samples and labels, as tensors or arrays.

    Args:
        name: what it is called in results.
        train: samples (N, ...), numbers or bytes, and labels (N,) from 0 on.
        test: the same for testing; by default every fifth training sample of each class.
        classes: their names; 0, 1, ... if not given.
        title: for figures; the name if not given.

    Example:
        >>> import torch
        >>> from fedbatchnorm.experiments import Run, dataset
        >>> x, y = torch.randn(100, 2), torch.arange(100) % 2
        >>> Run(dataset=dataset("noise", (x, y)), model="mlp").dataset
        'noise'
    """
    return _part("dataset", name, of_tensors(name, train, test, classes), title=title or name)


def partition(name: str, split: Callable[..., list[np.ndarray]], *, title: str = "") -> Part:
    """A partition of your own: (labels (N,), clients, rng) -> for each client the indices of its samples.

    Further arguments with defaults are parameters of the partition: call the partition to change them. They
    are stored in results. If the first one is a number, it is the level of heterogeneity.

    Example:
        >>> import numpy as np
        >>> from fedbatchnorm.experiments import Run, partition
        >>> def shards(labels, clients, rng, each=2):
        ...     pieces = np.array_split(np.argsort(labels, kind="stable"), clients * each)
        ...     order = rng.permutation(len(pieces)).reshape(clients, each)
        ...     return [np.concatenate([pieces[i] for i in row]) for row in order]
        >>> Run(partition=partition("shards", shards)(each=3)).heterogeneity()
        ('each', 3.0)
    """
    required, optional = _arguments(split)
    if len(required) != 3:
        raise ValueError(f"partition {name!r} must take (labels, clients, rng), and more only with defaults")
    fields = set(Recipe.__dataclass_fields__) | {*KINDS, "gamma", "alpha", "evaluate_every", "own"}
    for parameter, value in optional.items():
        if parameter in fields:
            raise ValueError(f"partition {name!r}: {parameter} is a field of a run: give it another name")
        if not isinstance(value, Value):
            raise ValueError(f"partition {name!r}: {parameter} must be a number, a text, true or false")
    found = _part("partition", name, split, title=title or name, uses=())
    return replace(found, parameters=tuple(optional.items()))


def model(name: str, factory: Factory | type[nn.Module], *, title: str = "") -> Part:
    """A model of your own: (shape of a sample, number of classes) -> a module, or a function of nothing.

    Example:
        >>> from torch import nn
        >>> from fedbatchnorm.experiments import Run, model
        >>> def net(shape, classes):
        ...     return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.BatchNorm1d(9), nn.Linear(9, classes))
        >>> Run(model=model("net", net)).model
        'net'
    """
    return _part("model", name, factory, title=title or name)


def attack(
    name: str,
    lie: Callable[..., Tensor],
    *,
    targets: tuple[str, ...] = ("means", "variances"),
    summary: str = "",
    title: str = "",
) -> Part:
    """An attack of your own: the honest clients' rows (h, d) -> the row (d,) that all Byzantine clients send.

    It may also take `f`, the number of Byzantine clients, `defense`, the server's rule, and `generator`, for
    random numbers.

    Example:
        >>> from fedbatchnorm.experiments import Run, attack
        >>> hush = attack("hush", lambda honest: 0 * honest[0], targets=("means",))
        >>> Run(byzantine=3, attack=hush).targets_struck()
        ('means',)
    """
    takes = {k for k in inspect.signature(lie).parameters if k in ("f", "defense", "generator")}

    def call(honest: Tensor, f: int, defense: Any, generator: Any) -> Tensor:
        more = {"f": f, "defense": defense, "generator": generator}
        return lie(honest, **{key: more[key] for key in takes})

    row = Attack(call, tuple(targets), summary or title or name, needs_host="generator" in takes)
    found = _part("attack", name, row, title=title or name, uses=tuple(targets))
    return replace(found, source=source_hash((lie, tuple(targets))))


def rule(name: str, function: Callable[..., Tensor], *, title: str = "") -> Part:
    """A server's rule of your own, a defense: (rows (n, d), f) -> (d,), against f Byzantine clients.

    Example:
        >>> from fedbatchnorm.experiments import Run, rule
        >>> Run(defense=rule("middle", lambda rows, f: rows.sort(0).values[f:-f or None].mean(0))).defense
        'middle'
    """
    return _part("defense", name, function, title=title or name)


def as_part(kind: Kind, value: Any) -> Part:
    """The value of a field of a run as a part; a function has its own name."""
    if isinstance(value, Part):
        if value.kind != kind:
            raise ValueError(f"{kind} is the {value.kind} {value.name!r}; it must be a {kind}")
        return value
    make: dict[Kind, Callable[[str, Any], Part]] = {
        "partition": partition,
        "model": model,
        "attack": attack,
        "defense": rule,
    }
    name = getattr(value, "__name__", "<lambda>")
    if kind in make and callable(value) and name != "<lambda>":
        return make[kind](name, value)
    maker = "rule" if kind == "defense" else kind
    raise ValueError(f"{kind} is {repr(value)[:60]}; it must be a name, or experiments.{maker}(name, ...)")


def row_of(kind: Kind, name: str) -> Part | None:
    """A row that was added to a table at run time, as a part; None for the package's own names."""
    steps = [step.partition(":")[0] for step in name.split("+")] if kind == "defense" else [name]
    rows = {s: table[s] for s in steps for table in _TABLES[kind] if s in table and s not in _SHIPPED[kind]}
    if not rows:
        return None
    row, uses = next(iter(rows.values())), None
    if kind == "scheme":
        uses = scheme_uses(row)
    if kind == "partition":
        uses = () if row.parameter is None else (row.parameter,)
    if kind == "attack":
        uses = row.targets
    title = getattr(row, "title", "") if kind == "scheme" else ""
    return Part(kind=kind, name=name, title=title, source=source_hash(rows), uses=uses, value=name)


def is_known(kind: Kind, name: str) -> bool:
    """Whether a table of this process has the name; names of attacks and rules may contain numbers."""
    steps = name.split("+") if kind == "defense" else [name]
    bare = [s.partition(":")[0] if kind in ("attack", "defense") else s for s in steps]
    return (name == "none" and kind in ("attack", "defense")) or all(
        any(step in table for table in _TABLES[kind]) for step in bare
    )


def names_of(kind: Kind) -> list[str]:
    """The names in the tables of this process."""
    return [name for table in _TABLES[kind] for name in table]


def scheme_uses(row: Scheme, name: str | None = None) -> tuple[str, ...]:
    """The fields of a run that a scheme uses, of those that not all use; the package's go by name, too."""
    found = {*row.before.settings}
    found |= {"calibrate", "recalibrate"} if row.replace is None else set()
    found |= {"beta"} if row.replace is None and row.before.survey is None else set()
    found |= {"groups"} if (name == "groupnorm" if name else row.replace is not None) else set()
    found |= {"switch"} if (name == "fixbn" if name else row.before != row.after) else set()
    return tuple(sorted(found))


def _part(kind: Kind, name: str, value: Any, **more: Any) -> Part:
    if not isinstance(name, str) or not re.match(_NAME, name):
        wanted = "letters, digits, points, dashes and underscores, a letter first"
        raise ValueError(f"the name of a {kind} is {name!r}; it must be {wanted}")
    if is_known(kind, name):
        raise ValueError(f"{kind} {name!r} is the package's own: give yours another name")
    return Part(kind=kind, name=name, value=value, source=source_hash(value), **more)


def _arguments(function: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """The names of arguments that must be given, and the others with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in plain if p.default is p.empty], {
        p.name: p.default for p in plain if p.default is not p.empty
    }
