"""What the wrapper costs a Flower server: a round's replies, FedAvg alone and wrapped, turn by turn.

    python benchmarks/flower_server.py --json results/benchmarks/flower_server.json

The same replies of ResNet-18 go through `aggregate_train` of FedAvg and of FederatedBatchNormStrategy around
it, which also examines them, merges their statistics and puts the model together. Time is the process's own
(CPU seconds): the machine may be shared. So that a thousand replies need not fit into memory, some of them
share their parameters, and each is read from memory all the same.
"""

import statistics
import time

import numpy as np
import torch
from common import arguments, ratio, write
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import fedbatchnorm as fbn
from fedbatchnorm.adapters.flower import FederatedBatchNormStrategy, load, reply
from fedbatchnorm.adapters.local import LocalGrid
from fedbatchnorm.simulation import models

REPLIES, DISTINCT = 1000, 40


def new_model():
    return models.build("resnet18", (3, 32, 32), 10, seed=0)


def payloads(request, count):
    """What this many clients answer: parameters that differ, and what the layers of one batch saw."""
    model, found = fbn.convert(new_model()), []
    for i in range(count):
        load(model, request)
        model.train()(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(i)))
        answer = reply(model, request, {"num-examples": 50, "loss": 1.0}).content
        noise = np.float32(1 + 1e-3 * (i + 1))
        for name, array in answer["arrays"].items():
            answer["arrays"][name] = Array(array.numpy() * noise)
        found.append(answer)
    return found


def renewed(statistics, number):
    """An update with an id of its own: the server leaves out one that comes twice."""
    update = fbn.from_bytes(statistics["update"].numpy().tobytes())
    new = fbn.Update(update.layers, update.round, update.skipped, number)
    content = np.frombuffer(fbn.to_bytes(new), dtype=np.uint8)
    return ArrayRecord({"update": Array(content), "steps": statistics["steps"]})


def answers(kind, requests, found, updates, state):
    """The messages of a round, made anew: whoever aggregates them may change what they hold."""
    messages = []
    for i, request in enumerate(requests):
        answer = found[i % len(found)]
        arrays = answer["arrays"]
        if kind == "FedAvg":  # whose clients send their running statistics among the arrays
            arrays = ArrayRecord({name: arrays.get(name, other) for name, other in state.items()})
        content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 50, "loss": 1.0})}
        if kind != "FedAvg":
            content["statistics"] = updates[i]
        messages.append(Message(RecordDict(content), reply_to=request))
    return messages


def main():
    args = arguments(__doc__, rounds=3)
    torch.set_num_threads(1)
    state = ArrayRecord(new_model().state_dict())
    grid, times = LocalGrid(None, REPLIES), {"FedAvg": [], "wrapped": []}
    wrapped = FederatedBatchNormStrategy(FedAvg(), model=fbn.convert(new_model()))
    first = list(wrapped.configure_train(1, state, ConfigRecord(), grid))
    found = payloads(first[0], DISTINCT)
    updates = [renewed(found[i % DISTINCT]["statistics"], i + 1) for i in range(REPLIES)]
    for turn in range(args.rounds):
        for name in times:
            wrapped = FederatedBatchNormStrategy(FedAvg(), model=fbn.convert(new_model()))
            requests = list(wrapped.configure_train(1, state, ConfigRecord(), grid))
            messages = answers(name, requests, found, updates, state)
            strategy = wrapped if name == "wrapped" else FedAvg()
            start = time.process_time()
            arrays, _ = strategy.aggregate_train(1, messages)
            times[name].append(time.process_time() - start)
            assert arrays is not None
            assert name == "FedAvg" or (len(wrapped.left_out) == 0 and len(requests) == REPLIES)
            print(f"turn {turn + 1}, {name}: {times[name][-1]:.1f} s", flush=True)
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    print(f"ratio {ratio(times, 'wrapped', 'FedAvg'):.3f}")
    facts = {"model": "resnet18", "replies": REPLIES, "distinct": DISTINCT, "turns": args.rounds}
    write(args, facts | {"seconds": seconds, "ratio": ratio(times, "wrapped", "FedAvg")})


if __name__ == "__main__":
    main()
