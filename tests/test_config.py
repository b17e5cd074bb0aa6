import tomllib
from pathlib import Path

import pytest
from flower_adsp.strategies import Adsp, Bsp

from flower_adsp.config import RUN_CONFIG_KEYS, choices, conf_folder, load_config
from flower_adsp.errors import ConfigError
from flower_adsp.tasks.build import build_task
from tests.toy import Quadratic


def test_defaults_are_the_main_job() -> None:
    config = load_config({})
    assert config.strategy.target is Adsp
    assert config.strategy.settings["check_period"] == 60.0
    assert config.strategy.settings["commit_rate"] == 4
    assert (config.task.name, config.devices.name, config.seed) == ("mnist-cnn", "adsp-ec2", 0)
    assert config.is_virtual


def test_the_app_offers_exactly_the_known_keys() -> None:
    project = tomllib.loads((conf_folder().parent / "pyproject.toml").read_text())
    offered = project["tool"]["flwr"]["app"]["config"]
    tracking = {f"tracking.{key}" for key in offered.pop("tracking")}
    assert set(offered) | tracking == set(RUN_CONFIG_KEYS)
    load_config(offered)


def test_overrides_reach_every_section_and_keep_types() -> None:
    config = load_config(
        {
            "overrides": "strategy.check_period=30 task.batch_size=64 run.target_loss=0.5 "
            "network.overhead_s=2 train.momentum=0.9 run.evaluate_every=null"
        }
    )
    assert config.strategy.settings["check_period"] == 30.0
    assert isinstance(config.strategy.settings["check_period"], float)
    assert config.task.settings["batch_size"] == 64
    assert config.run.target_loss == 0.5
    assert config.run.evaluate_every is None
    assert config.network.overhead_s == 2.0
    assert config.train.momentum == 0.9


@pytest.mark.parametrize("group", ["strategy", "devices", "task", "network"])
def test_every_file_in_conf_loads(group: str) -> None:
    assert choices(group)
    for name in choices(group):
        load_config({group: name})


def test_measured_devices_use_real_time_unless_told_otherwise() -> None:
    assert not load_config({"devices": "measured"}).is_virtual
    assert load_config({"devices": "measured", "overrides": "run.clock=virtual"}).is_virtual
    assert not load_config({"overrides": "run.clock=wall"}).is_virtual


def test_a_group_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("target: flower_adsp.strategies.bsp:Bsp\nlocal_steps: 7\n")
    choice = load_config({"strategy": str(path)}).strategy
    assert choice.target is Bsp
    assert choice.settings == {"local_steps": 7}


def test_a_user_s_own_task_is_given_by_its_target() -> None:
    config = load_config({"overrides": "task.target=tests.toy:build task.examples=9"})
    assert config.task.settings == {
        "batch_size": 1,
        "examples": 9,
        "growth": 0,
        "buffers": False,
    }
    task = build_task(config)
    assert isinstance(task, Quadratic)
    assert task.examples == 9


def test_a_target_that_makes_no_task_is_refused() -> None:
    config = load_config({"overrides": "task.target=tests.toy:build_nonsense"})
    with pytest.raises(ConfigError, match=r"tests.toy:build_nonsense.*int.*lacks"):
        build_task(config)


@pytest.mark.parametrize(
    ("run_config", "words"),
    [
        ({"strategy": "adps"}, ["strategy", "'adps'", "did you mean 'adsp'", "bsp"]),
        ({"devices": "ec3"}, ["devices", "'ec3'", "adsp-ec2"]),
        ({"task": "imagenet"}, ["task", "'imagenet'", "mnist-cnn"]),
        ({"network": "x"}, ["network", "'x'", "links"]),
        ({"strategy": "nowhere/mine.yaml"}, ["strategy", "nowhere/mine.yaml", "existing"]),
        ({"stratgy": "adsp"}, ["stratgy", "did you mean 'strategy'"]),
        ({"seed": -1}, ["seed", "-1", "at least 0"]),
        ({"seed": "one"}, ["seed", "'one'", "integer"]),
        ({"seed": True}, ["seed", "True", "integer"]),
        ({"output": 5}, ["output", "5", "string"]),
        ({"tracking.progress": "bars"}, ["tracking.progress", "'bars'", "lines"]),
        (
            {"overrides": "strategy.chek_period=3"},
            ["strategy.chek_period", "strategy.check_period"],
        ),
        ({"overrides": "strategi.x=1"}, ["section", "'strategi'", "strategy"]),
        ({"overrides": "strategy.check_period"}, ["strategy.check_period", "section.key=value"]),
        ({"overrides": "check_period=3"}, ["check_period=3", "section.key=value"]),
        ({"overrides": "strategy.check_period='"}, ["overrides", "split"]),
        ({"overrides": "strategy=1 strategy.a=1"}, ["section.key=value"]),
        ({"overrides": "strategy.check_period=soon"}, ["strategy.check_period", "'soon'", "float"]),
        ({"overrides": "strategy.check_period=.nan"}, ["strategy.check_period", "finite"]),
        ({"overrides": "strategy.commit_rate=1.5"}, ["strategy.commit_rate", "1.5", "int"]),
        ({"overrides": "task.batch_size=true"}, ["task.batch_size", "True", "int"]),
        ({"overrides": "run.num_rounds=0"}, ["run.num_rounds", "0", "at least 1"]),
        ({"overrides": "run.clock=sun"}, ["run.clock", "'sun'", "virtual", "wall"]),
        ({"overrides": "run.weighting=size"}, ["run.weighting", "examples"]),
        ({"overrides": "run.max_seconds=-4"}, ["run.max_seconds", "-4", "above 0"]),
        ({"overrides": "run.min_available_nodes=0"}, ["run.min_available_nodes", "0"]),
        ({"overrides": "run.smoothing_seconds=0"}, ["run.smoothing_seconds", "0", "above 0"]),
        ({"overrides": "train.learning_rate=0"}, ["train.learning_rate", "0", "above 0"]),
        ({"overrides": "train.momentum=1"}, ["train.momentum", "1", "below 1"]),
        ({"overrides": "train.device=tpu"}, ["train.device", "'tpu'", "cuda"]),
        ({"overrides": "network.overhead_s=-1"}, ["network.overhead_s", "-1", "at least 0"]),
        ({"overrides": "task.target=nonsense"}, ["task.target", "'nonsense'", "package.module"]),
        ({"overrides": "task.target=no.such:thing"}, ["task.target", "no.such:thing", "imported"]),
        ({"overrides": "task.target=tests.toy:nothing"}, ["task.target", "tests.toy:nothing"]),
        (
            {"overrides": "task.target=tests.toy:build task.alpha=1"},
            ["task.alpha", "task.examples"],
        ),
    ],
)
def test_bad_settings_are_named_with_what_is_allowed(
    run_config: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(run_config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("strategy.check_period=0", ["check_period", "0.0", "above 0"]),
        ("strategy.check_period=-5", ["check_period", "-5.0", "above 0"]),
        ("strategy.commit_rate=0", ["commit_rate", "0", "at least 1"]),
        ("strategy.server_learning_rate=0", ["server_learning_rate", "0.0", "above 0"]),
        ("strategy.timer_floor=-1", ["timer_floor", "-1.0", "at least 0"]),
    ],
)
def test_adsp_refuses_what_makes_no_sense(overrides: str, words: list[str]) -> None:
    config = load_config({"overrides": overrides})
    with pytest.raises(ConfigError) as caught:
        config.strategy.build()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a list\n", ["mine.yaml", "mapping"]),
        ("a: [\n", ["mine.yaml", "cannot read"]),
        ("local_steps: 3\n", ["no target"]),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config({"strategy": str(path)})
    for word in words:
        assert word in str(caught.value)


def test_a_preset_with_no_speed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("profiles:\n  - {name: slow, seconds_per_sample: 0}\n")
    with pytest.raises(ConfigError, match=r"seconds_per_sample of device 'slow' = 0"):
        load_config({"devices": str(path)})
    path.write_text("speeds: 3\n")
    with pytest.raises(ConfigError, match="'speeds'"):
        load_config({"devices": str(path)})
    path.write_text("source: none\n")
    with pytest.raises(ConfigError, match="not empty"):
        load_config({"devices": str(path)})
