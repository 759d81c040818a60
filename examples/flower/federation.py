"""A real Flower federation on this machine: TLS, and nodes that prove who they are; all ends with the script.

    python examples/flower/federation.py examples/flower/app --nodes 3 --run-config "rounds=5"

Makes a certificate authority, a server certificate and a key for every node in a temporary folder, starts
one SuperLink and the SuperNodes as processes of their own, submits the app, shows what its server logs, and
ends every process that it started, by its id. So do Ctrl-C, SIGTERM and SIGHUP, and the folder goes too.
"""

import argparse
import contextlib
import datetime
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BIN = Path(sys.executable).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # the apps run in this environment
    "RAY_USAGE_STATS_ENABLED": "0",
}


def make_certificates(folder):
    """A certificate authority (ca.pem) and a certificate for 127.0.0.1 and localhost that it signed."""
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name, issuer, public, signer, extensions):
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now)
        builder = builder.not_valid_after(now + datetime.timedelta(days=7))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(signer, hashes.SHA256())

    def named(text):
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    of_authority = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    root = certificate(
        named("fedbatchnorm example authority"),
        named("fedbatchnorm example authority"),
        authority.public_key(),
        authority,
        [(x509.BasicConstraints(ca=True, path_length=None), True), (of_authority, False), (signs, True)],
    )
    here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(of_authority)
    leaf = certificate(
        named("localhost"),
        root.subject,
        server.public_key(),
        authority,
        [(x509.SubjectAlternativeName(here), False), (by, False)],
    )
    key = server.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = serialization.Encoding.PEM
    for name, content in {
        "ca.pem": root.public_bytes(pem),
        "server.pem": leaf.public_bytes(pem),
        "server.key": key,
    }.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_bytes(content)


def make_key(folder, name):
    """A node's key, as ssh-keygen -t ecdsa -b 384 makes it: NAME, which stays with the node, and NAME.pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / name).touch(mode=0o600)
    (folder / name).write_bytes(private)
    (folder / f"{name}.pub").write_bytes(public)


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def running():
    """The processes that run: number -> that of its parent, and when it began; on Linux, which says so."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[int(folder.name)] = int(fields[1]), fields[19]
    return found


def below(root):
    """A process and those that it started, directly or not: number -> when it began."""
    everybody = running()
    found = [root]
    for number in found:  # which grows
        found += [child for child, (parent, _) in everybody.items() if parent == number]
    return {number: everybody[number][1] for number in found if number in everybody}


def command_of(number):
    """A process's command line; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


class Federation:
    """A SuperLink and SuperNodes on loopback, with TLS and node authentication; a context manager.

    Args:
        nodes: how many SuperNodes.
        folder: for certificates, keys, logs and Flower's own files.
    """

    def __init__(self, nodes, folder):
        self.nodes, self.folder = nodes, Path(folder)
        self.processes = {}
        self.ids = {}
        """Flower's id of each node, by its number."""
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"  # Flower starts programs of its own by name
        self.env = os.environ | QUIET | {"FLWR_HOME": str(self.folder / "home"), "PATH": path}

    def __enter__(self):
        (self.folder / "home").mkdir(parents=True, exist_ok=True)
        make_certificates(self.folder)
        self.port = free_port()
        config = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
        (self.folder / "home" / "config.toml").write_text(
            config + f'root-certificates = "{self.folder / "ca.pem"}"\n'
        )
        try:
            self._start(
                "superlink",
                "flower-superlink",
                *self._tls(),
                "--enable-supernode-auth",
                "--host=127.0.0.1",
                f"--port={self.port}",
            )
            self._wait_for(self.port)
            for i in range(self.nodes):
                make_key(self.folder, f"node-{i}")
                self.register(i)
                self.start_node(i)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        self._end(*self.processes.values())

    def register(self, node):
        """Tell the SuperLink a node's public key."""
        answer = json.loads(
            self._flwr("supernode", "register", self.folder / f"node-{node}.pub", "here", "--format", "json")
        )
        self.ids[node] = int(answer["node-id"])

    def start_node(self, node):
        """Start a SuperNode, which connects if its key is registered."""
        self._start(
            f"supernode-{node}",
            "flower-supernode",
            f"--root-certificates={self.folder / 'ca.pem'}",
            f"--superlink=127.0.0.1:{self.port}",
            f"--port={free_port()}",
            *self._tls(),
            f"--auth-supernode-private-key={self.folder / f'node-{node}'}",
            f"--node-config=partition-id={node} num-partitions={self.nodes}",
        )

    def online(self):
        """The nodes that the SuperLink takes to be there: one that was killed, too, for up to a minute."""
        answer = json.loads(self._flwr("supernode", "list", "here", "--format", "json"))
        there = {int(row["node-id"]) for row in answer["nodes"] if row["status"] == "online"}
        return {node for node, number in self.ids.items() if number in there}

    def revive(self, seconds=180):
        """Start the SuperNodes that have ended again; returns once all are online.

        A SuperLink misses a SuperNode that was killed after two heartbeats. Until then it refuses another
        one with its key, which ends for good. So a node is started when the old one is off the list.
        """
        until = time.monotonic() + seconds
        while True:
            ended = {node for node in self.ids if not self._alive(f"supernode-{node}")}
            online = self.online()
            if not ended and len(online) == len(self.ids):
                return
            if time.monotonic() > until:
                away = sorted(ended | (self.ids.keys() - online))
                raise TimeoutError(f"nodes {away} are not online: {self.log('superlink')[-3000:]}")
            for node in ended - online:
                self.start_node(node)
            time.sleep(1)

    def _alive(self, name):
        return name in self.processes and self.processes[name].poll() is None

    def _tls(self):
        files = {"ca-certfile": "ca.pem", "certfile": "server.pem", "keyfile": "server.key"}
        return [f"--ssl-{what}={self.folder / file}" for what, file in files.items()]

    def _start(self, name, program, *arguments):
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / program, *arguments], env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def _end(self, *processes, how=signal.SIGTERM):
        """End processes and all that they started, some of it in sessions of its own; each has some time."""
        started = {number: since for process in processes for number, since in below(process.pid).items()}
        for number in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, how)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            started |= below(process.pid)
        for number, (_, since) in running().items():  # a number may be somebody else's by now
            if started.get(number) == since:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        for process in processes:
            process.wait()

    def _wait_for(self, port, seconds=60):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.processes["superlink"].poll() is not None:
                break
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.2)
        raise RuntimeError("the SuperLink did not start:\n" + self.log("superlink"))

    def kill(self, node):
        """End a SuperNode at once, as a crash would."""
        self._end(self.processes.pop(f"supernode-{node}"), how=signal.SIGKILL)

    def log(self, name):
        """What a process has printed so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def submit(self, app, run_config=""):
        """Start a run of an app; returns its id."""
        command = [
            "run",
            str(app),
            "here",
            "--format",
            "json",
            *(["--run-config", run_config] if run_config else []),
        ]
        answer = json.loads(self._flwr(*command))
        if not answer.get("success"):
            raise RuntimeError(f"the run did not start: {answer}")
        return str(answer["run-id"])

    def status(self, run):
        """Such as starting, running, finished:completed."""
        answer = json.loads(self._flwr("list", "here", "--run-id", run, "--format", "json"))
        return answer["runs"][0]["status"]

    def wait(self, run, seconds=600):
        """Wait until a run has finished; returns its status."""
        until, asked = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < until:
            now = time.monotonic()
            # Asking takes a process and a second or two. The SuperLink's log has no line of a killed server.
            if re.search(rf"Finished task \d+ of run {run}\b", self.log("superlink")) or now - asked > 10:
                asked = now
                status = self.status(run)
                if status.startswith("finished"):
                    return status
            time.sleep(1)
        raise TimeoutError(f"run {run} has not finished in {seconds} s: {self.log('superlink')[-3000:]}")

    def server_log(self, run):
        """What a run's server app has logged so far."""
        return self._flwr("log", run, "here", "--show")

    def _flwr(self, *arguments):
        done = subprocess.run(
            [BIN / "flwr", *arguments], env=self.env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(map(str, arguments))}: {done.stdout}{done.stderr}")
        return done.stdout


@contextlib.contextmanager
def ended_by(*signals):
    """Makes these signals end the script as an error does, so that it cleans up, and once."""

    def stop(number, frame):
        for again in signals:
            signal.signal(again, signal.SIG_IGN)
        sys.exit(f"stopped by {signal.Signals(number).name}: all processes are being ended")

    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main():
    """Start a federation, run the app on it, and end everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("app", type=Path, help="folder of a Flower app")
    parser.add_argument("--nodes", type=int, default=3, help="how many SuperNodes")
    parser.add_argument("--run-config", default="", help="overrides, such as 'rounds=30 fbn=false'")
    args = parser.parse_args()
    if not (args.app / "pyproject.toml").is_file():
        parser.error(f"{args.app} is no Flower app: it has no pyproject.toml")
    stops = ended_by(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with stops, tempfile.TemporaryDirectory() as folder, Federation(args.nodes, folder) as federation:
        print(f"{args.nodes} SuperNodes and a SuperLink are running, with TLS and keys", flush=True)
        settings = f"min-nodes={args.nodes} {args.run_config}"
        run = federation.submit(args.app.resolve(), settings)
        subprocess.run([BIN / "flwr", "log", run, "here", "--stream"], env=federation.env, check=False)
        print(f"run {run}: {federation.wait(run)}")


if __name__ == "__main__":
    main()
