"""How a federation trains, as data, and the seeds of its random draws."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..aggregation.attacks import Attack, attack
from ..aggregation.defenses import Defense, OwnDefense, Rule, defense
from ..norm.gradient import limit_for
from .rules import TARGETS, Algorithm, Must, Optimizer, Schedule, Server, checked
from .rules import Precision as Precision
from .schemes import Scheme, find_scheme

_STREAMS = {"weights": 0, "partition": 1, "batches": 2, "dropout": 3, "attack": 4, "cohort": 5}
_STREAMS |= {"survey": 6, "client tests": 7}
ADVERSARY = ("byzantine", "attack", "targets", "defense")  # the fields of a recipe about Byzantine clients

# What a field is where nothing else is asked for, by algorithm: the paper's recipe, and what people run.
_USUAL: dict[str, dict[str, Any]] = {
    "dsgd": {
        "lr": 0.1,
        "momentum": 0.99,
        "momentum_kind": "dampened",
        "local_state": "keep",
        "schedule": "step",
        "weighting": "equal",
    },
    "fedavg": {
        "lr": 0.05,
        "momentum": 0.9,
        "momentum_kind": "ordinary",
        "local_state": "reset",
        "schedule": "constant",
        "weighting": "size",
    },
}
# Fields that came after the first results: a run's name holds one only where it is not what is usual.
LATER = [
    "algorithm",
    "local_steps",
    "local_epochs",
    "cohort",
    "optimizer",
    "momentum_kind",
    "local_state",
    "clip",
    "weight_decay",
    "prox",
    "schedule",
    "decay",
    "server",
    "server_lr",
    "server_momentum",
    "calibrate",
    "augment",
    "groups",
    "gradient",
    "limit",
    "blend",
    "recalibrate",
]
_FEDAVG_ONLY = ("local_steps", "local_epochs", "cohort", "prox", "optimizer")
_FEDAVG_ONLY += ("server", "server_lr", "server_momentum")


_Count = Annotated[int, Must("at least 1", ge=1)]
_SHARE = Must("auto, or between 0 (the paper's FBN) and 1 (BatchNorm's gradient)", ge=0, le=1)
_LIMIT = Must("auto, at least 1, or nothing for no limit", ge=1, lt=math.inf)
_BLEND = Must("between 0 (shared statistics) and 1 (the batch's own)", ge=0, le=1)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a federation trains. The defaults for distributed SGD are the paper's (appendix, table 2)."""

    scheme: str | Scheme = "fbn"
    """What clients normalize with, and what they share: see `fedbatchnorm list`."""
    clients: _Count = 10
    """How many clients, n."""
    batch: _Count = 50
    """Samples that a client uses in a step."""
    rounds: _Count = 3000
    """How many rounds, T."""
    lr: Annotated[float | None, Must("positive", gt=0, lt=math.inf)] = None
    """Learning rate of the first round; 0.1 for dsgd, 0.05 for fedavg if not given."""
    momentum: Annotated[float | None, Must("at least 0 and below 1", ge=0, lt=1)] = None
    """Client momentum; 0.99 for dsgd, 0.9 for fedavg if not given."""
    beta: Annotated[float, Must("above 0 and at most 1", gt=0, le=1)] = 0.1
    """Momentum of BatchNorm's running statistics."""
    switch: Annotated[int | None, Must("a step from 0 on, or nothing for half of the rounds", ge=0)] = None
    """The round at which FixBN freezes its statistics; half of the rounds if not given."""
    weighting: Literal["equal", "size"] | None = None
    """Whether clients have equal weight, or weight by the size of their data. By default equal for dsgd and
    with Byzantine clients, size for fedavg.
    """
    precision: Precision = "tf32"
    """Arithmetic: float32, tf32 (float32 with TF32 tensor cores on a GPU), bf16, float64."""
    seed: Annotated[int, Must("a whole number from 0 on", ge=0)] = 0
    """Seed of all random draws: weights, partition, cohorts, batches, dropout."""
    byzantine: Annotated[int, Must("at least 0", ge=0)] = 0
    """How many clients are Byzantine, f. They hold no data."""
    attack: str | Attack = "none"
    """What they send: see `fedbatchnorm list`; foe:10 and alie:3 give the factor."""
    targets: str = "usual"
    """What they attack: means, variances, gradients (under fedavg their whole update), joined by +, or all;
    by default what is usual for the attack. If gradients are attacked, they go through the defense, too.
    """
    defense: str | Rule = "none"
    """The server's rule for what clients send: none is a plain mean; nnm+median, nnm+trimmed_mean, ..."""
    algorithm: Algorithm = "dsgd"
    """dsgd: every client sends one gradient a round. fedavg: a cohort of clients trains for several steps and
    sends its weights."""
    local_steps: _Count | None = None
    """fedavg: steps of a client in a round. Give this or --local-epochs."""
    local_epochs: _Count | None = None
    """fedavg: passes of a client over its data in a round, including the last, shorter batch; 1 if neither is
    given.
    """
    cohort: _Count | None = None
    """fedavg: how many clients are sampled for each round; all of them if not given."""
    optimizer: Optimizer = "sgd"
    """fedavg: the clients' optimizer; adam has the usual settings (0.9, 0.999, 1e-8) and does not use
    --momentum.
    """
    momentum_kind: Literal["ordinary", "dampened"] | None = None
    """ordinary: v <- momentum v + gradient, as in torch. dampened: v <- momentum v + (1 - momentum)
    gradient, as in the paper. dampened for dsgd, ordinary for fedavg if not given."""
    local_state: Literal["reset", "keep"] | None = None
    """Whether a client's momentum (or Adam's moments) is reset in each of its rounds or is kept from one
    to the next; keep for dsgd, reset for fedavg if not given."""
    clip: Annotated[float | None, Must("positive, or nothing for no clipping", gt=0, lt=math.inf)] = None
    """Largest norm of a client's gradient; a longer one is scaled down to it."""
    weight_decay: Annotated[float, Must("at least 0", ge=0, lt=math.inf)] = 0.0
    """Weight decay: this number times the weights is added to the gradient."""
    prox: Annotated[float, Must("at least 0", ge=0, lt=math.inf)] = 0.0
    """fedavg: FedProx's mu, which pulls a client's weights toward those that it was sent."""
    schedule: Schedule | None = None
    """How the learning rate falls with the rounds: constant; step: a half of it after a third of the rounds,
    a third of it after two thirds; cosine: to 0; exponential: times --decay each round. By default step for
    dsgd, constant for fedavg.
    """
    decay: Annotated[float, Must("above 0 and at most 1", gt=0, le=1)] = 0.998
    """What the learning rate is multiplied by each round, for --schedule exponential."""
    server: Server = "mean"
    """fedavg: what the server does with the mean update: mean adds it, momentum is FedAvgM, adam is
    FedAdam."""
    server_lr: Annotated[float, Must("positive", gt=0, lt=math.inf)] = 1.0
    """fedavg: the server's learning rate."""
    server_momentum: Annotated[float, Must("at least 0 and below 1", ge=0, lt=1)] = 0.9
    """fedavg: the server's momentum (for --server adam, its first beta)."""
    calibrate: bool = False
    """Before the first round, clients make one pass with plain BatchNorm, and training starts from the merged
    statistics of all layers instead of mean 0 and variance 1."""
    augment: bool = False
    """Random crops (4 pixels of padding) and flips of training images, drawn on the device."""
    groups: _Count = 2
    """For the scheme groupnorm: the number of groups of channels."""
    gradient: Annotated[float | Literal["auto"], _SHARE] = 0.0
    """For the scheme fbn: the share of BatchNorm's gradient in the backward pass, from 0 (the paper's FBN) to
    1; auto follows the drift of the statistics in each round.
    """
    limit: Annotated[float | Literal["auto"] | None, _LIMIT] = None
    """For the scheme fbn: the largest standard deviation L of a client's normalized batch; its mean may be at
    most 2 (L - 1). A batch beyond that is normalized by statistics closer to its own, which keeps training
    with large learning rates from diverging. auto is 1 + 2.5 (1 - gradient); no limit if not given.
    """
    blend: Annotated[float, _BLEND] = 0.5
    """For the scheme fbn_blend: the share of the batch's own statistics in the first round; it falls with
    the learning rate."""
    recalibrate: bool = False
    """Before an evaluation, the clients of the last round make the pass of --calibrate with the new weights,
    and the model is evaluated with the merged statistics. Training does not see them."""

    def __post_init__(self):
        vars(self).update(completed(vars(self)))  # what depends on the algorithm and was not given
        vars(self).update(checked(self))
        check_together(self)

    def used(self, kind: Literal["scheme", "attack", "defense"]) -> Any:
        """The scheme, the attack or the defense: its name, or the user's own object."""
        return getattr(self, kind)

    def the_scheme(self) -> Scheme:
        """The row of the scheme."""
        return find_scheme(self.used("scheme"))

    def the_attack(self) -> Attack:
        """The row of the attack, if there is one."""
        return attack(self.used("attack"))

    def the_defense(self, f: int) -> Defense | OwnDefense:
        """The server's rule against f Byzantine clients, if there is one."""
        return defense(self.used("defense"), f)

    def shares_of_cohort(self) -> tuple[int, int]:
        """How many honest and how many Byzantine clients take part in a round.

        Every cohort contains its share of the Byzantine clients, rounded up.
        """
        if self.cohort is None:
            return self.honest(), self.byzantine
        lying = -(-self.byzantine * self.cohort // self.clients)
        return self.cohort - lying, lying

    def honest(self) -> int:
        """How many clients are honest; they hold the data."""
        return self.clients - self.byzantine

    def is_plain(self) -> bool:
        """Whether there are neither Byzantine clients nor a defense."""
        return not self.byzantine and self.defense == "none"

    def targets_struck(self) -> tuple[str, ...]:
        """What the Byzantine clients attack: a subset of means, variances, gradients."""
        if not self.byzantine:
            return ()
        if self.targets == "usual":
            return self.the_attack().targets
        return TARGETS if self.targets == "all" else tuple(t for t in TARGETS if t in self.targets.split("+"))

    def settings(
        self, rate: float | Tensor = 0.0, share: Tensor | None = None
    ) -> dict[str, float | Tensor | None]:
        """The settings of normalizers from the recipe, at a learning rate and a share of the gradient."""
        assert self.lr is not None
        gradient = 0.0 if share is None else share
        return {
            "gradient": gradient,
            "limit": limit_for(gradient) if self.limit == "auto" else self.limit,
            "blend": rate * (self.blend / self.lr),
        }

    def switch_step(self) -> int:
        """The step at which FixBN freezes its statistics."""
        return self.rounds // 2 if self.switch is None else self.switch


def usual(recipe: Recipe, name: str) -> Any:
    """The default of a field."""
    return usual_in(vars(recipe), name)


def usual_in(given: Mapping[str, Any], name: str) -> Any:
    """The default of a field, given these values of other fields."""
    algorithm, found = _given(given, "algorithm"), None
    if isinstance(algorithm, str):
        found = _USUAL.get(algorithm, {}).get(name)
    if name == "weighting" and (_given(given, "byzantine") or _given(given, "defense") != "none"):
        found = "equal"
    if name == "local_epochs" and algorithm == "fedavg" and _given(given, "local_steps") is None:
        found = 1
    return _default(name) if found is None else found


def completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """These values of fields, with defaults for those that depend on the algorithm."""
    names = (*_USUAL["fedavg"], "local_epochs")
    return {**given, **{name: usual_in(given, name) for name in names if given.get(name) is None}}


def _given(given: Mapping[str, Any], name: str) -> Any:
    return given.get(name, _default(name))


@functools.cache
def _default(name: str) -> Any:
    return next(f.default for f in dataclasses.fields(Recipe) if f.name == name)


def check_together(recipe: Recipe) -> None:
    """Check that fields go together; an error names one and says what to do."""
    _check_algorithm(recipe, recipe.the_scheme())
    _check_adversary(recipe, recipe.the_scheme())


def _check_algorithm(recipe: Recipe, scheme: Scheme) -> None:
    """The scheme, and settings of one algorithm alone, must go with the algorithm."""
    if recipe.algorithm not in scheme.algorithms:
        raise ValueError(
            f"scheme {_name(recipe.scheme)!r} is for algorithm {' and '.join(scheme.algorithms)}, not for "
            f"{recipe.algorithm}: {scheme.summary}"
        )
    if recipe.algorithm == "dsgd":
        given = [name for name in _FEDAVG_ONLY if getattr(recipe, name) != usual(recipe, name)]
        if given:
            raise ValueError(f"{given[0]} is for algorithm fedavg; dsgd sends one gradient of every client")
        if recipe.local_state == "reset":
            raise ValueError("local_state is 'reset', but under dsgd clients keep their momentum")
        return
    if recipe.local_steps is not None and recipe.local_epochs is not None:
        raise ValueError("local_steps and local_epochs are both given; give one of them")
    if recipe.cohort is not None and recipe.cohort > recipe.clients:
        raise ValueError(f"cohort is {recipe.cohort} of {recipe.clients} clients; it must be at most all")


def _name(used: Any) -> str:
    return used if isinstance(used, str) else getattr(used, "title", getattr(used, "__name__", "?"))


def _check_adversary(recipe: Recipe, scheme: Scheme) -> None:
    """Byzantine clients, attack, targets and defense must go together."""
    f, n = recipe.byzantine, recipe.clients
    honest, lying = recipe.shares_of_cohort()
    if recipe.targets not in ("usual", "all") and not set(recipe.targets.split("+")) <= set(TARGETS):
        wanted = f"usual, all, or some of {', '.join(TARGETS)}, joined by +"
        raise ValueError(f"targets is {recipe.targets!r}; it must be {wanted}")
    if recipe.attack != "none":
        recipe.the_attack()  # an error for a name that is not known
    if isinstance(recipe.used("defense"), str) and recipe.defense != "none":
        _try_defense(recipe.used("defense"), honest, lying)
    if (f > 0) != (recipe.attack != "none"):
        raise ValueError(f"byzantine is {f} and attack is {_name(recipe.attack)!r}; give both, or neither")
    if f and 2 * f >= n:
        raise ValueError(f"byzantine is {f} of {n} clients; no rule withstands half of them or more")
    if lying >= honest:
        raise ValueError(
            f"byzantine is {f} of {n} clients, which is {lying} in a cohort of {recipe.cohort}; "
            "no rule withstands half of them or more"
        )
    if not recipe.is_plain() and scheme.before.union:
        raise ValueError(
            f"scheme is {_name(recipe.scheme)!r}, which has no clients that could be Byzantine: "
            "choose another scheme"
        )
    if not recipe.is_plain() and scheme.before.share is not None and scheme.before.merge_rows is None:
        raise ValueError(
            f"scheme {_name(recipe.scheme)!r} does not say how it merges rows that may be attacked: "
            "give its phase merge_rows"
        )
    struck = recipe.targets_struck()
    rules = "rules for gradients" if recipe.algorithm == "dsgd" else "rules"
    robust = "gradients" in struck or (recipe.algorithm == "fedavg" and not recipe.is_plain())
    if robust and recipe.weighting == "size":
        raise ValueError(f"weighting is 'size', but robust {rules} weigh all clients the same")
    if struck and "gradients" not in struck and scheme.before.merge_rows is None:
        raise ValueError(
            f"scheme {_name(recipe.scheme)!r} shares no statistics that could be attacked: "
            "give targets gradients"
        )


@functools.cache
def _try_defense(name: str, honest: int, lying: int) -> None:
    """An error for a rule that would fail in the first round, such as one with an impossible radius."""
    rule = defense(name, lying)
    if lying < honest:  # else the numbers are what is wrong
        try:
            rule(torch.zeros(honest + lying, 1))
        except ValueError as error:
            raise ValueError(f"defense is {name!r}, which does not work here: {error}") from None


def stream(seed: int, what: str, step: int = 0, *more: int) -> np.random.Generator:
    """The generator of one purpose and one round, or a part of it."""
    return np.random.default_rng([seed, _STREAMS[what], step, *more])


def torch_seed(seed: int, what: str, step: int = 0, *more: int) -> int:
    """A seed for torch, for one purpose and one round, or a part of it."""
    return int(stream(seed, what, step, *more).integers(2**63))


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of round t of T.

    step is lr / (1 + floor(3 t / T)), the paper's 0.1, 0.05, 0.033, a third of the rounds each; cosine is
    lr (1 + cos(pi t / T)) / 2; exponential is lr decay^t.

    Example:
        >>> cosine = Recipe(algorithm="fedavg", lr=0.2, schedule="cosine", rounds=4)
        >>> [round(learning_rate(cosine, t), 4) for t in range(4)]
        [0.2, 0.1707, 0.1, 0.0293]
    """
    assert recipe.lr is not None
    if recipe.schedule == "step":
        return recipe.lr / (1 + 3 * step // recipe.rounds)
    if recipe.schedule == "cosine":
        return recipe.lr * (1 + math.cos(math.pi * step / recipe.rounds)) / 2
    if recipe.schedule == "exponential":
        return recipe.lr * recipe.decay**step
    return recipe.lr
