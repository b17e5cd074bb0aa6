"""Virtual time until a loss is reached: ADSP and its rivals on the same devices, data and seeds.

One target loss, learning rate, evaluation interval and smoothing for all: a run is over at the
first time at which the mean validation loss of the trailing 60 s, sampled every 15 s, is at or
below the target. Rivals and fixed commit rates are tuned on seeds of their own, per cell, and
reported on others. ADSP's search counts. The learning rate is the one that is best for the best
rival; with it a run is over within a few check periods, and with it the search, which hardly pays.

A barrier strategy's model depends neither on speeds nor on links, so each is run once a seed,
and its times are computed for each cell. All runs are kept in ``build/``, so that the whole can be
made in pieces.
"""

import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flower_adsp.strategies.loop import TrailingMean

from benchmarks.report import arguments, median, print_table, write
from flower_adsp.config import load_config
from flower_adsp.devices import deal, heterogeneity

CACHE = Path(__file__).resolve().parents[1] / "build" / "benchmarks" / "time_to_loss"
TASK, BATCH, TARGET, EVERY, WINDOW = "mnist-cnn", 32, 0.25, 15.0, 60.0
MOST_SECONDS = 800.0  # over the learning rate
LOCAL_STEPS = (1, 2, 5, 10, 20, 40, 80)
RATES = (2, 4, 8, 16)
OTHERS = {
    "adacomm": [f"strategy.local_steps={tau}" for tau in (10, 20, 40)],
    "batchtune": [f"strategy.local_steps={tau}" for tau in (1, 5, 10, 20)],
    "fedasync": [
        f"strategy.local_steps={tau} strategy.mixing={mixing}"
        for tau in (5, 10, 20)
        for mixing in (0.3, 0.6, 0.9)
    ],
    "fedbuff": [
        f"strategy.local_steps={tau} strategy.buffer_size={size}"
        for tau in (5, 10, 20)
        for size in (3, 6, 12)
    ],
    "fedcompass": [
        f"strategy.min_local_steps={least} strategy.max_local_steps={most}"
        for least, most in ((1, 5), (1, 10), (2, 10), (5, 20))
    ],
}


@dataclass(frozen=True)
class Cell:
    """Devices and what a commit costs."""

    devices: str
    overhead_s: float

    def profiles(self) -> list[Any]:
        """Return the devices' profiles."""
        preset = load_config({"devices": self.devices}).devices.profiles
        return deal(preset, sum(count for _, count in preset))

    @property
    def degree(self) -> float:
        """Return H."""
        return heterogeneity([profile.speed(BATCH) for profile in self.profiles()])


@dataclass(frozen=True)
class Job:
    """One run."""

    strategy: str
    settings: str
    devices: str
    overhead_s: float
    learning_rate: float
    seed: int
    task: str = TASK
    target: float = TARGET


EC2_5, EC2_HALF, EC2_10 = (Cell("adsp-ec2", seconds) for seconds in (5.0, 0.5, 10.0))
H320_HALF, H320_2 = Cell("adsp-ec2-h320", 0.5), Cell("adsp-ec2-h320", 2.0)
H145_HALF, H260_HALF = Cell("adsp-ec2-h145", 0.5), Cell("adsp-ec2-h260", 0.5)
TWICE_5 = Cell("adsp-ec2-36", 5.0)
CELLS = [EC2_5, EC2_10, H320_HALF, EC2_HALF, H145_HALF, H320_2, H260_HALF, TWICE_5]


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

    nodes = len(Cell(job.devices, 0).profiles())
    is_barrier = job.strategy in ("fixed-adacomm", "bsp")
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "strategy": job.strategy,
            "devices": job.devices,
            "task": job.task,
            "network": "fixed",
            "seed": job.seed,
            "output": folder,
            "tracking.progress": "off",
            "tracking.report": "off",
            "overrides": " ".join(
                [
                    f"network.overhead_s={job.overhead_s}",
                    f"train.learning_rate={job.learning_rate}",
                    f"run.target_loss={job.target * (0.97 if is_barrier else 1)}",
                    f"run.max_seconds={MOST_SECONDS / job.learning_rate}",
                    "run.num_rounds=1000000",
                    f"run.evaluate_every={'null' if is_barrier else EVERY}",
                    job.settings,
                ]
            ),
        }
        with InProcessGrid(app, nodes, settings) as grid:
            numbers = run_experiment(grid, load_config(settings))
        history = [json.loads(line) for line in (Path(folder) / "history.jsonl").open()]
    evaluations = [record for record in history if record["event"] == "evaluation"]
    rates = [r["commit_rate"] for r in history if r["event"] == "checkpoint" and "commit_rate" in r]
    return {
        "seconds": numbers["seconds_to_target"],
        "accuracy": numbers["validation"]["accuracy"],
        "test_accuracy": numbers["test"]["accuracy"],
        "compute_share": _mean(row["computing"] for row in numbers["devices"]),
        "least_compute_share": min(row["computing"] for row in numbers["devices"]),
        "blocked_share": _mean(row["blocked"] for row in numbers["devices"]),
        "commits": numbers["commits"],
        "bytes_up": numbers["bytes_up"],
        "bytes_down": numbers["bytes_down"],
        "rates": rates,
        "curve": [[r["index"], r["loss"], r["accuracy"]] for r in evaluations]
        if is_barrier
        else [],
    }


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def at_cell(base: Mapping[str, Any], local_steps: int, cell: Cell) -> dict[str, Any]:
    """Return what a barrier run comes to on the devices and links of a cell."""
    profiles = cell.profiles()
    steps = [local_steps * profile.step_seconds(BATCH) for profile in profiles]
    period = max(steps) + cell.overhead_s
    mean, held, reached, accuracy, barrier = TrailingMean(WINDOW), 0, None, None, 0
    curve = base["curve"]
    for number in range(int((curve[-1][0] * period + WINDOW) / EVERY) + 2):
        now = number * EVERY
        while held + 1 < len(curve) and curve[held + 1][0] * period <= now + 1e-9:
            held += 1
        smoothed = mean.add(now, curve[held][1])
        if smoothed is not None and smoothed <= TARGET:
            reached, accuracy, barrier = now, curve[held][2], int(now / period)
            break
    commits = barrier * len(profiles)
    size = base["bytes_up"] / base["commits"]
    return {
        "seconds": reached,
        "accuracy": accuracy,
        "compute_share": _mean(steps) / period,
        "least_compute_share": min(steps) / period,
        "blocked_share": _mean(max(steps) - each for each in steps) / period,
        "commits": commits,
        "bytes_up": commits * size,
        "bytes_down": commits * size,
    }


class Bench:
    """Runs jobs on several processes, and turns them into rows."""

    def __init__(self, tuning: list[int], seeds: list[int], quick: bool) -> None:
        self.tuning = tuning
        self.seeds = seeds
        self.quick = quick
        self.learning_rate = 0.1
        self.rows: list[dict[str, Any]] = []
        self.pool = ProcessPoolExecutor(os.cpu_count())

    def all(self, jobs: Iterable[Job]) -> list[dict[str, Any]]:
        """Return the results of jobs, in order."""
        return list(self.pool.map(run, jobs))

    def barrier_jobs(self, tau: int, rate: float, seeds: list[int], cell: Cell) -> list[Job]:
        """Return the runs of periodic averaging; only the number of devices is the cell's."""
        devices = "adsp-ec2-36" if len(cell.profiles()) == 36 else "adsp-ec2"
        settings = f"strategy.local_steps={tau}"
        return [Job("fixed-adacomm", settings, devices, 0.0, rate, seed) for seed in seeds]

    def barrier(self, tau: int, rate: float, seeds: list[int], cell: Cell) -> list[dict[str, Any]]:
        """Return periodic averaging at a cell."""
        results = self.all(self.barrier_jobs(tau, rate, seeds, cell))
        return [at_cell(result, tau, cell) for result in results]

    def jobs(self, strategy: str, settings: str, cell: Cell, seeds: list[int]) -> list[Job]:
        """Return the runs of another strategy at a cell."""
        job = Job(strategy, settings, cell.devices, cell.overhead_s, self.learning_rate, 0)
        return [replace(job, seed=seed) for seed in seeds]

    def add(self, name: str, settings: str, cell: Cell, results: list[dict[str, Any]]) -> None:
        """Add a row."""
        seconds = [result["seconds"] for result in results]
        row: dict[str, Any] = {
            "strategy": name,
            "settings": settings,
            "task": TASK,
            "devices": cell.devices,
            "H": cell.degree,
            "overhead_s": cell.overhead_s,
            "target_loss": TARGET,
            "learning_rate": self.learning_rate,
            "seconds": seconds,
            "seconds_median": median(seconds),
        }
        for key in (
            "compute_share",
            "least_compute_share",
            "blocked_share",
            "commits",
            "bytes_up",
            "bytes_down",
            "accuracy",
        ):
            values = [result[key] for result in results if result[key] is not None]
            row[key] = statistics.median(values) if values else None
        if any(result.get("rates") for result in results):
            row["rates"] = [result["rates"] for result in results]
        self.rows.append(row)


def _best(choices: Mapping[Any, list[dict[str, Any]]]) -> Any:
    """Return the choice with the least median time."""
    medians = {
        choice: median([result["seconds"] for result in results])
        for choice, results in choices.items()
    }
    return min(choices, key=lambda choice: medians[choice] or float("inf"))


def tune_learning_rate(bench: Bench, cells: list[Cell], taus: tuple[int, ...]) -> None:
    """Take the learning rate with which the best rival is fastest, over the cells."""
    rates = (0.1, 0.2) if bench.quick else (0.05, 0.1, 0.2, 0.4)
    bench.all(
        job
        for rate in rates
        for tau in taus
        for job in bench.barrier_jobs(tau, rate, bench.tuning[:1], EC2_5)
    )
    totals = {}
    for rate in rates:
        totals[rate] = 0.0
        for cell in cells:
            times = [bench.barrier(tau, rate, bench.tuning[:1], cell)[0]["seconds"] for tau in taus]
            totals[rate] += min((time for time in times if time), default=float("inf"))
    bench.learning_rate = min(totals, key=lambda rate: totals[rate])
    print(f"learning rate {bench.learning_rate}, of {totals}", flush=True)


def compare(bench: Bench, cell: Cell, taus: tuple[int, ...], rates: tuple[int, ...]) -> None:
    """Add the rows of one cell."""
    lr, tuning, seeds = bench.learning_rate, bench.tuning, bench.seeds
    tau = _best({tau: bench.barrier(tau, lr, tuning, cell) for tau in taus})
    fixed = {
        rate: bench.jobs("adsp", f"strategy.commit_rate={rate}", cell, tuning) for rate in rates
    }
    done = bench.all(job for jobs in fixed.values() for job in jobs)
    tuned = {r: done[i * len(tuning) : (i + 1) * len(tuning)] for i, r in enumerate(fixed)}
    rate = _best(tuned)
    choices = [f"strategy.step_factor={factor}" for factor in (1.0, 1.5)]
    over = {choice: bench.jobs("adsp-overlap", choice, cell, tuning) for choice in choices}
    done = bench.all(job for jobs in over.values() for job in jobs)
    overlap = _best(
        {c: done[i * len(tuning) : (i + 1) * len(tuning)] for i, c in enumerate(choices)}
    )
    aim = f"strategy.reward_target={TARGET}"
    named = {
        "adsp (published reward)": ("adsp-search", f"{aim} strategy.reward=published"),
        "adsp (robust reward)": ("adsp-search", f"{aim} strategy.reward=robust"),
        "adsp (guarded search)": ("adsp-guarded", ""),
        "adsp (best fixed rate)": ("adsp", f"strategy.commit_rate={rate}"),
        "adsp-overlap": ("adsp-overlap", overlap),
        "ssp": ("ssp", "strategy.staleness=40"),
    }
    if bench.quick:
        del named["adsp (published reward)"]
    if bench.quick or cell.devices != "adsp-ec2":
        del named["ssp"]  # a commit a step: ten times the computing of the others
    jobs = {name: bench.jobs(*choice, cell, seeds) for name, choice in named.items()}
    results = bench.all(job for each in jobs.values() for job in each)
    for index, (name, (_, settings)) in enumerate(named.items()):
        bench.add(name, settings, cell, results[index * len(seeds) : (index + 1) * len(seeds)])
    bench.add("bsp", "local_steps=1", cell, bench.barrier(1, lr, seeds, cell))
    bench.add(
        "fixed-adacomm (best)", f"local_steps={tau}", cell, bench.barrier(tau, lr, seeds, cell)
    )
    if 40 in taus:
        bench.add("fixed-adacomm (40)", "local_steps=40", cell, bench.barrier(40, lr, seeds, cell))


def compare_others(bench: Bench, cell: Cell) -> None:
    """Add the rows of the rivals that are compared on one cell only."""
    for name, choices in OTHERS.items():
        jobs = {choice: bench.jobs(name, choice, cell, bench.tuning) for choice in choices}
        done = bench.all(job for each in jobs.values() for job in each)
        size = len(bench.tuning)
        best = _best({c: done[i * size : (i + 1) * size] for i, c in enumerate(choices)})
        results = bench.all(bench.jobs(name, best, cell, bench.seeds))
        bench.add(f"{name} (best)", best, cell, results)


def savings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each cell and variant of ADSP, the time it saves against each rival."""
    result = []
    keys = ("devices", "overhead_s", "learning_rate")
    for cell in sorted({tuple(row[key] for key in keys) for row in rows}):
        here = [row for row in rows if tuple(row[key] for key in keys) == cell]
        for ours in here:
            if not ours["strategy"].startswith("adsp"):
                continue
            mine = ours["seconds_median"]
            saving = {
                rival["strategy"]: 1 - mine / rival["seconds_median"]
                if mine and rival["seconds_median"]
                else None
                for rival in here
                if rival is not ours
            }
            result.append(
                {
                    "strategy": ours["strategy"],
                    **{key: ours[key] for key in (*keys, "H")},
                    "saving_vs": saving,
                }
            )
    return result


def search_excess(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return how much longer than the best fixed rate each search takes, median of the cells."""
    seconds = {
        (row["strategy"], row["devices"], row["overhead_s"]): row["seconds_median"] for row in rows
    }
    found: dict[str, list[float]] = {}
    for (name, *cell), mine in seconds.items():
        best = seconds["adsp (best fixed rate)", *cell]
        if name.startswith("adsp (") and name != "adsp (best fixed rate)" and best:
            found.setdefault(name, []).append((mine or float("inf")) / best - 1)
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    options = arguments("Virtual time until a loss is reached.")
    if options.quick:
        bench = Bench([0], [1], quick=True)
        cells, taus, rates = [EC2_5], (1, 10), (4,)
    else:
        bench = Bench([0, 6], [1, 2, 3, 4, 5], quick=False)
        cells, taus, rates = CELLS, LOCAL_STEPS, RATES
    with bench.pool:
        tune_learning_rate(bench, cells[:2], (10,) if options.quick else (2, 5, 10))
        for cell in cells:
            compare(bench, cell, taus, rates)
            if not options.quick and cell is cells[0]:
                compare_others(bench, cell)
            print_table(
                [row for row in bench.rows if row["devices"] == cell.devices],
                ["strategy", "settings", "learning_rate", "overhead_s", "seconds_median",
                 "seconds", "compute_share", "blocked_share", "commits"],
            )  # fmt: skip
            saved = savings(bench.rows)
            write(
                options.json, bench.tuning + bench.seeds, rows=bench.rows, saving_vs=saved,
                tuning_seeds=bench.tuning, search_excess=search_excess(bench.rows),
            )  # fmt: skip
    for row in saved:
        against = ", ".join(
            f"{name} {'-' if value is None else f'{value:.1%}'}"
            for name, value in row["saving_vs"].items()
        )
        where = f"{row['devices']}, {row['overhead_s']} s, rate {row['learning_rate']}"
        print(f"{row['strategy']} on {where}: saves {against}")
    for name, excess in search_excess(bench.rows).items():
        print(f"{name}: {excess:+.0%} over the best fixed rate")


if __name__ == "__main__":
    main()
