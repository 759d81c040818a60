"""How far shared statistics drift in a round, and the share of BatchNorm's gradient that follows from it.

If clients normalize with constants, gradients push a channel's mean and scale in every round, because each
merge undoes the effect. A share of BatchNorm's gradient prevents this (`norm.gradient`). But if a client has
one class, its mean is also the signal to learn from, so the share should not be larger than necessary. The
merge shows how large it has to be: the mean of all clients' values moves little in a round while training is
stable, and by half a standard deviation or more before it diverges.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..norm.moments import Running, round_momentum

FIRST_SHARE, LEAST, MOST = 0.8, 0.7, 0.98  # to begin with, and the bounds with several steps a round
RELAX = 1.02  # how much more may come through from round to round: what was let go too fast runs away
SOUND = 0.3  # standard deviations that a layer's means may move in a round: the paper's recipe stays below


def drift(before: Sequence[Running], after: Sequence[Tensor], beta: float) -> Tensor:
    """The largest over layers of the root mean square of (u - m) / sqrt(v + eps).

    u is the mean of all that the round's clients saw: m' = (1 - beta) m + beta u.

    Args:
        before: each layer's statistics before the round.
        after: each layer's next mean m', (c,).
        beta: the round's momentum.

    Example:
        >>> before = [Running(torch.zeros(2), torch.ones(2), eps=0.0)]
        >>> round(drift(before, [torch.tensor([0.3, 0.4])], 0.5).item(), 4)
        0.7071
    """
    found = []
    for running, mean in zip(before, after, strict=True):
        moved = (mean - running.mean).to(mean.dtype) / beta
        found.append((moved.square() / (running.var.to(mean.dtype) + running.eps)).mean().sqrt())
    return torch.stack(found).max()


def next_share(share: Tensor, drift: Tensor, steps: float) -> Tensor:
    """The share of BatchNorm's gradient for the next round.

    1 - share is multiplied by sound / drift: it falls to a half at most in one round, and grows by 2% a round
    at most. With one step a round the share may fall to 0, the paper's FBN. With two or more it stays at 0.7
    or above, since clients drift apart even if their mean does not.

    Args:
        share: of this round.
        drift: in this round.
        steps: local steps of the round.

    Example:
        >>> share = torch.tensor(0.8)
        >>> [round(next_share(share, torch.tensor(d), 1).item(), 3) for d in (0.01, 0.3, 0.6, 9.0)]
        [0.796, 0.8, 0.9, 0.9]
    """
    factor = (SOUND / drift.clamp(min=1e-12)).clamp(0.5, RELAX).nan_to_num(0.5)
    least = LEAST * min(1.0, max(0.0, steps - 1))
    through = (1 - share) * factor.to(share.dtype)
    return (1 - through).clamp(least, MOST)


def next_gradient(
    gradient: float,
    before: Mapping[str, Running],
    after: Mapping[str, Running],
    *,
    steps: float = 1,
    momentum: float | None = None,
) -> float:
    """The share of BatchNorm's gradient that clients should use in the next round, from the result of
    `merge`.

    Args:
        gradient: the share in this round; start with 0.8.
        before: the statistics that the round's clients were sent.
        after: the statistics that `merge` returned.
        steps: local steps of the round.
        momentum: if `merge` was given one.

    Example:
        >>> sent = {"bn": Running(torch.zeros(1), torch.ones(1))}
        >>> merged = {"bn": Running(torch.tensor([0.1]), torch.ones(1))}
        >>> round(next_gradient(0.8, sent, merged), 3)  # the mean is a whole deviation away
        0.9
    """
    found = []
    for name, running in before.items():
        beta = round_momentum(running.momentum if momentum is None else momentum, running.tracked, steps)
        found.append(drift([running], [after[name].mean.double()], beta))
    if not found:
        return gradient
    share = torch.tensor(gradient, dtype=torch.float64)
    return float(next_share(share, torch.stack(found).max(), steps))
