"""Helpers that the tests share."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_adsp.strategies import CommitStrategy
from flwr.app import ArrayRecord, Message, MetricRecord

from flower_adsp.client_app import app
from flower_adsp.config import load_config
from flower_adsp.experiment import run_experiment
from flower_adsp.launch import processes
from flower_adsp.testing import InProcessGrid
from flower_adsp.tracking.base import Callback
from tests.toy import Quadratic

TOY = "task.target=tests.toy:build"


def running(*marks: str) -> set[tuple[int, str]]:
    """Return the processes of this environment whose command holds one of the marks."""
    environment = str(Path(sys.executable).parent.parent)
    return {
        (process.pid, process.arguments)
        for process in processes()
        if environment in process.arguments and any(mark in process.arguments for mark in marks)
    }


@contextmanager
def leaving_nothing(*marks: str) -> Iterator[None]:
    """Check that no process is left whose command holds one of the marks.

    Tests that run beside this one may have some for a moment.
    """
    before = running(*marks)
    yield
    deadline = time.monotonic() + 10
    while (left := running(*marks) - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


class Recorder(Callback):
    """Keeps the records of a run."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.closed = 0

    def on_event(self, record: Mapping[str, Any], state: Any) -> None:
        self.records.append(dict(record))
        self.state = state

    def on_close(self) -> None:
        self.closed += 1

    def of(self, event: str) -> list[Mapping[str, Any]]:
        return [record for record in self.records if record["event"] == event]


def toy_arrays(buffers: bool = False) -> ArrayRecord:
    return ArrayRecord(Quadratic(buffers=buffers).build_model().state_dict())


def weight(arrays: ArrayRecord) -> float:
    return float(arrays["w"].numpy()[0])


def toy_grid(
    num_nodes: int,
    client_app: Any = app,
    overrides: str = "",
    devices: str = "uniform",
    **options: Any,
) -> InProcessGrid:
    config = {"overrides": f"{TOY} {overrides}".strip(), "devices": devices}
    return InProcessGrid(client_app, num_nodes, config, **options)


def run_toy(
    strategy: CommitStrategy, grid: InProcessGrid, rounds: int, lr: float = 0.5, **options: Any
) -> Any:
    from flwr.app import ConfigRecord

    arrays = options.pop("arrays", None) or toy_arrays()
    return strategy.start(
        grid, arrays, num_rounds=rounds, train_config=ConfigRecord({"lr": lr}), **options
    )


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that runs a whole experiment on the in-process grid."""

    def run(
        name: str, nodes: int = 4, grid_options: Any = None, client: Any = app, **run_config: Any
    ) -> Path:
        folder = tmp_path / name
        settings = {
            "task": "digits-mlp",
            "output": str(folder),
            "tracking.report": "off",
            **run_config,
        }
        with InProcessGrid(client, nodes, settings, **(grid_options or {})) as grid:
            run_experiment(grid, load_config(settings))
        return folder

    return run


def evaluate_distance(index: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"loss": float(np.square(arrays["w"].numpy() - 2.0).sum())})


def spoil(handler: Callable[[Message, Any], Message], change: Callable[[Message], Message]) -> Any:
    """Return an app whose replies to ``train.commit`` are changed."""

    def spoiled(message: Message, context: Any) -> Message:
        reply = handler(message, context)
        return change(reply) if message.metadata.message_type == "train.commit" else reply

    return spoiled
