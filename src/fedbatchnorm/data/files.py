"""Common code for datasets with files: where to find them, downloading and checking.

Looked for in `data_dir`, else in $FEDBATCHNORM_DATA, else in the user's cache folder.
"""

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


class DataError(RuntimeError):
    """Data is missing, damaged or not what it should be; the message says what to do."""


def data_folder(data_dir: Path | None = None) -> Path:
    """Where data is looked for and downloaded to."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    if os.environ.get("FEDBATCHNORM_DATA"):
        return Path(os.environ["FEDBATCHNORM_DATA"]).expanduser()
    if sys.platform == "win32":
        cache = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        cache = "~/Library/Caches"
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "fedbatchnorm"


@contextlib.contextmanager
def downloads(
    root: Path, by_hand: Callable[[str], str], progress: bool = False
) -> Iterator[Callable[[str, str, str], Path]]:
    """A function (url, md5, name) -> path that downloads to a folder below `root`, deleted at the end.

    Any failure, of the download or of what is done with the files, raises a DataError with the text
    `by_hand(why)`.
    """
    try:
        import pooch
    except ImportError:
        why = "pooch is not installed (pip install pooch)"
        raise DataError(by_hand(why)) from None
    pooch.get_logger().setLevel("ERROR")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:

            def get(url: str, md5: str, name: str) -> Path:
                return Path(pooch.retrieve(url, f"md5:{md5}", path=folder, fname=name, progressbar=progress))

            yield get
    except (OSError, ValueError) as error:  # no network, no space, no permission; a wrong checksum
        raise DataError(by_hand(one_line(error))) from error


def check(content: bytes, expected: str, what: str) -> None:
    """An error for content whose MD5 sum is not the expected one."""
    found = md5_of(content)
    if found != expected:
        raise DataError(
            f"{what} is damaged: its MD5 is {found}, not {expected}. Delete it and run again to download it"
        )


def md5_of(content: bytes) -> str:
    """The MD5 sum, which detects damage and mix-ups."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def one_line(error: Exception) -> str:
    """The message of an error, short and on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
