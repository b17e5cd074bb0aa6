"""What a commit costs the server, with 10, 100 and 1,000 devices, and what its memory does.

The devices answer at once with a small update, so that what is timed is the server: the event loop,
the decoding and checking of replies, and the strategy; the time spent in the grid's own calls is
taken out. Each run is a process of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from flower_adsp.strategies import Adsp, LoopOptions
from flwr.app import ArrayRecord, ConfigRecord, Context, Message

from benchmarks.report import arguments, peak_resident, print_table, write
from flower_adsp.devices import DeviceProfile
from flower_adsp.messages import (
    QUERY_CAPABILITY,
    Capability,
    Commit,
    decode_assignment,
    encode_capability,
    encode_commit,
)
from flower_adsp.testing import InProcessGrid
from flower_adsp.tracking.base import Callback, Record

PARAMETERS, PERIOD, RATE = 20_000, 60.0, 4


def answer(message: Message, context: Context) -> Message:
    """Be a device that does nothing but answer."""
    node = int(str(context.node_config["partition-id"]))
    number = int(str(context.node_config["num-partitions"]))
    if message.metadata.message_type == QUERY_CAPABILITY:
        profile = DeviceProfile(seconds_per_sample=0.02 + 0.002 * (node % 10))
        return encode_capability(message, Capability(node, number, 100, 32, profile))
    assignment, _, _ = decode_assignment(message)
    steps = assignment.steps or 1
    update = {"w": np.full(PARAMETERS, 1e-6, np.float32)}
    commit = Commit(assignment.id, assignment.version, steps, 1.0, 100, 1.0, update)
    return encode_commit(message, commit)


class TimedGrid(InProcessGrid):
    """The in-process grid, that says how long was spent in it."""

    spent = 0.0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to their nodes."""
        began = time.process_time()
        ids = super().push_messages(messages)
        self.spent += time.process_time() - began
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return replies."""
        began = time.process_time()
        replies = super().pull_messages(message_ids)
        self.spent += time.process_time() - began
        return replies


class FromTheStart(Callback):
    """Notes when the nodes had been found, and the run began."""

    def __init__(self, grid: TimedGrid) -> None:
        self._grid = grid
        self.at = 0.0

    def on_event(self, record: Record, state: Any) -> None:
        """Note the time outside of the grid."""
        if record["event"] == "start":
            self.at = time.process_time() - self._grid.spent


def run(devices: int, commits: int) -> dict[str, Any]:
    """Run ADSP for about so many commits; return what the server spent."""
    arrays = ArrayRecord({"w": _array(np.zeros(PARAMETERS, np.float32))})
    rounds = max(1, round(commits / (devices * RATE)))
    with TimedGrid(answer, devices) as grid:
        start = FromTheStart(grid)
        loop = LoopOptions(min_available_nodes=devices, callbacks=[start])
        strategy = Adsp(PERIOD, RATE, loop=loop)
        strategy.start(grid, arrays, num_rounds=rounds, train_config=ConfigRecord({"lr": 0.1}))
        seconds = time.process_time() - grid.spent - start.at
    done = strategy.state.commits
    return {
        "devices": devices,
        "commits": done,
        "seconds_per_commit": seconds / done,
        "resident_mib": peak_resident() / 2**20,
    }


def _array(values: np.ndarray[Any, Any]) -> Any:
    from flwr.app import Array

    return Array(values)


def run_apart(devices: int, commits: int) -> dict[str, Any]:
    """Run in a fresh process."""
    command = [sys.executable, __file__, "--child", str(devices), str(commits)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(printed.splitlines()[-1]))


def main() -> None:
    if "--child" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--child", nargs=2, type=int)
        print(json.dumps(run(*parser.parse_args().child)))
        return
    options = arguments("What a commit costs the server.")
    repeats, most = (1, 2000) if options.quick else (5, 8000)
    # Taken in turn, so that what else the machine does falls on all alike.
    found = [run_apart(n, most) for _ in range(repeats) for n in (10, 100, 1000)]
    rows = []
    for number in (10, 100, 1000):
        mine = [each for each in found if each["devices"] == number]
        rows.append(
            {
                "devices": number,
                "commits": mine[0]["commits"],
                "seconds_per_commit": statistics.median(e["seconds_per_commit"] for e in mine),
                "all": [each["seconds_per_commit"] for each in mine],
            }
        )
    memory = [run_apart(10, commits) for commits in (500, 5000)]
    print_table(rows, ["devices", "commits", "seconds_per_commit"])
    numbers = {
        "cost_ratio": rows[-1]["seconds_per_commit"] / rows[0]["seconds_per_commit"],
        "resident_mib": [each["resident_mib"] for each in memory],
        "memory_ratio": memory[1]["resident_mib"] / memory[0]["resident_mib"],
    }
    print(numbers)
    write(options.json, [0], rows=rows, **numbers)


if __name__ == "__main__":
    main()
