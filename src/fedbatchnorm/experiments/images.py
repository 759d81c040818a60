"""A folder of images as a dataset."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from .parts import Part, dataset

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


def image_folder(
    name: str, folder: str | Path, *, size: tuple[int, int] | None = None, gray: bool = False, title: str = ""
) -> Part:
    """A dataset of images in folders, one for each class: FOLDER/cat/1.png, FOLDER/dog/2.png.

    If FOLDER has the folders `train` and `test`, the classes are in these; otherwise every fifth image of
    each class is used for testing.

    Args:
        name: its name in results.
        folder: the folder that has a folder for each class.
        size: (height, width) to which images are scaled; needed if they differ in size.
        gray: one channel instead of three.
        title: its title in figures; the name if not given.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for i in range(12):
        ...         place = Path(folder, "dark" if i < 6 else "light")
        ...         place.mkdir(exist_ok=True)
        ...         Image.new("L", (8, 8), 20 * i).save(place / f"{i}.png")
        ...     mine = image_folder("shades", folder, gray=True)
        >>> tuple(mine.value.train.x.shape), mine.value.classes
        ((8, 1, 8, 8), ('dark', 'light'))
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder: give one that holds a folder of images for each class")
    halves = [root / "train", root / "test"]
    places = halves if all(map(Path.is_dir, halves)) else [root]
    classes = _folders(places[0])
    for other in places[1:]:
        if _folders(other) != classes:
            raise ValueError(f"{other} has other classes than {places[0]}")
    read = [_read(place, classes, size, "L" if gray else "RGB") for place in places]
    return dataset(name, read[0], read[1] if len(read) > 1 else None, classes=tuple(classes), title=title)


def _folders(place: Path) -> list[str]:
    found = sorted(path.name for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(found) < 2:
        raise ValueError(f"{place} holds {len(found)} folders: give it one for each class, two at least")
    return found


def _read(
    place: Path, classes: list[str], size: tuple[int, int] | None, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, c, h, w) as bytes, and their classes (N,)."""
    arrays, labels, first = [], [], None
    for label, name in enumerate(classes):
        files = sorted(path for path in (place / name).iterdir() if path.suffix.lower() in ENDINGS)
        if not files:
            raise ValueError(f"{place / name} holds no image ({', '.join(ENDINGS)})")
        for file in files:
            array = _pixels(file, size, mode)
            if arrays and array.shape != arrays[0].shape:
                theirs, its = (" x ".join(map(str, a.shape[1:])) for a in (arrays[0], array))
                raise ValueError(f"{file} is {its}, {first} is {theirs}: give size=(height, width)")
            first = first or file
            arrays.append(array)
            labels.append(label)
    return torch.from_numpy(np.stack(arrays)), torch.tensor(labels)


def _pixels(file: Path, size: tuple[int, int] | None, mode: str) -> np.ndarray:
    try:
        with Image.open(file) as image:
            plain = image.convert(mode)
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file} cannot be read as an image: {error}") from None
    if size is not None:
        plain = plain.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(plain)
    return np.ascontiguousarray(pixels[None] if mode == "L" else pixels.transpose(2, 0, 1))
