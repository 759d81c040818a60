"""Byzantine clients and the server's defense: what is sent in a round, and how it is aggregated.

Byzantine clients hold no data. They know what the honest clients send, and all send the same. They replace
their rows of running means, running variances and gradients on the server, after its verdicts, so that only
the aggregator is tested.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..aggregation.statistics import Rows, running_rows, split_layers
from ..norm.moments import Moments, Running, round_momentum
from .fold import FoldedNorm
from .recipe import TARGETS, Recipe, torch_seed
from .schemes import Phase

Rule = Callable[[Tensor], Tensor]


def server_rule(recipe: Recipe) -> Rule:
    """What the server does with n rows: (n, d) -> (d,). Without a defense it takes the mean."""
    if recipe.defense == "none":
        return lambda rows: rows.mean(0)
    return recipe.the_defense(recipe.shares_of_cohort()[1])


def needs_host(recipe: Recipe) -> str | None:
    """Why a round cannot be captured as a CUDA graph: its attack or rule needs the host; None if it can."""
    asks = recipe.attack != "none" and recipe.the_attack().needs_host
    if asks or (recipe.defense != "none" and recipe.the_defense(recipe.byzantine).needs_host()):
        return f"{recipe.attack} against {recipe.defense} needs the host in every round"
    return None


def with_lies(honest: Tensor, recipe: Recipe, what: str, rule: Rule, step: int) -> Tensor:
    """The honest rows (h, d) and those of the Byzantine clients below them, (n, d).

    What is not attacked is the honest mean.

    Args:
        honest: (h, d).
        recipe: how many clients are Byzantine, and what they attack in which way.
        what: means, variances or gradients.
        rule: the server's, which some attacks know.
        step: the round.
    """
    _, f = recipe.shares_of_cohort()
    if not f:
        return honest
    if what in recipe.targets_struck():
        seed = torch_seed(recipe.seed, "attack", step, TARGETS.index(what))
        generator = torch.Generator().manual_seed(seed)
        sent = recipe.the_attack().lie(honest, f, rule, generator)
    else:
        sent = honest.mean(0)
    return torch.cat([honest, sent.expand(f, -1)])


def share_robustly(
    phase: Phase, layers: Mapping[str, tuple[Running, Moments]], recipe: Recipe, step: int
) -> dict[str, Running]:
    """The next statistics of all layers, through the server's rule (design of the robust server; section 5).

    The rows of all layers are concatenated, and each kind of row goes through the rule on its own. Where the
    honest clients' rows are not finite, training has diverged: no row is usable, and the statistics stay.
    Nothing here waits for a GPU.

    Args:
        phase: how the scheme merges rows.
        layers: layer name -> statistics before the round, and the honest clients' moments (h, c).
        recipe: clients, Byzantine clients, attack, defense.
        step: the round.
    """
    running = [r for r, _ in layers.values()]
    seen = [s for _, s in layers.values()]
    beta = [round_momentum(r.momentum, r.tracked) for r in running]
    total = [float(s.count) * (recipe.clients if phase.pooled else 1) for s in seen]
    mean, var, fine = through_rule(phase, lambda s: running_rows(running, s, beta, total), seen, recipe, step)
    after = split_layers(running, mean, var)
    return {
        name: new._replace(mean=torch.where(fine, new.mean, r.mean), var=torch.where(fine, new.var, r.var))
        for name, r, new in zip(layers, running, after, strict=True)
    }


def through_rule(
    phase: Phase, form: Callable[[list[Moments]], Rows], seen: list[Moments], recipe: Recipe, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of all layers through the server's rule, and whether the honest rows were finite.

    Args:
        phase: how the scheme merges rows.
        form: the honest clients' moments -> the rows that the server forms of them.
        seen: each layer's moments, (h, c).
        recipe: clients, attack, defense.
        step: the round.
    """
    rule = server_rule(recipe)
    fine = torch.stack([m.isfinite().all() & v.isfinite().all() for _, m, v in seen]).all()
    rows = form(
        [s._replace(mean=torch.where(fine, s.mean, 0), var=torch.where(fine, s.var, 0)) for s in seen]
    )
    means = with_lies(rows.means, recipe, "means", rule, step)
    variances = with_lies(rows.variances, recipe, "variances", rule, step)
    assert phase.merge_rows is not None
    mean, var = phase.merge_rows(means, variances, beta=rows.beta, total=rows.total, aggregator=rule)
    return mean, torch.maximum(var, rows.floor), fine


def robust_update_of(rows: Tensor, recipe: Recipe, step: int) -> Tensor:
    """The server's aggregate of all clients' updates, of which the honest ones are (h, d); NaN if training
    has diverged.
    """
    rule, fine = server_rule(recipe), rows.isfinite().all()
    sent = with_lies(torch.where(fine, rows, 0), recipe, "gradients", rule, step)
    return torch.where(fine, rule(sent), torch.nan)


def client_gradients(
    model: nn.Module,
    layers: Mapping[str, FoldedNorm],
    x: Tensor,
    y: Tensor,
    chunk: int,
    half: bool = False,
    stacked: dict[str, Tensor] | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Every client's own gradient in one pass: `vmap` over the clients (Robust-DSGD).

    What the clients measure is left in the layers, as after an ordinary pass.

    Args:
        model: in training mode.
        layers: its normalization layers, started for the round.
        x: (h, batch, ...), the clients' inputs.
        y: (h, batch).
        chunk: clients at a time.
        half: compute in bfloat16 where that is safe.
        stacked: parameters of each client, by name, (h, ...); the model's own for all if not given.
        weights: (h, batch), the weight of each sample in its client's loss, 0 for padding; equal if not
            given.

    Returns:
        Gradients (h, P), flattened in the order of the parameters, and losses (h,).
    """
    own = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    for layer in layers.values():
        layer.clients = 1

    def loss(
        parameters: dict[str, Tensor], x: Tensor, y: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, dict[str, tuple[Tensor, ...]]]:
        for layer in layers.values():
            layer.seen = []
            layer.keep = None if weights is None else (weights > 0).to(weights.dtype)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            scores = torch.func.functional_call(model, parameters, (x,))
        scores = scores.to(x.dtype)
        value = (
            F.cross_entropy(scores, y)
            if weights is None
            else F.cross_entropy(scores, y, reduction="none") @ weights
        )
        seen = {name: layer.seen[0] for name, layer in layers.items() if layer.seen}
        found = {name: m for name, m in seen.items() if m is not None}
        counts.update({name: m.count for name, m in found.items() if isinstance(m.count, int)})
        rows = {name: (m.mean[0], m.var[0]) for name, m in found.items()}
        measured = {name: (m.count,) for name, m in found.items() if isinstance(m.count, Tensor)}
        return value, {name: (*row, *measured.get(name, ())) for name, row in rows.items()}

    counts: dict[str, int] = {}  # those that are known beforehand; others leave with the rows
    each = torch.func.grad_and_value(loss, has_aux=True)
    dims = (None if stacked is None else 0, 0, 0, None if weights is None else 0)
    over = torch.func.vmap(each, in_dims=dims, randomness="different", chunk_size=chunk)
    gradients, (losses, seen) = over(own if stacked is None else stacked, x, y, weights)
    for name, layer in layers.items():
        layer.seen, layer.keep = [], None
        if name in seen:
            mean, var, *count = seen[name]
            layer.seen.append(Moments(count[0] if count else counts[name], mean, var))
    return torch.cat([g.flatten(1) for g in gradients.values()], dim=1).detach(), losses.detach()
