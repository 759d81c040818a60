"""What travels between a client and a server: updates one way, statistics the other, and sums.

Statistics are a plain mapping {layer name: Running}. Their version is the sum of the layers' step
counters, which grows with every update and is in every state_dict, too. So a client that loads only the
model's weights still replies with the right round.
"""

import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .moments import Moments, Running

FORMAT = 1
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of moments that travel
_ID_BITS = 48  # exact as a float64, so that it can travel with the moments of a process group


def new_id() -> int:
    """A number that no other update has."""
    return secrets.randbits(_ID_BITS)


@dataclass(frozen=True, eq=False)
class Update(Mapping[str, Moments]):
    """One client's moments since its last `collect`, by layer name.

    Attributes:
        layers: {layer name: Moments(count, mean, var)}, float64 on the CPU.
        round: version of the statistics that the client trained with; None if not known.
        skipped: {layer name: passes left out because their moments were not finite}, where any were.
        id: distinguishes a message that arrives twice from two clients with equal data; None if not known.
        format: number of the message format.
    """

    __eq__, __hash__ = object.__eq__, object.__hash__  # Mapping would compare tensors

    layers: Mapping[str, Moments]
    round: int | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    id: int | None = None
    format: int = FORMAT

    def __getitem__(self, name: str) -> Moments:
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, eq=False)
class Sums:
    """A layer's moments as sums that add up: K, and per channel sum z and sum z^2, in float64.

    z = (u - m) / sqrt(v + eps) with the shared (m, v), so that nothing large cancels later.
    """

    count: float
    z: Tensor
    zz: Tensor

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.count + other.count, self.z + other.z, self.zz + other.zz)

    def __radd__(self, other: int) -> "Sums":
        if other != 0:
            return NotImplemented
        return self


def version(shared: Mapping[str, Running]) -> int:
    """The version of shared statistics: it grows whenever any layer of them is updated."""
    return sum(running.tracked for running in shared.values())


def same_layers(message: Mapping, expected: Mapping) -> None:
    """Raise a ValueError that names the layers in which two mappings by layer name differ."""
    missing, extra = sorted(set(expected) - set(message)), sorted(set(message) - set(expected))
    if missing or extra:
        raise ValueError(f"the layers do not match: missing {missing}, unexpected {extra}")


def to_sums(update: Mapping[str, Moments], shared: Mapping[str, Running]) -> dict[str, Sums]:
    """Write an update as additive sums, for a server that may see only the total.

    sum z = K (u - m) / s;  sum z^2 = K (sigma^2 + (u - m)^2) / s^2;  s = sqrt(v + eps).

    Args:
        update: one client's moments.
        shared: the statistics of the round, the same at every client and at the server.

    Returns:
        {layer name: Sums}; add them up over clients, then call `from_sums`.

    Example:
        >>> shared = {"bn": Running(torch.zeros(1), torch.ones(1), eps=3.0)}
        >>> to_sums({"bn": Moments(2, torch.tensor([6.0]), torch.tensor([4.0]))}, shared)["bn"].z
        tensor([6.], dtype=torch.float64)
    """
    same_layers(update, shared)
    if isinstance(update, Update) and update.round not in (None, version(shared)):
        raise ValueError(f"the update is of round {update.round}, the statistics are of {version(shared)}")
    sums = {}
    for name, running in shared.items():
        count, mean, var = update[name]
        center, scale = _standard(running)
        _same_shape(f"layer {name!r}: moments", center, mean, var)
        shift = mean.double() - center
        sums[name] = Sums(
            float(count), count * shift / scale, count * (var.double() + shift.square()) / scale.square()
        )
    return sums


def from_sums(total: Mapping[str, Sums], shared: Mapping[str, Running]) -> Update:
    """Read a total of sums as the update of one client that saw everything: merge it alone.

    A variance slightly below zero, from rounding, becomes zero. One that is clearly negative stays, so that
    `merge` refuses the total.

    Args:
        total: {layer name: Sums} added over clients.
        shared: the statistics that `to_sums` was called with.

    Example:
        >>> shared = {"bn": Running(torch.zeros(1), torch.ones(1), eps=3.0)}
        >>> clients = [{"bn": Moments(1, torch.tensor([u]), torch.zeros(1))} for u in (2.0, 6.0)]
        >>> seen = from_sums({"bn": sum(to_sums(c, shared)["bn"] for c in clients)}, shared)["bn"]
        >>> seen.count, seen.mean.item(), seen.var.item()
        (2, 4.0, 4.0)
    """
    same_layers(total, shared)
    layers = {}
    for name, running in shared.items():
        count, z, zz = float(total[name].count), total[name].z.double(), total[name].zz.double()
        if not (math.isfinite(count) and count >= 0 and count == round(count)):
            raise ValueError(f"layer {name!r}: the total count is {count}, not a whole number of values")
        center, scale = _standard(running)
        _same_shape(f"layer {name!r}: sums", center, z, zz)
        mean, square = z / max(count, 1), zz / max(count, 1)
        var = square - mean.square()
        var = torch.where((var < 0) & (var > -1e-9 * square), 0, var)
        seen_mean = center + scale * mean if count else torch.zeros_like(mean)
        layers[name] = Moments(int(count), seen_mean, scale.square() * var)
    return Update(layers, round=version(shared))


def _standard(running: Running) -> tuple[Tensor, Tensor]:
    mean, var = running.mean.double().cpu(), running.var.double().cpu()
    return mean, (var + running.eps).sqrt()


def _same_shape(what: str, like: Tensor, one: Tensor, other: Tensor) -> None:
    if one.shape != like.shape or other.shape != like.shape:
        shapes = f"{tuple(one.shape)} and {tuple(other.shape)}"
        raise ValueError(f"{what} of shape {shapes}, expected {tuple(like.shape)}")
