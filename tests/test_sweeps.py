"""Sweep files, and what they come to with and without W&B's agent."""

from pathlib import Path

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from flower_adsp.cli.common import checked, with_settings
from flower_adsp.config import conf_folder, load_config
from flower_adsp.errors import ConfigError
from flower_adsp.sweeps import check_metric, figure, read_sweep, settings_of_agent
from flower_adsp.tasks.build import build_task

FILES = sorted((conf_folder() / "sweep").glob("*.yaml"))


def sweep_file(folder: Path, **content: object) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"method": "grid", **content}, sort_keys=False))
    return str(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_sweep_can_be_run(path: Path) -> None:
    runs = read_sweep(path.stem).combinations(None, 0)
    assert len(runs) >= 4
    for values in runs:
        checked(with_settings({}, [f"{key}={value}" for key, value in values.items()]))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_agents_command_line_is_one_of_ours(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    values = read_sweep(path.stem).combinations(1, 0)[0]
    given = {"args": {key: {"value": value} for key, value in values.items()}}
    words: list[str] = []
    for word in create_sweep_command(content["command"]):
        is_macro = word.startswith("${")
        words += create_sweep_command_args(given)[word[2:-1]] if is_macro else [word]
    assert words[:2] == ["flower-adsp", "run"]
    config = checked(with_settings({}, words[2:]))
    assert config.tracking.wandb == "online"
    assert config.strategy.name == values["strategy"]


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    file = sweep_file(
        tmp_path,
        parameters={"strategy": {"values": ["adsp", "ssp"]}, "seed": {"values": [0, 1, 2]},
                    "task": {"value": "digits-mlp"}},
        run_cap=5,
    )  # fmt: skip
    runs = read_sweep(file).combinations(None, 0)
    assert [(run["strategy"], run["seed"]) for run in runs] == [
        ("adsp", 0), ("adsp", 1), ("adsp", 2), ("ssp", 0), ("ssp", 1),
    ]  # fmt: skip
    assert {run["task"] for run in runs} == {"digits-mlp"}
    assert len(read_sweep(file).combinations(2, 0)) == 2


def test_draws_repeat_and_keep_to_their_bounds(tmp_path: Path) -> None:
    file = sweep_file(
        tmp_path,
        method="random",
        parameters={
            "strategy.commit_rate": {"min": 1, "max": 3},
            "train.learning_rate": {"distribution": "log_uniform_values", "min": 0.01, "max": 1.0},
            "train.momentum": {"min": 0.0, "max": 0.5},
            "strategy.check_period": {"distribution": "q_uniform", "q": 10, "min": 20, "max": 60},
            "strategy": {"values": ["adsp", "adsp-overlap"]},
        },
    )
    sweep = read_sweep(file)
    runs = sweep.combinations(200, 3)
    assert runs == sweep.combinations(200, 3)
    assert runs != sweep.combinations(200, 4)
    assert {run["strategy.commit_rate"] for run in runs} == {1, 2, 3}
    assert {run["strategy.check_period"] for run in runs} == {20.0, 30.0, 40.0, 50.0, 60.0}
    assert all(0.01 <= run["train.learning_rate"] <= 1 for run in runs)
    assert 50 < sum(run["train.learning_rate"] < 0.1 for run in runs) < 150
    with pytest.raises(ConfigError, match=r"--runs says how many"):
        sweep.combinations(None, 0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"method": "bayes", "parameters": {"seed": {"value": 1}}}, ["bayes", "wandb agent"]),
        ({"method": "best", "parameters": {"seed": {"value": 1}}}, ["method", "best", "grid"]),
        ({"parameters": {}}, ["parameters", "not empty"]),
        ({"parameters": {"seed": 3}}, ["parameters.seed", "3", "values"]),
        ({"parameters": {"seed": {"values": []}}}, ["parameters.seed.values", "not empty"]),
        ({"parameters": {"seed": {"min": 3, "max": 1}}}, ["parameters.seed.max", "above min"]),
        ({"parameters": {"seed": {"min": 3}}}, ["parameters.seed.max", "a number"]),
        (
            {"parameters": {"seed": {"distribution": "beta", "min": 0, "max": 1}}},
            ["parameters.seed.distribution", "beta", "uniform"],
        ),
        ({"parameters": {"seed": {"value": 1}}, "metrik": 1}, ["metrik", "metric"]),
        ({"parameters": {"seed": {"value": 1}}, "run_cap": 0}, ["run_cap", "0", "at least 1"]),
        (
            {"parameters": {"seed": {"value": 1}}, "metric": {"name": "a", "goal": "up"}},
            ["metric.goal", "up", "maximize"],
        ),
    ],
)
def test_wrong_files_are_explained(
    tmp_path: Path, content: dict[str, object], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sweep(sweep_file(tmp_path, **content))
    for part in said:
        assert part in str(caught.value)


def test_an_unknown_sweep_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown sweep 'strategis'.*strategies"):
        read_sweep("strategis")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        read_sweep("nowhere.yaml")


def test_a_metric_is_checked_before_any_run() -> None:
    task = build_task(load_config({"task": "digits-mlp"}))
    for name in ("test.accuracy", "validation/loss", "seconds_to_target", "bytes_up"):
        check_metric(name, task)
    for name in ("test.los", "los", "test"):
        with pytest.raises(ConfigError, match="metric"):
            check_metric(name, task)


def test_figures_are_found_by_name() -> None:
    summary = {"commits": 3, "seconds_to_target": None, "test": {"loss": 0.5}, "config": {"a": "b"}}
    assert figure(summary, "commits") == 3
    assert figure(summary, "test.loss") == figure(summary, "test/loss") == 0.5
    assert figure(summary, "seconds_to_target") is None
    with pytest.raises(ConfigError, match=r"unknown metric 'test.los'.*loss"):
        figure(summary, "test.los")
    with pytest.raises(ConfigError, match="one number"):
        figure(summary, "test")


def test_a_run_is_tied_to_the_sweep_of_its_agent() -> None:
    agent = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": "r1", "WANDB_PROJECT": "p", "HOME": "/"}
    assert settings_of_agent(agent) == {
        "tracking.wandb_sweep_id": "s1",
        "tracking.wandb_run_id": "r1",
        "tracking.wandb_project": "p",
    }
    assert settings_of_agent({"WANDB_RUN_ID": "r1"}) == {}
