"""Start ``flwr run`` with a SuperLink of its own, and leave nothing behind.

Plain ``flwr run`` uses whatever SuperLink answers on its port, with that process's environment,
leaves it running, and exits with 0 when the ServerApp has failed. This module starts a SuperLink
on free ports with a home folder of its own, finds out how the run ended, and stops it.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.error import URLError
from urllib.request import urlopen

from pathspec import GitIgnoreSpec

from flower_adsp.errors import ConfigError, FlowerAdspError

_CONNECTION = "own"
_LONGEST_HOME = 40  # Ray makes Unix sockets below it, whose paths have at most 107 characters
_START_SECONDS, _STOP_SECONDS = 60.0, 20.0


class RunFailed(FlowerAdspError, RuntimeError):
    """The run did not complete."""


def free_ports(number: int) -> list[int]:
    """Return ports of the loopback interface that nobody listens on."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _short_folder() -> Path:
    """Make a temporary folder, with a short path even where ``TMPDIR`` is long."""
    folder = Path(tempfile.mkdtemp(prefix="fadsp-"))
    if len(str(folder)) > _LONGEST_HOME and os.access("/tmp", os.W_OK):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="fadsp-", dir="/tmp"))
    return folder


def copy_app(app: Path, folder: Path) -> Path:
    """Copy what Flower may send of an app into a folder, and return the copy.

    ``flwr run`` looks at each file below an app before it drops those that ``.gitignore`` names;
    with a virtual environment among them this takes longer than a short run. So environments,
    Git's own files and whatever ``.gitignore`` names stay behind. The files are hard links where
    that is possible.
    """
    rules = app / ".gitignore"
    lines = rules.read_text(encoding="utf-8").splitlines() if rules.is_file() else []
    ignored = GitIgnoreSpec.from_lines([*lines, ".git/"])

    def left_out(parent: str, names: list[str]) -> set[str]:
        found = set()
        for name in names:
            path = Path(parent, name)
            relative = path.relative_to(app).as_posix()
            if ignored.match_file(f"{relative}/" if path.is_dir() else relative) or (
                path.is_symlink() or (path / "pyvenv.cfg").is_file()
            ):
                found.add(name)
        return found

    return Path(shutil.copytree(app, folder / app.name, ignore=left_out, copy_function=_link))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def to_toml(settings: Mapping[str, Any]) -> str:
    """Return settings of plain types as lines of TOML; a dot in a key makes a table."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


class SuperLink:
    """A SuperLink that Flower's commands know by the name of a connection.

    Used as a context manager; leaving it removes its temporary files.

    Parameters
    ----------
    name : str
        The connection's, in ``config.toml`` of Flower's home folder.
    """

    is_own = False  # or others, too, may start runs

    def __init__(self, name: str) -> None:
        self.name = name
        self._others: set[Any] = set()
        self._home = _short_folder()
        scripts = str(Path(sys.executable).parent)
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")]),
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        self._runs: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        """Use it as a context manager."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop what it started."""
        self.close()

    def close(self) -> None:
        """Stop showing logs, and remove the temporary files."""
        for run in self._runs:  # which only shows the log
            if run.poll() is None:
                run.kill()
                run.communicate()
        self._runs.clear()
        shutil.rmtree(self._home, ignore_errors=True)

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a ``flwr`` command against this SuperLink, and capture what it prints."""
        return subprocess.run(
            ["flwr", *arguments], env=self.environment, capture_output=True, text=True, check=False
        )

    def status(self) -> dict[str, Any] | None:
        """Return what ``flwr list`` says of the latest run, or None if there is none."""
        runs = [run for run in self._list() if run.get("run-id") not in self._others]
        return runs[0] if runs else None

    def _list(self) -> list[dict[str, Any]]:
        listed = self.flwr("list", self.name, "--format", "json")
        try:
            runs = json.loads(listed.stdout[listed.stdout.index("{") :]).get("runs", [])
        except ValueError:
            return []
        return [dict(run) for run in runs]

    def start(
        self, app: Path, run_config: Mapping[str, Any], *more: str, quiet: bool = False
    ) -> "subprocess.Popen[str]":
        """Start a run, and return the process that shows its log."""
        if not self.is_own:
            self._others = {run.get("run-id") for run in self._list()}
        config_file = self._home / "run-config.toml"
        config_file.write_text(to_toml(run_config), encoding="utf-8")
        copies = Path(tempfile.mkdtemp(prefix="app-", dir=self._home))
        run = subprocess.Popen(
            ["flwr", "run", str(copy_app(app.resolve(), copies)), self.name, "--stream",
             "--run-config", str(config_file), *more],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if quiet else None,
            stderr=subprocess.STDOUT if quiet else None,
            text=True,
        )  # fmt: skip
        self._runs.append(run)
        return run

    def finish(self, process: "subprocess.Popen[str]") -> None:
        """Wait for the end of a run that was started.

        Raises
        ------
        RunFailed
            If it did not complete.
        """
        try:
            printed, _ = process.communicate()
        except BaseException:
            self._stop_run()
            process.terminate()
            process.wait()
            raise
        status = self._final_status()
        if status != "finished:completed":
            raise RunFailed(f"the run ended as {status}\n{printed or ''}".rstrip())

    def _final_status(self) -> str:
        deadline = time.monotonic() + _STOP_SECONDS
        while True:
            run = self.status()
            status = "not started" if run is None else str(run.get("status"))
            if status.startswith("finished") or run is None or time.monotonic() > deadline:
                return status
            time.sleep(0.5)

    def _stop_run(self) -> None:
        run = self.status()
        if run is not None and not str(run.get("status")).startswith("finished"):
            self.flwr("stop", str(run["run-id"]), self.name)


class LocalSuperLink(SuperLink):
    """A SuperLink for simulations, with a home folder and ports of its own.

    Used as a context manager; leaving it stops the SuperLink and all that it started.
    """

    is_own = True
    mode: tuple[str, ...] = ("--simulation",)
    security: tuple[str, ...] = ("--insecure",)
    connection = "insecure = true"

    def __init__(self) -> None:
        super().__init__(_CONNECTION)
        self.port, control = free_ports(2)
        self.environment |= {
            "FLWR_HOME": str(self._home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if len(str(self._home)) <= _LONGEST_HOME:
            self.environment["RAY_TMPDIR"] = str(self._home)
        self._control = control
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the SuperLink and wait until it answers."""
        (self._home / "config.toml").write_text(
            f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
            f'address = "127.0.0.1:{self.port}"\n{self.connection}\n',
            encoding="utf-8",
        )
        log_path = self._home / "superlink.log"
        try:
            with log_path.open("wb") as log_file:
                self._process = subprocess.Popen(
                    self._command(),
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._wait_until_healthy(log_path)
        except BaseException:
            self.close()
            raise
        return self

    def _command(self) -> list[str]:
        return [
            "flower-superlink", *self.security, *self.mode, "--isolation", "subprocess",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--control-api-address", f"127.0.0.1:{self._control}",
            "--disable-runtime-dependency-installation",
        ]  # fmt: skip

    def _wait_until_healthy(self, log_path: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self._check_health()
                return
            except (URLError, OSError):
                time.sleep(0.1)
        tail = log_path.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RunFailed(f"flower-superlink did not start within {_START_SECONDS:.0f} s:\n{tail}")

    def _check_health(self) -> None:
        with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
            pass

    def close(self) -> None:
        """Stop the SuperLink and all processes it started, and remove its home folder."""
        process, self._process = self._process, None
        if process is not None:
            stop(process)
        super().close()

    def run(
        self,
        app: Path,
        run_config: Mapping[str, Any],
        num_supernodes: int,
        num_actors: int,
        quiet: bool = False,
    ) -> None:
        """Run an app in simulation, and wait for its end.

        Parameters
        ----------
        app : Path
            Folder of the app's ``pyproject.toml``.
        run_config : Mapping[str, Any]
            Values over those of the app's ``[tool.flwr.app.config]``.
        num_supernodes : int
            Number of simulated devices.
        num_actors : int
            Number of Ray actors, each with one CPU, that take turns in being a device.
        quiet : bool (default: False)
            Whether to keep the run's log back unless it fails.

        Raises
        ------
        RunFailed
            If the run did not complete.
        """
        federation = (
            f"num-supernodes={num_supernodes} client-resources-num-cpus=1 "
            f"init-args-num-cpus={num_actors}"
        )
        self.finish(self.start(app, run_config, "--federation-config", federation, quiet=quiet))


def run_simulation(
    app: Path,
    run_config: Mapping[str, Any],
    num_supernodes: int,
    num_actors: int,
    quiet: bool = False,
    link: LocalSuperLink | None = None,
) -> dict[str, Any]:
    """Run an app that writes a ``summary.json``.

    Parameters
    ----------
    app, run_config, num_supernodes, num_actors, quiet
        As for `LocalSuperLink.run`; the run config must hold an absolute ``output``.
    link : LocalSuperLink or None (default: None)
        A SuperLink that has been started; None: one that serves this run only.

    Returns
    -------
    dict[str, Any]
        What ``summary.json`` holds.

    Raises
    ------
    RunFailed
        If the run did not complete, or left no summary.
    """
    if not (app / "pyproject.toml").is_file():
        raise ConfigError(f"app = {str(app)!r} holds no pyproject.toml of a Flower app")
    output = Path(run_config["output"])
    if not output.is_absolute():
        raise ConfigError(f"output = {str(output)!r} must be an absolute path")
    summary = output / "summary.json"
    summary.unlink(missing_ok=True)  # one of an earlier run would hide a failure
    with contextlib.nullcontext(link) if link else LocalSuperLink() as used:
        used.run(app, run_config, num_supernodes, num_actors, quiet)
    if not summary.is_file():
        raise RunFailed(f"the run left no {summary}")
    return dict(json.loads(summary.read_text(encoding="utf-8")))


# ---------------------------------------------------------------------------------------- processes


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop a process and all that it started, and wait until they are gone."""
    family = {child.pid for child in descendants(process.pid)}
    _signal(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        family.update(child.pid for child in descendants(process.pid))  # it may start more
        time.sleep(0.1)
    for pid in family:  # those that did not end with it
        _signal(pid, signal.SIGTERM)
    _wait_gone(family, deadline - time.monotonic())
    for pid in (*family, process.pid):
        _signal(pid, signal.SIGKILL)
    process.wait()
    _wait_gone(family, _STOP_SECONDS)


class Process(NamedTuple):
    """A process of this machine, as ``ps`` shows it."""

    pid: int
    parent: int
    state: str
    arguments: str


def processes() -> list[Process]:
    """Return all processes of this machine, their arguments whole."""
    listed = subprocess.run(
        ["ps", "-e", "-ww", "-o", "pid=,ppid=,stat=,args="],  # -ww: whatever COLUMNS says
        capture_output=True,
        text=True,
        check=True,
    )
    lines = (line.split(maxsplit=3) for line in listed.stdout.splitlines())
    return [
        Process(int(pid), int(parent), state, " ".join(rest)) for pid, parent, state, *rest in lines
    ]


def descendants(pid: int) -> list[Process]:
    """Return a process's children and theirs."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process)
    found, queue = [], [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child.pid)
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_gone(pids: Iterable[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
