"""The wheel in an environment of its own, away from the checkout, under a user's own app."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

import flower_adsp

ROOT = Path(flower_adsp.__file__).resolve().parent.parent
PROGRAM = """
import sys
from pathlib import Path
import flower_adsp
from flower_adsp.launch import LocalSuperLink

print("from", Path(flower_adsp.__file__).parent)
with LocalSuperLink() as link:
    link.run(Path(sys.argv[1]), {"num-rounds": 2}, 3, 1)
"""


def pip(*words: str, python: str = sys.executable) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
    done = subprocess.run(
        [python, "-c", PROGRAM, str(app)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"from {packages / 'flower_adsp'}" in done.stdout
    assert "accuracy 0." in done.stdout
    for part in ("strategies/adsp.py", "clients/register.py", "conf/sweep/strategies.yaml"):
        assert (packages / "flower_adsp" / part).is_file()
    assert not (packages / "strategies").exists()
