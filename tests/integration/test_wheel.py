"""The wheel in an environment of its own, away from the checkout, under a user's own app."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

import flower_adsp
from flower_adsp.launch import free_ports, processes

ROOT = Path(flower_adsp.__file__).resolve().parent.parent
README = ROOT / "examples" / "bring_your_own" / "README.md"


def pip(*words: str, python: str = sys.executable) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def stop_all(environment: str) -> None:
    """Stop the local SuperLink that plain ``flwr run`` leaves behind, and what it started."""
    own = [process.pid for process in processes() if environment in process.arguments]
    for pid in own:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while any(environment in process.arguments for process in processes()):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.timeout(600)
def test_the_wheel_serves_an_app_of_a_user_s_own(tmp_path: Path) -> None:
    """All but the wheel and Flower's commands are the packages of this environment."""
    pip("wheel", "--no-deps", "--wheel-dir", str(tmp_path / "dist"), str(ROOT))
    (wheel,) = (tmp_path / "dist").glob("flower_adsp-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip("install", "--no-deps", str(wheel), f"flwr=={version('flwr')}", python=python)
    # Below its own packages come ours; what is linked there from the checkout is not followed.
    paths = {key: str(tmp_path / "venv") for key in ("base", "platbase")}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    app = tmp_path / "app"
    shutil.copytree(ROOT / "examples" / "bring_your_own", app)
    where = "import flower_adsp; print(flower_adsp.__file__)"
    found = subprocess.run(
        [python, "-c", where], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(packages / "flower_adsp" / "__init__.py")
    (command,) = re.findall(r"^\$ (.*flwr run.*)$", README.read_text("utf-8"), re.MULTILINE)
    http, control = free_ports(2)
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", command],
                cwd=app,
                capture_output=True,
                text=True,
                check=False,
                env={
                    "PATH": f"{tmp_path / 'venv' / 'bin'}:/usr/bin:/bin",
                    "HOME": home,
                    "FLWR_HOME": home,
                    "RAY_TMPDIR": home,
                    "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
                    "FLWR_LOCAL_CONTROL_API_PORT": str(control),
                },
            )
        finally:
            stop_all(str(tmp_path / "venv"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy 0." in done.stdout, done.stdout + done.stderr
    for part in ("strategies/adsp.py", "clients/register.py", "conf/sweep/strategies.yaml"):
        assert (packages / "flower_adsp" / part).is_file()
    assert not (packages / "strategies").exists()
