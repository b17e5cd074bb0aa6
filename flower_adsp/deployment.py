"""A federation of real SuperNodes on this machine, for trials: SuperLink, nodes and all.

With `secure`, connections use TLS with a certificate made on the spot, and only SuperNodes whose
keys have been registered may connect, as a federation beyond one's own machine should.
"""

import datetime
import ipaddress
import json
import os
import signal
import ssl
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flower_adsp.launch import LocalSuperLink, RunFailed, descendants, free_ports, stop
from flower_adsp.tracking.summary import format_summary

_DEMO = ((1.0, 2.4), (2.0, 1.2), (4.0, 0.8))  # slowdown, MiB for training
_DAY = datetime.timedelta(days=1)
# Flower looks for work once a second; this is what its environment lets one set.
POLL = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}


class LocalDeployment(LocalSuperLink):
    """A SuperLink for real nodes, and the nodes.

    Used as a context manager; leaving it stops all of them.

    Parameters
    ----------
    secure : bool (default: False)
        Whether to use TLS and the authentication of SuperNodes.
    """

    mode = ()

    def __init__(self, secure: bool = False) -> None:
        super().__init__()
        self.environment |= POLL
        self.secure = secure
        self._nodes: list[subprocess.Popen[bytes]] = []
        if secure:
            certificate, key = _make_certificate(self._home)
            self._authority = certificate
            self.security = (
                "--ssl-ca-certfile", str(certificate), "--ssl-certfile", str(certificate),
                "--ssl-keyfile", str(key), "--enable-supernode-auth",
            )  # fmt: skip
            self.connection = f'root-certificates = "{certificate}"'

    def _check_health(self) -> None:
        if not self.secure:
            return super()._check_health()
        context = ssl.create_default_context(cafile=str(self._authority))
        with urlopen(f"https://127.0.0.1:{self.port}/health", timeout=1, context=context):
            pass

    def add_node(
        self, node_config: Mapping[str, Any], port: int | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a SuperNode; return its process.

        Parameters
        ----------
        node_config : Mapping[str, Any]
            Its ``--node-config``.
        port : int | None (default: None)
            Where on this machine it finds the SuperLink, if something stands between them.
        """
        number = len(self._nodes)
        settings = " ".join(
            f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}"
            for key, value in node_config.items()
        )
        command = [
            "flower-supernode", "--superlink", f"127.0.0.1:{port or self.port}",
            "--port", str(free_ports(1)[0]), "--node-config", settings,
        ]  # fmt: skip
        if self.secure:
            private, public = _make_keys(self._home, number)
            registered = self.flwr("supernode", "register", str(public), "own")
            if registered.returncode:
                raise RunFailed(f"a SuperNode could not be registered: {registered.stdout}")
            command += [
                "--root-certificates", str(self._authority),
                "--auth-supernode-private-key", str(private),
                "--auth-supernode-public-key", str(public),
            ]  # fmt: skip
        else:
            command.append("--insecure")
        with (self._home / f"node-{number}.log").open("wb") as log_file:
            process = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._nodes.append(process)
        return process

    def kill_node(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill a SuperNode and what it runs, as a power cut would."""
        for pid in (process.pid, *(child.pid for child in descendants(process.pid))):
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def kill_server_app(self, seconds: float = 60.0) -> None:
        """Kill the process in which the ServerApp runs, once there is one, as a crash would.

        Parameters
        ----------
        seconds : float (default: 60.0)
            How long to wait until there is one, and then until it is gone.

        Raises
        ------
        RunFailed
            If there is none, or none that goes.
        """
        deadline = time.monotonic() + seconds
        killed: set[int] = set()
        while time.monotonic() < deadline:
            found = self._server_apps()
            if killed and not found:
                return
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            killed.update(found)
            time.sleep(0.2)
        raise RunFailed(f"no ServerApp to kill within {seconds:.0f} s; killed: {sorted(killed)}")

    def _server_apps(self) -> list[int]:
        assert self._process is not None
        return [
            child.pid
            for child in descendants(self._process.pid)
            if "flwr-serverapp" in child.arguments and not child.state.startswith("Z")
        ]

    def node_log(self, number: int) -> str:
        """Return what a SuperNode has printed."""
        path = self._home / f"node-{number}.log"
        return path.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Stop the nodes and the SuperLink."""
        for node in self._nodes:
            if node.poll() is None:
                stop(node)
        self._nodes.clear()
        super().close()


def demonstrate(app: Path, folder: Path, seconds: float) -> list[str]:
    """Train on three SuperNodes of unequal speed and memory; return the summary.

    Parameters
    ----------
    app : Path
        Folder of the app's ``pyproject.toml``.
    folder : Path
        Folder for the run's files; absolute.
    seconds : float
        Real time to train for.

    Raises
    ------
    RunFailed
        If the run did not complete, or left no summary.
    """
    settings = {
        "strategy": "adsp",
        "plan": "dsparse",
        "devices": "measured",
        "task": "mnist-resnet",
        "output": str(folder),
        "overrides": "task.batch_size=16 train.learning_rate=0.1 run.evaluate_every=15 "
        f"run.max_seconds={seconds} run.min_available_nodes={len(_DEMO)} "
        "strategy.check_period=30 strategy.commit_rate=1",
    }
    with LocalDeployment(secure=True) as link:
        for number, (slowdown, memory) in enumerate(_DEMO):
            link.add_node(
                {
                    "partition-id": number,
                    "num-partitions": len(_DEMO),
                    "name": f"node-{number}",
                    "slowdown": slowdown,
                    "memory-mib": memory,
                }
            )
        link.finish(link.start(app, settings))
    summary = folder / "summary.json"
    if not summary.is_file():
        raise RunFailed(f"the run left no {summary}")
    numbers = json.loads(summary.read_text(encoding="utf-8"))
    return [*format_summary(numbers), f"The files are in {folder}"]


def _make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for the loopback interface that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    hosts: Sequence[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_path, key_path = folder / "server.pem", folder / "server.key"
    certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(_private_bytes(key, serialization.PrivateFormat.PKCS8))
    return certificate_path, key_path


def _make_keys(folder: Path, number: int) -> tuple[Path, Path]:
    """Make the keys of a SuperNode."""
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / f"node-{number}", folder / f"node-{number}.pub"
    private.write_bytes(_private_bytes(key, serialization.PrivateFormat.OpenSSH))
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )
    return private, public


def _private_bytes(key: ec.EllipticCurvePrivateKey, kind: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
