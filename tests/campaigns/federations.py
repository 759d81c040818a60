"""Flower servers and SuperNodes that are killed while nodes send garbage: nothing is lost, nothing gets in.

What must come out are the bits of a run in which nobody is killed and whoever sends garbage is not there.
"""

import collections
import contextlib
import json
import logging
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedYogi
from garbage import AbsentError, at_fault, spoiling
from processes import ended, fork

from fedbatchnorm.adapters.local import LocalGrid
from fedbatchnorm.adapters.scaffold import write_app

EXAMPLES = Path(__file__).parents[2] / "examples" / "flower"
sys.path += [str(EXAMPLES), str(EXAMPLES / "app")]
from fbn_app import client_app, server_app  # noqa: E402
from federation import Federation, below, command_of  # noqa: E402

USUAL = tomllib.loads((EXAMPLES / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
STRATEGIES = FedAvg, FedAdam, FedAvgM, FedYogi
NODES, PATIENCE = 3, 600
PAUSE = 10  # seconds until a SuperNode that was refused tries again
# The app of a real federation: clients that send garbage, and a server that writes down whose replies came.
APP = """
import json
from pathlib import Path
from flwr.serverapp import ServerApp
from . import client_app, server_app
from .garbage import spoiling

client = spoiling(client_app.app, {seed})
server = ServerApp()

class Recorded:
    def __init__(self, grid):
        self.grid = grid

    def __getattr__(self, name):
        return getattr(self.grid, name)

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        server_round = messages[0].content["config"]["server-round"]
        replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        came = [reply.metadata.src_node_id for reply in replies if not reply.has_error()]
        with Path({place!r}).open("a") as record:
            record.write(json.dumps([server_round, came]) + "\\n")
        return replies

@server.main()
def main(grid, context):
    server_app.app(Recorded(grid), context)
"""


def play(folder, app, nodes, strategy=FedAvg, **settings):
    """The app's server in this process; its model and a checkpoint in the folder."""
    folder.mkdir(exist_ok=True)
    files = {"output": str(folder / "model.safetensors"), "checkpoint": str(folder / "server.safetensors")}
    config = USUAL | {"lr": 0.01} | files | {"min-nodes": nodes} | settings
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    server_app.FedAvg = strategy
    here = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    server_app.app(LocalGrid(app, nodes, config), here)


def absent(seed, nodes, there=None, order=None):
    """The honest app of those who are there and not at fault; the others do not answer.

    Args:
        seed: of the garbage.
        nodes: how many there are.
        there: round -> the partitions that answered; all of them if not given.
        order: which partition each node has, in the order of their ids.
    """

    def app(message, context):
        node = (order or range(nodes))[context.node_config["partition-id"]]
        server_round = message.content["config"]["server-round"]
        missing = there is not None and node not in there.get(server_round, ())
        if missing or node in at_fault(seed, server_round, nodes):
            raise AbsentError
        place = {"partition-id": node, "num-partitions": nodes}
        here = Context(context.run_id, context.node_id, place, context.state, context.run_config)
        return client_app.app(message, here)

    return app


def same(folder, whole):
    """Whether the final models are the same to the bit, and so are the accuracies since the last start."""
    model, other = ((path / "model.safetensors").read_bytes() for path in (folder, whole))
    curve, full = (json.loads((path / "model.json").read_text()) for path in (folder, whole))
    return model == other and curve.items() <= full.items()


def server_kills(count, rng, place):
    """SIGKILL of a server at random moments; it continues to the bits of the undisturbed run."""
    nodes, found, seed = 5, collections.Counter(), 0
    while found["killed"] < count:
        seed, strategy = seed + 1, STRATEGIES[seed % len(STRATEGIES)]
        how = {"rounds": 6, "strategy": strategy, "nodes": nodes}
        whole, start = place / f"whole {seed}", time.monotonic()
        assert ended(fork(lambda s=seed, w=whole, h=how: play(w, absent(s, h["nodes"]), **h))) == 0
        takes, killed, folder = time.monotonic() - start, 0, place / f"killed {seed}"
        while not (folder / "model.json").exists():
            child = fork(lambda s=seed, f=folder, h=how: play(f, spoiling(client_app.app, s), **h))
            if killed < 6:  # then it may finish
                time.sleep(rng.random() * takes)
                os.kill(child, signal.SIGKILL)
            status = ended(child)
            assert status in (0, -signal.SIGKILL)
            killed += status != 0
        assert same(folder, whole), (seed, strategy)
        assert not list(folder.glob("*.damaged"))
        found["garbage"] += sum(len(at_fault(seed, step, nodes)) for step in range(how["rounds"] + 1))
        found["killed"] += killed
        found["runs"] += 1
    return found


def federation_kills(count, rng, place):
    """The same with a SuperLink and SuperNodes as processes: servers are killed, and SuperNodes, too."""
    found, seed, rounds = collections.Counter(), 0, 2 if count < 5 else 4
    with Federation(NODES, place) as federation:
        ids = sorted(federation.ids.items(), key=lambda item: item[1])
        order = [partition for partition, _ in ids]
        while found["killed"] < count:
            seed += 1
            run = _Run(federation, place / f"run {seed}", seed, rounds)
            least = count - found["killed"]
            found["killed"] += run.play(min(5, least), rng)
            found["SuperNodes killed"] += run.nodes_killed
            there = run.there()
            found["replies lost"] += sum(NODES - len(came) for came in there.values())
            found["garbage"] += sum(len(at_fault(seed, step, NODES)) for step in range(rounds + 1))
            found["runs"] += 1
            twin = absent(seed, NODES, there, order)
            assert ended(fork(lambda r=run, t=twin: play(r.folder / "twin", t, NODES, rounds=rounds))) == 0
            said = federation.server_log(run.number)
            assert same(run.folder, run.folder / "twin"), (seed, there, said[-5000:])
            assert any(len(came) > 1 for came in there.values()), there
            assert "Traceback" not in said, said[-3000:]
    return found


class _Run:
    """One run of the app on a federation, from its first start to its end."""

    def __init__(self, federation, folder, seed, rounds):
        self.federation, self.folder, self.number = federation, folder, None
        self.nodes_killed, self.record = 0, folder / "record.jsonl"
        self.again = dict.fromkeys(range(NODES), 0.0)
        folder.mkdir()
        self.app = folder / "app"
        write_app("flower-app", self.app)
        package = self.app / "fbn_app"
        (package / "garbage.py").write_text(Path(__file__).with_name("garbage.py").read_text())
        (package / "campaign.py").write_text(APP.format(seed=seed, place=str(self.record)))
        project = self.app / "pyproject.toml"
        text = project.read_text().replace("fbn_app.client_app:app", "fbn_app.campaign:client")
        project.write_text(text.replace("fbn_app.server_app:app", "fbn_app.campaign:server"))
        self.checkpoint = folder / "server.safetensors"
        self.settings = f"rounds={rounds} min-nodes={NODES} lr=0.01 timeout=120.0 "
        self.settings += f"checkpoint='{self.checkpoint}' output='{folder / 'model.safetensors'}'"

    def play(self, kills, rng):
        """Start it again and again until it is done; the first so many servers are killed, and in every
        second session a SuperNode, too; with one kill none is, as a lost reply takes a minute."""
        killed = 0
        while not (self.folder / "model.json").exists():
            self.number = self.federation.submit(self.app, self.settings)
            server = self._until(lambda: self._server())
            if self.nodes_killed < kills // 2 and self.nodes_killed <= killed // 2:
                self._until_time(rng.random() * 6)
                self._kill_node(rng.randrange(NODES), rng.random() * 4)
            if killed < kills:
                if rng.random() < 0.7:  # once it has done something
                    before = self._written()
                    self._until(lambda b=before, s=server: self._written() != b or self._ended(s))
                self._until_time(rng.random() * 6)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server, signal.SIGKILL)
                    killed += not (self.folder / "model.json").exists()
            self._until(lambda s=server: self._ended(s))
        return killed

    def there(self):
        """Round -> the partitions that answered; a round that was repeated counts as it was in the end."""
        partitions = {node: partition for partition, node in self.federation.ids.items()}
        rows = [json.loads(line) for line in self.record.read_text().splitlines()]
        return {step: {partitions[node] for node in came} for step, came in rows}

    def _kill_node(self, node, pause):
        self.federation.kill(node)
        self.nodes_killed += 1
        self._until_time(pause)
        self._start_node(node)

    def _start_node(self, node):
        self.federation.start_node(node)
        self.again[node] = time.monotonic() + PAUSE

    def _supervise(self):
        """Start SuperNodes that have ended again: a SuperLink refuses one that it still takes to be there."""
        for node, when in self.again.items():
            ended = self.federation.processes[f"supernode-{node}"].poll() is not None
            if ended and time.monotonic() > when:
                self._start_node(node)

    def _server(self):
        """The process of this run's server, which the SuperLink has started, or None."""
        found = below(self.federation.processes["superlink"].pid)
        servers = [number for number in found if "flwr-serverapp" in command_of(number)]
        return max(servers, default=None)

    def _written(self):
        with contextlib.suppress(FileNotFoundError):
            return self.checkpoint.stat().st_mtime_ns
        return None

    def _ended(self, server):
        return server not in below(self.federation.processes["superlink"].pid)

    def _until(self, what):
        until = time.monotonic() + PATIENCE
        while not (found := what()):
            assert time.monotonic() < until, self.federation.log("superlink")[-3000:]
            self._supervise()
            time.sleep(0.05)
        return found

    def _until_time(self, seconds):
        time.sleep(seconds)
