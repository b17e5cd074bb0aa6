"""Training on while commits travel, against Algorithm 1, over tasks, H and data.

For each task and data, the learning rate and η are those with which Algorithm 1 is fastest, on a
seed of its own; in each cell it has the better of its two rewards. The overlap has the same
learning rate, and in each cell its own best η of the same grid, on that seed. Then both run with
the same other seeds, and the ratios of their times, seed by seed, give an interval.
"""

import json
import math
import statistics
from dataclasses import replace
from itertools import product
from typing import Any

from scipy.stats import t as student

from benchmarks.report import arguments, print_table, write
from benchmarks.time_to_loss import Bench, Cell, Job

OVERHEAD, LEVEL, DEVICES_EACH = 2.0, 0.90, 18
REWARDS = ("published", "robust")
DEVICES = {1.45: "adsp-ec2-h145", 2.0: "adsp-ec2-h200", 2.6: "adsp-ec2-h260", 3.2: "adsp-ec2-h320"}
TARGETS = {  # by task: target loss and learning rates, for IID data and for Dirichlet 0.1
    "mnist-cnn": {"iid": (0.25, (0.2, 0.4, 0.8)), "dirichlet": (0.3, (0.1, 0.2, 0.4))},
    "mnist-svm": {"iid": (0.064, (0.1, 0.2, 0.4)), "dirichlet": (0.07, (0.1, 0.2, 0.4))},
    "mnist-lstm": {"iid": (0.6, (0.7, 1.4, 2.8)), "dirichlet": (0.9, (0.7, 1.4, 2.8))},
}
FACTORS = (1.0, 1.5, 2.0)  # η·M, published as 1
DIRICHLET = "task.partitioning=dirichlet task.alpha=0.1"


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 90 % interval of the geometric mean of ratios, by Student's t on logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    half = student.ppf((1 + LEVEL) / 2, len(logs) - 1) * statistics.stdev(logs) / len(logs) ** 0.5
    return math.exp(mean - half), math.exp(mean + half)


def median(results: list[dict[str, Any]]) -> float:
    """Return the median time; a run that never got there counts as infinite."""
    return statistics.median(float(r["seconds"] or math.inf) for r in results)


def with_factor(aim: str, factor: float) -> str:
    """Return Algorithm 1's settings with η = factor/M; without one, η is the published 1/M."""
    return aim if factor == 1 else f"{aim} strategy.server_learning_rate={factor / DEVICES_EACH}"


def tune(bench: Bench, base: Job, aim: str, rates: tuple[float, ...]) -> tuple[float, float]:
    """Return the learning rate and η·M with which the search is fastest, on the tuning seed."""
    choices = list(product(rates, FACTORS))
    results = bench.all(
        replace(base, settings=with_factor(f"{aim}robust", factor), learning_rate=rate)
        for rate, factor in choices
    )
    times = [median([result]) for result in results]
    print(base.task, base.target, dict(zip(choices, times, strict=True)), flush=True)
    return choices[times.index(min(times))]


def compare(bench: Bench, base: Job, data: str, aim: str, factor: float) -> dict[str, Any]:
    """Return the row of one cell."""
    searches = [replace(base, settings=with_factor(aim + reward, factor)) for reward in REWARDS]
    overlaps = [
        replace(base, strategy="adsp-overlap", settings=f"{data} strategy.step_factor={each}")
        for each in FACTORS
    ]
    tuned = [median([result]) for result in bench.all(overlaps)]
    best = tuned.index(min(tuned))
    size = len(bench.seeds)
    results = bench.all(
        replace(choice, seed=seed) for choice in (*searches, overlaps[best]) for seed in bench.seeds
    )
    published, robust, overlap = (results[size * part : size * (part + 1)] for part in range(3))
    is_robust = median(robust) < median(published)
    search = robust if is_robust else published
    pairs = [(a["seconds"], b["seconds"]) for a, b in zip(overlap, search, strict=True)]
    ratios = [mine / theirs for mine, theirs in pairs if mine and theirs]
    return {
        "task": base.task,
        "partitioning": "dirichlet" if data else "iid",
        "H": Cell(base.devices, base.overhead_s).degree,
        "overhead_s": base.overhead_s,
        "target_loss": base.target,
        "learning_rate": base.learning_rate,
        "reward": REWARDS[is_robust],
        "adsp_factor": factor,
        "overlap_factor": FACTORS[best],
        "adsp_seconds": [theirs for _, theirs in pairs],
        "overlap_seconds": [mine for mine, _ in pairs],
        "ratio": statistics.median(ratios) if ratios else None,
        "interval": interval(ratios) if len(ratios) > 1 else None,
    }


def main() -> None:
    options = arguments("Training on while commits travel, against Algorithm 1.")
    tasks = ["mnist-svm"] if options.quick else list(TARGETS)
    degrees = [3.2] if options.quick else list(DEVICES)
    bench = Bench([0], [1, 2] if options.quick else [1, 2, 3], options.quick)
    rows: list[dict[str, Any]] = []
    with bench.pool:
        for task in tasks:
            for partitioning, (target, rates) in TARGETS[task].items():
                data = DIRICHLET if partitioning == "dirichlet" else ""
                aim = f"{data} strategy.reward_target={target} strategy.reward="
                base = Job("adsp-search", "", DEVICES[2.6], OVERHEAD, 0.1, 0, task, target)
                rate, factor = tune(bench, base, aim, rates)
                for degree in degrees:
                    cell = replace(base, devices=DEVICES[degree], learning_rate=rate)
                    rows.append(compare(bench, cell, data, aim, factor))
                    print(json.dumps(rows[-1]), flush=True)
                    median_ratio = _median_ratio(rows)
                    write(
                        options.json, bench.seeds, rows=rows, level=LEVEL,
                        median_ratio=median_ratio,
                    )  # fmt: skip
    print_table(
        rows,
        ["task", "partitioning", "H", "learning_rate", "reward", "adsp_factor", "overlap_factor",
         "ratio", "interval"],
    )  # fmt: skip
    print(f"overlap over Algorithm 1, median of the cells: {median_ratio}")


def _median_ratio(rows: list[dict[str, Any]]) -> float | None:
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    return statistics.median(ratios) if ratios else None


if __name__ == "__main__":
    main()
