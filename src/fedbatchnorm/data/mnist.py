"""The files of MNIST and Fashion-MNIST, official IDX editions: found, downloaded, checked and read.

Looked for in `data_dir`, else in $FEDBATCHNORM_DATA, else in the user's cache folder, and downloaded to
that place when they are not there. Gzipped or unpacked, every file is checked against its MD5 sum as it
is read.
"""

import functools
import gzip
import io
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .files import DataError, check, data_folder, downloads, md5_of, one_line

SHAPES = {
    "train-images-idx3-ubyte": (60_000, 28, 28),
    "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte": (10_000,),
}
_CLOTHES = (
    *("t-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
_UNSIGNED_BYTES = 0x08  # the third byte of an IDX file; the fourth is the number of dimensions


class Sums(NamedTuple):
    """The MD5 sums of a file: gzipped, as it is published, and unpacked."""

    packed: str
    unpacked: str


class Edition(NamedTuple):
    """A dataset in MNIST's format: where its files are, on disk and on the network, and what they are."""

    title: str
    folders: tuple[str, ...]  # ours, to which it is downloaded; torchvision's
    mirrors: tuple[str, ...]
    sums: dict[str, Sums]
    classes: tuple[str, ...]


EDITIONS = {
    "mnist": Edition(
        title="MNIST",
        folders=("mnist", "MNIST/raw"),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        sums={
            "train-images-idx3-ubyte": Sums(
                "f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"
            ),
            "train-labels-idx1-ubyte": Sums(
                "d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"
            ),
            "t10k-images-idx3-ubyte": Sums(
                "9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"
            ),
            "t10k-labels-idx1-ubyte": Sums(
                "ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"
            ),
        },
        classes=tuple("0123456789"),
    ),
    "fashion_mnist": Edition(
        title="Fashion-MNIST",
        folders=("fashion-mnist", "FashionMNIST/raw"),
        mirrors=(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        sums={
            "train-images-idx3-ubyte": Sums(
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"
            ),
            "train-labels-idx1-ubyte": Sums(
                "25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"
            ),
            "t10k-images-idx3-ubyte": Sums(
                "bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"
            ),
            "t10k-labels-idx1-ubyte": Sums(
                "bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"
            ),
        },
        classes=_CLOTHES,
    ),
}


def find(data_dir: Path | None = None, name: str = "mnist") -> Path | None:
    """The folder with all four files, each gzipped or unpacked, or None.

    `data_dir` may be that folder or the one around it, ours or torchvision's. Both datasets have files
    of the same names, so a folder that is not named after the one does not count if it holds the other.
    """
    root = data_folder(data_dir)
    for folder in (*(root / below for below in EDITIONS[name].folders), root):
        if not _missing(folder) and not (folder == root and _holds_another(folder, name)):
            return folder
    return None


def read(
    data_dir: Path | None = None, name: str = "mnist", progress: bool = False
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Training and test images (N, 1, 28, 28) in uint8 with labels (N,) in int64; downloads if need be."""
    folder = find(data_dir, name) or download(data_folder(data_dir), name, progress)
    train_x, train_y, test_x, test_y = (_array(folder, file, name) for file in SHAPES)
    return (train_x, train_y), (test_x, test_y)


def download(root: Path, name: str = "mnist", progress: bool = False) -> Path:
    """Download the four files to a folder below `root`, all of them or none, and return that folder."""
    edition = EDITIONS[name]
    folder = root / edition.folders[0]
    with downloads(root, functools.partial(_by_hand, root, name), progress) as get:
        downloaded = [_from_a_mirror(get, edition, file) for file in SHAPES]
        folder.mkdir(parents=True, exist_ok=True)
        for path in downloaded:
            path.replace(folder / path.name)
    return folder


def _from_a_mirror(get: Callable[[str, str, str], Path], edition: Edition, file: str) -> Path:
    """A gzipped file from the first mirror that has it; the error of the last one if none has."""
    *others, last = (f"{mirror}{file}.gz" for mirror in edition.mirrors)
    for url in others:
        try:
            return get(url, edition.sums[file].packed, f"{file}.gz")
        except (OSError, ValueError):  # not there, or not this file: the next one may do better
            continue
    return get(last, edition.sums[file].packed, f"{file}.gz")


def _missing(folder: Path) -> list[str]:
    return [file for file in SHAPES if not any(p.is_file() for p in (_packed(folder, file), folder / file))]


def _packed(folder: Path, file: str) -> Path:
    return folder / f"{file}.gz"


def _holds_another(folder: Path, name: str) -> bool:
    """Whether the smallest of the files, the test labels, are those of another dataset."""
    file = "t10k-labels-idx1-ubyte"
    path = _packed(folder, file) if _packed(folder, file).is_file() else folder / file
    found = md5_of(_read_at_most(path, _longest_packed(file)))
    return any(found in other.sums[file] for key, other in EDITIONS.items() if key != name)


def _array(folder: Path, file: str, name: str) -> np.ndarray:
    """Images (N, 1, 28, 28) in uint8 or labels (N,) in int64, of a file that is what it should be."""
    sums, shape = EDITIONS[name].sums[file], SHAPES[file]
    path = _packed(folder, file)
    if path.is_file():
        values = _values(_unpacked(path, file, sums.packed), shape, path)
    else:
        path = folder / file
        content = _read_at_most(path, _size(file) + 1)
        values = _values(content, shape, path)
        check(content, sums.unpacked, f"{path}")
    return values.astype(np.int64) if len(shape) == 1 else values[:, None].copy()


def _unpacked(path: Path, file: str, md5: str) -> bytes:
    """What is in a gzip file with this checksum, at most one byte more than there should be."""
    content = _read_at_most(path, _longest_packed(file))
    check(content, md5, f"{path}")
    try:
        with gzip.open(io.BytesIO(content)) as stream:
            return stream.read(_size(file) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _wrong(path, f"it cannot be unpacked: {one_line(error)}") from error


def _values(content: bytes, shape: tuple[int, ...], path: Path) -> np.ndarray:
    """The bytes of an IDX file, in this shape; an error for anything else."""
    header = struct.pack(f">{1 + len(shape)}I", (_UNSIGNED_BYTES << 8) + len(shape), *shape)
    size = len(header) + math.prod(shape)
    if content[:4] != header[:4]:
        raise _wrong(path, f"it begins with the bytes {content[:4].hex()}, not {header[:4].hex()}")
    if len(content) >= len(header) and content[: len(header)] != header:
        found = struct.unpack_from(f">{len(shape)}I", content, 4)
        raise _wrong(path, f"its dimensions are {found}, not {shape}")
    if len(content) != size:
        found = f"{len(content)}" if len(content) < size else "more"
        raise _wrong(path, f"it holds {found} bytes, not {size}")
    values = np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)
    if len(shape) == 1 and values.max() > 9:
        raise _wrong(path, f"it holds the label {values.max()}; labels are 0 to 9")
    return values


def _read_at_most(path: Path, size: int) -> bytes:
    with path.open("rb") as stream:
        return stream.read(size)


def _size(file: str) -> int:
    return 4 * (1 + len(SHAPES[file])) + math.prod(SHAPES[file])


def _longest_packed(file: str) -> int:
    return 2 * _size(file) + 1000  # gzip adds far less to what it cannot make smaller


def _wrong(path: Path, why: str) -> DataError:
    return DataError(f"{path} is not the file it should be: {why}. Delete it and run again to download it")


def _by_hand(root: Path, name: str, why: str) -> str:
    edition = EDITIONS[name]
    files = ", ".join(f"{file}.gz (MD5 {sums.packed})" for file, sums in edition.sums.items())
    partial = [f for f in (*(root / f for f in edition.folders), root) if 0 < len(_missing(f)) < len(SHAPES)]
    lacks = "".join(f"\n{folder} lacks {', '.join(_missing(folder))}." for folder in partial)
    return (
        f"{edition.title} is not in {root} and could not be downloaded: {why}.{lacks}\n"
        f"To put it there by hand: download {files} from {edition.mirrors[0]} and place them "
        f"in {root / edition.folders[0]}; or name the folder that holds them with --data-dir or "
        "FEDBATCHNORM_DATA."
    )
