"""What every engine is asked to do: a federation whose clients write down what their layers saw.

No engine is known here. An engine calls `turn` at each client in each round, with its own `load` and `reply`;
what clients do wrong, they do to the core's answer, before the engine packs it.
"""

import contextlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch import nn

import fedbatchnorm as fbn
from fedbatchnorm.adapters import client as core
from fedbatchnorm.norm.messages import Update

PATIENCE = int(os.environ.get("FEDBATCHNORM_PATIENCE", "1"))  # more where a machine has much else to do
LAYERS = {"norm": 0.1, "last_norm": 0.3}  # layer -> momentum
FAULTS = {  # what a client does -> the verdict
    "NaN": "non_finite",
    "negative variance": "impossible_moments",
    "wrong shape": "schema",
    "missing key": "schema",
    "huge count": "count_out_of_range",
    "stale round": "stale_round",
}


class Net(nn.Module):
    """A small network with two layers of BatchNorm, of different momentum."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
            self.hidden, self.last_norm = nn.Linear(4 * 36, 8), nn.BatchNorm1d(8, momentum=0.3)
            self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(F.relu(self.conv(x))).flatten(1)
        return self.head(self.last_norm(self.hidden(x)))


@dataclass(frozen=True)
class Case:
    """A federation, as JSON can hold it.

    Attributes:
        folder: where clients and the server leave what they have to say.
        clients: how many there are.
        rounds: of training.
        sizes: examples in a batch, by client.
        steps: local steps a round.
        faults: "round/client" -> what that client does then: one of FAULTS, "lie", "dies" or "waits".
        cohort: how many clients a round asks; all if 0.
        quorum: of the server.
        liars: above 0, the server uses a robust rule against so many.
        restarts: the round in which the server is killed, once; 0 is never.
        timeout: seconds that a round waits for those that do not answer, where the engine does not notice.
    """

    folder: str
    clients: int = 4
    rounds: int = 3
    sizes: tuple[int, ...] = (6, 6, 6, 6)
    steps: int = 1
    faults: dict[str, str] = field(default_factory=dict)
    cohort: int = 0
    quorum: int = 1
    liars: int = 0
    restarts: int = 0
    timeout: int = 45 * PATIENCE

    def options(self):
        """The server's settings."""
        rule = fbn.defense("nnm+median", self.liars) if self.liars else None
        place = Path(self.folder) / "server.safetensors"
        return {"quorum": self.quorum, "aggregator": rule, "calibrate": False, "checkpoint": str(place)}

    def save(self):
        file = Path(self.folder) / "case.json"
        file.write_text(json.dumps(asdict(self)))
        return file


def read_case(file):
    found = json.loads(Path(file).read_text())
    return Case(**found | {"sizes": tuple(found["sizes"])})


def read_outcome(folder):
    """What `Outcome.save` has saved, or None."""
    with contextlib.suppress(FileNotFoundError):
        found = json.loads((Path(folder) / "outcome.json").read_text())
        return Outcome(read_case(Path(folder) / "case.json"), **found)
    return None


class DiedError(Exception):
    """A client that is killed, where it is no process of its own."""


def turn(case, index, number, load, reply, dies=None):
    """A client's turn in a round: load, train, reply.

    Args:
        case: the federation.
        index: the client's, from 0.
        number: of the round, from 1.
        load: loads what was sent into a model.
        reply: (model, metrics, steps) -> what the engine sends.
        dies: what a client does that is to be killed; raises if not given.
    """
    fault, place = case.faults.get(f"{number}/{index}"), Path(case.folder)
    model = fbn.convert(Net())
    load(model)
    seen = {name: [] for name in LAYERS}
    for name, into in seen.items():
        model.get_submodule(name).register_forward_pre_hook(lambda m, x, to=into: to.append(x[0].detach()))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(1000 * number + index)
    for _ in range(case.steps):
        x = torch.randn(case.sizes[index], 1, 8, 8, generator=generator) * (1 + index) + index
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), torch.full((len(x),), index % 3))
        loss.backward()
        optimizer.step()
    rows = {name: np.concatenate([_rows(x) for x in inputs]) for name, inputs in seen.items()}
    part = place / f"seen-{number}-{index}.part.npz"
    np.savez(part, **rows)
    part.replace(place / f"seen-{number}-{index}.npz")
    if fault == "dies":
        (dies or _raise)()
    if fault == "waits" and not (place / "killed").exists():  # for the end of the server
        (place / "waiting").touch()
        until = time.monotonic() + 120
        while not (place / "killed").exists() and time.monotonic() < until:
            time.sleep(0.1)
    with _answering(fault):
        return reply(model, {"num-examples": case.steps * case.sizes[index], "loss": loss.item()}, case.steps)


def hang():
    """Of a client that is a process: until somebody kills it."""
    time.sleep(600)


def _raise():
    raise DiedError("the client was killed")


def _rows(x):
    return x.transpose(0, 1).flatten(1).T.double().numpy()


@contextlib.contextmanager
def _answering(fault):
    """The core's answer with a fault, whatever engine packs it."""
    honest = core.answer
    if fault in FAULTS or fault == "lie":
        core.answer = lambda *a, **k: spoilt(honest(*a, **k), fault)
    try:
        yield
    finally:
        core.answer = honest


def spoilt(answer, fault):
    """An answer with a fault in it."""
    update = fbn.from_bytes(answer.statistics["update"].tobytes())
    layers, number, first = dict(update.layers), update.round, update["norm"]
    parameters = dict(answer.parameters)
    if fault == "NaN":
        layers["norm"] = first._replace(mean=first.mean * float("nan"))
    elif fault == "negative variance":
        layers["norm"] = first._replace(var=-first.var - 1)
    elif fault == "wrong shape":
        layers["norm"] = first._replace(mean=first.mean[:3], var=first.var[:3])
    elif fault == "missing key":
        del parameters["head.bias"]
    elif fault == "huge count":
        layers["norm"] = first._replace(count=10**9)
    elif fault == "stale round":
        number -= 1
    elif fault == "lie":
        layers["norm"] = first._replace(mean=first.mean * 0 + 1e6)
    sent = np.frombuffer(fbn.to_bytes(Update(layers, number, update.skipped, update.id)), dtype=np.uint8)
    return core.Answer(parameters, answer.statistics | {"update": sent})


class Outcome:
    """What a run has left: the server's state, what it said, and what the clients saw."""

    def __init__(self, case, lines, names, traffic=None):
        """Read it.

        Args:
            case: the federation.
            lines: what the server said.
            names: how the engine calls the clients, by index.
            traffic: (bytes to a client, bytes from it) in a round, where the engine can tell.
        """
        self.case, self.lines, self.names, self.traffic = case, lines, list(names), traffic
        self._names = {str(name): index for index, name in enumerate(self.names)}
        saved = load_file(Path(case.folder) / "server.safetensors")
        self.state = {k.removeprefix("arrays/"): v for k, v in saved.items() if k.startswith("arrays/")}

    def save(self):
        """So that another process can read it, with `read_outcome`."""
        content = {"lines": self.lines, "names": self.names, "traffic": self.traffic}
        self.case.save()
        (Path(self.case.folder) / "outcome.json").write_text(json.dumps(content))

    def verdicts(self):
        """(round, client) -> the reason for which it was left out."""
        found = {}
        for line in self.lines:
            match = re.search(r"round (\d+): \w+ (\S+) left out: (\w+)", line)
            if match and match[2] in self._names:
                found[int(match[1]), self._names[match[2]]] = match[3]
        return found

    def rounds(self):
        """Round -> (asked, answered, used); of one that was begun twice, the last time."""
        matches = (re.search(r"round (\d+): (\d+) asked, (\d+) answered, (\d+) used", x) for x in self.lines)
        return {int(m[1]): (int(m[2]), int(m[3]), int(m[4])) for m in matches if m}

    def seen(self, number, layer):
        """Client -> what its layer saw in a round, (k, channels)."""
        files = sorted(Path(self.case.folder).glob(f"seen-{number}-[0-9]*.npz"))
        return {int(f.stem.rpartition("-")[2]): np.load(f)[layer] for f in files if ".part" not in f.name}

    def good(self, number):
        """How many of those who are asked answer, and answer well."""
        bad = [k for k, what in self.case.faults.items() if k.startswith(f"{number}/") and what in FAULTS]
        dead = [k for k, what in self.case.faults.items() if k.startswith(f"{number}/") and what == "dies"]
        return len(self.seen(number, "norm")) - len(bad) - len(dead)

    def used(self, number, layer="norm"):
        """The clients whose statistics a round should have used."""
        bad = {f"{number}/{i}" for i in range(self.case.clients)} & self.case.faults.keys()
        bad = {key for key in bad if self.case.faults[key] not in ("waits", "lie")}
        fine = [i for i in self.seen(number, layer) if f"{number}/{i}" not in bad]
        return fine if len(fine) >= self.case.quorum else []

    def expected(self, layer):
        """Mean and variance of float64 BatchNorm on the union of what the clients that count saw."""
        beta = 1 - (1 - LAYERS[layer]) ** self.case.steps
        mean, var, tracked = 0.0, 1.0, 0
        for number in range(1, self.case.rounds + 1):
            seen, used = self.seen(number, layer), self.used(number, layer)
            if not used:
                continue
            rows, n, m = [seen[i] for i in used], self.case.clients, self.case.cohort
            union, total = np.concatenate(rows), sum(map(len, rows))
            ours = union.var(0)
            if m:  # of equal sizes: the spread between m clients, corrected to that between n
                between = np.var([r.mean(0) for r in rows], axis=0)
                ours = ours - between + between * (m / (m - 1)) * ((n - 1) / n)
                total = total * n / m
            mean = (1 - beta) * mean + beta * union.mean(0)
            var = (1 - beta) * var + beta * ours * total / (total - 1)
            tracked += self.case.steps
        return mean, var, tracked
