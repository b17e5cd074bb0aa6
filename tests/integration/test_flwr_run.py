"""The real ``flwr run``: SuperLink, Ray actors and all."""

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flower_adsp
from flower_adsp.client_app import app as client_app
from flower_adsp.config import load_config
from flower_adsp.experiment import run_experiment
from flower_adsp.launch import LocalSuperLink, RunFailed, run_simulation
from flower_adsp.testing import InProcessGrid
from tests.conftest import leaving_nothing

ROOT = Path(flower_adsp.__file__).resolve().parent.parent
SETTINGS = {
    "task": "digits-mlp",
    "seed": 3,
    "overrides": "run.num_rounds=3 strategy.check_period=10",
    "tracking.progress": "off",
    "tracking.report": "off",
}
DETERMINISTIC = ("history.jsonl", "model.safetensors", "summary.json")
PROCESSES = ("flower-superlink", "flwr-simulation", "flwr-serverapp", "raylet", "gcs_server")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with leaving_nothing(*PROCESSES):
        yield


def in_process(folder: Path, nodes: int, **settings: Any) -> Path:
    config = {**SETTINGS, **settings, "output": str(folder)}
    with InProcessGrid(client_app, nodes, config) as grid:
        run_experiment(grid, load_config(config))
    return folder


@pytest.mark.parametrize("actors", [1, 2])
def test_flwr_run_gives_the_same_bits_as_the_grid_in_the_process(
    tmp_path: Path, actors: int
) -> None:
    folder = tmp_path / "flwr"
    run_simulation(ROOT, {**SETTINGS, "output": str(folder)}, 5, actors, quiet=True)
    expected = in_process(tmp_path / "grid", 5)
    for name in DETERMINISTIC:
        assert (folder / name).read_bytes() == (expected / name).read_bytes()


def test_runs_that_fail_say_so_and_a_plain_run_works(tmp_path: Path) -> None:
    """One SuperLink serves several runs, as that of a user does."""
    with LocalSuperLink() as link:
        home = Path(link.environment["FLWR_HOME"])
        wrong = {**SETTINGS, "strategy": "adsq", "output": str(tmp_path / "wrong")}
        with pytest.raises(RunFailed, match="strategy 'adsq'"):
            link.run(ROOT, wrong, 2, 1, quiet=True)

        few = {
            **SETTINGS,
            "output": str(tmp_path / "few"),
            "overrides": "run.min_available_nodes=3 run.node_timeout=2",
        }
        with pytest.raises(RunFailed, match=r"min_available_nodes = 3, but only 2 nodes"):
            link.run(ROOT, few, 2, 1, quiet=True)

        settings = tmp_path / "settings.toml"
        settings.write_text(
            'task = "digits-mlp"\n'
            f'output = "{tmp_path / "plain"}"\n'
            'overrides = "run.num_rounds=2 strategy.check_period=5"\n'
        )
        done = link.flwr(
            "run", str(ROOT), "own", "--stream",
            "--federation-config", "num-supernodes=2", "--run-config", str(settings),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "H = 1" in done.stdout
        assert "commits" in done.stdout
    assert not home.exists()
    summary = json.loads((tmp_path / "plain" / "summary.json").read_text())
    assert len(summary["devices"]) == 2
    assert summary["rounds"] == 2


def test_the_command_runs_a_user_s_own_task(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from tests.toy import build_slow as build\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [
        str(Path(sys.executable).parent / "flower-adsp"), "run",
        "--num-supernodes", "3", "--num-actors", "1",
        "--output", str(tmp_path / "run"), "--app", str(ROOT),
        "--overrides", "task.target=mine:build run.num_rounds=2 strategy.check_period=40",
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Test: loss" in done.stdout
    assert (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_interrupted_stops_what_it_started(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    history = tmp_path / "run" / "history.jsonl"
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        before = signal.signal(number, signal.SIG_DFL)  # where tests run in the background too
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "flower-adsp"), "run", "--task", "digits-mlp",
             "--num-supernodes", "2", "--num-actors", "1", "--output", str(tmp_path / "run"),
             "--app", str(ROOT), "run.num_rounds=100000"],
            env={**os.environ, "TMPDIR": home},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        signal.signal(number, before)
        try:
            deadline = time.monotonic() + 120
            while not (history.is_file() and '"commit"' in history.read_text()):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.2)
            process.send_signal(number)
            _, said = process.communicate(timeout=150)
        finally:
            process.terminate()  # which stops all that it started, where the signal did not
            process.wait(timeout=150)
        assert process.returncode == code
        assert "what was started has been stopped" in said
        assert not list(Path(home).glob("fadsp-*"))


def command(*words: str) -> subprocess.CompletedProcess[str]:
    executable = str(Path(sys.executable).parent / "flower-adsp")
    return subprocess.run([executable, *words], capture_output=True, text=True, check=False)


def test_strategies_are_compared_and_the_report_is_there(tmp_path: Path) -> None:
    done = command(
        "compare", "--strategies", "adsp,fedasync", "--task", "digits-mlp", "--seconds", "20",
        "--num-supernodes", "3", "--num-actors", "1", "--output", str(tmp_path / "both"),
        "--app", str(ROOT),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.rindex("run  ") :].splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["adsp", "fedasync"]
    assert "All runs have the same seed" in (tmp_path / "both" / "report.html").read_text()
    assert (tmp_path / "both" / "figures" / "loss.png").is_file()
    for name in ("adsp", "fedasync"):
        assert json.loads((tmp_path / "both" / name / "summary.json").read_text())["seconds"] == 20


def test_a_sweep_of_four_runs_comes_to_one_table(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "method: grid\nmetric: {name: test.loss, goal: minimize}\nparameters:\n"
        "  strategy.commit_rate: {values: [1, 2]}\n  train.learning_rate: {values: [0.05, 0.2]}\n"
    )
    done = command(
        "sweep", str(file), "task=digits-mlp", "run.num_rounds=2", "strategy.check_period=10",
        "tracking.report=off", "--num-supernodes", "2", "--num-actors", "1",
        "--output", str(tmp_path / "sweep"), "--app", str(ROOT),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "sweep" / "sweep.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["strategy.commit_rate"], row["train.learning_rate"]) for row in rows] == [
        ("1", "0.05"), ("1", "0.2"), ("2", "0.05"), ("2", "0.2"),
    ]  # fmt: skip
    for row in rows:
        summary = json.loads((tmp_path / "sweep" / row["run"] / "summary.json").read_text())
        assert float(row["test.loss"]) == summary["test"]["loss"]
        assert row["state"] == "finished"
    best = min(rows, key=lambda row: float(row["test.loss"]))
    shown = done.stdout[done.stdout.rindex("run    ") :].splitlines()
    assert shown[1].split()[0] == best["run"]
