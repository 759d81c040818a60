"""Hashes of the user's own code and data, so that changed code is a new experiment.

The hash of a function covers its source, its defaults, its closure, and the same for everything of the user's
own that it refers to. Libraries count by name only. The rest of the file does not matter.
"""

import functools
import hashlib
import importlib.util
import inspect
import site
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from torch import Tensor

_LENGTH = 16  # characters of a hash


def source_hash(value: Any) -> str:
    """A hash of a function, a class, tensors, or a tuple, list or dictionary of such.

    Example:
        >>> source_hash((np.arange(3), "a")) == source_hash((np.arange(3), "a")) != source_hash(np.arange(4))
        True
    """
    found = hashlib.sha256()
    for piece in _pieces(value, set()):
        found.update(len(piece).to_bytes(8, "big") + piece)
    return found.hexdigest()[:_LENGTH]


def file_hash(file: Path) -> str:
    """A hash of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:_LENGTH]


def module_file(name: str) -> Path | None:
    """The file of the module of this name; None if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (Exception, SystemExit):  # of the package around it
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return Path(spec.origin)


def _pieces(value: Any, seen: set[int]) -> Iterator[bytes]:
    """The parts of a value for the hash; what was seen before or is a library's counts by name."""
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, Tensor | np.ndarray):
        array = np.ascontiguousarray(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)
        yield f"array {array.dtype} {array.shape}".encode()
        yield array.tobytes()
    elif isinstance(value, types.ModuleType):
        file = getattr(value, "__file__", None)
        yield value.__name__.encode()
        if file is not None and _is_own(value.__name__, file):
            yield Path(file).read_bytes()
    elif isinstance(value, functools.partial):
        yield from _pieces((value.func, value.args, value.keywords), seen)
    elif isinstance(value, types.FunctionType | type):
        yield value.__qualname__.encode() if _is_users(value) else name.encode()
        if _is_users(value) and id(value) not in seen:
            seen.add(id(value))
            yield from _code(value, seen)
    elif isinstance(value, types.MethodType):
        yield from _pieces((value.__func__, value.__self__), seen)
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} {len(value)}".encode()
        for item in value:
            yield from _pieces(item, seen)
    elif isinstance(value, dict):
        yield f"dict {len(value)}".encode()
        for key in sorted(value, key=repr):
            yield from _pieces((key, value[key]), seen)
    elif value is None or isinstance(value, str | bytes | bool | int | float | complex | Enum):
        yield repr(value).encode()
    elif id(value) not in seen:
        seen.add(id(value))
        yield from _pieces((type(value), dict(getattr(value, "__dict__", {}))), seen)


def _code(value: Any, seen: set[int]) -> Iterator[bytes]:
    """The source of a user's function or class, and what it refers to."""
    try:
        yield textwrap.dedent(inspect.getsource(value)).encode()
    except (OSError, TypeError, SyntaxError, TokenError):  # no file, or none of Python: by the compiled code
        code = getattr(value, "__code__", None)
        yield from _compiled(code) if code is not None else [value.__qualname__.encode()]
    if isinstance(value, type):
        for name, item in sorted(vars(value).items()):
            if isinstance(item, types.FunctionType):
                yield name.encode()
                yield from _references(item, seen)
        yield from _pieces([base for base in value.__bases__ if base is not object], seen)
    else:
        yield from _references(value, seen)


def _references(function: types.FunctionType, seen: set[int]) -> Iterator[bytes]:
    cells = function.__closure__ or ()
    closed = dict(zip(function.__code__.co_freevars, (_content(cell) for cell in cells), strict=True))
    named = {n: function.__globals__[n] for n in _names(function.__code__) if n in function.__globals__}
    yield from _pieces((function.__defaults__, function.__kwdefaults__), seen)
    for name, item in sorted((closed | named).items()):
        yield name.encode()
        yield from _pieces(item, seen)


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


def _compiled(code: types.CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr(code.co_names).encode()
    for constant in code.co_consts:
        yield from _compiled(constant) if isinstance(constant, types.CodeType) else [repr(constant).encode()]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _is_users(value: Callable[..., Any] | type) -> bool:
    module = sys.modules.get(value.__module__ or "")
    return _is_own(value.__module__ or "", getattr(module, "__file__", None))


@functools.cache
def _is_own(module: str, file: str | None) -> bool:
    """Whether a module is neither this package nor a library."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("fedbatchnorm", "torch", "numpy"):
        return top == "__main__"
    places = {*sysconfig.get_paths().values(), site.getusersitepackages(), *site.getsitepackages()}
    library = [Path(place) for place in places if place.endswith(("site-packages", "dist-packages"))]
    return file is None or not any(Path(file).resolve().is_relative_to(place) for place in library)
