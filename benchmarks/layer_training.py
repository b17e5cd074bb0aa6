"""What training parts of a model does to accuracy and to aggregation.

`mnist-resnet` in mini-batches of 16 over seven devices, from scratch: a network and an input size
for which many runs fit the time. Budgets are fractions of the peak of stock training, as in
`layer_memory`; they are higher, since here a forward pass alone takes a quarter of it. All methods
have one learning rate. Results of runs are kept in ``build/``.
"""

import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import print_table
from flower_adsp.arrays import Weights
from flower_adsp.config import load_config
from flower_adsp.sparse.plan import MIB, LayerPlan, LayerPlanner, Member
from flower_adsp.tasks.build import build_task

CACHE = Path(__file__).resolve().parents[1] / "build" / "benchmarks" / "layer_training"
TASK, SIZE = "mnist-resnet", "task.batch_size=16"
TIGHT = (0.6, 0.5, 0.4, 0.4, 0.35, 0.3, 0.25)
EQUAL = (0.03125,) * 7
STEPS, RATE = 1500, 0.2
EVERY, WINDOW, MOST_SECONDS = 5, 20, 1000  # of runs to a loss
MBPS, LATENCY = 20.0, 0.01
DECAY = "train.half_life=200"
UNITS = "dsparse, whole units"
METHODS = {  # plan and settings
    "everything": ("everything", ""),
    "dsparse": ("dsparse", " plan.channels=true"),
    UNITS: ("dsparse", " plan.channels=false"),
    f"{UNITS}, rotating": ("dsparse", " plan.channels=false plan.rotate=true plan.period=5"),
    "suffix": ("suffix", ""),
    "alone": ("alone", " plan.channels=false"),
    "head": ("head", ""),
}
MAIN = ("everything", "dsparse")  # with all seeds
CONTROLS = ("suffix", "alone", "head")  # with one seed; the others with three


@dataclass(frozen=True)
class Job:
    """One run."""

    strategy: str
    plan: str
    settings: str
    seed: int
    budgets: tuple[float, ...] = TIGHT
    speeds: tuple[float, ...] = EQUAL
    rounds: int = 1
    until: float | None = None  # a loss


@lru_cache(maxsize=1)
def stock_peak() -> float:
    """Return the MiB at the peak of stock training, by the memory model."""
    planner = LayerPlanner(
        build_task(load_config({"task": TASK, "overrides": SIZE})), method="suffix"
    )
    units, profile = planner.profiled()
    return profile.peak_bytes(dict.fromkeys(range(len(units)), 1.0)) / MIB


def run(job: Job) -> dict[str, Any]:
    """Return what a run came to, from the cache where it is there."""
    key = hashlib.sha256(json.dumps(asdict(job)).encode()).hexdigest()[:20]
    path = CACHE / f"{key}.json"
    if path.is_file():
        return dict(json.loads(path.read_text()))
    result = {"job": asdict(job), **_run(job)}
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(result))
    partial.replace(path)
    return result


def _run(job: Job) -> dict[str, Any]:
    from flower_adsp.client_app import app
    from flower_adsp.experiment import run_experiment
    from flower_adsp.testing import InProcessGrid

    with tempfile.TemporaryDirectory() as folder:
        preset = Path(folder) / "devices.yaml"
        lines = [
            f"  - {{name: d{i}, memory_mib: {budget * stock_peak()}, seconds_per_sample: {speed}}}"
            for i, (budget, speed) in enumerate(zip(job.budgets, job.speeds, strict=True))
        ]
        preset.write_text("\n".join(["profiles:", *lines]) + "\n")
        until = ""
        if job.until is not None:
            until = f"run.target_loss={job.until} run.smoothing_seconds={WINDOW}"
            until += f" run.max_seconds={MOST_SECONDS}"
        settings = {
            "strategy": job.strategy,
            "plan": job.plan,
            "devices": str(preset),
            "task": TASK,
            "network": "links",
            "seed": job.seed,
            "output": folder,
            "tracking.progress": "off",
            "tracking.report": "off",
            "overrides": f"{SIZE} train.learning_rate={RATE} run.num_rounds={job.rounds} "
            f"run.evaluate_every={'null' if job.until is None else EVERY} {until} "
            f"run.min_available_nodes=1 {job.settings}",
        }
        with InProcessGrid(app, len(job.budgets), settings) as grid:
            numbers = run_experiment(grid, load_config(settings))
        history = [json.loads(line) for line in (Path(folder) / "history.jsonl").open()]
    curve = [(r["index"], r["accuracy"]) for r in history if r["event"] == "evaluation"]
    plans = [record for record in history if record["event"] == "plan"]
    return {
        "accuracy": numbers["test"]["accuracy"],
        "loss": numbers["test"]["loss"],
        "validation_accuracy": numbers["validation"]["accuracy"],
        "seconds": numbers["seconds_to_target"] if job.until is not None else None,
        "bytes_up": numbers["bytes_up"],
        "bytes_down": numbers["bytes_down"],
        "uncovered": plans[0]["uncovered"] if plans else [],
        "curve": curve if job.until is None else [],
    }


# ------------------------------------------------------------------------------------ aggregation


def trainer_sets(plan: LayerPlan, model: Weights) -> dict[frozenset[int], float]:
    """Return the bytes of the parameters that each set of workers trains."""
    sizes: dict[frozenset[int], float] = {}
    for name in {name for worker in plan.workers.values() for name in worker.slices}:
        array = model[name]
        parts = {id_: w.slices[name] for id_, w in plan.workers.items() if name in w.slices}
        axis = next((part.axis for part in parts.values() if part.axis is not None), None)
        channels = 1 if axis is None else array.shape[axis]
        for channel in range(channels):
            group = frozenset(
                id_
                for id_, part in parts.items()
                if part.channels is None or np.isin(channel, part.channels)
            )
            if group:
                sizes[group] = sizes.get(group, 0.0) + array.nbytes / channels
    return sizes


def ring_seconds(size: float, members: int) -> float:
    """Return the seconds of a ring all-reduce of one bucket."""
    steps = 2 * (members - 1)
    return steps * (size / members * 8 / (MBPS * 1e6) + LATENCY)


def aggregation(plan: LayerPlan, model: Weights) -> dict[str, float]:
    """Return the seconds of one aggregation, from the end of training until all have the model.

    ``star`` is by the server, each device on a link of its own; ``groups`` is an all-reduce among
    the trainers of each set and a broadcast to the others, a device doing one after another; a
    ring over all devices in one bucket, as full training has it, is beside it.
    """
    total = sum(array.nbytes for array in model.values())
    ups = [worker.upload_bytes(model) for worker in plan.workers.values()]
    sizes = trainer_sets(plan, model)
    downs = [
        sum(size for group, size in sizes.items() if group != frozenset({id_}))
        for id_ in plan.workers
    ]
    rate = MBPS * 1e6 / 8
    spent = dict.fromkeys(plan.workers, 0.0)
    for group, size in sizes.items():
        for id_ in plan.workers:
            if id_ in group:
                spent[id_] += ring_seconds(size, len(group))
            if len(group) < len(plan.workers):
                spent[id_] += size / rate + LATENCY
    return {
        "star": max(ups) / rate + max(downs) / rate + 2 * LATENCY,
        "star_full": 2 * (total / rate + LATENCY),
        "groups": max(spent.values()),
        "ring_full": ring_seconds(total, len(plan.workers)),
        "mean_upload": statistics.fmean(ups) / total,
    }


def plan_of(budgets: Sequence[float]) -> tuple[LayerPlan, Weights]:
    """Return a plan as the runs have it at their start."""
    task = build_task(load_config({"task": TASK, "overrides": SIZE}))
    model = {name: tensor.numpy() for name, tensor in task.build_model().state_dict().items()}
    members = [
        Member(i, f"d{i}", budget * stock_peak(), 514, task.batch_size)
        for i, budget in enumerate(budgets)
    ]
    return LayerPlanner(task, channels=True).make(members, model), model


def rounds_to(curve: Iterable[Sequence[float]], accuracy: float) -> float | None:
    """Return the first round from which on the mean of five evaluations is at the accuracy."""
    points = list(curve)
    for end in range(5, len(points) + 1):
        if statistics.fmean(value for _, value in points[end - 5 : end]) >= accuracy:
            return points[end - 1][0]
    return None


# ---------------------------------------------------------------------------------------- the whole


def job_of(method: str, tau: int, seed: int, steps: int) -> Job:
    """Return the run of a method with τ local steps."""
    plan, settings = METHODS[method]
    settings = f"strategy.local_steps={tau} {DECAY}{settings}"
    return Job("dsparse", plan, settings, seed, rounds=steps // tau)


def accuracy_rows(
    pool: ProcessPoolExecutor, seeds: list[int], methods: Sequence[str], steps: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for each method, and the gap to full training."""
    jobs = [
        (method, job_of(method, 10, seed, steps))
        for seed in seeds
        for method in methods
        if method in MAIN or seed in seeds[: 1 if method in CONTROLS else 3]
    ]
    done = list(pool.map(run, [job for _, job in jobs]))
    by: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for (method, _), result in zip(jobs, done, strict=True):
        by[method].append(result)
    full = [result["accuracy"] for result in by["everything"]]
    rows = []
    for method, results in by.items():
        accuracy = [result["accuracy"] for result in results]
        gaps = [a - b for a, b in zip(full, accuracy, strict=False)]  # seed by seed
        rows.append(
            {
                "method": method,
                "accuracy": accuracy,
                "accuracy_mean": statistics.fmean(accuracy),
                "loss_mean": statistics.fmean(result["loss"] for result in results),
                "gap": statistics.fmean(gaps),
                "gap_interval": _interval(gaps),
                "uncovered": results[0]["uncovered"],
            }
        )
    gap = next(row for row in rows if row["method"] == "dsparse")
    return rows, {"accuracy_gap": gap["gap"], "accuracy_gap_interval": gap["gap_interval"]}


def _interval(values: list[float]) -> list[float] | None:
    """Return the 90 % interval of the mean, by Student's t."""
    if len(values) < 2:
        return None
    from scipy.stats import t as student

    half = student.ppf(0.95, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.fmean(values)
    return [float(mean - half), float(mean + half)]


def aggregation_rows(
    pool: ProcessPoolExecutor, seeds: list[int], taus: Sequence[int], steps: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return, for each τ, the time spent on aggregation until FedAvg's accuracy less a point."""
    plan, model = plan_of(TIGHT)
    once = aggregation(plan, model)
    cases = [(method, tau) for tau in taus for method in MAIN]
    jobs = [job_of(method, tau, seed, steps) for method, tau in cases for seed in seeds]
    done = list(pool.map(run, jobs))
    by = {
        case: done[index * len(seeds) : (index + 1) * len(seeds)]
        for index, case in enumerate(cases)
    }
    fedavg = [r for (method, _), results in by.items() if method == "everything" for r in results]
    goal = max(statistics.fmean([a for _, a in r["curve"][-5:]]) for r in fedavg) - 0.01
    rows = []
    for tau in taus:
        for method in MAIN:
            results = by[(method, tau)]
            rounds = [rounds_to(r["curve"], goal) for r in results]
            is_full = method == "everything"
            reached = [r for r in rounds if r is not None]
            middle = statistics.median(reached) if len(reached) == len(rounds) else None
            rows.append(
                {
                    "method": method,
                    "local_steps": tau,
                    "rounds": rounds,
                    "star_seconds": middle and middle * once["star_full" if is_full else "star"],
                    "ring_seconds": middle and middle * once["ring_full" if is_full else "groups"],
                }
            )

    def least(method: str, kind: str) -> float | None:
        found = [row[kind] for row in rows if row["method"] == method and row[kind]]
        return min(found) if found else None

    summary: dict[str, Any] = {"aggregation_goal": goal, "one_aggregation_seconds": once}
    for kind in ("star_seconds", "ring_seconds"):
        full, ours = least("everything", kind), least("dsparse", kind)
        saved = 1 - ours / full if ours and full else None
        summary["aggregation_saved" if kind == "star_seconds" else "ring_saved"] = saved
    return rows, summary


def training(quick: bool) -> tuple[list[int], dict[str, Any], Mapping[str, Any]]:
    """Run it all; return the seeds, the rows and the numbers they come to."""
    seeds = [1] if quick else [1, 2, 3, 4]
    steps = 200 if quick else STEPS
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        methods = MAIN if quick else tuple(METHODS)
        accuracy, summary = accuracy_rows(pool, seeds, methods, steps)
        print_table(accuracy, ["method", "accuracy_mean", "loss_mean", "gap", "gap_interval",
                               "uncovered"])  # fmt: skip
        rows, more = aggregation_rows(pool, seeds, (10,), steps)
        print_table(rows, ["method", "local_steps", "rounds", "star_seconds", "ring_seconds"])
    return seeds, {"accuracy": accuracy, "aggregation": rows}, summary | more
