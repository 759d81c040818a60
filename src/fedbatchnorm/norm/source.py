"""Whether a class's own forward always calls super's exactly once: read from its source."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from tokenize import TokenError
from types import FunctionType

# What a call may stand in and still be made each time. Everything else is refused: branches, loops, ...
_ALWAYS = (
    ast.Return,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Expr,
    ast.With,
    ast.withitem,
    ast.Call,
    ast.keyword,
    ast.BinOp,
    ast.UnaryOp,
    ast.Attribute,
    ast.Subscript,
    ast.Tuple,
    ast.List,
)
# Statistics are ours to keep, and mode and class are what a layer goes by.
_HANDS_OFF = ("running_", "batch_norm", "num_batches_tracked", "momentum", "track_running_stats")
_ATTRIBUTES = {"training", "eps", "weight", "bias", "num_features"}  # to be read, not to be set
_METHODS = {"train", "eval", "forward", "_buffers", "_parameters", "state_dict", "load_state_dict", "apply"}


@functools.cache
def reads_as_one_call(kind: type) -> str | None:
    """None if the forward that `kind` itself defines calls `super().forward` exactly once; otherwise the
    doubt.
    """
    forward = vars(kind)["forward"]
    try:
        body = _parse(forward)
        _check_forward(body)
        _check_rest(kind, body, {"forward"})
    except _Doubt as doubt:
        return str(doubt)
    return None


class _Doubt(Exception):  # noqa: N818 - caught above; nothing has gone wrong
    """Why a forward cannot be seen to call super's exactly once."""


def _parse(function: object) -> ast.FunctionDef:
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        raise _Doubt("it is no plain function")
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError, TokenError):
        raise _Doubt("its source cannot be read") from None
    if not isinstance(found, ast.FunctionDef) or found.name != function.__name__:
        raise _Doubt("its source cannot be read")
    if {ast.unparse(d).split(".")[-1] for d in found.decorator_list} - {"override", "property"}:
        raise _Doubt("it has a decorator")
    if not found.args.args and not found.args.posonlyargs:
        raise _Doubt("it has no self")
    return found


def _check_forward(body: ast.FunctionDef) -> None:
    """Exactly one `super().forward(...)`, which is called each time."""
    called = [node for node in ast.walk(body) if isinstance(node, ast.Call) and _super_method(node)]
    calls = [node for node in called if _super_method(node) == "forward"]
    if len(calls) != 1:
        times = f"it calls super().forward {len(calls)} times"
        raise _Doubt(times if calls else "it does not call super().forward")
    supers = [node for node in ast.walk(body) if isinstance(node, ast.Name) and node.id == "super"]
    if len(supers) != len(called):
        raise _Doubt("it uses super() for more than a call")
    parents = {child: parent for parent in ast.walk(body) for child in ast.iter_child_nodes(parent)}
    node: ast.AST = calls[0]
    while (node := parents[node]) is not body:
        if not isinstance(node, _ALWAYS):
            raise _Doubt("it may not call super().forward each time")
    returns = [node for node in ast.walk(body) if isinstance(node, ast.Return)]
    if any((node.end_lineno or 0) < calls[0].lineno for node in returns):
        raise _Doubt("it may return before it calls super().forward")


def _check_rest(kind: type, body: ast.FunctionDef, seen: set[str]) -> None:
    """Nothing else in it, or in methods that it calls, touches statistics, mode, or the layer as a whole."""
    me = (body.args.posonlyargs + body.args.args)[0].arg
    allowed = _places_of_self(body, me)
    for node in _without_docstring(body):
        for word in _words(node):
            if any(taboo in word for taboo in _HANDS_OFF):
                raise _Doubt(f"it uses {word}")
        if isinstance(node, ast.Name) and node.id == me and node not in allowed:
            raise _Doubt(f"it hands {me} on")
        if isinstance(node, ast.Name) and node.id == "__class__":
            raise _Doubt("it uses __class__")
        method = _super_method(node) if isinstance(node, ast.Call) else None
        if method not in (None, "_check_input_dim") and (method, body.name) != ("forward", "forward"):
            raise _Doubt(f"it calls super().{method} in {body.name}")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me:
            _check_attribute(kind, node, seen)


def _check_attribute(kind: type, node: ast.Attribute, seen: set[str]) -> None:
    name = node.attr
    if name in _METHODS or (name.startswith("__") and name.endswith("__")):
        raise _Doubt(f"it uses self.{name}")
    if name in _ATTRIBUTES and not isinstance(node.ctx, ast.Load):
        raise _Doubt(f"it sets self.{name}")
    own = next((vars(c)[name] for c in kind.__mro__ if name in vars(c) and not _is_torchs(c)), None)
    own = own.fget if isinstance(own, property) else own
    if callable(own) and not isinstance(own, staticmethod) and name not in seen:  # which has no self
        seen.add(name)
        _check_rest(kind, _parse(own), seen)


def _is_torchs(kind: type) -> bool:
    return kind is object or kind.__module__.startswith("torch.nn.modules.")


def _super_method(call: ast.Call) -> str | None:
    """Which of super's methods a call calls."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call):
        inner = function.value.func
        if isinstance(inner, ast.Name) and inner.id == "super":
            return function.attr
    return None


def _places_of_self(body: ast.FunctionDef, me: str) -> set[ast.AST]:
    """Where `self` may stand: self.x, super(Class, self), hasattr(self, "x")."""
    allowed: set[ast.AST] = set()
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute):
            allowed.add(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("super", "hasattr"):
            allowed.update(node.args)
    return allowed


def _without_docstring(body: ast.FunctionDef) -> Iterator[ast.AST]:
    first = body.body[0]
    skip = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    for statement in body.body[1:] if skip else body.body:
        yield from ast.walk(statement)


def _words(node: ast.AST) -> Iterator[str]:
    """Names, attributes and strings: whatever could name a buffer or a function."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.keyword) and node.arg:
        yield node.arg
