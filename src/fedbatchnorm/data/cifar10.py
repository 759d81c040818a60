"""The files of CIFAR-10, official binary edition: found, downloaded, unpacked, checked and read.

Looked for in `data_dir`, else in $FEDBATCHNORM_DATA, else in the user's cache folder, and downloaded to
that place when it is not there. Every file is checked against its MD5 sum as it is read.
"""

import contextlib
import functools
import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .files import DataError, check, data_folder, downloads, one_line

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
FILES = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_RECORDS, _PIXELS = 10_000, 3 * 32 * 32
_FILE_SIZE = _RECORDS * (1 + _PIXELS)
_NOT_NEEDED = {"batches.meta.txt", "readme.html"}  # in the archive, and left in it


def find(data_dir: Path | None = None) -> Path | None:
    """The folder with all six files, or None; `data_dir` may be that folder or the one around it."""
    root = data_folder(data_dir)
    for folder in (root / FOLDER, root):
        if all((folder / name).is_file() for name in FILES):
            return folder
    return None


def read(
    data_dir: Path | None = None, progress: bool = False
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Training and test images (N, 3, 32, 32) in uint8 with labels (N,) in int64; downloads if need be."""
    folder = find(data_dir) or download(data_folder(data_dir), progress)
    records = {}
    for name, expected in FILES.items():
        content = (folder / name).read_bytes()
        check(content, expected, f"{folder / name}")
        records[name] = np.frombuffer(content, np.uint8).reshape(_RECORDS, 1 + _PIXELS)
    test = records.pop("test_batch.bin")
    return _images(np.concatenate(list(records.values()))), _images(test)


def download(root: Path, progress: bool = False, url: str = URL, md5: str = ARCHIVE_MD5) -> Path:
    """Download the official archive, unpack it below `root`, and return the folder with the files."""
    with downloads(root, functools.partial(_by_hand, root), progress) as get:
        return unpack(get(url, md5, "archive.tar.gz"), root)


def unpack(archive: Path, root: Path) -> Path:
    """Unpack the six files of an archive below `root`; anything else in it refuses it as a whole.

    Every name, type and size is checked before a byte is written, and every checksum before a file
    gets its name.
    """
    try:
        with tarfile.open(archive) as tar:
            wanted = dict(_wanted(tar))
            missing = FILES.keys() - wanted.keys()
            if missing:
                raise DataError(f"{archive.name} lacks {', '.join(sorted(missing))}; nothing was unpacked")
            contents = {name: _content(tar, member) for name, member in wanted.items()}
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{archive.name} is not a readable archive: {one_line(error)}") from error
    for name, content in contents.items():
        check(content, FILES[name], f"{name} in {archive.name}")
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        with _replacing(folder / name) as temporary:
            temporary.write_bytes(content)
    return folder


def _wanted(tar: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """The members to unpack; an error for whatever the official archive does not hold."""
    for member in tar:
        folder, _, name = member.name.partition("/")
        if folder == FOLDER and name in FILES and member.isreg() and member.size == _FILE_SIZE:
            yield name, member
        elif not (folder == FOLDER and ((member.isdir() and not name) or name in _NOT_NEEDED)):
            raise DataError(
                f"the archive holds {member.name!r}, which the official one does not "
                "(a link, another name, size or type); nothing was unpacked"
            )


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


def _images(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return records[:, 1:].reshape(-1, 3, 32, 32).copy(), records[:, 0].astype(np.int64)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary name that becomes `path` only when all went well."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _by_hand(root: Path, why: str) -> str:
    return (
        f"CIFAR-10 is not in {root} and could not be downloaded: {why}.\n"
        f"To put it there by hand: download {URL} (MD5 {ARCHIVE_MD5}), unpack it, and place the folder "
        f"{FOLDER} in {root}; or name the folder that holds it with --data-dir or FEDBATCHNORM_DATA."
    )
