"""`NumPyClient` clients of Flower's earlier API, in an app for `FederatedBatchNormStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .arrays import as_numpy, parameters_of, unwrapped
from .extras import needs
from .flower_client import calibrate, load, reply

try:
    from flwr.app import Context, Message, MetricRecord, RecordDict
    from flwr.client import NumPyClient
    from flwr.clientapp import ClientApp
except ImportError as error:
    raise needs("Flower", "flower", error) from error


def numpy_client_app(
    client_fn: Callable[[Context], Any],
    *,
    model: Callable[[Any], nn.Module] | None = None,
    batches: Callable[[Any], Iterable[Tensor]] | None = None,
    **options: Any,
) -> ClientApp:
    """A ClientApp of `NumPyClient` clients, whose `fit` and `evaluate` stay as they are.

    `fit` receives all arrays of the model in the order of its `state_dict`, and returns them in the same way,
    with the number of optimizer steps as a metric: `return arrays, examples, {"steps": steps}`. The moments
    of its model's layers are sent along.

        app = numpy_client_app(client_fn, batches=lambda client: (x for x, _ in client.loader))

    Args:
        client_fn: as for `ClientApp`: a context -> a client. Its model must be converted.
        model: a client -> its model; `client.model` or `client.net` if not given.
        batches: a client -> inputs of its model, for round 0; without it clients do not calibrate.
        options: of the ClientApp, such as mods.
    """
    app, model_of = ClientApp(**options), model or _model_of

    def client_of(context: Context) -> tuple[Any, nn.Module]:
        made = client_fn(context)
        client = getattr(made, "numpy_client", made)  # what `to_client` has wrapped
        if not isinstance(client, NumPyClient):
            raise TypeError(f"client_fn returned a {type(made).__name__}, expected a NumPyClient")
        return client, unwrapped(model_of(client))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, net = client_of(context)
        load(net, message)
        found = client.fit(_arrays_of(net), _settings(message))
        arrays, examples, metrics = _checked(found, "fit", list)
        if "steps" not in metrics:
            raise ValueError(
                "fit's metrics have no 'steps', the number of optimizer steps that it took: "
                "return arrays, examples, {'steps': steps}"
            )
        _put(net, arrays)
        numbers = {name: value for name, value in metrics.items() if name != "steps"}
        return reply(net, message, {"num-examples": examples} | numbers, steps=metrics["steps"])

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client, net = client_of(context)
        load(net, message)
        found = client.evaluate(_arrays_of(net), _settings(message))
        loss, examples, metrics = _checked(found, "evaluate", float | int)
        record = MetricRecord({"num-examples": examples, "loss": float(loss)} | metrics)
        return Message(RecordDict({"metrics": record}), reply_to=message)

    if batches is not None:

        @app.train("calibrate")
        def measure(message: Message, context: Context) -> Message:
            client, net = client_of(context)
            return calibrate(net, message, batches(client))

    return app


def _model_of(client: Any) -> nn.Module:
    for name in ("model", "net"):
        if isinstance(found := getattr(client, name, None), nn.Module):
            return found
    raise TypeError(
        f"a {type(client).__name__} has no attribute model or net that is a module: say where its model is, "
        "numpy_client_app(client_fn, model=lambda client: ...)"
    )


def _arrays_of(model: nn.Module) -> list[np.ndarray]:
    return [value.detach().cpu().numpy().copy() for value in model.state_dict().values()]


def _settings(message: Message) -> dict[str, Any]:
    """The server's settings for a round, without those of federated BatchNorm."""
    own = (record for name, record in message.content.config_records.items() if name != "fedbatchnorm")
    return dict(next(own, {}))


def _checked(found: Any, method: str, first: Any) -> tuple[Any, int, dict[str, Any]]:
    """What a client's method returned; an error says what it should have been."""
    fine = isinstance(found, tuple) and len(found) == 3
    if not (
        fine and isinstance(found[0], first) and isinstance(found[1], int) and isinstance(found[2], dict)
    ):
        what = "a list of arrays" if method == "fit" else "a loss"
        raise TypeError(f"{method} must return {what}, the number of examples, and a dict of metrics")
    return found


def _put(model: nn.Module, arrays: list[Any]) -> None:
    """Set the parameters to what `fit` returned, and keep what the layers have seen."""
    state = model.state_dict()
    if len(arrays) != len(state):
        raise ValueError(
            f"fit returned {len(arrays)} arrays; the model's state_dict has {len(state)}, and all are needed"
        )
    kept = parameters_of(model)
    with torch.no_grad():
        for (name, value), array in zip(state.items(), arrays, strict=True):
            if name in kept:
                value.copy_(torch.from_numpy(np.array(as_numpy(array, name))))
