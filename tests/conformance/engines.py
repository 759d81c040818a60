"""The engines: each runs a `Case` and returns its `Outcome`. One class for each, as small as can be."""

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from cases import PATIENCE, Case, DiedError, Net, Outcome, turn

import fedbatchnorm as fbn
from fedbatchnorm.adapters import client as core
from fedbatchnorm.adapters.replies import Reply
from fedbatchnorm.adapters.session import Session

HERE = Path(__file__).parent
LONG = 300  # seconds until what a process should do has failed; who passes does not wait so long
sys.path[:0] = [str(HERE.parent / "adapters"), str(HERE.parents[1] / "examples" / "flower")]


class ServerDiedError(Exception):
    """A server that is killed, where it is no process of its own."""


class Engine:
    """An engine, for as long as it is needed: a context manager.

    Attributes:
        title: what the table calls it.
        slow: it starts processes.
        cannot: property -> why it is not tried there.
    """

    title, slow = "", False
    cannot: Mapping[str, str] = MappingProxyType({})

    def __init__(self, place):
        self.place = Path(place)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def run(self, case: Case) -> Outcome:
        raise NotImplementedError


def names_at_random(case, number):
    """Who is asked in a round, where the engine does not draw: others every time."""
    first = number % case.clients
    return [(first + i) % case.clients for i in range(case.cohort or case.clients)]


class Core(Engine):
    """The session and the client without an engine."""

    title = "no engine: `Session` alone"

    def run(self, case):
        (Path(case.folder) / "killed").touch()
        lines, restarts, self.traffic = [], case.restarts, None
        while True:
            note = lambda event: lines.append(event.text)  # noqa: E731
            session = Session(model=fbn.convert(Net()), on_event=note, **case.options())
            session.start(Net().state_dict(), case.rounds)
            try:
                for number in range(session.done + 1, case.rounds + 1):
                    self._round(case, session, number, restarts)
            except ServerDiedError:
                restarts = 0
                continue
            return Outcome(case, lines, range(case.clients), self.traffic)

    def _round(self, case, session, number, restarts):
        asked = names_at_random(case, number)
        request = session.begin(number, asked=asked, population=case.clients if case.cohort else None)
        replies = [self._reply(case, index, number, request) for index in asked]
        if number == restarts:
            raise ServerDiedError
        taken = session.take(number, replies)
        session.finish(number, session.average(taken) if taken.used else None)

    def _reply(self, case, index, number, request):
        def reply(model, metrics, steps):
            answer = core.answer(model, steps=steps)
            self.traffic = bytes_of(*request[:2]), bytes_of(answer.parameters, answer.statistics)
            return Reply(index, answer.parameters, metrics, answer.statistics)

        try:
            return turn(case, index, number, lambda model: core.load(model, request), reply)
        except DiedError as error:
            return Reply(index, failure=str(error))


def bytes_of(*parts):
    return sum(array.nbytes for arrays in parts for array in arrays.values())


class FlowerHere(Engine):
    """Flower's strategy and client app in this process, on a `LocalGrid`."""

    title = "Flower, in one process"

    def run(self, case):
        from flwr.app import Context, RecordDict

        from fedbatchnorm.adapters.local import LocalGrid

        (Path(case.folder) / "killed").touch()
        sys.path.insert(0, str(HERE / "flower_job"))
        app = importlib.import_module("conforming.app")
        config = {"place": str(HERE), "case": str(case.save())}
        restarts, traffic = case.restarts, []

        class Grid(LocalGrid):
            def send_and_receive(self, messages, *, timeout=None):
                nonlocal restarts
                messages = list(messages)
                replies = list(super().send_and_receive(messages))
                if not messages:
                    return replies
                traffic.append((sent(messages[0]), max(map(sent, replies))))
                if messages[0].content["config"]["server-round"] == restarts:
                    restarts = 0
                    raise ServerDiedError
                return replies

        def sent(message):
            if message.has_error():
                return 0
            return sum(record.count_bytes() for record in message.content.array_records.values())

        while True:
            here = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
            with contextlib.suppress(ServerDiedError):
                app.server(Grid(app.client, case.clients, config), here)
                break
        said = (Path(case.folder) / "said.txt").read_text().splitlines()
        return Outcome(case, said, range(1, case.clients + 1), traffic[0])


class FlowerLoopback(Engine):
    """A SuperLink and SuperNodes as processes of their own, with TLS and keys."""

    title, slow = "Flower, SuperLink and SuperNodes with TLS", True
    cannot: Mapping[str, str] = MappingProxyType(
        {
            "traffic": "what a message holds is the same as in one process",
        }
    )

    def __enter__(self):
        from federation import Federation

        self.federation = Federation(4, self.place / "federation")
        self.federation.__enter__()
        return self

    def __exit__(self, *error):
        self.federation.__exit__(*error)

    def run(self, case):
        from federation import below, command_of, running

        self.federation.revive()  # those that the run before has killed
        app, folder = self.place / f"app {case.folder.rpartition('/')[2]}", Path(case.folder)
        shutil.copytree(HERE / "flower_job", app, ignore=shutil.ignore_patterns("__pycache__"))
        project = app / "pyproject.toml"
        project.write_text(project.read_text() + "processes = true\n")
        settings = f"place='{HERE}' case='{case.save()}'"
        run = self.federation.submit(app, settings)
        dying = [key for key, fault in case.faults.items() if fault == "dies"]
        if case.restarts:
            self._until(lambda: (folder / "waiting").exists())
            started = below(self.federation.processes["superlink"].pid)
            [server] = [number for number in started if "flwr-serverapp" in command_of(number)]
            os.kill(server, signal.SIGKILL)
            self._until(lambda: server not in running())
            (folder / "killed").touch()
            run = self.federation.submit(app, settings)
        for key in dying:
            number, _, index = key.partition("/")
            self._until(lambda n=number, i=index: (folder / f"seen-{n}-{i}.npz").exists())
            self.federation.kill(int(index))
        status = self.federation.wait(run, LONG * PATIENCE)
        assert status == "finished:completed", self.federation.server_log(run)[-3000:]
        said = (folder / "said.txt").read_text().splitlines()
        return Outcome(case, said, [self.federation.ids[i] for i in range(case.clients)])

    def _until(self, what):
        until = time.monotonic() + LONG * PATIENCE
        while not what():
            assert time.monotonic() < until, self.federation.log("superlink")[-3000:]
            time.sleep(0.1)


class NVFlareHere(Engine):
    """NVFlare's aggregator in this process; what travels goes through NVFlare's serialization."""

    title = "NVFlare, aggregator in one process"

    def run(self, case):
        from fedbatchnorm.adapters.nvflare import FederatedBatchNormAggregator

        (Path(case.folder) / "killed").touch()
        self.lines, restarts, self.traffic = [], case.restarts, None
        while True:
            note = lambda event: self.lines.append(event.text)  # noqa: E731
            population = case.clients if case.cohort else None
            aggregator = FederatedBatchNormAggregator(
                model=Net(), on_event=note, weight="num-examples", population=population, **case.options()
            )
            left = aggregator.start({k: v.numpy() for k, v in Net().state_dict().items()}, case.rounds)
            try:
                for number in range(case.rounds - left + 1, case.rounds + 1):
                    self._round(case, aggregator, number, restarts)
            except ServerDiedError:
                restarts = 0
                continue
            return Outcome(case, self.lines, self._names(case), self.traffic)

    def _names(self, case):
        return [f"site-{i + 1}" for i in range(case.clients)]

    def _round(self, case, aggregator, number, restarts):
        asked, names = names_at_random(case, number), self._names(case)
        aggregator.reset_stats()
        aggregator.ask([names[i] for i in asked])
        request = aggregator.request(population=case.clients if case.cohort else None)
        for index in asked:
            try:
                found = self._reply(case, index, number, request)
            except DiedError as error:
                aggregator.fail(names[index], str(error))
                continue
            found.meta["client_name"] = names[index]
            aggregator.accept_model(found)
        if number == restarts:
            raise ServerDiedError
        aggregator.aggregate_model()

    def _reply(self, case, index, number, request):
        from nvflare.client.config import ExchangeFormat
        from nvflare.client.converter_utils import convert_params
        from nvflare_clients import over_the_wire

        from fedbatchnorm.adapters.nvflare import load, reply

        received, state = over_the_wire(request), {}
        numpy, tensors = ExchangeFormat.NUMPY, ExchangeFormat.PYTORCH
        received.params = convert_params(received.params, numpy, tensors, state)

        def answer(model, metrics, steps):
            weight = {"num-examples": metrics["num-examples"]}
            found = reply(model, received, metrics, steps=steps, meta=weight)
            found.params = convert_params(found.params, tensors, numpy, state)
            self.traffic = fobs_bytes(request), fobs_bytes(found)
            return over_the_wire(found)

        return turn(case, index, number, lambda model: load(model, received), answer)


def fobs_bytes(model):
    """What a model takes as NVFlare writes it, beyond its arrays' own form."""
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils
    from nvflare.fuel.utils import fobs

    return len(fobs.dumps(FLModelUtils.to_shareable(model)))


class NVFlareSimulator(Engine):
    """A job in NVFlare's simulator, which starts the clients' scripts."""

    title, slow, kind = "NVFlare, simulator", True, "sim"
    cannot: Mapping[str, str] = MappingProxyType(
        {
            "a server killed and resumed": "the simulator ends with its server; tried in POC",
            "a client killed in mid-round": "tried in POC",
            "traffic": "what a message holds is the same as in one process",
        }
    )

    def run(self, case):
        from nvflare_processes import ending, environment

        folder = Path(case.folder)
        with ending(folder):
            done = subprocess.run(
                self._command(case),
                cwd=self._job(case),
                env=environment(folder),
                capture_output=True,
                text=True,
                timeout=LONG * PATIENCE,
                check=False,
            )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return self._outcome(case, done.stdout + done.stderr)

    def _job(self, case):
        return shutil.copytree(HERE / "nvflare_job", Path(case.folder) / "job", dirs_exist_ok=True)

    def _command(self, case):
        return [sys.executable, "job.py", self.kind, str(case.save()), str(HERE)]

    def _outcome(self, case, text):
        lines = dict.fromkeys(line[line.find("round ") :] for line in text.splitlines() if "round " in line)
        return Outcome(case, list(lines), [f"site-{i + 1}" for i in range(case.clients)])


class NVFlarePoc(NVFlareSimulator):
    """NVFlare's server and clients as processes of their own, provisioned with certificates.

    Jobs are submitted as to a federation in production, with its admin's startup kit.
    """

    title, kind = "NVFlare, POC", "prod"
    cannot: Mapping[str, str] = MappingProxyType(
        {
            "traffic": "what a message holds is the same as in one process",
        }
    )

    def run(self, case):
        from nvflare_processes import poc_federation, processes_in, wait_for

        folder = Path(case.folder)
        with poc_federation(folder, case.clients), contextlib.ExitStack() as ends:

            def until(what):
                assert wait_for(what, LONG * PATIENCE), self._logs(folder)[-4000:]

            job, before = ends.enter_context(self._started(case)), ""
            if case.restarts:
                until((folder / "waiting").exists)
                before = self._logs(folder)  # NVFlare clears away what the job has written
                [server] = processes_in(folder, "server.runner_process")
                server.kill()
                job.kill()
                until(lambda: not server.is_running())
                (folder / "killed").touch()
                job = ends.enter_context(self._started(case))
            for key in [key for key, fault in case.faults.items() if fault == "dies"]:
                number, _, index = key.partition("/")
                until((folder / f"seen-{number}-{index}.npz").exists)
                for victim in processes_in(folder, f"/site-{int(index) + 1}"):
                    victim.kill()
            until(lambda: job.poll() is not None)
            assert job.returncode == 0, self._logs(folder)[-4000:]
            return self._outcome(case, before + self._logs(folder))

    @contextlib.contextmanager
    def _started(self, case):
        """The process that submits the job and waits for its end."""
        from nvflare_processes import environment

        place = self._job(case)
        with (place / "out.txt").open("a") as out:
            process = subprocess.Popen(
                self._command(case), cwd=place, env=environment(Path(case.folder)), stdout=out, stderr=out
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _logs(self, folder):
        """What was written by whoever submitted, by the servers, and by that of the job."""
        logs = [*folder.glob("job/out.txt"), *(f for f in folder.rglob("log.txt") if "/server/" in str(f))]
        logs += folder.rglob("transfer/*/workspace/log.txt")
        return "\n".join(file.read_text() for file in logs)


ENGINES = [Core, FlowerHere, FlowerLoopback, NVFlareHere, NVFlareSimulator, NVFlarePoc]
