"""The commands and examples of README work as they stand."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import flower_adsp
from flower_adsp import cli
from flower_adsp.cli import common
from flower_adsp.config import RUN_CONFIG_KEYS, choices, load_config
from flower_adsp.experiment import check_config, run_experiment
from flower_adsp.testing import InProcessGrid

ROOT = Path(flower_adsp.__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLAIN = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"  # before plain flwr
COMMANDS = re.findall(r"^\$ (.*)$", README, re.MULTILINE)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_the_commands_that_the_tests_below_run() -> None:
    starts = [command.split()[0] for command in COMMANDS]
    ours = ".venv/bin/flower-adsp"
    assert sorted(set(starts)) == sorted({"make", ours, "PYTHONPATH=.", PLAIN})


@pytest.mark.parametrize("command", [c for c in COMMANDS if "flower-adsp run" in c or "ARGS" in c])
def test_the_options_of_a_command_are_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it but the launch, which the integration tests do."""
    (tmp_path / "mytask.py").write_text(PYTHON[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    words = shlex.split(command)
    arguments = (
        shlex.split(words[-1].removeprefix("ARGS="))
        if words[0] == "make"
        else words[words.index("run") + 1 :]
    )
    asked: list[Any] = []

    def launch(app: Path, run_config: Any, *_: Any, **__: Any) -> dict[str, Any]:
        asked.append(run_config)
        return {"test": {}}

    monkeypatch.setattr(common, "run_simulation", launch)
    result = CliRunner().invoke(cli.main, ["run", *arguments])
    assert result.exit_code == 0, result.output
    check_config(load_config(asked[0]))


def test_the_run_config_of_plain_flower_is_accepted() -> None:
    words = shlex.split(next(command for command in COMMANDS if command.startswith(PLAIN)))
    settings = words[words.index("--run-config") + 1]
    parsed = tomllib.loads(re.sub(r'" (?=\w+=)', '"\n', settings))
    assert parsed["task"] == "digits-mlp"
    check_config(load_config(parsed))


def test_the_task_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "readme_task.py").write_text(PYTHON[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    from flower_adsp.client_app import app

    settings = {
        "output": str(tmp_path / "run"),
        "overrides": "task.target=readme_task:build task.batch_size=16 run.num_rounds=3",
    }
    with InProcessGrid(app, 4, settings) as grid:
        numbers = run_experiment(grid, load_config(settings))
    assert numbers["test"]["loss"] < 0.2  # 4.6 at the start


def test_the_server_app_of_the_readme_runs() -> None:
    from flwr.app import Context, RecordDict

    from tests.conftest import toy_grid
    from tests.toy import Quadratic

    names: dict[str, Any] = {"build_model": Quadratic().build_model}
    exec(compile(PYTHON[0].replace("num_rounds=20", "num_rounds=1"), "README", "exec"), names)
    context = Context(1, 1, {}, RecordDict(), {})
    with toy_grid(2) as grid:
        names["app"](grid, context)


def test_the_plan_of_the_readme_is_what_the_command_prints() -> None:
    words = shlex.split(next(command for command in COMMANDS if "flower-adsp plan" in command))
    result = CliRunner().invoke(cli.main, words[1:])
    assert result.exit_code == 0, result.output
    shown = README.split("```text\n20 units")[1].split("```")[0]
    assert result.output.splitlines()[-1] == shown.splitlines()[-1]
    for line in shown.splitlines()[1:-1]:  # which bytes a layer keeps may change with torch
        if line != "...":
            assert line.split("  ")[0] in result.output
    for name in choices("plan"):
        assert f"`{name}`" in README + (ROOT / "docs" / "explanation.md").read_text("utf-8")


def test_the_tables_name_all_there_is() -> None:
    for key in RUN_CONFIG_KEYS:
        assert f"| `{key}` |" in README
    for name in choices("strategy"):
        assert f"`{name}`" in README


def test_the_files_of_a_run_are_named() -> None:
    from flower_adsp.tracking import files

    for name in (files.MODEL, files.HISTORY, files.SUMMARY, files.HOST, files.REPORT):
        assert f"`{name}`" in README


def test_links_within_the_project_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_settings_in_the_docs_exist() -> None:
    text = README + (ROOT / "docs" / "explanation.md").read_text(encoding="utf-8")
    base = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text(encoding="utf-8"))
    for section, key in re.findall(r"`?\b(run|train)\.(\w+)", text):
        assert key in base[section], f"{section}.{key}"


def test_the_module_runs_as_a_command() -> None:
    command = [str(Path(sys.executable).parent / "flower-adsp"), "run", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert "--overrides" in done.stdout
