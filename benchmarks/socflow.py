"""SoCFlow on its cluster: virtual time to a loss, against synchronous and federated training.

The preset `soc-cluster`: 32 devices on nine boards, eight groups of four, of which two must share a
board's uplink. `mnist-cnn` in mini-batches of four stands for VGG-11 in mini-batches of 64: links
are slower by the ratio of the models' sizes, and examples take longer by that of the batches, so
that a transfer and a step take as long as VGG-11's, and an epoch has 28 steps, about as many as
CIFAR-10 has there. What the model learns is real; how long it takes is the preset's.

Rivals: a parameter server and a ring, both with a barrier after each step; and FedAvg, one epoch
between barriers, through the server and along a double binary tree. The parameter server is one of
the devices. SoCFlow's parts are added one by one: groups as devices are listed, without turns; then
the mapping to boards; then turns; then mixed precision, whose gain in time is that of modelled
hardware: an NPU of 3.9 times the speed of the CPU, in INT8, which is emulated here. The paper's
groups average after each step; with more local steps in between, the last two rows go beyond it.

Each method has the learning rate that is best for it on a seed of its own. The time is that of the
first evaluation at or below the target, after each barrier, or each second under SoCFlow.
"""

import itertools
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, median, print_table, write
from flower_adsp.client_app import app
from flower_adsp.config import load_config
from flower_adsp.devices import deal
from flower_adsp.experiment import run_experiment
from flower_adsp.testing import InProcessGrid

NODES, GROUPS, BATCH, STEPS = 32, 8, 4, 28
PAPER_BATCH, PAPER_BYTES, BYTES = 64, 36.9e6, 424_488
RATIO = BYTES / PAPER_BYTES
TARGET, GBIT = 0.35, 1000 * RATIO
BOARDS = f"network.site_up_mbps={GBIT} network.site_down_mbps={GBIT}"
SERVER = f"{BOARDS} network.server_up_mbps={GBIT} network.server_down_mbps={GBIT}"
TREE = (
    f"network.server_up_mbps={GBIT} network.server_down_mbps={GBIT} network.collective=binary-trees"
)
RING = f"{BOARDS} network.collective=ring"
# One run serves the two of a pair: a barrier's model does not depend on its links.
BARRIERS = {
    "parameter server": ("bsp", "strategy.local_steps=1", SERVER),
    "ring": ("socflow", "strategy.num_groups=1 strategy.interval=1000000", RING),
    "FedAvg": ("bsp", f"strategy.local_steps={STEPS}", SERVER),
    "tree FedAvg": ("bsp", f"strategy.local_steps={STEPS}", TREE),
}
PARTS = {
    "groups": "strategy.mapping=sequential strategy.takes_turns=false",
    "+ mapping": "strategy.mapping=packed strategy.takes_turns=false",
    "+ planning": "strategy.mapping=packed strategy.takes_turns=true",
    "+ mixed": "strategy.mapping=packed strategy.takes_turns=true strategy.mixed_precision=true",
    "+ planning, interval 1": "strategy.mapping=packed strategy.interval=1.0",
}
MORE_STEPS = (2, 4, 7)


def profiles() -> list[dict[str, Any]]:
    """Return what lays the devices of the preset over those of a model of another size."""
    preset = load_config({"devices": "soc-cluster"}).devices.profiles
    found = []
    for profile in deal(preset, NODES):
        fields = asdict(profile)
        fields["seconds_per_sample"] *= PAPER_BATCH / BATCH
        fields["up_mbps"], fields["down_mbps"] = GBIT, GBIT
        found.append(fields)
    return found


def run(strategy: str, settings: str, rate: float, seed: int, rounds: int) -> dict[str, Any]:
    """Run, and return the losses over time and what it ended with."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "strategy": strategy,
            "task": "mnist-cnn",
            "devices": "soc-cluster",
            "seed": seed,
            "output": folder,
            "tracking.progress": "off",
            "tracking.report": "off",
            "overrides": f"task.batch_size={BATCH} train.learning_rate={rate} "
            f"run.num_rounds={rounds} run.save_every=null {settings}",
        }
        with InProcessGrid(app, NODES, config, node_configs=profiles()) as grid:
            summary = run_experiment(grid, load_config(config))
        history = [json.loads(line) for line in (Path(folder) / "history.jsonl").open()]
    curve = [(r["t"], r["index"], r["loss"]) for r in history if r["event"] == "evaluation"]
    commits = [r["t"] for r in history if r["event"] == "commit" and r["worker"] == 0]
    checkpoints = [record for record in history if record["event"] == "checkpoint"]
    return {
        "curve": curve,
        "period": statistics.median(b - a for a, b in itertools.pairwise(commits)),
        "accuracy": summary["test"]["accuracy"],
        "computing": statistics.fmean(row["computing"] for row in summary["devices"]),
        "fp32_share": checkpoints[-1].get("fp32_share") if checkpoints else None,
    }


def first_below(curve: list[tuple[float, float]]) -> float | None:
    return next((time for time, loss in curve if loss <= TARGET), None)


def barrier_runs(steps: int, rates: list[float], seeds: list[int], epochs: int) -> dict[str, Any]:
    """Return, of periodic averaging, the barriers until the target with the best learning rate."""
    rounds = epochs * STEPS // steps

    def once(rate: float, seed: int) -> dict[str, Any]:
        settings = f"strategy.local_steps={steps} run.evaluate_every=null"
        found = run("bsp", settings, rate, seed, rounds)
        reached = first_below([(index, loss) for _, index, loss in found["curve"]])
        return {"barriers": reached, "accuracy": found["accuracy"]}

    tuned = {rate: once(rate, 0)["barriers"] or float("inf") for rate in rates}
    print(f"{steps} steps between barriers: barriers by learning rate {tuned}", flush=True)
    best = min(rates, key=lambda rate: tuned[rate])
    return {"learning_rate": best, "runs": [once(best, seed) for seed in seeds]}


def barrier_row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a method by its barriers, and by how long one takes on its links."""
    strategy, settings, links = BARRIERS[name]
    more = "run.evaluate_every=100000 run.max_seconds=100"
    few = run(strategy, f"{settings} {links} {more}", 0.1, 0, 1000)
    period = few["period"]
    seconds = [each["barriers"] and each["barriers"] * period for each in found["runs"]]
    return {
        "method": name,
        "learning_rate": found["learning_rate"],
        "seconds_a_barrier": period,
        "computing": few["computing"],
        "seconds": seconds,
        "seconds_median": median(seconds),
        "accuracy": [each["accuracy"] for each in found["runs"]],
    }


def group_row(
    name: str, rate: float, seeds: list[int], epochs: int, local_steps: int = 1
) -> dict[str, Any]:
    """Return the row of SoCFlow with some of its parts."""
    settings = f"strategy.num_groups={GROUPS} {PARTS[name]} {RING} run.evaluate_every=1"
    settings += f" strategy.local_steps={local_steps}"
    rounds = epochs if "interval" in PARTS[name] else epochs * 4  # in the first ten epochs
    runs = [run("socflow", settings, rate, seed, rounds) for seed in seeds]
    seconds = [first_below([(time, loss) for time, _, loss in each["curve"]]) for each in runs]
    return {
        "method": f"SoCFlow: {name}" + (f", {local_steps} steps" if local_steps > 1 else ""),
        "learning_rate": rate,
        "seconds_a_barrier": statistics.fmean(each["period"] for each in runs),
        "computing": statistics.fmean(each["computing"] for each in runs),
        "fp32_share": runs[-1]["fp32_share"],
        "seconds": seconds,
        "seconds_median": median(seconds),
        "accuracy": [each["accuracy"] for each in runs],
    }


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    seeds = [1] if options.quick else [1, 2]
    # What averages more often stands more of it; each grid has its best inside.
    rates = [0.1] if options.quick else [0.05, 0.1, 0.2]
    group_rates = [0.1] if options.quick else [0.1, 0.2, 0.4, 0.8]
    step_rates = [0.2] if options.quick else [0.2, 0.4, 0.8]
    epochs = 2 if options.quick else 8
    rows: list[dict[str, Any]] = []
    columns = ["method", "learning_rate", "seconds_a_barrier", "computing", "seconds_median",
               "seconds", "accuracy"]  # fmt: skip

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print_table(rows[-1:], columns)
        gains = {
            rival["method"]: {
                ours["method"]: rival["seconds_median"] / ours["seconds_median"]
                for ours in rows
                if ours["method"].startswith("SoCFlow") and ours["seconds_median"]
            }
            for rival in rows
            if rival["method"] in BARRIERS and rival["seconds_median"]
        }
        write(options.json, [0, *seeds], rows=rows, target_loss=TARGET, epochs=epochs, gains=gains)

    steps = barrier_runs(1, step_rates, seeds, epochs)
    for name in ("parameter server", "ring"):
        add(barrier_row(name, steps))
    rounds = barrier_runs(STEPS, rates, seeds, 2 if options.quick else 4 * epochs)
    for name in ("FedAvg", "tree FedAvg"):
        add(barrier_row(name, rounds))

    def tune(rate: float, local_steps: int) -> float:
        row = group_row("+ planning", rate, [0], epochs, local_steps)
        return row["seconds_median"] or float("inf")

    tuned = {rate: tune(rate, 1) for rate in group_rates}
    best = min(group_rates, key=lambda rate: tuned[rate])
    by_steps = {1: tuned[best]}
    if not options.quick:
        by_steps |= {steps: tune(best, steps) for steps in MORE_STEPS}
    print(f"SoCFlow: seconds by learning rate {tuned}, by local steps {by_steps}", flush=True)
    for name in PARTS:
        add(group_row(name, best, seeds, epochs))
    more = min(by_steps, key=lambda steps: by_steps[steps])
    if more > 1:
        for name in ("+ planning", "+ mixed"):
            add(group_row(name, best, seeds, epochs, more))
    print_table(rows, columns)


if __name__ == "__main__":
    main()
