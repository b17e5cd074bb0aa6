"""The processes that a launch starts, and how they are found and stopped."""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from flower_adsp.launch import SuperLink, copy_app, descendants, processes, stop
from tests.conftest import running

MARK = "a-process-of-the-tests-" + "x" * 200
PARENT = (
    "import subprocess, sys, time;"
    f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', '{MARK}']);"
    "print('started', flush=True); time.sleep(60)"
)


def test_a_temporary_folder_has_a_short_path_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("a-folder-with-a-long-path" * 4)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with SuperLink("none") as link:
        (folder,) = [Path(value) for value in vars(link).values() if isinstance(value, Path)]
        assert folder.parent == Path("/tmp")
    assert not folder.exists()
    assert not list(long.iterdir())


APP = """
[project]
name = "app"
version = "1.0.0"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.42"]
[tool.flwr.app]
publisher = "somebody"
fab-format-version = 1
flwr-version-target = "1.42.0"
fab-include = ["LICENSE", "**/*.py", "**/*.yaml"]
[tool.flwr.app.components]
serverapp = "app.server:app"
clientapp = "app.client:app"
"""


def test_an_app_is_copied_without_what_flower_would_drop(tmp_path: Path) -> None:
    app = tmp_path / "here" / "app"
    files = {
        "pyproject.toml": APP,
        "LICENSE": "Do as you like.\n",
        ".gitignore": "__pycache__/\n/build/\n*.bin\n!kept.bin\n",
        "app/server.py": "app = 1\n",
        "app/client.py": "app = 2\n",
        "app/conf/values.yaml": "a: 1\n",
        "app/build/plan.py": "plan = 3\n",
        "kept.bin": "",
    }
    dropped = {
        "build/big.py": "",
        "app/__pycache__/server.pyc": "",
        "data.bin": "",
        ".git/config": "",
        "environment/pyvenv.cfg": "",
        "environment/lib/module.py": "",
    }
    for name, text in (files | dropped).items():
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(text)
    (app / "link").symlink_to(tmp_path)
    copied = copy_app(app, tmp_path / "there")
    assert copied.name == "app"
    found = {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()}
    assert found == set(files)
    shutil.rmtree(app / "environment")  # which Flower would have sent
    assert build_fab_from_disk(copied) == build_fab_from_disk(app)


@pytest.mark.parametrize("columns", ["", "20", "80"])
def test_a_process_is_found_whatever_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    before = {process.pid for process in processes()}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        (child,) = descendants(parent.pid)
        assert child.arguments.endswith(MARK)
        assert child.parent == parent.pid
        assert child.pid in {pid for pid, _ in running(MARK)} - before
    finally:
        begun = time.monotonic()
        stop(parent)
    assert time.monotonic() - begun < 10  # the child is told, and not only killed in the end
    assert not running(MARK)
    assert parent.returncode is not None
