"""Replies that no server can use, at random: which nodes send them in which rounds, and what is in them.

It is copied into the app that a real federation runs, so it imports what a Flower app has.
"""

import random

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.clientapp import ClientApp

from fedbatchnorm.norm.messages import Update
from fedbatchnorm.norm.wire import from_bytes, to_bytes


class AbsentError(RuntimeError):
    """What a node answers that is not there."""


def at_fault(seed, server_round, nodes):
    """The partitions whose replies are garbage in this round: fewer than half."""
    rng = random.Random(f"garbage {seed} {server_round}")
    return set(rng.sample(range(nodes), rng.randint(0, (nodes - 1) // 2)))


def spoiling(honest, seed):
    """An app that answers as the honest one, or with garbage where it is at fault."""
    app = ClientApp()

    @app.train("calibrate")
    def calibrate(message, context):
        return answer(message, context)

    @app.train()
    def train(message, context):
        return answer(message, context)

    def answer(message, context):
        node, nodes = (context.node_config[name] for name in ("partition-id", "num-partitions"))
        server_round = message.content["config"]["server-round"]
        reply = honest(message, context)
        if node not in at_fault(seed, server_round, nodes):
            return reply
        rng = random.Random(f"{seed} {server_round} {node}")
        spoil(reply, rng)
        return reply

    return app


def spoil(reply, rng):
    """Make one part of a reply what no server can use."""
    content = reply.content
    kinds = [_changed_update, _odd_bytes, _odd_steps, _no_statistics]
    if "metrics" in content:  # a calibration has none
        kinds += [_odd_parameters, _odd_metrics]
    rng.choice(kinds)(content, rng)


def _changed_update(content, rng):
    update = _update(content)
    name = rng.choice(list(update))
    _, mean, var = update[name]
    odd = rng.choice([float("nan"), float("inf"), -float("inf")])
    kind = rng.randrange(7)
    layers = dict(update.layers)
    if kind == 0:
        layers[name] = layers[name]._replace(mean=torch.where(torch.arange(len(mean)) == 0, odd, mean))
    elif kind == 1:
        layers[name] = layers[name]._replace(var=torch.full_like(var, odd))
    elif kind == 2:
        layers[name] = layers[name]._replace(var=-var - 1)
    elif kind == 3:
        layers[name] = layers[name]._replace(mean=mean[1:], var=var[1:])
    elif kind == 4:
        layers[name] = layers[name]._replace(count=10 ** rng.choice([9, 15, 18]))
    elif kind == 5:
        del layers[name]
    else:
        layers["another"] = layers[name]
    stale = rng.choice([0, 0, 0, 1, -1, 2**40])
    _put(content, to_bytes(Update(layers, update.round + stale, id=update.id)))


def _odd_bytes(content, rng):
    data = content["statistics"]["update"].numpy().tobytes()
    torn = data[: rng.randrange(len(data))]
    _put(content, rng.choice([b"", torn, rng.randbytes(len(data)), data + b"x", bytes(len(data))]))


def _no_statistics(content, rng):
    del content["statistics"]
    if rng.random() < 0.5:
        content["statistics"] = ArrayRecord({"other": Array(np.zeros(3))})


def _odd_steps(content, rng):
    odd = rng.choice([0, -1, 10**9, 1.5, [1, 2]])
    content["statistics"]["steps"] = Array(np.array(odd))


def _odd_parameters(content, rng):
    arrays = content["arrays"]
    name = rng.choice(list(arrays))
    value = arrays[name].numpy()
    odd = rng.choice([np.full_like(value, np.nan), value[:0], value[None], value.astype(np.float16), None])
    if odd is None:
        del arrays[name]
    else:
        arrays[name] = Array(odd)


def _odd_metrics(content, rng):
    # Of the metrics only this one has a part in the average: an odd loss costs a node nothing but its loss.
    odd = rng.choice([float("nan"), float("inf"), -1, 0, 10**12])
    content["metrics"] = MetricRecord({**content["metrics"], "num-examples": float(odd)})


def _update(content):
    return from_bytes(content["statistics"]["update"].numpy().tobytes())


def _put(content, data):
    content["statistics"]["update"] = Array(np.frombuffer(data, dtype=np.uint8))
