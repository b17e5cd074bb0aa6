"""What the guides show exists, and can be run."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flower_adsp.cli import common, main
from flower_adsp.config import RUN_CONFIG_KEYS, load_config
from flower_adsp.devices import PROFILE_FIELDS

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
PAGES = [ROOT / "docs" / "tutorial.md", *GUIDES]
COMMANDS = [
    (path.stem, line)
    for path in PAGES
    for line in re.findall(
        r"^\$ (\.venv/bin/flower-adsp .*)$", path.read_text("utf-8"), re.MULTILINE
    )
]
UNITS = sorted((ROOT / "deploy").glob("*.service"))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_what_a_guide_shows_can_be_read(guide: Path) -> None:
    text = guide.read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        ast.parse(code)
    for named in re.findall(r"`(deploy/[^`]+)`", text):
        assert (ROOT / named).is_file()
    for config in re.findall(r"--run-config '([^']*)'", text):
        pairs = dict(re.findall(r'([\w.]+)="([^"]*)"', config))
        assert pairs
        assert pairs.keys() <= set(RUN_CONFIG_KEYS)
        load_config(pairs)
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_of_a_page_is_accepted(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it but the launch, in whose place the settings are run on the in-process grid."""
    asked: list[dict[str, Any]] = []

    def launch(app: Path, run_config: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        asked.append(dict(run_config))
        folder = Path(run_config["output"])
        folder.mkdir(parents=True)
        (folder / "history.jsonl").write_text(
            '{"event": "start", "t": 0, "strategy": "Adsp", "workers": []}\n'
        )
        return {"test": {"loss": 1.0}, "seconds_to_target": None}

    monkeypatch.chdir(tmp_path)
    (path,) = (path for path in PAGES if path.stem == page)
    for name, content in re.findall(
        r"```yaml\n# (\S+)\n(.*?)```", path.read_text("utf-8"), re.DOTALL
    ):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(common, "run_simulation", launch)
    words = shlex.split(line)[1:]
    if words[0] == "report":
        for name in words[1:3]:
            launch(tmp_path, {"output": name})
        asked.clear()
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert asked or words[0] in ("report", "plan", "devices")


def test_the_page_on_devices_names_all_fields() -> None:
    page = (ROOT / "docs" / "how-to" / "devices.md").read_text("utf-8")
    for name in (*PROFILE_FIELDS, "count"):
        assert re.search(rf"^\| .*`{name}`.* \|", page, re.MULTILINE), name


def test_the_python_of_the_guides_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "bring_your_own"))
    text = (ROOT / "docs" / "how-to" / "own-app.md").read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "own-app.md", "exec"), {})


def test_the_reference_of_the_command_is_what_it_says_itself() -> None:
    words = ["flower_adsp.cli", "utils", "docs", "--name", "flower-adsp", "--title", "The command"]
    shown = subprocess.run(
        [sys.executable, "-m", "typer", *words], capture_output=True, text=True, check=True
    ).stdout
    page = ROOT / "docs" / "reference" / "command.md"
    assert page.read_text(encoding="utf-8").strip() == shown.strip()


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_a_command_with_options_that_it_has(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8").replace("\\\n", " ")
    line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    command, *words = line.removeprefix("ExecStart=").split()
    program = Path(sys.executable).parent / Path(command).name
    shown = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    options = [word for word in words if word.startswith("--")]
    assert options
    for option in options:
        assert option in shown
