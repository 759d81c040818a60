"""The flags of `fedbatchnorm run`, by topic: a group for each, so that `--help` can be read.

A flag is a field of `experiments.config.Run`; its text is the field's. Every flag takes several values, as in
`--scheme fbn,naive --seed 0..4`; a file of settings has lists.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from .experiments.config import Run
from .experiments.grids import grid
from .experiments.parts import KINDS, is_known, names_of
from .simulation.models import imported
from .storage.files import write_bytes

# Topic -> (what it is about, the fields of a run that belong to it).
TOPICS: dict[str, tuple[str, str]] = {
    "model_and_data": (
        "What is learned, and how the data is split among the clients.",
        "dataset model partition gamma alpha augment",
    ),
    "federation": (
        "Who takes part in a round, and what the server does.",
        "algorithm clients cohort rounds local_steps local_epochs weighting server server_lr server_momentum",
    ),
    "training": (
        "What a client does in its steps.",
        "batch lr schedule decay optimizer momentum momentum_kind local_state clip weight_decay prox "
        "precision seed evaluate_every",
    ),
    "normalization": (
        "What clients normalize with, and what they share.",
        "scheme gradient limit blend beta switch groups calibrate recalibrate",
    ),
    "byzantine_clients": ("Byzantine clients, and the server's defense.", "byzantine attack targets defense"),
}
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_LONGEST = 10_000  # values of one flag
_WORDS = {int: "whole numbers", float: "numbers", bool: "true or false", str: "names", NoneType: "none"}
_METAVARS = {int: "INTS", float: "NUMBERS", str: "NAMES", bool: "{true,false}"}


class WrongFlagError(Exception):
    """A flag has a value that it does not allow."""


class Values(tuple[Any, ...]):
    """The values of a flag; `given` says whether the user gave them."""

    given: bool = False


def field_texts(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass and of its base classes.

    Example:
        >>> field_texts(Run)["seed"].startswith("Seed of all random draws")
        True
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(definition, ast.ClassDef)
            for field, text in zip(definition.body, definition.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    assert isinstance(field.target, ast.Name)
                    assert isinstance(text.value, ast.Constant)
                    found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def parse(name: str, text: str) -> list[Any]:
    """The values of a flag: separated by commas; integers also as 0..4, with the last one included.

    Example:
        >>> parse("scheme", "fbn,naive"), parse("seed", "0..2,7"), parse("gamma", "0,0.1")
        (['fbn', 'naive'], [0, 1, 2, 7], [0.0, 0.1])
    """
    found: list[Any] = []
    for piece in text.split(","):
        span = _RANGE.fullmatch(piece.strip())
        if span and int in _KINDS[name]:
            first, last = map(int, span.groups())
            if not 0 <= last - first < _LONGEST:
                raise ValueError(f"{name} is {piece}; the first of a range must be below the last")
            found += range(first, last + 1)
        else:
            found.append(_value(name, piece.strip()))
    return found


def _value(name: str, text: str) -> Any:
    """One value of a flag."""
    kinds = _KINDS[name]
    choices = {str(kind): kind for kind in kinds if not isinstance(kind, type)}
    if text in choices:
        return choices[text]
    if NoneType in kinds and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                pass
    if str in kinds and text:
        return text
    wanted = [*choices, *(_WORDS[kind] for kind in kinds if isinstance(kind, type))]
    hint = "; 0..4 is for whole numbers: list values" if _RANGE.fullmatch(text) else ""
    raise ValueError(f"{name} is {text!r}; it must be {' or '.join(dict.fromkeys(wanted))}{hint}")


def _kinds(hint: Any) -> list[Any]:
    """The types and choices of a field."""
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    if get_origin(hint) is Literal:
        return [*get_args(hint)]
    return [hint] if isinstance(hint, type) else []


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Run)}
_KINDS = {
    name: [*_kinds(hint), *([NoneType] if _DEFAULTS.get(name, 0) is None else [])]
    for name, hint in get_type_hints(Run).items()
    if name != "own"
}
_TEXTS = field_texts(Run)


def _help(field: str) -> str:
    text = _TEXTS[field]
    if field in KINDS:
        text = re.sub(r": see `fedbatchnorm list`(?=[.;])", "", text)
        if field != "defense":
            text = f"{text.rstrip('.')}. Choices: {', '.join(names_of(field))}."  # pyrefly: ignore
        if field != "model":
            text += f" file:name is your own {'rule' if field == 'defense' else field}."
    return text


def _flag(field: str) -> Any:
    """The type of a flag: the values that it accepts, and its text in `--help`."""
    kinds = _KINDS[field]

    def read(given: list[str]) -> Values:
        try:
            values = Values(value for text in given or ["true"] for value in parse(field, text))
        except ValueError as error:
            raise WrongFlagError(f"--{field.replace('_', '-')}: {error}") from None
        values.given = True
        return values

    def show(values: Values) -> list[str]:
        return ["none" if value is None else str(value) for value in values]

    choices = [str(kind) for kind in kinds if not isinstance(kind, type)]
    plain = [_METAVARS[kind] for kind in kinds if kind in _METAVARS]
    metavar = "|".join([*plain, *([f"{{{','.join(choices)}}}"] if choices else [])])
    spec = PrimitiveConstructorSpec(
        nargs="*" if bool in kinds else 1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, Values),
        str_from_instance=show,
    )
    return Annotated[Values, spec, tyro.conf.arg(help=_help(field))]


def _topic(name: str, about: str, names: list[str]) -> type:
    rows = [(field, _flag(field), Values((_DEFAULTS[field],))) for field in names]
    made = dataclasses.make_dataclass(name, rows, kw_only=True, frozen=True)
    made.__doc__ = about
    return made


_CLASSES = {name: _topic(name, about, fields.split()) for name, (about, fields) in TOPICS.items()}
ModelAndData: Any = _CLASSES["model_and_data"]
Federation: Any = _CLASSES["federation"]
Training: Any = _CLASSES["training"]
Normalization: Any = _CLASSES["normalization"]
ByzantineClients: Any = _CLASSES["byzantine_clients"]


def given(*topics: Any) -> dict[str, list[Any]]:
    """The settings that were given, each with its values."""
    pairs = [pair for topic in topics for pair in vars(topic).items()]
    return {name: [*values] for name, values in pairs if values.given}


def runs_of(settings: Mapping[str, list[Any]]) -> list[Run]:
    """The runs of every combination; an error names the flag."""
    return grid(**{name: [_object(name, value) for value in values] for name, values in settings.items()})


def _object(name: str, value: Any) -> Any:
    """The user's own scheme, dataset, ... for a name like file:name; otherwise the value itself."""
    own = name in KINDS and name != "model" and isinstance(value, str) and _OWN.fullmatch(value)
    return imported(name, value) if own and not is_known(name, value) else value  # pyrefly: ignore


def read_toml(file: Path) -> dict[str, list[Any]]:
    """The settings in a file, each with its values; an error names the file and the setting."""
    try:
        content = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"{file} is not there: --write-config {file} writes one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not TOML: {error}") from None
    found = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in _KINDS:
            raise ValueError(f"{file}: a run has no {key!r}")
        try:
            found[name] = [v for item in _items(name, value) for v in item]
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    return found


def _items(name: str, value: Any) -> list[list[Any]]:
    """The values of a setting in a file: strings as in flags, numbers as they are."""
    values = value if isinstance(value, list) else [value]
    if not values or any(not isinstance(v, str | int | float | bool) for v in values):
        raise ValueError(f"{name} must be a value or a list of values")
    numbers = float in _KINDS[name] and int not in _KINDS[name]
    plain = [float(v) if numbers and type(v) is int else v for v in values]
    return [parse(name, value) if isinstance(value, str) else [value] for value in plain]


def write_toml(file: Path, settings: Mapping[str, list[Any]]) -> None:
    """Write settings to a new file, and below them all others as comments, with explanations."""
    if file.exists():
        raise ValueError(f"{file} is there already: give another name, or remove it")
    lines = [f"# fedbatchnorm run --config {file.name}", ""]
    for name, values in settings.items():
        plain = ["none" if value is None else value for value in values]
        texts = [_toml(value) for value in plain]
        lines.append(f"{name} = {texts[0]}" if len(texts) == 1 else f"{name} = [{', '.join(texts)}]")
    for about, names in TOPICS.values():
        rest = [name for name in names.split() if name not in settings]
        lines += ["", f"# {about}"]
        for name in rest:
            lines += [f"#   {line}" for line in textwrap.wrap(_help(name), 96)]
            lines.append(f"# {name} = {'' if _DEFAULTS[name] is None else _toml(_DEFAULTS[name])}".rstrip())
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, ("\n".join(lines) + "\n").encode())


def _toml(value: Any) -> str:
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
