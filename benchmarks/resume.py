"""Runs killed at random points, resumed, and compared with runs that nobody killed.

Each run is a process of its own that gets SIGKILL after a random share of the time that the whole
takes, so that it may die while it trains, evaluates, or writes a checkpoint. In virtual time the
resumed run must leave the same history, summary and model, byte for byte.
"""

import multiprocessing
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, print_table, write
from flower_adsp.config import load_config
from flower_adsp.tracking.files import CHECKPOINT, HISTORY, MODEL, SUMMARY

FILES = (HISTORY, SUMMARY, MODEL)
CASES = {
    "adsp": ("adsp", "strategy.check_period=20"),
    "adsp-search": ("adsp-search", "strategy.check_period=20 strategy.reward_target=0.2"),
    "adsp-overlap": ("adsp-overlap", "strategy.check_period=20 train.momentum=0.5"),
    "bsp": ("bsp", "run.num_rounds=60"),
    "fedasync": ("fedasync", "strategy.check_period=20"),
    "fedbuff": ("fedbuff", "strategy.check_period=20"),
    "fedcompass": ("fedcompass", "strategy.check_period=20"),
    "ssp": ("ssp", "run.num_rounds=40"),
}
NODES, KILLS = 6, 50


def settings(case: str, folder: Path, resume: bool) -> dict[str, Any]:
    """Return the run config of a case."""
    strategy, more = CASES[case]
    return {
        "strategy": strategy,
        "devices": "adsp-ec2",
        "task": "digits-mlp",
        "seed": 0,
        "output": str(folder),
        "resume": str(folder) if resume else "",
        "tracking.progress": "off",
        "tracking.report": "off",
        "overrides": f"run.num_rounds=20 run.evaluate_every=10 {more}",
    }


def run(given: dict[str, Any]) -> None:
    """Run in this process."""
    from flower_adsp.client_app import app
    from flower_adsp.experiment import run_experiment
    from flower_adsp.testing import InProcessGrid

    with InProcessGrid(app, NODES, given) as grid:
        run_experiment(grid, load_config(given))


def run_apart(given: dict[str, Any], seconds: float | None = None) -> tuple[int | None, float]:
    """Run in a process of its own; kill it after so many seconds.

    Returns
    -------
    tuple[int | None, float]
        Exit code, and the seconds it took.
    """
    process = multiprocessing.get_context("fork").Process(target=run, args=(given,))
    began = time.monotonic()
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, time.monotonic() - began


def main() -> None:
    options = arguments("Runs that are killed and resumed.")
    kills = 6 if options.quick else KILLS
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as parent:
        # What the runs import is imported here, once, and is there in each process that is forked.
        run(settings("bsp", Path(parent) / "first", resume=False))
        whole: dict[str, tuple[Path, float]] = {}
        for number in range(kills):
            case = list(CASES)[number % len(CASES)]
            if case not in whole:
                folder = Path(parent) / f"whole-{case}"
                code, seconds = run_apart(settings(case, folder, resume=False))
                assert code == 0, case
                whole[case] = folder, seconds
            expected, seconds = whole[case]
            folder = Path(parent) / "cut"
            share = draw.random()
            code, _ = run_apart(settings(case, folder, resume=False), share * seconds)
            # Before its first checkpoint nothing had been trained, and it begins anew.
            resumed = (folder / CHECKPOINT).is_file()
            again, _ = run_apart(settings(case, folder, resume=resumed))
            identical = again == 0 and all(
                (folder / name).read_bytes() == (expected / name).read_bytes() for name in FILES
            )
            rows.append(
                {
                    "strategy": case,
                    "killed_after": share,
                    "was_killed": code == -signal.SIGKILL,
                    "from_checkpoint": resumed,
                    "identical": identical,
                }
            )
            shutil.rmtree(folder)
    print_table(rows, ["strategy", "killed_after", "was_killed", "from_checkpoint", "identical"])
    totals = {
        "identical": sum(row["identical"] for row in rows),
        "kills": len(rows),
        "killed": sum(row["was_killed"] for row in rows),
        "from_checkpoint": sum(row["from_checkpoint"] for row in rows),
    }
    print(totals)
    write(options.json, [0], rows=rows, **totals)


if __name__ == "__main__":
    main()
