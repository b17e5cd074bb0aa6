"""What a commit costs on real SuperNodes, and how much of the time they train.

ADSP on the loopback interface with commits 30 s apart, three nodes that take turns on this
machine's cores: once with Flower's own intervals, once with the shorter one that Flower lets its
user set (`LocalDeployment`). A node asks for work every 3 s, which cannot be set, and starts a
process for each message; both are in the overhead, which ADSP's timers allow for. `process_s` is
the part of such a process: from its start to its first step, as many at a time as there are nodes.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, print_table, write
from flower_adsp.deployment import POLL, LocalDeployment

ROOT = Path(__file__).resolve().parents[1]
NODES, APART = 3, 30.0
PROCESS = """
import flower_adsp.client_app
from flower_adsp.clients.device import device_of
from flwr.app import Context, RecordDict
node = {"partition-id": 0, "num-partitions": 3}
run_config = {"strategy": "adsp", "devices": "measured", "task": "digits-mlp"}
device_of(Context(1, 1, node, RecordDict(), run_config)).task.build_model()
"""


def process_seconds(repetitions: int = 3) -> float:
    """Return the median seconds until processes that start together are ready to train."""
    times = []
    for _ in range(repetitions):
        started = time.monotonic()
        running = [
            subprocess.Popen([sys.executable, "-c", PROCESS], cwd=ROOT) for _ in range(NODES)
        ]
        for process in running:
            process.wait()
        times.append(time.monotonic() - started)
    return statistics.median(times)


def run(environment: dict[str, str], seconds: float) -> dict[str, Any]:
    """Return what a run comes to whose processes have this environment beside the usual one."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "strategy": "adsp",
            "devices": "measured",
            "task": "digits-mlp",
            "output": folder,
            "tracking.report": "off",
            "overrides": f"strategy.check_period={2 * APART} strategy.commit_rate=2 "
            f"run.num_rounds=1000 run.max_seconds={seconds} run.min_available_nodes={NODES} "
            "run.evaluate_every=30",
        }
        with LocalDeployment() as link:
            for key in POLL:
                link.environment.pop(key, None)
            link.environment |= environment
            for number in range(NODES):
                link.add_node({"partition-id": number, "num-partitions": NODES})
            link.finish(link.start(ROOT, settings, quiet=True))
        summary = json.loads((Path(folder) / "summary.json").read_text())
        history = [json.loads(line) for line in (Path(folder) / "history.jsonl").open()]
    commits = [record for record in history if record["event"] == "commit"]
    cycles = [record["t"] - record["released"] for record in commits]
    trained = [
        row["computing"] * summary["seconds"] / max(row["commits"], 1) for row in summary["devices"]
    ]
    latest = max(record["t"] for record in commits)
    return {
        "compute_share": statistics.fmean(
            row["computing"] * summary["seconds"] / latest for row in summary["devices"]
        ),
        "overhead_s": statistics.fmean(cycles) - statistics.fmean(trained),
        "cycle_s": statistics.fmean(cycles),
        "commits": [row["commits"] for row in summary["devices"]],
        "refused": summary["refused"],
    }


def main() -> None:
    options = arguments("What a commit costs on real SuperNodes.")
    seconds = 90.0 if options.quick else 180.0
    process = process_seconds()
    rows = [
        {"setting": name, **run(environment, seconds), "process_s": process}
        for name, environment in (("Flower's own", {}), ("shorter", POLL))
    ]
    print_table(rows, [*rows[0]])
    write(options.json, [0], rows=rows, seconds=seconds, shorter=POLL)


if __name__ == "__main__":
    main()
