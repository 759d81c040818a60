"""The datasets, as tensors: the paper's Gaussian ring, scikit-learn's digits, CIFAR-10, MNIST, Fashion-MNIST.

One table, `DATASETS`; a new dataset is one function and one row. `of_tensors` makes one of samples and
labels.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import cifar10, mnist

RING_CLASSES, RING_RADIUS = 10, 10.0


class Split(NamedTuple):
    """Samples (N, ...) as they are stored, and labels (N,) in int64."""

    x: Tensor
    y: Tensor


class Dataset(NamedTuple):
    """Training and test samples, and the mean and deviation of each channel of the training set."""

    train: Split
    test: Split
    mean: Tensor
    std: Tensor
    classes: tuple[str, ...]

    def inputs(self, x: Tensor) -> Tensor:
        """The model's input for stored samples `x`: (x - mean) / std, by channel."""
        return (x - self.mean) / self.std

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> "Dataset":
        """Everything on `device`; bytes stay bytes, the rest becomes `dtype`."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, dtype if x.is_floating_point() else None)

        train, test = (Split(move(s.x), s.y.to(device)) for s in (self.train, self.test))
        return Dataset(train, test, move(self.mean), move(self.std), self.classes)


def load(name: "str | Dataset", data_dir: Path | None = None, progress: bool = False) -> Dataset:
    """The dataset of this name; `data_dir` is where its files are, or go (ring and digits have none).

    A user's own dataset, made by `of_tensors`, is returned as it is.
    """
    if isinstance(name, Dataset):
        return name
    if name not in DATASETS:
        raise ValueError(f"dataset {name!r} is not known; choose from {', '.join(DATASETS)}")
    return DATASETS[name](data_dir, progress)


def of_tensors(
    name: str,
    train: tuple[Any, Any],
    test: tuple[Any, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """A dataset of the user's own, from samples and labels; an error names what is wrong.

    Args:
        name: named in errors.
        train: samples (N, ...), numbers or bytes, and labels (N,) from 0 on.
        test: the same for testing; by default every fifth training sample of each class.
        classes: their names; 0, 1, ... if not given.

    Example:
        >>> found = of_tensors("mine", (torch.tensor([[0.0], [2.0]] * 10), torch.arange(20) % 2))
        >>> len(found.train.y), len(found.test.y), found.mean.item()
        (16, 4, 1.0)
    """
    whole = _split_of(name, "train", train)
    if test is None:
        held_out = _every_fifth(whole.y)
        whole, rest = (
            Split(whole.x[~held_out], whole.y[~held_out]),
            Split(whole.x[held_out], whole.y[held_out]),
        )
    else:
        rest = _split_of(name, "test", test)
    if rest.x.shape[1:] != whole.x.shape[1:] or rest.x.dtype != whole.x.dtype:
        raise ValueError(
            f"dataset {name!r}: training samples are {whole.x.dtype} {tuple(whole.x.shape[1:])}, "
            f"test samples {rest.x.dtype} {tuple(rest.x.shape[1:])}: they must be alike"
        )
    if not len(whole.y) or not len(rest.y):
        raise ValueError(f"dataset {name!r} has {len(whole.y)} training and {len(rest.y)} test samples")
    count = 1 + int(max(whole.y.max(), rest.y.max()))
    names = tuple(map(str, range(count))) if classes is None else tuple(map(str, classes))
    if len(names) < count:
        raise ValueError(f"dataset {name!r} has labels up to {count - 1} and {len(names)} names of classes")
    return Dataset(whole, rest, *_moments(whole.x), names)


def _split_of(name: str, which: str, pair: tuple[Any, Any]) -> Split:
    try:
        x, y = (torch.as_tensor(values) for values in pair)
    except (TypeError, ValueError) as error:
        raise ValueError(f"dataset {name!r}: {which} must be samples and labels ({error})") from None
    if y.dim() != 1 or x.dim() < 2 or len(x) != len(y):
        raise ValueError(
            f"dataset {name!r}: {which} has samples {tuple(x.shape)} and labels {tuple(y.shape)}; they must "
            "be (N, ...) and (N,)"
        )
    if y.is_floating_point() or y.is_complex() or (len(y) and int(y.min()) < 0):
        raise ValueError(f"dataset {name!r}: labels of {which} must be whole numbers from 0 on")
    x = x if x.dtype == torch.uint8 else x.float()
    if not x.float().isfinite().all():
        raise ValueError(f"dataset {name!r}: {which} has samples that are not finite")
    return Split(x, y.long())


def _every_fifth(y: Tensor) -> Tensor:
    """Every fifth sample of each class, for testing, (N,)."""
    held_out = torch.zeros(len(y), dtype=torch.bool)
    for label in y.unique():
        held_out[(y == label).nonzero().flatten()[::5]] = True
    return held_out


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, or of each feature of flat samples; 1 for a constant one."""
    if x.dtype == torch.uint8 and x.dim() == 4:
        mean, std = _channel_moments(x)
    else:
        dims = [0, *range(2, x.dim())]
        var, mean = torch.var_mean(x.double(), dims, correction=0, keepdim=True)
        mean, std = mean[0].float(), var[0].sqrt().float()
    return mean, torch.where(std > 0, std, 1)


def ring_points(clients: int, points: int, gamma: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One batch for each client from the paper's ring of ten Gaussians (section 3).

    Class i ~ N(10 (cos 2 pi i/10, sin 2 pi i/10), I). A point is of a uniformly drawn class with
    probability gamma, and of its client's own class otherwise.

    Returns:
        Points (clients, points, 2) in float32, and their classes (clients, points).

    Example:
        >>> x, y = ring_points(10, 30, 0.0, torch.Generator().manual_seed(0))
        >>> tuple(x.shape), y[3].unique().tolist()
        ((10, 30, 2), [3])
    """
    own = (torch.arange(clients) % RING_CLASSES).unsqueeze(1).expand(clients, points)
    drawn = torch.randint(RING_CLASSES, (clients, points), generator=generator)
    shared = torch.rand((clients, points), generator=generator) < gamma
    y = torch.where(shared, drawn, own)
    angle = y * (2 * math.pi / RING_CLASSES)
    center = RING_RADIUS * torch.stack([angle.cos(), angle.sin()], dim=-1)
    return center + torch.randn((clients, points, 2), generator=generator), y


def _ring(data_dir: Path | None, progress: bool) -> Dataset:
    """The ring as a dataset to learn: 600 training points and 100 test points of each class."""
    generator = torch.Generator().manual_seed(0)
    train, test = (
        Split(x.flatten(0, 1), y.flatten())
        for x, y in (ring_points(RING_CLASSES, points, 0.0, generator) for points in (600, 100))
    )
    names = tuple(f"class {i}" for i in range(RING_CLASSES))
    return Dataset(train, test, train.x.mean(0), train.x.std(0, correction=0), names)


def _digits(data_dir: Path | None, progress: bool) -> Dataset:
    """scikit-learn's 1,797 images of handwritten digits, 8 x 8; every fifth of each class is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError(
            "the digits come with scikit-learn: pip install 'PATH[experiments]', where PATH is the folder of "
            "fedbatchnorm's source"
        ) from None
    images, labels = (np.asarray(a) for a in load_digits(return_X_y=True))
    x = torch.from_numpy(images.astype(np.uint8)).view(-1, 1, 8, 8)
    y = torch.from_numpy(labels.astype(np.int64))
    held_out = _every_fifth(y)
    train, test = Split(x[~held_out], y[~held_out]), Split(x[held_out], y[held_out])
    return Dataset(train, test, *_channel_moments(train.x), tuple(str(i) for i in range(10)))


def _cifar10(data_dir: Path | None, progress: bool) -> Dataset:
    """CIFAR-10: 50,000 training and 10,000 test images, 3 x 32 x 32, as bytes."""
    arrays = cifar10.read(data_dir, progress)
    train, test = (Split(*(torch.from_numpy(a) for a in pair)) for pair in arrays)
    return Dataset(train, test, *_channel_moments(train.x), cifar10.CLASSES)


def _mnist(data_dir: Path | None, progress: bool) -> Dataset:
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 1 x 28 x 28, as bytes."""
    return _idx("mnist", data_dir, progress)


def _fashion_mnist(data_dir: Path | None, progress: bool) -> Dataset:
    """Fashion-MNIST: as many images of clothes, in the same format."""
    return _idx("fashion_mnist", data_dir, progress)


def _idx(name: str, data_dir: Path | None, progress: bool) -> Dataset:
    arrays = mnist.read(data_dir, name, progress)
    train, test = (Split(*(torch.from_numpy(a) for a in pair)) for pair in arrays)
    return Dataset(train, test, *_channel_moments(train.x), mnist.EDITIONS[name].classes)


def _channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of byte images (N, c, h, w), exact, as (c, 1, 1)."""
    values = torch.arange(256, dtype=torch.float64)
    share = torch.stack([torch.bincount(plane.flatten(), minlength=256) for plane in x.unbind(1)]).double()
    share /= share.sum(1, keepdim=True)
    mean = share @ values
    variance = share @ values.square() - mean.square()
    return tuple(t.float().view(-1, 1, 1) for t in (mean, variance.sqrt()))  # pyrefly: ignore


DATASETS: dict[str, Callable[[Path | None, bool], Dataset]] = {
    "gaussian_ring": _ring,
    "digits": _digits,
    "cifar10": _cifar10,
    "mnist": _mnist,
    "fashion_mnist": _fashion_mnist,
}
