"""Updates and statistics as bytes: safetensors, so nothing that arrives is ever executed."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .exchange import check_running
from .messages import DTYPES, FORMAT, Update
from .moments import Moments, Running

_KEY = "fedbatchnorm"
_HEADER = 1 << 20  # bytes of header that are read at all: thousands of layers


class FormatError(ValueError):
    """The bytes are not a message of this library, or are damaged."""


def to_bytes(message: Update | Mapping[str, Running]) -> bytes:
    """Write an update or statistics as bytes.

    Example:
        >>> import torch
        >>> shared = {"bn": Running(torch.zeros(2), torch.ones(2), tracked=7)}
        >>> from_bytes(to_bytes(shared))["bn"].tracked
        7
    """
    from safetensors.torch import save

    names = list(message)
    tensors = {}
    for i, name in enumerate(names):
        for what in ("mean", "var"):
            tensors[f"{i}.{what}"] = getattr(message[name], what).detach().cpu().contiguous().clone()
    header: dict[str, Any] = {"layers": names}
    if isinstance(message, Update):
        header |= {
            "kind": "update",
            "format": message.format,
            "round": message.round,
            "id": message.id,
            "count": [int(message[name].count) for name in names],
            "skipped": [message.skipped.get(name, 0) for name in names],
        }
    else:
        for name in names:
            check_running(name, message[name])
        header |= {
            "kind": "statistics",
            "format": FORMAT,
            "tracked": [message[name].tracked for name in names],
            "momentum": [message[name].momentum for name in names],
            "eps": [float(message[name].eps) for name in names],
        }
    return save(tensors, metadata={_KEY: json.dumps(header)})


def from_bytes(data: bytes) -> Update | dict[str, Running]:
    """Read what `to_bytes` wrote. Anything else gives a `FormatError`.

    Only the format is checked: an update with a NaN or a negative variance is read, and `merge` gives it a
    verdict.
    """
    header, tensors = _open(data)
    try:
        names, kind = header["layers"], header["kind"]
        _expect(header["format"] == FORMAT, f"format {header['format']!r}; this version reads {FORMAT}")
        _expect(_is_list(names, str) and len(set(names)) == len(names), "layer names")
        wanted = {f"{i}.{what}" for i in range(len(names)) for what in ("mean", "var")}
        _expect(set(tensors) == wanted, "tensor names")
        for tensor in tensors.values():
            _expect(tensor.dim() == 1 and tensor.dtype in DTYPES, "a tensor's shape or type")
        if kind == "update":
            return _read_update(header, names, tensors)
        _expect(kind == "statistics", f"kind {kind!r}")
        return _read_statistics(header, names, tensors)
    except (KeyError, TypeError) as error:
        raise FormatError(f"not a fedbatchnorm message: {error!r}") from error


def _open(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Our header and the tensors; each tensor is exactly as large as its bytes."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not isinstance(data, bytes | bytearray | memoryview):
        raise FormatError(f"expected bytes, got {type(data).__name__}")
    data = bytes(data)
    size = int.from_bytes(data[:8], "little")
    _expect(len(data) >= 8 and size <= min(len(data) - 8, _HEADER), "the header's length")
    try:
        tensors = load(data)
        header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_KEY])
        _expect(isinstance(header, dict), "the header")
        return header, tensors
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError, RuntimeError) as error:
        raise FormatError(f"not a fedbatchnorm message: {error}") from error


def _read_update(header: dict, names: list[str], tensors: dict[str, Tensor]) -> Update:
    counts, skipped = header["count"], header["skipped"]
    for what in (counts, skipped):
        _expect(_is_list(what, int) and len(what) == len(names), "counts")
    for what in (header["round"], header["id"]):
        _expect(what is None or _is(what, int), "round or id")
    layers = {n: Moments(counts[i], tensors[f"{i}.mean"], tensors[f"{i}.var"]) for i, n in enumerate(names)}
    lost = {name: times for name, times in zip(names, skipped, strict=True) if times}
    return Update(layers, header["round"], lost, header["id"])


def _read_statistics(header: dict, names: list[str], tensors: dict[str, Tensor]) -> dict[str, Running]:
    tracked, momentum, eps = header["tracked"], header["momentum"], header["eps"]
    _expect(_is_list(tracked, int) and _is_list(eps, float) and isinstance(momentum, list), "settings")
    _expect(len(tracked) == len(momentum) == len(eps) == len(names), "settings")
    _expect(all(m is None or _is(m, float) or _is(m, int) for m in momentum), "momentum")
    shared = {
        name: Running(tensors[f"{i}.mean"], tensors[f"{i}.var"], tracked[i], momentum[i], eps[i])
        for i, name in enumerate(names)
    }
    for name, running in shared.items():
        try:
            check_running(name, running)
        except ValueError as error:
            raise FormatError(str(error)) from error
    return shared


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(_is(item, kind) for item in value)


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise FormatError(f"not a fedbatchnorm message: unexpected {what}")
