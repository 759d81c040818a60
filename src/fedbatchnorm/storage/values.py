"""Values read from JSON from an untrusted source: parsed, and checked with errors that name the place."""

import json
import math
from typing import Any

from .files import DamagedError

_LARGEST = 2**63  # whole numbers stay below it
_SHOWN = 60  # characters of a value in a message


def parse(content: bytes, where: object) -> Any:
    """The JSON in a file or line; an error says where it is and what is wrong."""
    try:
        return json.loads(content.decode(), parse_constant=_refuse)
    except RecursionError:
        raise DamagedError(f"{where}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise DamagedError(f"{where}: not JSON: {' '.join(str(error).split())[:200]}") from None


def number(
    values: dict[str, Any],
    name: str,
    where: object,
    low: float = -math.inf,
    high: float = math.inf,
    needed: bool = True,
) -> float:
    """A finite number in a range; null or nothing is fine (and 0) where it is not needed."""
    value = values.get(name)
    if value is None and not needed:
        return 0.0
    fine = (type(value) is int and abs(value) < _LARGEST) or (type(value) is float and math.isfinite(value))
    if not fine or not low <= value <= high:
        wanted = "a number" if low == -math.inf else f"a number from {low:g} on"
        wanted = wanted if high == math.inf else f"a number between {low:g} and {high:g}"
        raise DamagedError(f"{where}: {name} is {shown(value)}; it must be {wanted}")
    return value  # pyrefly: ignore


def text(value: Any, where: object) -> str:
    """Text that can be written as UTF-8."""
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:
        pass
    raise DamagedError(f"{where} is {shown(value)}; it must be a text")


def shown(value: Any) -> str:
    """A value in a message: short, in ASCII."""
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return "a number of many digits"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__}"
    found = ascii(value)
    return found if len(found) <= _SHOWN else found[:_SHOWN] + "..."


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number")
