"""What the guides show exists, and can be run."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flower_adsp.config import RUN_CONFIG_KEYS, load_config

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
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
