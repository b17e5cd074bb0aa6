"""The processes that a launch starts, and how they are found and stopped."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flower_adsp.launch import SuperLink, descendants, processes, stop
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
        stop(parent)
    assert not running(MARK)
    assert parent.returncode is not None
