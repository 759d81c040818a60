"""How clients and servers turn gradients into steps: pure functions on flat vectors, one row a client."""

from typing import NamedTuple

import torch
from torch import Tensor

from .recipe import Recipe

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
SERVER_BETA, SERVER_EPS = 0.99, 1e-3  # FedAdam's second beta, and tau (Reddi et al., 2021)


class Local(NamedTuple):
    """What a client's step depends on, besides the learning rate."""

    adam: bool
    momentum: float
    dampened: bool
    clip: float | None
    weight_decay: float
    prox: float

    @classmethod
    def of(cls, recipe: Recipe) -> "Local":
        """The client's optimizer in a recipe."""
        assert recipe.momentum is not None
        dampened = recipe.momentum_kind == "dampened"
        rest = recipe.clip, recipe.weight_decay, recipe.prox
        return cls(recipe.optimizer == "adam", recipe.momentum, dampened, *rest)

    def buffers(self) -> int:
        """How many vectors of state a client has: Adam's two moments, momentum, or none."""
        return 2 if self.adam else int(self.momentum > 0)


def clipped(rows: Tensor, limit: float) -> Tensor:
    """Rows (n, d), each scaled down to a norm of `limit` if it is longer, as torch's clip_grad_norm_ does.

    Example:
        >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0).norm(dim=1).round(decimals=4)
        tensor([1.0000, 0.5000])
    """
    norm = rows.norm(dim=-1, keepdim=True)
    return rows * (limit / (norm + 1e-6)).clamp(max=1.0)


def local_step(
    weights: Tensor, gradient: Tensor, state: Tensor, taken: Tensor, sent: Tensor, rate: Tensor, how: Local
) -> None:
    """One step of a client's optimizer, in place; of many clients' where everything has a leading axis.

    FedProx's pull belongs to the loss and is clipped with it; weight decay does not, as in torch.

    Args:
        weights: (d,), changed.
        gradient: (d,), of the loss.
        state: (buffers, d), changed.
        taken: (), steps that the state has seen, changed.
        sent: (d,), the weights that the client was sent.
        rate: the learning rate.
        how: the optimizer.
    """
    g = gradient
    if how.prox:
        g = g + how.prox * (weights - sent)
    if how.clip is not None:
        g = clipped(g, how.clip)
    if how.weight_decay:
        g = g + how.weight_decay * weights
    if how.adam:
        taken.add_(1)
        before = zip(ADAM_BETAS, state.unbind(-2), (g, g * g), strict=True)
        first, second = (b * s + (1 - b) * x for b, s, x in before)
        state.copy_(torch.stack([first, second], -2))
        unbiased = (1 - b ** (taken[:, None] if taken.dim() else taken) for b in ADAM_BETAS)
        first, second = (s / u for s, u in zip((first, second), unbiased, strict=True))
        g = first / (second.sqrt() + ADAM_EPS)
    elif how.momentum:
        before = state[..., 0, :]
        g = how.momentum * before + ((1 - how.momentum) * g if how.dampened else g)
        before.copy_(g)
    weights.sub_(rate * g)


def server_step(weights: Tensor, update: Tensor, state: Tensor, recipe: Recipe) -> None:
    """The server's step with the clients' mean update, in place.

    mean: w + lr u. momentum (FedAvgM; Hsu et al., 2019): v <- beta v + u, w + lr v. adam (FedAdam; Reddi et
    al., 2021): first and second moments of u without bias correction, w + lr first / (sqrt(second) + tau).

    Args:
        weights: (d,), changed.
        update: (d,), the mean of the clients' weights less `weights`.
        state: (0, 1 or 2, d), changed.
        recipe: server, server_lr, server_momentum.
    """
    if recipe.server == "momentum":
        update = state[0].mul_(recipe.server_momentum).add_(update)
    elif recipe.server == "adam":
        state[0].lerp_(update, 1 - recipe.server_momentum)
        state[1].lerp_(update.square(), 1 - SERVER_BETA)
        update = state[0] / (state[1].sqrt() + SERVER_EPS)
    weights.add_(update, alpha=recipe.server_lr)


def server_buffers(recipe: Recipe) -> int:
    """How many vectors of state the server has."""
    return {"mean": 0, "momentum": 1, "adam": 2}[recipe.server]
