"""A server's rule by its name: mixing steps and an aggregator, such as nnm+median."""

from collections.abc import Callable

from torch import Tensor

from .aggregators import AGGREGATORS
from .mixing import MIXING


def defense(name: str, f: int) -> Callable[[Tensor], Tensor]:
    """The rule (n, d) -> (d,) of this name, against f liars; it goes into `merge(aggregator=...)`.

    Args:
        name: an aggregator, after any number of mixing steps: `median`, `nnm+trimmed_mean`, `arc+nnm+krum`.
        f: how many clients may lie; an error when it is applied to 2f clients or fewer.

    Example:
        >>> import torch
        >>> defense("nnm+median", f=1)(torch.tensor([[0.0], [1.0], [2.0], [1e9]]))
        tensor([1.])
    """
    *steps, last = name.split("+")
    unknown = [step for step in steps if step not in MIXING]
    if unknown or last not in AGGREGATORS:
        raise ValueError(
            f"defense {name!r} is not known: it is one of {', '.join(AGGREGATORS)}, "
            f"after any of {', '.join(MIXING)}, joined by +, such as nnm+median"
        )
    if f < 0:
        raise ValueError(f"f is {f}; it must be at least 0")

    def rule(rows: Tensor) -> Tensor:
        for step in steps:
            rows = MIXING[step](rows, f)
        return AGGREGATORS[last](rows, f)

    return rule
