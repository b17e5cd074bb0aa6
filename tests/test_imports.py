"""What may import what, and what a device loads."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import flower_adsp

ROOT = Path(flower_adsp.__file__).resolve().parent.parent
ENTRY = {"server_app.py", "client_app.py", "cli.py", "experiment.py", "__init__.py"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def test_the_two_halves_do_not_know_each_other() -> None:
    for path in (ROOT / "strategies").rglob("*.py"):
        assert not any(name.startswith("flower_adsp.clients") for name in imports(path)), path
    for path in (ROOT / "clients").rglob("*.py"):
        assert not any(name.startswith("flower_adsp.strategies") for name in imports(path)), path


def test_the_core_knows_neither_half() -> None:
    halves = ("flower_adsp.strategies", "flower_adsp.clients")
    for path in (ROOT / "flower_adsp").rglob("*.py"):
        if path.name in ENTRY or "tracking" in path.parts:
            continue
        assert not any(name.startswith(halves) for name in imports(path)), path


def loaded_by(statement: str) -> set[str]:
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_device_loads_nothing_that_it_does_not_need() -> None:
    loaded = loaded_by("import flower_adsp.client_app")
    unwanted = {"matplotlib", "wandb", "flwr_datasets", "sklearn", "mlxtend", "ray"}
    assert not loaded & unwanted
    assert not any(name.startswith("flower_adsp.strategies") for name in loaded)


def test_the_package_itself_loads_next_to_nothing() -> None:
    loaded = loaded_by("import flower_adsp")
    assert not loaded & {"torch", "flwr", "numpy", "omegaconf"}


def test_the_package_takes_no_time_to_import() -> None:
    program = (
        "import time, flwr; began = time.perf_counter(); import flower_adsp; "
        "print(time.perf_counter() - began)"
    )
    took = [
        float(
            subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
        )
        for _ in range(3)
    ]
    assert min(took) < 0.2


@pytest.mark.parametrize("name", flower_adsp.__all__)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(flower_adsp, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = flower_adsp.Nothing
