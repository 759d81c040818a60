"""The ways to normalize in a federation, as rows of one table.

A scheme says what a client normalizes with in training, what is shared after a round, and what each client
keeps local. Everything else (the simulator, the experiments, the figures, the tests) runs over the table
`SCHEMES`.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..aggregation.statistics import robust_update
from ..norm.moments import Moments
from .normalizers import (
    with_all_clients,
    with_blend,
    with_frozen,
    with_mixture,
    with_own_batch,
    with_shared,
)
from .sharing import MOMENTS, RUNNING, Kept, Share, average, average_rows, merge_exactly

Normalize = Callable[..., tuple[Tensor, Moments | None]]
Setting = float | Tensor | None
MergeRows = Callable[..., tuple[Tensor, Tensor]]


class Survey(NamedTuple):
    """Statistics from a separate pass over one batch of each client, with the weights that it was sent.

    images: samples in the batch, or all of the client's if it has fewer.
    momentum: of the shared statistics toward the merged ones.
    normalize: what the pass normalizes with, if not what training does.
    by_images: counts are images, not values, in the merged variance's correction.
    again: before an evaluation, the round's clients make the pass again with the new weights, and the model
        is evaluated with the merged statistics alone.
    """

    images: int
    momentum: float
    normalize: Normalize | None = None
    by_images: bool = False
    again: bool = False


class Phase(NamedTuple):
    """What happens in each round of a part of training.

    normalize: (x, running, clients=, weight=, bias=, keep=) -> (y, Moments (clients, c), or None).
    share: (running, Moments (n, c)) -> the next running statistics; None leaves them as they are.
    merge_rows: the same from rows that may be attacked, through the server's rule:
        (means (n, d), variances (n, d), beta=, total=, aggregator=) -> (mean (d,), variance (d,)).
    pooled: variances are corrected for the number of values of all clients, not of one.
    union: the clients' batches count as one batch.
    kept: what a client keeps over its local steps: moments of everything that it saw, or running statistics.
    first: what the first local step normalizes with, all clients of the round side by side.
    survey: statistics come from a separate pass, not from the training steps.
    learned: parameters of a layer that `normalize` takes in addition to weight and bias, one value for each
        channel; they start at 0.
    population: the spread between the clients of a cohort is corrected to that between all clients.
    settings: of the recipe, which `normalize` takes by name: the gradient's share, the blend.
    """

    normalize: Normalize
    share: Share | None
    merge_rows: MergeRows | None = None
    pooled: bool = True
    union: bool = False
    kept: Kept = RUNNING
    first: Normalize | None = None
    survey: Survey | None = None
    learned: tuple[str, ...] = ()
    population: bool = False
    settings: tuple[str, ...] = ()


class Scheme(NamedTuple):
    """A row of the table.

    title, summary: a name and a line of explanation, with the source.
    before, after: what happens in rounds before and after the switch step.
    algorithms: the algorithms that the scheme supports.
    replace: (BatchNorm layer, groups) -> the layer that replaces it; None keeps BatchNorm.
    own: the parts of a layer that each client keeps local: weight, bias, statistics, or something learned.
    """

    title: str
    summary: str
    before: Phase
    after: Phase
    algorithms: tuple[str, ...] = ("dsgd", "fedavg")
    replace: Callable[[_BatchNorm, int], nn.Module] | None = None
    own: tuple[str, ...] = ()

    def phase(self, step: int, switch: int) -> Phase:
        """The phase that a round belongs to; most schemes have only one."""
        return self.before if step < switch else self.after


def group_norm(layer: _BatchNorm, groups: int) -> nn.Module:
    """GroupNorm of as many channels and the same learned weight and bias; an error names the channels."""
    if layer.num_features % groups:
        raise ValueError(f"{layer.num_features} channels do not split into {groups} groups")
    new = nn.GroupNorm(groups, layer.num_features, layer.eps, layer.affine)
    if layer.affine:
        new.weight, new.bias = layer.weight, layer.bias
    return new


_NAIVE = Phase(with_own_batch, average, average_rows, pooled=False)
_UNION = Phase(with_own_batch, merge_exactly, union=True)
_MERGED = Phase(with_shared, merge_exactly, robust_update, kept=MOMENTS, population=True)
_FBN = _MERGED._replace(settings=("gradient", "limit"))
_BLEND = _MERGED._replace(normalize=with_blend, settings=("blend",))
_LOCAL = Phase(with_own_batch, None)
_FEDTAN = _NAIVE._replace(first=with_all_clients)
_HBN_SURVEY = Survey(images=64, momentum=0.002, by_images=True, again=True)
_HBN = Phase(with_mixture, merge_exactly, robust_update, kept=MOMENTS, survey=_HBN_SURVEY, learned=("mix",))
_FEDAVG = ("fedavg",)

CALIBRATION = Survey(images=64, momentum=1.0, normalize=with_own_batch)

SCHEMES: dict[str, Scheme] = {
    "centralized": Scheme(
        "Centralized", "BatchNorm on the union of all batches", _UNION, _UNION, algorithms=("dsgd",)
    ),
    "fbn": Scheme("FBN", "shared statistics as constants; total-variance merge", _FBN, _FBN),
    "fixbn": Scheme("FixBN", "naive, then frozen from the switch step on", _NAIVE, Phase(with_frozen, None)),
    "naive": Scheme("Naive BN", "each client's own batch; running statistics averaged", _NAIVE, _NAIVE),
    "groupnorm": Scheme(
        "GroupNorm",
        "GroupNorm in place of BatchNorm (Hsieh et al., 2020)",
        _LOCAL,
        _LOCAL,
        replace=group_norm,
    ),
    "layernorm": Scheme(
        "LayerNorm",
        "GroupNorm with one group in place of BatchNorm",
        _LOCAL,
        _LOCAL,
        replace=lambda layer, groups: group_norm(layer, 1),
    ),
    "hbn": Scheme(
        "HBN",
        "shared and batch statistics mixed, by channel and client (Chen et al., 2025)",
        _HBN,
        _HBN,
        algorithms=_FEDAVG,
        own=("mix",),
    ),
    "fedbn": Scheme(
        "FedBN",
        "each client keeps its BatchNorm layers to itself (Li et al., 2021)",
        _LOCAL,
        _LOCAL,
        algorithms=_FEDAVG,
        own=("weight", "bias", "statistics"),
    ),
    "silobn": Scheme(
        "SiloBN",
        "each client keeps its running statistics to itself (Andreux et al., 2020)",
        _LOCAL,
        _LOCAL,
        algorithms=_FEDAVG,
        own=("statistics",),
    ),
    "fedtan": Scheme(
        "FedTAN",
        "the first local step by all clients' statistics, then as naive (Wang et al., 2023)",
        _FEDTAN,
        _FEDTAN,
        algorithms=_FEDAVG,
    ),
    "none": Scheme(
        "No norm", "the layers removed", _LOCAL, _LOCAL, replace=lambda layer, groups: nn.Identity()
    ),
    "fbn_blend": Scheme(
        "Blended FBN",
        "shared statistics with a share of the batch's, which falls with the rate",
        _BLEND,
        _BLEND,
    ),
}
PAPER = ("centralized", "fbn", "fixbn", "naive")  # the schemes that the paper compares


def find_scheme(scheme: str | Scheme) -> Scheme:
    """The row of this name; a user's own row is returned as it is."""
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}; it must be one of {', '.join(SCHEMES)}")
    return SCHEMES[scheme]
