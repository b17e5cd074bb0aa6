import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from flower_adsp.client_app import app
from flower_adsp.config import choices, load_config
from flower_adsp.errors import ConfigError, DataError, NodeCountError
from flower_adsp.experiment import run_experiment
from flower_adsp.testing import InProcessGrid
from flower_adsp.tracking.summary import NUMBERS

Run = Callable[..., Path]
SHORT = "run.num_rounds=2 strategy.check_period=4"
FILES = ("history.jsonl", "model.safetensors", "summary.json")


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def test_a_run_writes_its_files(run_folder: Run) -> None:
    folder = run_folder("run", overrides=SHORT)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*FILES, "host.json", "config.json", "checkpoint.safetensors"]
    )
    numbers, records = summary(folder), history(folder)
    assert [record["t"] for record in records] == sorted(record["t"] for record in records)
    assert numbers["commits"] == sum(record["event"] == "commit" for record in records)
    assert numbers["commits"] == sum(row["commits"] for row in numbers["devices"])
    assert numbers["steps"] == sum(record.get("steps", 0) for record in records)
    assert numbers["rounds"] == 2
    for row in numbers["devices"]:
        assert row["computing"] + row["communicating"] + row["blocked"] == pytest.approx(1)
    speeds = [row["speed"] for row in numbers["devices"]]
    assert numbers["H"] == pytest.approx(np.mean(speeds) / min(speeds))
    assert numbers["not_waiting_limit"] == pytest.approx(1 - 1 / numbers["H"])
    assert [k for k, v in numbers.items() if not isinstance(v, dict | list)] == list(NUMBERS)


def test_the_saved_model_is_the_one_that_was_tested(run_folder: Run) -> None:
    from flower_adsp.tasks.build import build_task

    folder = run_folder("run", overrides=SHORT)
    task = build_task(load_config({"task": "digits-mlp"}))
    model = task.build_model()
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    assert task.metrics(model, task.held_out_data("test")) == summary(folder)["test"]


@pytest.mark.parametrize("strategy", ["adsp", "bsp"])
def test_the_same_seed_gives_the_same_bits(run_folder: Run, strategy: str) -> None:
    rounds = "run.num_rounds=3" if strategy == "bsp" else SHORT
    options: dict[str, Any] = {"strategy": strategy, "overrides": rounds}
    first = run_folder("first", **options)
    again = run_folder("again", **options)
    threads = run_folder("threads", grid_options={"threads": 3}, **options)
    ids = run_folder("ids", grid_options={"node_ids": [77, 3, 1 << 60, 12]}, **options)
    other = run_folder("other", seed=1, **options)
    for name in ("history.jsonl", "model.safetensors"):
        bits = (first / name).read_bytes()
        assert bits == (again / name).read_bytes()
        assert bits == (threads / name).read_bytes()
        assert bits == (ids / name).read_bytes()
        assert bits != (other / name).read_bytes()


@pytest.mark.parametrize("strategy", choices("strategy"))
def test_every_strategy_runs_as_it_is_shipped(run_folder: Run, strategy: str) -> None:
    folder = run_folder("run", strategy=strategy, overrides="run.num_rounds=2")
    numbers = summary(folder)
    assert numbers["rounds"] == 2
    assert numbers["config"]["strategy"]["name"]
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedadam"])
def test_flower_s_own_strategies_learn_with_our_client_app(run_folder: Run, strategy: str) -> None:
    folder = run_folder("run", strategy=strategy, overrides="run.num_rounds=4")
    numbers = summary(folder)
    losses = [record["loss"] for record in numbers["evaluations"].values()]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert numbers["rounds"] == 4
    assert (folder / "model.safetensors").is_file()


def test_it_learns(run_folder: Run) -> None:
    folder = run_folder("run", overrides="run.num_rounds=4 strategy.check_period=30")
    assert summary(folder)["test"]["accuracy"] > 0.85


def test_a_run_can_begin_with_the_model_of_an_earlier_one(run_folder: Run) -> None:
    first = run_folder("first", overrides=SHORT)
    final = [record for record in history(first) if record["event"] == "evaluation"][-1]
    second = run_folder("second", overrides=SHORT, initial_model=str(first))
    begun = next(record for record in history(second) if record["event"] == "evaluation")
    assert (begun["t"], begun["loss"]) == (0, final["loss"])


def test_a_run_that_breaks_off_leaves_its_model(tmp_path: Path) -> None:
    calls = 0

    def dying(message: Any, context: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise KeyboardInterrupt
        return app(message, context)

    settings = {"task": "digits-mlp", "output": str(tmp_path), "overrides": "run.evaluate_every=1"}
    with InProcessGrid(dying, 2, settings) as grid, pytest.raises(KeyboardInterrupt):
        run_experiment(grid, load_config(settings))
    saved = load_file(tmp_path / "model.safetensors")
    assert all(np.isfinite(array).all() for array in saved.values())
    assert not (tmp_path / "summary.json").exists()
    assert any(record["event"] == "commit" for record in history(tmp_path))


def spoil_model(folder: Path, how: str) -> str:
    folder.mkdir()
    path = folder / "model.safetensors"
    if how == "garbage":
        path.write_bytes(b"not a model")
    elif how == "other":
        save_file({"w": np.zeros(3, np.float32)}, path)
    return str(folder)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "folder of a run that has model.safetensors"),
        ("garbage", "cannot read"),
        ("other", "same model"),
    ],
)
def test_a_bad_initial_model_is_named(run_folder: Run, tmp_path: Path, how: str, said: str) -> None:
    given = spoil_model(tmp_path / "earlier", how)
    with pytest.raises(ConfigError) as caught:
        run_folder("run", initial_model=given)
    assert "initial_model" in str(caught.value)
    assert given in str(caught.value)
    assert said in str(caught.value)


def test_an_output_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    settings = {"task": "digits-mlp", "output": str(tmp_path / "file" / "run")}
    with InProcessGrid(app, 2, settings) as grid, pytest.raises(ConfigError, match="output = "):
        run_experiment(grid, load_config(settings))


def test_too_few_nodes_are_waited_for_and_then_said(run_folder: Run) -> None:
    with pytest.raises(NodeCountError, match=r"min_available_nodes = 5.*only 4 nodes"):
        run_folder("run", nodes=4, overrides="run.min_available_nodes=5 run.node_timeout=0.3")


def test_more_devices_than_examples_are_refused(run_folder: Run) -> None:
    with pytest.raises((DataError, NodeCountError)) as caught:
        run_folder("run", nodes=1500, overrides="run.node_timeout=0.3")
    assert "num-partitions = 1500" in str(caught.value)


def test_a_strategy_of_another_kind_is_named(tmp_path: Path) -> None:
    chosen = tmp_path / "mine.yaml"
    chosen.write_text("target: tests.toy:build_nonsense\n")
    settings = {"task": "digits-mlp", "strategy": str(chosen), "output": str(tmp_path / "run")}
    with InProcessGrid(app, 2, settings) as grid, pytest.raises(ConfigError) as caught:
        run_experiment(grid, load_config(settings))
    assert "strategy.target" in str(caught.value)


def test_a_user_s_own_task_runs(run_folder: Run) -> None:
    folder = run_folder("run", overrides=f"task.target=tests.toy:build {SHORT}")
    assert "loss" in summary(folder)["test"]
