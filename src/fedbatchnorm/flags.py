"""The flags of `fedbatchnorm run`, by topic: a group for each, so that `--help` can be read.

A flag is a field of `experiments.config.Run`; its text is the field's.
"""

import ast
import dataclasses
import inspect
import textwrap
from typing import Annotated, Any, get_type_hints

import tyro

from .experiments.config import Run

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
    "byzantine_clients": ("Clients that lie, and the server's defense.", "byzantine attack targets defense"),
}


def field_texts(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass and of those that it extends.

    Example:
        >>> field_texts(Run)["seed"].startswith("Of everything that is drawn")
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


def _topic(name: str, about: str, fields: list[str]) -> type:
    texts, types = field_texts(Run), get_type_hints(Run)
    defaults = {field.name: field.default for field in dataclasses.fields(Run)}
    types |= {field: types[field] | None for field, default in defaults.items() if default is None}
    made = dataclasses.make_dataclass(
        name,
        [
            (field, Annotated[types[field], tyro.conf.arg(help=texts[field])], defaults[field])
            for field in fields
        ],
        kw_only=True,
        frozen=True,
    )
    made.__doc__ = about
    return made


_CLASSES = {name: _topic(name, about, fields.split()) for name, (about, fields) in TOPICS.items()}
ModelAndData: Any = _CLASSES["model_and_data"]
Federation: Any = _CLASSES["federation"]
Training: Any = _CLASSES["training"]
Normalization: Any = _CLASSES["normalization"]
ByzantineClients: Any = _CLASSES["byzantine_clients"]


def run_of(*topics: Any) -> Run:
    """The run that flags of all topics describe; an error names the flag's field."""
    return Run(**{name: value for topic in topics for name, value in vars(topic).items()})
