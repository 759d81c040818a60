"""Files that survive crashes and concurrent processes: how to write, lock and read them.

A file is written under a unique name, synced, renamed, and its folder synced: a crash leaves
the old content or the new one. Symbolic links are not followed where something is written.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # not on Windows: there, two processes on one folder are the user's to avoid
    fcntl = None

LARGEST = 2**30  # bytes of a text file that is read as a whole
_LONGEST = 600  # characters of a message
_PART = ".part"
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF)


class BusyError(RuntimeError):
    """Another process is working on this run."""


class DamagedError(ValueError):
    """A file is damaged or invalid; the short message names it."""

    def __init__(self, message: str):
        super().__init__(message if len(message) <= _LONGEST else f"{message[:_LONGEST]}...")


class Lock(NamedTuple):
    """A file that is locked, by its path and its number."""

    path: Path
    number: int

    def holds(self) -> bool:
        """Whether the path still leads to the file that is locked: it may have been removed and recreated."""
        try:
            there, here = self.path.lstat(), os.fstat(self.number)
        except OSError:
            return False
        return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)


@contextlib.contextmanager
def locked(path: Path, wait: bool = False, keep: bool = True) -> Iterator[Lock]:
    """Hold a lock file; `BusyError` if another process does and we are not to wait for it.

    Args:
        path: the lock file, made if need be.
        wait: until it is free.
        keep: the lock file afterwards.
    """
    while True:
        lock = Lock(path, _open(path, os.O_RDWR | os.O_CREAT))
        try:
            if fcntl is not None:
                fcntl.flock(lock.number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            os.close(lock.number)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise BusyError(f"another process is working on {path.parent}") from None
            raise _named(error, path) from None
        if fcntl is None or lock.holds():
            break
        os.close(lock.number)  # the process that had it has removed it
    try:
        yield lock
    finally:
        if not keep and lock.holds():
            path.unlink(missing_ok=True)
        os.close(lock.number)


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock right now."""
    if fcntl is None:
        return False
    try:
        number = _open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(number)
    return False


def write_bytes(path: Path, content: bytes, before: Callable[[], None] = lambda: None) -> None:
    """Write a file so that a crash leaves the old one or the new one; it is on the disk when this returns.

    Args:
        path: the file.
        content: all of it.
        before: called when everything but the name is written; an error keeps the old file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_PART}")
    try:
        number = _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        before()
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _named(error, path) from None
    sync_folder(path.parent)


def append(path: Path, text: str) -> None:
    """Add text at the end of a file."""
    try:
        with os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            file.write(text.encode())
    except OSError as error:
        raise _named(error, path) from None


def cut(path: Path, length: int) -> None:
    """Cut a file to a length, if it exists."""
    with contextlib.suppress(FileNotFoundError), os.fdopen(_open(path, os.O_RDWR), "r+b") as file:
        file.truncate(length)


def sync(path: Path) -> None:
    """Sync a file's content to disk, if the file exists."""
    with contextlib.suppress(FileNotFoundError):
        number = _open(path, os.O_RDWR)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def sync_folder(folder: Path) -> None:
    """Sync a folder's names to disk, if the system supports it."""
    if os.name == "nt":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise _named(error, folder) from None
    finally:
        os.close(number)


def sweep(folder: Path, name: str = "*") -> None:
    """Remove what killed writers have left; only for the holder of the lock."""
    for part in folder.glob(f".{name}.*{_PART}"):
        with contextlib.suppress(OSError):
            part.unlink()


def regular(path: Path) -> os.stat_result:
    """The `stat` of a regular file; a `DamagedError` for anything else."""
    try:
        facts = path.stat()
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISREG(facts.st_mode):
        raise DamagedError(f"{path}: not a file")
    return facts


def read_bytes(path: Path) -> bytes:
    """All of a regular file of reasonable size; a `DamagedError` for anything else."""
    if regular(path).st_size > LARGEST:
        raise DamagedError(f"{path}: larger than {LARGEST} bytes")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror or error}") from None


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _SAFE, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path} is a symbolic link, which is not followed: remove it") from None
        raise


def _named(error: BaseException, path: Path) -> BaseException:
    """The error, with the file that it is about."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, os.strerror(error.errno), str(path))
    return error
