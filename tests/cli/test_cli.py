from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_adsp.cli import main
from flower_adsp.cli.common import number_of_nodes, with_settings
from flower_adsp.config import choices, load_config
from flower_adsp.errors import ConfigError
from flower_adsp.launch import run_simulation, to_toml


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--strategy", "adsq"], ["strategy", "adsq", "adsp", "bsp"]),
        (["--devices", "toasters"], ["devices", "toasters", "adsp-ec2"]),
        (["--task", "mnist"], ["task", "mnist", "mnist-cnn"]),
        (["--network", "pigeon"], ["network", "pigeon", "links"]),
        (["--seed", "-1"], ["seed", "-1", "at least 0"]),
        (["--overrides", "strategy.commit_rat=2"], ["strategy.commit_rat", "commit_rate"]),
        (["--overrides", "strategy.commit_rate=two"], ["commit_rate", "two"]),
        (["--overrides", "strategy.check_period=0"], ["check_period", "0", "above 0"]),
        (["--overrides", "strategy.commit_rate=0"], ["commit_rate", "0", "at least 1"]),
        (["--overrides", "commit_rate"], ["commit_rate", "section.key=value"]),
        (["--overrides", "task.target=nowhere:build"], ["task.target", "nowhere"]),
    ],
)
def test_wrong_settings_exit_with_2_and_say_why(arguments: list[str], said: list[str]) -> None:
    result = CliRunner().invoke(main, ["run", *arguments])
    assert result.exit_code == 2
    for part in said:
        assert part in result.output
    assert "Traceback" not in result.output


def test_an_unknown_option_exits_with_2() -> None:
    assert CliRunner().invoke(main, ["run", "--speed", "9"]).exit_code == 2


def test_a_folder_without_an_app_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"app = .*no pyproject\.toml"):
        run_simulation(tmp_path, {"output": str(tmp_path)}, 2, 1)


def test_settings_survive_toml() -> None:
    import tomllib

    settings = {"seed": 3, "output": 'a "b"\\c\nd', "tracking.progress": "off", "flag": True}
    read = tomllib.loads(to_toml(settings))
    assert read == {
        "seed": 3,
        "output": 'a "b"\\c\nd',
        "tracking": {"progress": "off"},
        "flag": True,
    }


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--plan dsparse", 0, "every unit is trained whole by some device"),
        ("--plan head", 1, "not covered: 0, 3, 4, 5, 6, 7"),
        ("--plan none", 2, "plan = 'none' is not allowed"),
        ("--plan best", 2, "unknown plan 'best'"),
        ("--devices measured", 2, "devices = 'measured' is not allowed"),
        ("--overrides plan.importance=luck", 2, "plan.importance 'luck'"),
        ("--devices tiny.yaml", 2, "a mini-batch of at most"),
    ],
)
def test_plan(
    options: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text("profiles:\n  - {name: tiny, memory_mib: 0.6}\n")
    words = ["plan", "--task", "mnist-resnet", "--devices", "rpi-mixed", *options.split()]
    result = CliRunner().invoke(main, words)
    assert said in result.output
    assert result.exit_code == code


@pytest.mark.parametrize(
    "words",
    [
        ["run", "strategy.commit_rat=2"],
        ["run", "speed=3"],
        ["run", "ssp"],
        ["run", "seed=one"],
        ["run", "tracking.wandb=maybe"],
        ["compare", "--strategies", "adsp"],
        ["compare", "--strategies", "adsp,adsp"],
        ["compare", "--strategies", "adsp,fedavg"],
        ["compare", "--strategies", "adsp,bsq"],
        ["report", "nowhere"],
        ["sweep", "nothing"],
        ["sweep", "strategies", "run.most=3"],
        ["devices", "show", "toasters"],
        ["resume", "nowhere"],
    ],
)
def test_wrong_words_exit_with_2_and_say_why(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "Error: " in result.output
    wrong = words[-1].partition("=")[0].split(",")[-1]
    assert wrong in result.output
    assert "Traceback" not in result.output


def test_a_sweep_over_a_key_that_does_not_exist_runs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("method: grid\nparameters:\n  strategy.commit_rte: {values: [1, 2]}\n")
    result = CliRunner().invoke(main, ["sweep", str(file), "--output", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "strategy.commit_rte" in result.output
    assert "commit_rate" in result.output
    assert not (tmp_path / "out").exists()


def test_settings_are_laid_over_each_other() -> None:
    base = {"strategy": "adsp", "overrides": "run.num_rounds=2"}
    merged = with_settings(base, ["strategy=ssp", "seed=4", "task.name=a b", "tracking.wandb=x"])
    assert merged == {
        "strategy": "ssp",
        "seed": 4,
        "tracking.wandb": "x",
        "overrides": "run.num_rounds=2 task.name='a b'",
    }


def test_presets_are_listed_and_shown() -> None:
    listed = CliRunner().invoke(main, ["devices", "list"])
    assert listed.exit_code == 0
    for name in choices("devices"):
        assert name in listed.output
    shown = CliRunner().invoke(main, ["devices", "show", "adsp-ec2"])
    assert shown.exit_code == 0
    for said in ("t2.large", "AAAI 2020", "H = 2.06"):
        assert said in shown.output


def test_a_measurement_is_a_preset(tmp_path: Path) -> None:
    measured = CliRunner().invoke(main, ["devices", "measure", "--task", "digits-mlp"])
    assert measured.exit_code == 0
    path = tmp_path / "mine.yaml"
    path.write_text(measured.stdout)
    ((profile, count),) = load_config({"devices": str(path)}).devices.profiles
    assert count == 1
    assert 0 < profile.seconds_per_sample < 1


def test_as_many_devices_as_the_preset_has() -> None:
    for name, expected in (("dsparse-seven", 7), ("adsp-ec2-36", 36), ("uniform", 18)):
        assert number_of_nodes(load_config({"devices": name}), 0) == expected
    assert number_of_nodes(load_config({"devices": "phones"}), 4) == 4


@pytest.mark.parametrize(
    "command", ["run", "resume", "compare", "report", "plan", "sweep", "deploy-demo", "devices"]
)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "Usage" in result.output
    if command not in ("deploy-demo", "devices"):
        assert "Example: flower-adsp" in result.output
