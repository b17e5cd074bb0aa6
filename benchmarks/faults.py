"""Faulty replies of every kind, under every strategy: whether runs go on, and what it costs.

In virtual time, on the in-process grid. First many faults, of all kinds, under each strategy: no
run may crash or get stuck, and no valid commit may be lost. Then one reply in ten is faulty: the
loss is compared with that of the same run without faults, after as many applied commits, and at the
same time. A reply that never comes is missed after three times what the assignment should take.
"""

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import arguments, print_table, write
from flower_adsp.config import load_config
from flower_adsp.faults import FaultyGrid

STRATEGIES = {
    "adsp": "",
    "adsp-search": "strategy.reward_target=0.1",
    "adsp-overlap": "",
    "adsp-plus": "",
    "bsp": "run.num_rounds=100",
    "fixed-adacomm": "strategy.local_steps=8 run.num_rounds=80",
    "adacomm": "strategy.local_steps=8 run.num_rounds=80",
    "batchtune": "strategy.local_steps=4 run.num_rounds=80",
    "ssp": "strategy.staleness=8 run.num_rounds=100",
    "fedasync": "strategy.local_steps=8",
    "fedbuff": "strategy.local_steps=8 strategy.buffer_size=3",
    "fedcompass": "strategy.min_local_steps=2 strategy.max_local_steps=16",
}
NODES, LIMIT = 6, 300.0  # host seconds after which a run counts as stuck
MANY, FEW = 0.3, 0.1
COMPARED = ("adsp", "ssp", "fedasync", "fedbuff", "fedcompass", "fixed-adacomm")


def run(job: tuple[str, str, int, float]) -> dict[str, Any]:
    """Run a strategy with a seed and a rate of faults; say what came of it."""
    strategy, more, seed, rate = job
    from flower_adsp.client_app import app
    from flower_adsp.experiment import run_experiment

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "strategy": strategy,
            "devices": "adsp-ec2",
            "task": "digits-mlp",
            "network": "fixed",
            "seed": seed,
            "output": folder,
            "tracking.progress": "off",
            "tracking.report": "off",
            "overrides": "network.overhead_s=2 run.norm_limit=20 run.reply_timeout=0.01 "
            f"run.save_every=null {more}",
        }
        grid = FaultyGrid(app, NODES, settings, rate=rate, seed=seed)
        began = time.monotonic()
        crashed, numbers = "", {}
        try:
            with grid:
                numbers = run_experiment(grid, load_config(settings))
        except Exception as error:  # whatever it is, it is what this is about
            crashed = f"{type(error).__name__}: {error}"
        history = [json.loads(line) for line in (Path(folder) / "history.jsonl").open()]
    refused: Counter[str] = Counter()
    for row in numbers.get("devices", []):
        refused.update(row["refused"])
    evaluations = [record for record in history if record["event"] == "evaluation"]
    return {
        "strategy": strategy,
        "seed": seed,
        "crashed": crashed,
        "host_seconds": time.monotonic() - began,
        "injected": dict(grid.injected),
        "refused": dict(refused),
        "lost_commits": grid.valid - numbers.get("commits", 0),
        "commits": [record["commits"] for record in evaluations],
        "times": [record["t"] for record in evaluations],
        "losses": [record["loss"] for record in evaluations],
    }


def excess(faulty: dict[str, Any], clean: dict[str, Any], by: str) -> float:
    """Return by how much more loss there is with faults, where both have got to, as a fraction."""
    end = min(faulty[by][-1], clean[by][-1])
    losses = [float(np.interp(end, each[by], each["losses"])) for each in (faulty, clean)]
    return losses[0] / losses[1] - 1


def main() -> None:
    options = arguments("What faulty replies do.")
    seeds = [0] if options.quick else [0, 1, 2, 3, 4]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        jobs = [(name, more, 0, MANY) for name, more in STRATEGIES.items()]
        rows = []
        injected: Counter[str] = Counter()
        waiting = [pool.submit(run, job) for job in jobs]
        stuck = 0
        for (name, *_), each in zip(jobs, waiting, strict=True):
            try:
                result = each.result(timeout=LIMIT)
            except TimeoutError:
                stuck += 1
                rows.append({"strategy": name, "stuck": True})
                continue
            injected.update(result["injected"])
            rows.append(
                {
                    "strategy": name,
                    "faults": sum(result["injected"].values()),
                    "refused": sum(result["refused"].values()),
                    "lost_commits": result["lost_commits"],
                    "crashed": result["crashed"],
                    "kinds": result["refused"],
                }
            )
        print_table(rows, ["strategy", "faults", "refused", "lost_commits", "crashed"])
        compared = compare(pool, seeds, COMPARED[:2] if options.quick else COMPARED)
    print_table(compared, ["strategy", "after_commits", "after_commits_all", "at_time"])
    totals = {
        "injected": sum(injected.values()),
        "kinds": len(injected),
        "crashed": sum(bool(row.get("crashed")) for row in rows),
        "stuck": stuck,
        "lost_commits": sum(row.get("lost_commits", 0) for row in rows),
    }
    print(totals)
    write(options.json, seeds, rows=rows, compared=compared, by_kind=dict(injected), **totals)


def compare(
    pool: ProcessPoolExecutor, seeds: Sequence[int], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return how much more loss one faulty reply in ten leads to, median over the seeds."""
    jobs = [
        (name, STRATEGIES[name], seed, rate)
        for name in names
        for seed in seeds
        for rate in (FEW, 0.0)
    ]
    results = list(pool.map(run, jobs))
    rows = []
    for index, name in enumerate(names):
        mine = results[2 * len(seeds) * index : 2 * len(seeds) * (index + 1)]
        pairs = list(zip(mine[::2], mine[1::2], strict=True))
        commits = [excess(faulty, clean, "commits") for faulty, clean in pairs]
        times = [excess(faulty, clean, "times") for faulty, clean in pairs]
        rows.append(
            {
                "strategy": name,
                "rate": FEW,
                "after_commits": statistics.median(commits),
                "after_commits_all": commits,
                "at_time": statistics.median(times),
                "at_time_all": times,
                "final_loss": statistics.median(clean["losses"][-1] for _, clean in pairs),
            }
        )
    return rows


if __name__ == "__main__":
    main()
