"""A server's rule by its name: mixing steps and an aggregator, such as nnm+median."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from .aggregators import AGGREGATORS, centred_clipping
from .mixing import MIXING, clipping

Rule = Callable[[Tensor, int], Tensor]  # (rows (n, d), f) -> (d,)
_WITH_RADIUS = {"clipping": clipping, "centred_clipping": centred_clipping}


@dataclass(frozen=True)
class Defense:
    """A rule (n, d) -> (d,) against f Byzantine clients; see `defense`."""

    name: str
    f: int

    def __post_init__(self):
        if not isinstance(self.f, int) or self.f < 0:
            raise ValueError(f"f is {self.f!r}; it must be a whole number, at least 0")
        self._steps()

    def __call__(self, rows: Tensor) -> Tensor:
        """Aggregate n clients' rows; an error for 2f clients or fewer."""
        for step in self._steps():
            rows = step(rows, self.f)
        return rows

    def against(self, f: int) -> "Defense":
        """The same rule against another number of Byzantine clients."""
        return replace(self, f=f)

    def needs_host(self) -> bool:
        """Whether a step of the rule needs the host while it runs, which a CUDA graph does not allow."""
        return any(getattr(step, "needs_host", False) for step in self._steps())

    def _steps(self) -> list[Callable[[Tensor, int], Tensor]]:
        *mixing, last = self.name.split("+")
        return [*(self._step(step, MIXING) for step in mixing), self._step(last, AGGREGATORS)]

    def _step(self, text: str, table: dict[str, Callable[[Tensor, int], Tensor]]) -> Callable:
        name, colon, radius = text.partition(":")
        if not colon and name in table:
            return table[name]
        try:
            if name in table:
                return functools.partial(_WITH_RADIUS[name], radius=float(radius))
        except (KeyError, ValueError):
            pass
        raise ValueError(
            f"defense {self.name!r} is not known: it is one of {', '.join(AGGREGATORS)}, after any of "
            f"{', '.join(MIXING)}, joined by +, such as nnm+median; "
            f"{' and '.join(_WITH_RADIUS)} may have a radius, such as clipping:20"
        )


@dataclass(frozen=True)
class OwnDefense:
    """A rule of the user's own, (rows (n, d), f) -> (d,), against f Byzantine clients."""

    rule: Rule
    f: int

    def __call__(self, rows: Tensor) -> Tensor:
        """Aggregate n clients' rows; an error if the result is not one row."""
        row = self.rule(rows, self.f)
        if not isinstance(row, Tensor) or row.shape != rows.shape[1:]:
            found = tuple(row.shape) if isinstance(row, Tensor) else type(row).__name__
            name = getattr(self.rule, "__name__", "the rule")
            raise ValueError(f"defense {name!r} returned {found}; it must be one row of {rows.shape[1]}")
        return row.to(rows.dtype)

    def against(self, f: int) -> "OwnDefense":
        """The same rule against another number of Byzantine clients."""
        return replace(self, f=f)

    def needs_host(self) -> bool:
        """Whether the rule says that it needs the host while it runs."""
        return getattr(self.rule, "needs_host", False)


def defense(name: str | Rule, f: int) -> Defense | OwnDefense:
    """The rule (n, d) -> (d,) of this name, against f Byzantine clients; for `merge(aggregator=...)`.

    Args:
        name: an aggregator, after any number of mixing steps: `median`, `nnm+trimmed_mean`, `arc+nnm+krum`;
            or a function of your own, (rows (n, d), f) -> (d,).
        f: how many clients may be Byzantine; an error when it is applied to 2f clients or fewer.

    Example:
        >>> import torch
        >>> defense("nnm+median", f=1)(torch.tensor([[0.0], [1.0], [2.0], [1e9]]))
        tensor([1.])
    """
    return Defense(name, f) if isinstance(name, str) else OwnDefense(name, f)
