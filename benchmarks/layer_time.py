"""Virtual time to a loss on devices of unequal speed and memory, with and without waiting.

`mnist-resnet` on seven devices, whose budgets are as in `dsparse-seven-wide` and whose speeds
differ by a factor of four: ADSP under a layer plan, against DSparse, which waits, and against
FedAvg on the devices that can train it all, with their own data. Commit rates and local steps are
tuned on a seed of their own. Results of runs are kept in ``build/``.
"""

import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from benchmarks.layer_training import Job, run
from benchmarks.report import arguments, median, print_table, write
from flower_adsp.tasks.base import SizedDataset
from flower_adsp.tasks.images import MnistResNet

BUDGETS = (1.1, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25)  # of the peak of stock training
SPEEDS = (0.015625, 0.015625, 0.03125, 0.03125, 0.03125, 0.0625, 0.0625)  # seconds an example
TARGET = 0.25
UNITS, PART = "plan.channels=false", "task.target=benchmarks.layer_time:OneOfSeven"


class OneOfSeven(MnistResNet):
    """The task with a seventh of the data for each device, however few take part."""

    def train_data(self, partition_id: int, num_partitions: int) -> SizedDataset:
        """Return the training examples of one device."""
        return super().train_data(partition_id, len(BUDGETS))


def choices(quick: bool) -> dict[str, list[Job]]:
    """Return the runs of which the fastest counts, by what they are."""
    base = Job("dsparse", "dsparse", "", 0, BUDGETS, SPEEDS, 10**6, TARGET)
    whole = [place for place, budget in enumerate(BUDGETS) if budget >= 1]
    capable = replace(
        base,
        plan="everything",
        budgets=tuple(BUDGETS[place] for place in whole),
        speeds=tuple(SPEEDS[place] for place in whole),
    )
    adsp = replace(base, strategy="adsp")
    rates, taus = ((8,), (10,)) if quick else ((8, 16, 32, 64), (2, 5, 10, 20))
    return {
        "adsp, plan": [
            replace(adsp, settings=f"strategy.commit_rate={rate} {UNITS}") for rate in rates
        ],
        "dsparse": [replace(base, settings=f"strategy.local_steps={tau} {UNITS}") for tau in taus],
        "FedAvg on those that can": [
            replace(capable, settings=f"strategy.local_steps={tau} {PART}") for tau in taus[:2]
        ],
    }


def said(job: Job) -> str:
    """Return what was tuned."""
    return job.settings.split()[0]


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    tuning, seeds = 0, [1] if options.quick else [1, 2, 3]
    rows = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name, jobs in choices(options.quick).items():
            tried = [found["seconds"] for found in pool.map(run, jobs)]
            best = jobs[min(range(len(jobs)), key=lambda i: tried[i] or float("inf"))]
            found = list(pool.map(run, [replace(best, seed=seed) for seed in seeds]))
            seconds = [each["seconds"] for each in found]
            rows.append(
                {
                    "strategy": name,
                    "settings": said(best),
                    "tried": {said(job): took for job, took in zip(jobs, tried, strict=True)},
                    "seconds": seconds,
                    "seconds_median": median(seconds),
                    "accuracy": statistics.fmean(each["accuracy"] for each in found),
                }
            )
            print_table(
                rows[-1:], ["strategy", "settings", "seconds_median", "seconds", "accuracy"]
            )
            write(options.json, [tuning, *seeds], rows=rows, target_loss=TARGET)


if __name__ == "__main__":
    main()
