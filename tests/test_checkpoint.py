from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord

from flower_adsp.arrays import encode
from flower_adsp.checkpoint import load, save
from flower_adsp.errors import ConfigError


@dataclass
class Leaf:
    name: str
    values: dict[int, Any] = field(default_factory=dict)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    record = encode({"w": array, "n": np.array(3)})
    state = {
        "plain": [1, 0.1, "ü", None, True, float("inf")],
        "numpy": np.float32(0.1),
        "big": 2**70,
        "keys": {(1, "a"): 1, 2: [3]},
        "tuple": (1, (2,)),
        "set": {3, 1},
        "frozen": frozenset({"b"}),
        "deque": deque([(0.0, 1.0)]),
        "counter": Counter({"nan": 2}),
        "array": array,
        "scalar": np.array(True),
        "leaf": Leaf("x", {1: Leaf("y")}),
        "metrics": MetricRecord({"loss": 0.25}),
        "records": [record, record],
    }
    save(path, state, [Leaf])
    back = load(path, [Leaf])
    for name in ("plain", "big", "keys", "tuple", "set", "frozen", "deque", "counter", "leaf"):
        assert back[name] == state[name]
        assert type(back[name]) is type(state[name])
    assert back["numpy"] == float(np.float32(0.1))
    assert dict(back["metrics"]) == {"loss": 0.25}
    for name in ("array", "scalar"):
        assert back[name].dtype == state[name].dtype
        assert np.array_equal(back[name], state[name])
    first, second = back["records"]
    assert first is second
    assert isinstance(first, ArrayRecord)
    assert np.array_equal(first["w"].numpy(), array)
    assert first["n"].numpy().shape == ()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_same_record_is_stored_once(tmp_path: Path) -> None:
    record = encode({"w": np.zeros(10_000)})
    sizes = []
    for number in (1, 10):
        save(tmp_path / "c.safetensors", {"all": [record] * number})
        sizes.append((tmp_path / "c.safetensors").stat().st_size)
    assert sizes[1] < sizes[0] + 2_000


def test_what_cannot_be_saved_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save(path, {"a": 1})
    with pytest.raises(TypeError, match="object cannot be part of a checkpoint"):
        save(path, {"a": object()})
    with pytest.raises(TypeError, match="Leaf cannot be part"):
        save(path, {"a": Leaf("x")})
    assert load(path) == {"a": 1}


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\x08\0\0\0\0\0\0\0{}      "])
def test_another_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.safetensors"):
        load(path)


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "c.safetensors", {"a": Leaf("x")}, [Leaf])
    with pytest.raises(ConfigError, match="'Leaf' is unknown"):
        load(tmp_path / "c.safetensors")
