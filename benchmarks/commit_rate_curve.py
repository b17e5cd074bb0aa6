"""Virtual time to a loss over the commit rate, and what the search makes of it.

Is there an optimum, and does the search find it?
"""

import statistics

from benchmarks.report import arguments, print_table, write
from benchmarks.time_to_loss import EC2_5, TARGET, Bench

LEARNING_RATE = 0.4  # the best for the best rival, by time_to_loss.py


def main() -> None:
    options = arguments("Virtual time to a loss over the commit rate.")
    rates = (1, 4) if options.quick else (1, 2, 3, 4, 5, 6, 8, 12)
    seeds = [1] if options.quick else [1, 2, 3]
    bench = Bench([], seeds, options.quick)
    bench.learning_rate = LEARNING_RATE
    aim = f"strategy.reward_target={TARGET}"
    named = {
        **{f"rate {rate}": ("adsp", f"strategy.commit_rate={rate}") for rate in rates},
        "search, published reward": ("adsp-search", f"{aim} strategy.reward=published"),
        "search, robust reward": ("adsp-search", f"{aim} strategy.reward=robust"),
        "search, guarded": ("adsp-guarded", ""),
    }
    with bench.pool:
        jobs = [job for choice in named.values() for job in bench.jobs(*choice, EC2_5, seeds)]
        results = bench.all(jobs)
    for index, (name, (_, settings)) in enumerate(named.items()):
        part = results[index * len(seeds) : (index + 1) * len(seeds)]
        bench.add(name, settings, EC2_5, part)
    print_table(
        bench.rows, ["strategy", "seconds_median", "seconds", "compute_share", "commits", "rates"]
    )
    times = {row["strategy"]: row["seconds"] for row in bench.rows}
    points = {rate: [s for s in times[f"rate {rate}"] if s is not None] for rate in rates}
    marks = {
        name: [s for s in seconds if s is not None]
        for name, seconds in times.items()
        if name.startswith("search")
    }
    best = min((rate for rate in rates if points[rate]), key=lambda r: statistics.median(points[r]))
    least = statistics.median(points[best])
    excess = {name: statistics.median(seconds) / least - 1 for name, seconds in marks.items()}
    print(f"best rate {best}; the search takes longer by {excess}")
    write(options.json, seeds, rows=bench.rows, best_rate=best, search_excess=excess)


if __name__ == "__main__":
    main()
