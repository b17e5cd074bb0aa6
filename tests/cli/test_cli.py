from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_adsp.cli import main
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
