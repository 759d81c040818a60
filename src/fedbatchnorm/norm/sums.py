"""Weighted means over clients that are the same to the last bit, in whatever order the clients come."""

import torch
from torch import Tensor

_EXPONENT = 0x7FF << 52  # of a float64
_LARGEST = 2.0**1020  # beyond it 6 times as much is not finite
_LOW = 2.0**-32  # how far below the first grid the second one lies


def weighted_mean(share: Tensor, values: Tensor) -> Tensor:
    """sum_i w_i x_i over rows, for weights w_i >= 0 that add up to 1; the order of rows does not matter.

    With 2^e > max |x_i| every term is rounded to a multiple of 2^(e - 51). Such multiples add up without
    rounding, since their sum is not much more than 2^e, so their order cannot matter. The remainders are
    added up in the same way, in multiples of 2^(e - 83), for up to a million rows. (The splitting is Rump's
    "ExtractVector".) A row with weight 0 and values 0 is as if it were not there, to the bit.

    Args:
        share: (n, d) float64, w_i.
        values: (n, d) float64, finite; 0 where w_i is.

    Returns:
        (d,).

    Example:
        >>> x = torch.tensor([[1e16], [4.0], [-1e16]]).double()
        >>> weighted_mean(torch.full_like(x, 0.25), x).item()
        1.0
    """
    largest = values.abs().amax(0)
    grid = 6 * (largest.view(torch.int64) & _EXPONENT).view(torch.float64).clamp(max=_LARGEST)
    low = grid * _LOW
    terms = share * values
    high = (terms + grid).sub_(grid)
    rest = terms.sub_(high).add_(low).sub_(low)
    return high.sum(0) + rest.sum(0)
