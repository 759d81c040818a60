"""What Byzantine clients send: one vector made from the honest ones, (h, d) -> (d,), the same for each.

One table, `ATTACKS`. h is the honest mean and s the honest standard deviation of each coordinate. Attacks
know everything that the honest clients send; the optimized ones also know the server's rule.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..norm.moments import accumulator_dtype

Defense = Callable[[Tensor], Tensor]  # (n, d) -> (d,)
_FOE, _ALIE = 2.0, 1.5  # the usual factors


def sign_flipping(honest: Tensor) -> Tensor:
    """-h (Allen-Zhu et al., 2020).

    Example:
        >>> sign_flipping(torch.tensor([[1.0], [3.0]]))
        tensor([-2.])
    """
    return -honest.mean(0)


def fall_of_empires(honest: Tensor, tau: float | Tensor = _FOE) -> Tensor:
    """-tau h (Xie et al., 2020)."""
    return -tau * honest.mean(0)


def a_little_is_enough(honest: Tensor, tau: float | Tensor = _ALIE) -> Tensor:
    """h + tau s, with the sample deviation, n - 1 (Baruch et al., 2019)."""
    if len(honest) < 2:
        return honest.mean(0)
    return honest.mean(0) + tau * honest.std(0)


def mimic(honest: Tensor, client: int = 0) -> Tensor:
    """What one honest client sends, over-represented (Karimireddy et al., 2022)."""
    return honest[client].clone()


def gaussian(honest: Tensor, *, generator: torch.Generator, mean: float = 0.0, sd: float = 1.0) -> Tensor:
    """Noise."""
    noise = torch.randn(honest.shape[1:], generator=generator, dtype=honest.dtype, device=generator.device)
    return mean + sd * noise.to(honest.device)


def spike(honest: Tensor, *, generator: torch.Generator, size: float = 1e6) -> Tensor:
    """The honest mean, except in one coordinate: a faulty client, or an attack that is hard to detect."""
    sent = honest.mean(0)
    sent[int(torch.randint(len(sent), (1,), generator=generator, device=generator.device))] = size
    return sent


def infinity(honest: Tensor) -> Tensor:
    """Infinity everywhere: a fault more than an attack."""
    return torch.full_like(honest[0], torch.inf)


def not_a_number(honest: Tensor) -> Tensor:
    """NaN everywhere: a fault more than an attack."""
    return torch.full_like(honest[0], torch.nan)


def optimized(
    attack: Callable[[Tensor, Any], Tensor], honest: Tensor, f: int, defense: Defense, evaluations: int = 20
) -> Tensor:
    """The attack with the tau that takes the server's result furthest from the honest mean.

    Args:
        attack: (honest, tau) -> vector.
        honest: (h, d).
        f: how many Byzantine clients send the vector.
        defense: the server's rule on all h + f rows.
        evaluations: how many times the rule is applied.
    """
    center = honest.mean(0)

    def damage(tau: Tensor) -> Tensor:
        lies = attack(honest, tau).expand(f, -1)
        return (defense(torch.cat([honest, lies])) - center).to(start.dtype).norm()

    start = torch.zeros((), dtype=accumulator_dtype(honest), device=honest.device)

    return attack(honest, line_search(damage, evaluations, start))


def line_search(
    height: Callable[[Tensor], Tensor],
    evaluations: int,
    start: Tensor,
    step: float = 10.0,
    ratio: float = 0.8,
) -> Tensor:
    """The best place found for a maximum of `height`, in a number of evaluations; nothing waits for a GPU.

    Each stride goes out from the best place so far. Strides double while every one leads upwards; from the
    first that does not, they get shorter.

    Example:
        >>> line_search(lambda x: -abs(x - 30), 20, torch.zeros(())).item()
        30.0
    """
    best, highest, stride = start, height(start), torch.full_like(start, step)
    growing = torch.ones_like(start, dtype=torch.bool)
    for _ in range(evaluations - 1):
        found = height(best + stride)
        better = found > highest
        growing = growing & better
        best, highest = torch.where(better, best + stride, best), torch.where(better, found, highest)
        stride = torch.where(growing, 2 * stride, ratio * stride)
    return best


class Attack(NamedTuple):
    """A row of the table: (honest, f, defense, generator) -> vector, its usual targets, a line of text, and
    whether it needs the host while it runs, which a CUDA graph does not allow.
    """

    lie: Callable[[Tensor, int, Defense, torch.Generator], Tensor]
    targets: tuple[str, ...]
    summary: str
    needs_host: bool = False


_BOTH = ("means", "variances")
_WITH_FACTOR = {"foe": (fall_of_empires, _FOE), "alie": (a_little_is_enough, _ALIE)}

ATTACKS: dict[str, Attack] = {
    "sf": Attack(lambda h, f, d, g: sign_flipping(h), ("means",), "sign flipping: minus the honest mean"),
    "foe": Attack(lambda h, f, d, g: fall_of_empires(h), _BOTH, "fall of empires: -2 times the honest mean"),
    "alie": Attack(
        lambda h, f, d, g: a_little_is_enough(h), _BOTH, "a little is enough: mean + 1.5 deviations"
    ),
    "opt_foe": Attack(
        lambda h, f, d, g: optimized(fall_of_empires, h, f, d),
        _BOTH,
        "fall of empires, factor by line search",
    ),
    "opt_alie": Attack(
        lambda h, f, d, g: optimized(a_little_is_enough, h, f, d),
        _BOTH,
        "a little is enough, factor by line search",
    ),
    "mimic": Attack(lambda h, f, d, g: mimic(h), _BOTH, "what honest client 0 sends"),
    "gaussian": Attack(lambda h, f, d, g: gaussian(h, generator=g), _BOTH, "standard normal noise", True),
    "spike": Attack(lambda h, f, d, g: spike(h, generator=g), _BOTH, "1e6 on one coordinate", True),
    "infinity": Attack(lambda h, f, d, g: infinity(h), _BOTH, "infinity everywhere"),
    "nan": Attack(lambda h, f, d, g: not_a_number(h), _BOTH, "not a number everywhere"),
}


def attack(name: str | Attack) -> Attack:
    """The attack of this name; `foe:10` and `alie:3` give the factor tau. A user's own attack is returned as
    it is.

    Example:
        >>> honest = torch.tensor([[1.0], [3.0]])
        >>> attack("foe:10").lie(honest, 1, torch.mean, torch.Generator())
        tensor([-20.])
    """
    if isinstance(name, Attack):
        return name
    known, _, factor = plain_name(name).partition(":")
    if not factor:
        return ATTACKS[known]
    form, tau = _WITH_FACTOR[known][0], float(factor)
    return ATTACKS[known]._replace(lie=lambda h, f, d, g: form(h, tau))


def plain_name(name: str) -> str:
    """The canonical name of an attack: foe for foe:2.0, foe:10 for foe:1e1; an error if it is unknown."""
    known, colon, factor = name.partition(":")
    if not colon and known in ATTACKS:
        return known
    try:
        tau, usual = float(factor), _WITH_FACTOR[known][1]
    except (ValueError, KeyError):
        tau = usual = math.nan
    if not math.isfinite(tau):
        raise ValueError(
            f"attack {name!r} is not known: it is one of {', '.join(ATTACKS)}; "
            f"{' and '.join(_WITH_FACTOR)} may have a factor, such as foe:10"
        )
    return known if tau == usual else f"{known}:{tau:g}" if float(f"{tau:g}") == tau else f"{known}:{tau!r}"
