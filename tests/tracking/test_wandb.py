"""Weights & Biases, offline, read back from the file that it writes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2 as pb

from flower_adsp.client_app import app
from flower_adsp.config import load_config
from flower_adsp.errors import ConfigError
from flower_adsp.experiment import run_experiment
from flower_adsp.testing import InProcessGrid
from tests.conftest import leaving_nothing

Runner = Callable[..., Path]
_BLOCK, _HEADER = 32768, 7
SETTINGS: dict[str, Any] = {
    "tracking.wandb": "offline",
    "tracking.report": "html",
    "overrides": "strategy.check_period=10 run.num_rounds=3",
}


@pytest.fixture(autouse=True)
def no_service_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_SWEEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    with leaving_nothing("wandb-core"):
        yield


def records(file: Path) -> list[Any]:
    """Read a ``.wandb`` file: blocks of LevelDB's log format after a header of seven bytes."""
    content = file.read_bytes()
    assert content[:4] == b":W&B"
    found, partial, at = [], b"", 7
    while at < len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        length = int.from_bytes(content[at + 4 : at + 6], "little")
        kind = content[at + 6]
        partial += content[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # whole, or the last piece
            record = pb.Record()
            record.ParseFromString(partial)
            found.append(record)
            partial = b""
    return found


def logged(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], Any, list[Any]]:
    """Return the history, the config, the run and the artifacts of a folder's W&B run."""
    rows, config, run, artifacts = [], {}, None, []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                rows.append(
                    {
                        ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
            elif kind == "run":
                run = record.run
                for item in record.run.config.update:
                    config[".".join(item.nested_key) or item.key] = json.loads(item.value_json)
            elif kind == "artifact":
                artifacts.append(record.artifact)
            elif kind == "request" and record.request.HasField("log_artifact"):
                artifacts.append(record.request.log_artifact.artifact)
    return rows, config, run, artifacts


def test_metrics_config_and_files_are_there(run_folder: Runner) -> None:
    folder = run_folder("run", **SETTINGS)
    rows, config, _, artifacts = logged(folder)
    history = [json.loads(line) for line in (folder / "history.jsonl").open()]
    told = {r["t"]: r["loss"] for r in history if r["event"] == "evaluation"}
    seen = {row["t"]: row["validation/loss"] for row in rows if "validation/loss" in row}
    assert seen == pytest.approx(told)
    commits = [record["commits"] for record in history if record["event"] == "checkpoint"]
    found = [
        [row[f"device/{worker}/commits"] for worker in range(4)]
        for row in rows
        if "device/0/commits" in row
    ]
    assert found == commits
    assert all(0 <= row["device/0/computing"] <= 1 for row in rows if "device/0/computing" in row)
    assert config["strategy"]["check_period"] == 10
    assert config["task"]["name"] == "digits-mlp"
    files = {entry.path for artifact in artifacts for entry in artifact.manifest.contents}
    assert {"model.safetensors", "summary.json", "history.jsonl", "config.json"} <= files
    report = next(row for row in rows if "report._type" in row)
    assert report["report._type"] == "html-file"
    media = next(folder.glob("wandb/offline-run-*/files")) / report["report.path"]
    assert "What each device did" in media.read_text()


def test_units_of_a_plan_have_their_panels(run_folder: Runner) -> None:
    settings = {
        **SETTINGS,
        "task": "mnist-resnet",
        "plan": "dsparse",
        "overrides": f"{SETTINGS['overrides']} task.batch_size=2",
    }
    folder = run_folder("run", nodes=2, **settings)
    rows = logged(folder)[0]
    plan = next(row for row in rows if any(key.startswith("unit/") for key in row))
    assert {key for key in plan if key.startswith("unit/")} >= {"unit/0/trainers"}
    assert plan["device/0/plan_peak_mib"] > 0


def test_the_run_of_an_agent_keeps_its_id(run_folder: Runner) -> None:
    folder = run_folder(
        "run", **{**SETTINGS, "tracking.wandb_run_id": "r1", "tracking.wandb_project": "mine"}
    )
    run = logged(folder)[2]
    assert (run.run_id, run.project) == ("r1", "mine")


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    settings = {"task": "digits-mlp", "output": str(tmp_path / "run"), **SETTINGS}
    with InProcessGrid(app, 3, settings) as grid:
        run_experiment(grid, load_config(settings))
    first = logged(tmp_path / "run")[2].run_id
    more = {**settings, "resume": settings["output"]}
    more["overrides"] = SETTINGS["overrides"].replace("num_rounds=3", "num_rounds=5")
    with InProcessGrid(app, 3, more) as grid:
        run_experiment(grid, load_config(more))
    files = list((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))
    assert {file.name for file in files} == {f"run-{first}.wandb"}
    assert len(files) == 2


def test_without_a_login_it_goes_on_offline(run_folder: Runner, caplog: Any) -> None:
    folder = run_folder("run", **{**SETTINGS, "tracking.wandb": "online"})
    assert logged(folder)[0]
    assert "cannot be reached" in caplog.text
    assert "offline" in caplog.text


def test_one_of_flowers_own_strategies_leaves_its_rounds(run_folder: Runner) -> None:
    folder = run_folder("run", strategy="fedavg", **{**SETTINGS, "overrides": "run.num_rounds=2"})
    rows = logged(folder)[0]
    assert [row["round"] for row in rows if "round" in row] == [0, 1, 2]


def test_a_run_that_fails_is_a_failed_run(tmp_path: Path) -> None:
    calls = 0

    def dying(message: Any, context: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise KeyboardInterrupt
        return app(message, context)

    settings = {"task": "digits-mlp", "output": str(tmp_path), **SETTINGS}
    with InProcessGrid(dying, 2, settings) as grid, pytest.raises(KeyboardInterrupt):
        run_experiment(grid, load_config(settings))
    codes = [
        record.exit.exit_code
        for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        for record in records(file)
        if record.WhichOneof("record_type") == "exit"
    ]
    assert codes == [1]


def test_a_wrong_mode_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tracking\.wandb 'onlin'.*online"):
        load_config({"tracking.wandb": "onlin"})
