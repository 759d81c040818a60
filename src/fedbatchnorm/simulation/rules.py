"""Bounds of the fields of a run in their annotations, and a plain check of them.

The annotations are written once. `checked` reads them here, where only torch and numpy may be needed; in
`fedbatchnorm.experiments` pydantic reads them.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

Precision = Literal["float32", "tf32", "bf16", "float64"]
Algorithm = Literal["dsgd", "fedavg"]
Schedule = Literal["constant", "step", "cosine", "exponential"]
Optimizer = Literal["sgd", "adam"]
Server = Literal["mean", "momentum", "adam"]
TARGETS = ("means", "variances", "gradients")
_LARGEST = 2**63  # whole numbers stay below it
_SHOWN = 200  # characters of a value in a message


@dataclass(frozen=True)
class Must:
    """The condition on a number, as text and as bounds, in a field's annotation.

    Example:
        >>> Must("above 0 and at most 1", gt=0, le=1).allows(0.0)
        False
    """

    words: str
    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf

    def allows(self, value: Any) -> bool:
        """Whether a value is within the bounds; values that are not numbers have none."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True
        if isinstance(value, int) and abs(value) >= _LARGEST:
            return False
        return value >= self.ge and value <= self.le and value < self.lt and (value > self.gt)

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """The same check for pydantic."""
        from pydantic_core import core_schema

        def check(value: Any) -> Any:
            if not self.allows(value):
                raise ValueError(self.words)
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))


def checked(config: Any) -> dict[str, Any]:
    """The values of all fields, checked against their annotations; an error names the field.

    Integers in a field of floats become floats, so that 0 and 0.0 are the same setting.
    """
    hints = annotations(type(config))
    return {
        field.name: _checked(field.name, hints[field.name], getattr(config, field.name))
        for field in dataclasses.fields(config)
    }


@functools.cache
def annotations(kind: type) -> dict[str, Any]:
    """The annotation of each field of a dataclass, with bounds."""
    return typing.get_type_hints(kind, include_extras=True)


def refusal(name: str, hint: Any, value: Any) -> str:
    """The error message for a value that a field cannot have."""
    many = isinstance(value, int) and abs(value) >= _LARGEST
    shown = "a number of many digits" if many else repr(value)[:_SHOWN]
    return f"{name} is {shown}; it must be {_words(hint)}{', and below 2^63' if many else ''}"


def _words(hint: Any) -> str:
    kinds, bounds = _parts(hint)
    if bounds:
        return bounds[0].words
    names = [kind for kind in kinds if isinstance(kind, str)]
    if names:
        return f"one of {', '.join(names)}"
    return {bool: "true or false", str: "a name", int: "a whole number"}.get(kinds[0], "a number")


@functools.cache
def _parts(hint: Any) -> tuple[tuple[Any, ...], tuple[Must, ...]]:
    """The types and the literal values that an annotation allows, and its bounds."""
    if get_origin(hint) is Annotated:
        kinds, bounds = _parts(get_args(hint)[0])
        return kinds, (*bounds, *(m for m in hint.__metadata__ if isinstance(m, Must)))
    if get_origin(hint) is Literal:
        return get_args(hint), ()
    if get_origin(hint) in (typing.Union, type(int | None)):
        found = [_parts(argument) for argument in get_args(hint)]
        return tuple(k for kinds, _ in found for k in kinds), tuple(b for _, bounds in found for b in bounds)
    return (get_origin(hint) or hint,), ()


def _checked(name: str, hint: Any, value: Any) -> Any:
    kinds, bounds = _parts(hint)
    if type(value) is int and float in kinds and int not in kinds and abs(value) < _LARGEST:
        value = float(value)
    known = type(value) in kinds or (isinstance(value, str) and value in kinds)
    known = known or (Callable in kinds and callable(value))
    if not known or not all(bound.allows(value) for bound in bounds):
        raise ValueError(refusal(name, hint, value))
    return value
