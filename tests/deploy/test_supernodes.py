"""Real processes: a SuperLink, SuperNodes of different speed, and what befalls them.

They take minutes, and are run by ``make test-deploy``.
"""

import contextlib
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flower_adsp
from flower_adsp.config import load_config
from flower_adsp.deployment import LocalDeployment
from flower_adsp.launch import RunFailed
from tests.conftest import leaving_nothing

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

ROOT = Path(flower_adsp.__file__).resolve().parent.parent
SETTINGS = {
    "strategy": "adsp",
    "devices": "measured",
    "task": "digits-mlp",
    "tracking.progress": "off",
    "tracking.report": "off",
    "overrides": "strategy.check_period=20 strategy.commit_rate=1 run.min_available_nodes=3 "
    "run.evaluate_every=15",
}


PROCESSES = ("flower-superlink", "flower-supernode", "flwr-serverapp", "flwr-clientapp")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with leaving_nothing(*PROCESSES):
        yield


def settings(folder: Path, rounds: int, **more: Any) -> dict[str, Any]:
    overrides = f"{SETTINGS['overrides']} run.num_rounds={rounds}"
    return {**SETTINGS, "output": str(folder), "overrides": overrides, **more}


def history(folder: Path) -> list[dict[str, Any]]:
    path = folder / "history.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(folder: Path, found: Callable[[list[dict[str, Any]]], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not found(history(folder)):
        assert time.monotonic() < deadline, history(folder)[-3:]
        time.sleep(0.5)


def commits(records: list[dict[str, Any]]) -> list[int]:
    return [record["worker"] for record in records if record["event"] == "commit"]


def node(partition: int, slowdown: float) -> dict[str, Any]:
    return {"partition-id": partition, "num-partitions": 4, "slowdown": slowdown}


class Throttle:
    """A port from which bytes pass to another at a rate, each way."""

    def __init__(self, target: int, mbps: float) -> None:
        self._target = target
        self._mbps = mbps
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._free = [0.0, 0.0]  # when the link is free again, each way
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                node, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for way, pair in enumerate(((node, server), (server, node))):
                    threading.Thread(target=self._pass, args=(*pair, way), daemon=True).start()

    def _pass(self, sender: socket.socket, receiver: socket.socket, way: int) -> None:
        with contextlib.suppress(OSError), sender, receiver:
            while data := sender.recv(65536):
                with self._lock:
                    begins = max(self._free[way], time.monotonic())
                    self._free[way] = begins + len(data) * 8e-6 / self._mbps
                time.sleep(max(0.0, self._free[way] - time.monotonic()))
                receiver.sendall(data)
            receiver.shutdown(socket.SHUT_WR)


def test_a_link_is_probed(tmp_path: Path) -> None:
    with LocalDeployment() as link:
        throttle = Throttle(link.port, mbps=1.0)
        try:
            link.add_node({"partition-id": 0, "num-partitions": 1, "name": "far"}, throttle.port)
            done = subprocess.run(
                ["flower-adsp", "network", "probe", "own", "--nodes", "1", "--task", "digits-mlp",
                 "--overrides", "probe.seconds=1 probe.repeats=2", "--app", str(ROOT),
                 "--output", str(tmp_path / "links.yaml")],
                env=link.environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
        finally:
            throttle.close()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^far +", done.stdout, re.MULTILINE)
    ((profile, _),) = load_config({"devices": str(tmp_path / "links.yaml")}).devices.profiles
    assert profile.name == "far"
    # A megabyte takes 8 s; Flower looks for work each 3 s.
    assert 0.5 < profile.up_mbps < 2.0
    assert 0.5 < profile.down_mbps < 2.0


def test_equal_commits_and_nodes_that_die_and_join(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with LocalDeployment() as link:
        nodes = [link.add_node(node(i, slowdown)) for i, slowdown in enumerate((1.0, 2.0, 4.0))]
        run = link.start(ROOT, settings(folder, 8), quiet=True)
        wait_for(folder, lambda records: sorted(set(commits(records))) == [0, 1, 2], 240)
        wait_for(folder, lambda records: len(commits(records)) >= 5, 90)
        before = commits(history(folder))
        counts = [before.count(worker) for worker in range(3)]
        assert max(counts) - min(counts) <= 1
        link.kill_node(nodes[2])
        link.add_node(node(3, 1.0))
        wait_for(folder, lambda records: 3 in commits(records), 150)
        link.finish(run)
    records = history(folder)
    assert [r["worker"] for r in records if r["event"] == "joined"] == [3]
    after = commits(records[len([r for r in records if r["t"] == 0]) :])
    assert after.count(0) > before.count(0)
    assert after.count(1) > before.count(1)
    speeds = {w["id"]: w["speed"] for w in records[0]["workers"]}
    assert speeds[0] > 1.3 * speeds[2]  # four times, were the nodes not to share this machine
    numbers = json.loads((folder / "summary.json").read_text())
    assert numbers["test"]["accuracy"] > 0.8


def test_a_server_that_is_killed_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with LocalDeployment() as link:
        for partition in range(3):
            link.add_node({"partition-id": partition, "num-partitions": 3})
        run = link.start(ROOT, settings(folder, 20), quiet=True)
        wait_for(
            folder, lambda records: any(record["event"] == "checkpoint" for record in records), 150
        )
        link.kill_server_app()
        with pytest.raises(RunFailed):
            link.finish(run)
        assert not (folder / "summary.json").exists()
        before = [record for record in history(folder) if record["event"] == "checkpoint"]
        rounds = before[-1]["index"] + 1
        again = link.start(ROOT, settings(folder, rounds, resume=str(folder)), quiet=True)
        link.finish(again)
    records = history(folder)
    indices = [r["index"] for r in records if r["event"] == "checkpoint"]
    assert indices == list(range(1, rounds + 1))
    assert before[0] in records
    assert [r["t"] for r in records] == sorted(r["t"] for r in records)
    assert json.loads((folder / "summary.json").read_text())["commits"] == len(commits(records))
