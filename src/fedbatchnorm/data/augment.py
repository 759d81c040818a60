"""Random crops and flips of images on their device, by one gather."""

import torch
from torch import Tensor

PADDING = 4


def augment(x: Tensor, shifts: Tensor, flips: Tensor) -> Tensor:
    """Crop each image out of itself with four black pixels around it, then mirror it left to right.

    What torchvision's RandomCrop(size, padding=4) and RandomHorizontalFlip compute, for given draws. It takes
    images as they are stored, before normalization, since the padding is 0. Nothing is read back from
    the device, so that it can be compiled, captured in a CUDA graph, and vmapped.

    Args:
        x: (N, c, h, w), of any type.
        shifts: (N, 2), down and right, integers from 0 to 8; 4 is where the image was. They are not checked
            (that would be a read from the device); what lies further outside is black, too.
        flips: (N,), bool.

    Returns:
        (N, c, h, w), of the same type.

    Example:
        >>> x = torch.tensor([[[[1, 2], [3, 4]]]])
        >>> augment(x, torch.tensor([[5, 4]]), torch.tensor([True])).tolist()
        [[[[4, 3], [0, 0]]]]
    """
    n, c, h, w = x.shape
    if shifts.shape != (n, 2) or flips.shape != (n,):
        raise ValueError(
            f"for {n} images, shifts must be ({n}, 2) and flips ({n},); "
            f"they are {tuple(shifts.shape)} and {tuple(flips.shape)}"
        )
    down, right = torch.arange(h, device=x.device), torch.arange(w, device=x.device)
    rows = down + shifts[:, :1] - PADDING
    columns = torch.where(flips.unsqueeze(1), w - 1 - right, right) + shifts[:, 1:] - PADDING
    inside = _within(rows, h).unsqueeze(2) & _within(columns, w).unsqueeze(1)
    source = rows.clamp(0, h - 1).unsqueeze(2) * w + columns.clamp(0, w - 1).unsqueeze(1)
    pixels = x.flatten(2).gather(2, source.view(n, 1, h * w).expand(n, c, h * w)).view(n, c, h, w)
    return torch.where(inside.unsqueeze(1), pixels, 0)


def random_augment(x: Tensor) -> Tensor:
    """`augment` with a shift and a flip for each image, uniform, from the device's default generator."""
    shifts = torch.randint(2 * PADDING + 1, (len(x), 2), device=x.device)
    flips = torch.rand(len(x), device=x.device) < 0.5
    return augment(x, shifts, flips)


def _within(positions: Tensor, size: int) -> Tensor:
    return (positions >= 0) & (positions < size)
