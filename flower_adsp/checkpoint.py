"""The state of a run in one file, so that it can go on after whatever ended it.

A checkpoint is a safetensors file: arrays, and beside them a tree of plain data as JSON. It is
written whole or not at all. Nothing in it is code, so that reading one runs none.
"""

import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flower_adsp.arrays import decode, encode
from flower_adsp.errors import ConfigError

FORMAT = 2
_TAG, _VALUE = "$", "value"
_STATE, _FORMAT = "state", "format"
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def save(path: Path, state: Mapping[str, Any], kinds: Iterable[type] = ()) -> None:
    """Write a checkpoint, whole or not at all.

    Parameters
    ----------
    path : Path
        The file; one that is there is replaced.
    state : Mapping[str, Any]
        Plain data, containers, arrays, records of Flower's, and dataclasses.
    kinds : Iterable[type] (default: ())
        The dataclasses that may be in it.

    Raises
    ------
    TypeError
        If something else is in it.
    """
    packer = _Packer(kinds)
    text = json.dumps(packer.pack(dict(state)))
    partial = path.with_suffix(".partial")
    save_file(packer.arrays, partial, {_FORMAT: str(FORMAT), _STATE: text})
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


def load(path: Path, kinds: Iterable[type] = ()) -> dict[str, Any]:
    """Read a checkpoint that was saved with the same kinds.

    Raises
    ------
    ConfigError
        If the file is not a checkpoint, or not of this format.
    """
    try:
        with safe_open(path, "numpy") as opened:
            about = opened.metadata() or {}
            if about.get(_FORMAT) != str(FORMAT):
                raise ConfigError(
                    f"{path} has checkpoint format {about.get(_FORMAT)!r}; {FORMAT} can be read"
                )
            arrays = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        return dict(_Unpacker(arrays, kinds).unpack(json.loads(about[_STATE])))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a checkpoint that can be read: {error}") from None


def _sync(path: Path) -> None:
    """Have a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Packer:
    """Turns a state into JSON's types; what is the same object twice is stored once."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds = tuple(kinds)
        self.arrays: dict[str, NDArray[Any]] = {}
        self._stored: dict[int, tuple[str, Any]] = {}

    def pack(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, list):
            return [self.pack(item) for item in value]
        if isinstance(value, np.ndarray):
            return {_TAG: "array", _VALUE: self._store(value)}
        if isinstance(value, ArrayRecord):
            return {_TAG: "ArrayRecord", _VALUE: self._store_record(value)}
        return {_TAG: type(value).__name__, _VALUE: self._pack_tagged(value)}

    def _pack_tagged(self, value: Any) -> Any:
        if isinstance(value, dict | Counter | MetricRecord):
            return [[self.pack(key), self.pack(item)] for key, item in value.items()]
        if isinstance(value, tuple | deque):
            return [self.pack(item) for item in value]
        if isinstance(value, set | frozenset):
            return [self.pack(item) for item in sorted(value)]
        if type(value) in self._kinds:
            return {each.name: self.pack(getattr(value, each.name)) for each in fields(value)}
        raise TypeError(f"a {type(value).__name__} cannot be part of a checkpoint: {value!r}")

    def _store(self, array: NDArray[Any]) -> str:
        if id(array) not in self._stored:
            key = f"{len(self.arrays)}"
            self.arrays[key] = np.array(array, order="C")
            self._stored[id(array)] = (key, array)  # which is held, so that its id stays its own
        return self._stored[id(array)][0]

    def _store_record(self, record: ArrayRecord) -> str:
        if id(record) not in self._stored:
            names = {}
            for name, array in decode(record).items():
                key = names[name] = f"{len(self.arrays)}"
                self.arrays[key] = np.array(array, order="C")
            self._stored[id(record)] = (json.dumps(names), record)
        return self._stored[id(record)][0]


class _Unpacker:
    def __init__(self, arrays: Mapping[str, NDArray[Any]], kinds: Iterable[type]) -> None:
        self._arrays = arrays
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._records: dict[str, ArrayRecord] = {}

    def unpack(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.unpack(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        tag, value = tree[_TAG], tree[_VALUE]
        if tag == "array":
            return self._arrays[value]
        if tag == "ArrayRecord":
            if value not in self._records:
                names = json.loads(value)
                self._records[value] = encode({n: self._arrays[k] for n, k in names.items()})
            return self._records[value]
        if tag in ("dict", "Counter", "MetricRecord"):
            items = {self.unpack(key): self.unpack(item) for key, item in value}
            return {"dict": dict, "Counter": Counter, "MetricRecord": MetricRecord}[tag](items)
        if tag == "deque":
            return deque(self.unpack(item) for item in value)
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](self.unpack(item) for item in value)
        if tag not in self._kinds:
            raise ValueError(f"{tag!r} is unknown")
        return self._kinds[tag](**{name: self.unpack(item) for name, item in value.items()})
