"""Write docs/benchmarks.md and its pictures from the results.

``python -m benchmarks.write_docs``
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
CELL = ("devices", "overhead_s", "learning_rate")
HEAD = ("strategy", "settings", "seconds, median", "by seed", "computing", "blocked", "commits")


def text(value: Any) -> str:
    """Return a value as a table shows it."""
    if value is None:
        return "not reached"
    if isinstance(value, list):
        return ", ".join(text(item) for item in value)
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def percent(value: float | None) -> str:
    """Return a share as a table shows it."""
    return "-" if value is None else f"{100 * value:.0f} %"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def picture(first: Mapping[str, Any]) -> str:
    """Return the file name of a cell's picture."""
    overhead, rate = first["overhead_s"], first["learning_rate"]
    return f"time_to_loss_{first['devices']}_{overhead:g}s_lr{rate:g}.png"


def title(first: Mapping[str, Any]) -> str:
    """Return the title of a cell."""
    where = f"{first['devices']}, H = {first['H']:.2f}, overhead {first['overhead_s']:g} s"
    return f"{where}, learning rate {first['learning_rate']:g}"


def cell_lines(rows: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tables of one cell."""
    lines = [
        f"### {title(rows[0])}",
        "",
        f"![Time to the loss](images/{picture(rows[0])})",
        "",
        *table(
            HEAD,
            [
                [
                    row["strategy"],
                    f"`{row['settings'].replace('strategy.', '')}`" if row["settings"] else "-",
                    text(row["seconds_median"]),
                    text(row["seconds"]),
                    percent(row["compute_share"]),
                    percent(row["blocked_share"]),
                    text(row["commits"]),
                ]
                for row in rows
            ],
        ),
        "",
    ]
    rivals = [row["strategy"] for row in rows if not row["strategy"].startswith("adsp")]
    lines += table(
        ["time saved by", *(f"vs {rival}" for rival in rivals)],
        [
            [entry["strategy"], *(percent(entry["saving_vs"].get(rival)) for rival in rivals)]
            for entry in saved
        ],
    )
    return [*lines, ""]


def by_cell(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Return the rows of each cell."""
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in CELL), []).append(row)
    return cells


def curve_lines() -> list[str]:
    """Return the part on the commit rate."""
    result = json.loads((RESULTS / "commit_rate_curve.json").read_text(encoding="utf-8"))
    rows, excess = result["rows"], result["search_excess"]
    said = "; ".join(
        f"{name.split(', ')[1]} {100 * value:+.0f} %" for name, value in excess.items()
    )
    return [
        "## The commit rate",
        "",
        f"The same loss on {title(rows[0])},",
        "over the commits of each device in 60 s. The best rate is",
        f"{result['best_rate']}. How much longer the search takes, its own time counted: {said}.",
        "",
        "![Time to the loss over the commit rate](images/commit_rate_curve.png)",
        "",
        *table(
            ["", "seconds, median", "by seed", "computing", "commits"],
            [
                [
                    row["strategy"],
                    text(row["seconds_median"]),
                    text(row["seconds"]),
                    percent(row["compute_share"]),
                    text(row["commits"]),
                ]
                for row in rows
            ],
        ),
        "",
    ]


def memory_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the part on memory under layer plans."""
    once, trained = result["one_aggregation_seconds"], result["training"]
    said = {
        key: "not reached" if result[key] is None else percent(result[key])
        for key in ("aggregation_saved", "ring_saved")
    }
    wrong, plans = result["saved_bytes_wrong"], result["random_plans"]
    return [
        "## Layers that fit",
        "",
        "`mobilenetv2`, 32×32, mini-batches of 32, SGD with momentum, seven devices with budgets",
        f"that are fractions of {result['stock_mib']:.0f} MiB, the peak of stock training; plans",
        "of units and channels. Peaks are metered, in a process of its own for each device.",
        "Resident is how much the process grew by in two steps where each tensor is given back",
        "once freed (`MALLOC_MMAP_THRESHOLD_=65536`); the model itself is there before. By default",
        "glibc keeps freed blocks in a heap with holes, and the process grows by more. Giving all",
        "back makes steps of this network up to twice as long, so it is for devices that would",
        "not have the memory otherwise.",
        "",
        *table(
            ["device", "budget, MiB", "peak, MiB", "modelled, MiB", "resident, MiB",
             "by default, MiB", "units",
             "step by arithmetic", "step, measured"],
            [
                [
                    text(row["device"]),
                    f"{row['budget_mib']:.1f}",
                    f"{row['peak_mib']:.1f}",
                    f"{row['modelled_mib']:.1f}",
                    f"{row['resident_mib']:.0f}",
                    f"{row['resident_default_mib']:.0f}",
                    text(row["units"]),
                    percent(row["time_share"]),
                    percent(row["step_share"]),
                ]
                for row in result["rows"]
            ],
        ),
        "",
        f"* Over budget: {result['over_budget']}. Parameters with no trainer over a rotation of",
        f"  eight plans: {result['uncovered']}.",
        f"* Mean peak saved over stock training: {100 * result['mean_reduction']:.1f} %. Peng et",
        "  al. have 59.6 %, at budgets that could not be found.",
        f"* Of {plans} random plans, {wrong} keep other bytes than modelled; the peak is off by",
        f"  {100 * result['peak_error_most']:.1f} % at most.",
        f"* A step with memory-true layers, all trained: {result['step_ratio']:.2f} times a stock",
        f"  one. Steps of plans: up to {result['step_over_arithmetic_most']:.2f} times what the",
        "  arithmetic says.",
        "",
        "Trained from scratch on a smaller network, `mnist-resnet` in mini-batches of 16: 1,500",
        "steps of each device, ten between barriers, a learning rate of 0.2 that halves every",
        "200 s; on 500 test images. The gap is to full training with the same seeds, its interval",
        "at 90 %.",
        "",
        *table(
            ["plan", "accuracy, mean", "by seed", "loss", "gap, points", "interval",
             "trained by nobody"],
            [
                [
                    row["method"],
                    f"{100 * row['accuracy_mean']:.1f} %",
                    ", ".join(f"{100 * value:.1f}" for value in row["accuracy"]),
                    f"{row['loss_mean']:.3f}",
                    f"{100 * row['gap']:.1f}",
                    " to ".join(f"{100 * value:.1f}" for value in row["gap_interval"] or []),
                    ", ".join(row["uncovered"]) or "-",
                ]
                for row in trained["accuracy"]
            ],
        ),
        "",
        "One aggregation, from the end of training until all have what they need, at 20 Mbit/s",
        f"and 10 ms: {once['star']:.3f} s by a server ({once['star_full']:.3f} s for all",
        f"parameters), {once['groups']:.3f} s by groups of trainers ({once['ring_full']:.3f} s by",
        "a ring over all in one bucket). Summed until full training's accuracy less a point, the",
        f"plan saves {said['aggregation_saved']} by the server and {said['ring_saved']} over the",
        "ring. Peng et al. have 75.4 %, over what could not be found.",
        "",
    ]  # fmt: skip


def layer_time_lines() -> list[str]:
    """Return the time to a loss under a layer plan, with and without waiting."""
    result = json.loads((RESULTS / "layer_time.json").read_text(encoding="utf-8"))
    return [
        f"Virtual time until `mnist-resnet` has a validation loss of {result['target_loss']:g},",
        "averaged over 20 s, on seven devices of unequal speed and memory. One of them can train",
        "it all; FedAvg has its data alone. Settings are the best on another seed:",
        "",
        *table(
            ["strategy", "settings", "seconds, median", "by seed"],
            [
                [
                    row["strategy"],
                    f"`{row['settings'].replace('strategy.', '')}`",
                    text(row["seconds_median"]),
                    text(row["seconds"]),
                ]
                for row in result["rows"]
            ],
        ),
        "",
    ]


def supernode_lines() -> list[str]:
    """Return what a commit costs on real SuperNodes."""
    nodes = json.loads((RESULTS / "supernodes.json").read_text(encoding="utf-8"))
    ((variable, value),) = nodes["shorter"].items()
    return [
        "## Real SuperNodes",
        "",
        "ADSP with commits 30 s apart on three SuperNodes that share two cores with the SuperLink",
        "and each other, `digits-mlp`. Flower starts a process for each message;",
        f"{nodes['rows'][0]['process_s']:.1f} s of the overhead are what three such processes, at",
        "the same time, need from their start to their first step.",
        "",
        *table(
            ["Flower's intervals", "computing", "overhead a commit", "from commit to commit"],
            [
                [
                    "as they are" if row["setting"] != "shorter" else f"`{variable}={value}`",
                    f"{100 * row['compute_share']:.0f} %",
                    f"{row['overhead_s']:.1f} s",
                    f"{row['cycle_s']:.1f} s",
                ]
                for row in nodes["rows"]
            ],
        ),
        "",
    ]


def network_lines() -> list[str]:
    """Return what trees, slices and codecs come to."""
    network = json.loads((RESULTS / "network.json").read_text(encoding="utf-8"))
    share = f"{100 * network['efficiency']:.0f} %"
    lines = [
        "## The network",
        "",
        "Packed trees, against the exact optimum (max-flow or linear programme); of random graphs",
        "of up to nine nodes, the worst:",
        "",
        *table(
            ["graphs", "rate", "trees", "share of the optimum", "seconds to plan"],
            [
                [
                    row["graphs"],
                    text(row.get("rate", "")),
                    text(row.get("trees", "")),
                    f"{100 * row['share_of_optimum']:.1f} %",
                    f"{row['seconds']:.1f}",
                ]
                for row in network["trees"]
            ],
        ),
        "",
        "An iteration of synchronous SGD with mini-batches of 32 in the model of slices,",
        "with whole layers sent when they are ready (`fifo`), and with slices of 40,000",
        "parameters by priority (`p3`). The paper's gains are the largest of its",
        f"measurements, over MXNet. Its GPUs, P4000s, are taken to reach {share} of",
        "their peak. At 15 Gbit/s the model hides all of VGG-19's transfers, since most of",
        "its parameters are in the last layers, whose gradients come first. What the paper",
        "gained there is not in the model: servers that add up, copies, and MXNet's own",
        "waits.",
        "",
        *table(
            ["model", "Gbit/s", "computing", "one message", "fifo", "p3", "gain", "the paper's"],
            [
                [
                    row["model"],
                    f"{row['gbits']:g}",
                    f"{row['compute_s']:.3f} s",
                    f"{row['whole_s']:.3f} s",
                    f"{row['fifo_layers_s']:.3f} s",
                    f"{row['p3_s']:.3f} s",
                    f"{100 * row['gain_over_layers']:.0f} %",
                    "" if row["published_gain"] is None else f"{100 * row['published_gain']:.0f} %",
                ]
                for row in network["slices"]
            ],
        ),
        "",
        f"Virtual time until `mnist-cnn` on {network['nodes']} equal devices first has a loss of",
        f"{network['target_loss']}, evaluated each second:",
        "",
        *table(
            [
                "strategy",
                "Mbit/s",
                "schedule and codec",
                "seconds, median",
                "by seed",
                "MB up",
                "computing",
            ],
            [
                [
                    row["strategy"],
                    f"{row['mbps']:g}",
                    row["variant"],
                    text(row["seconds_median"]),
                    text(row["seconds"]),
                    f"{row['bytes_up'] / 1e6:.0f}",
                    f"{100 * row['compute_share']:.0f} %",
                ]
                for row in network["rows"]
            ],
        ),
        "",
    ]
    return lines


def socflow_lines() -> list[str]:
    """Return SoCFlow's time to a loss against its rivals'."""
    result = json.loads((RESULTS / "socflow.json").read_text(encoding="utf-8"))

    def gains(row: Mapping[str, Any]) -> list[str]:
        rivals = result["gains"]
        return [f"{by[row['method']]:.2f}" if row["method"] in by else "" for by in rivals.values()]

    return [
        "## SoCFlow on its cluster",
        "",
        "`soc-cluster`, 32 devices on nine boards, links and examples as slow as makes a transfer",
        "and a step of `mnist-cnn` take as long as VGG-11's; virtual time until the validation",
        f"loss is {result['target_loss']:g}, {len(result['seeds']) - 1} seeds, each method with",
        f"its own learning rate; accuracy on test data after {result['epochs']} epochs, four times",
        "as many under FedAvg. The last columns are how many times as long each rival takes. The",
        "paper's whole takes 1/2.85 of FedAvg's time and 1/2.17 of tree FedAvg's, on average over",
        "its tasks. What mixed precision gains in time is modelled hardware (an NPU of 3.9 times",
        "the CPU's speed; INT8 is emulated); all else is what the algorithm does on these links.",
        "The paper's groups average after each step; rows with more steps go beyond it.",
        "",
        *table(
            ["method", "learning rate", "seconds a barrier", "computing", "seconds", "accuracy, %",
             *(f"over {name}" for name in result["gains"])],
            [
                [
                    row["method"],
                    f"{row['learning_rate']:g}",
                    f"{row['seconds_a_barrier']:.2f}",
                    percent(row["computing"]),
                    text(row["seconds"]),
                    ", ".join(f"{100 * value:.1f}" for value in row["accuracy"]),
                    *gains(row),
                ]
                for row in result["rows"]
            ],
        ),
        "",
    ]  # fmt: skip


def recovery_lines() -> list[str]:
    """Return what faults, kills and numbers of devices lead to."""
    faults, resume, scale = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("faults", "resume", "scale")
    )
    return [
        "## Faults",
        "",
        f"{faults['injected']} faulty replies of {faults['kinds']} kinds under",
        f"{len(faults['rows'])} strategies, three of ten replies being faulty: {faults['crashed']}",
        f"runs crashed, {faults['stuck']} got stuck, {faults['lost_commits']} valid commits were",
        "lost. With one faulty reply in ten, how much higher the loss is than without faults,",
        "after as many commits and at the same time (`digits-mlp`, median of",
        f"{len(faults['seeds'])} seeds). A barrier is passed without those whose replies were",
        "refused.",
        "",
        *table(
            ["strategy", "after as many commits", "by seed", "at the same time"],
            [
                [
                    row["strategy"],
                    f"{100 * row['after_commits']:.1f} %",
                    ", ".join(f"{100 * value:.1f}" for value in row["after_commits_all"]),
                    f"{100 * row['at_time']:.1f} %",
                ]
                for row in faults["compared"]
            ],
        ),
        "",
        "## Kills",
        "",
        f"Of {resume['kills']} runs, {resume['killed']} were killed at a random point before they",
        f"ended, and {resume['from_checkpoint']} had a checkpoint to go on from;",
        f"{resume['identical']} came to the same history, summary and model as an uninterrupted",
        "run, byte for byte.",
        "",
        "## Numbers of devices",
        "",
        "Server time per commit, without the calls of the grid, for a model of 20,000 parameters:",
        "",
        *table(
            ["devices", "commits", "milliseconds a commit"],
            [
                [
                    str(row["devices"]),
                    str(row["commits"]),
                    f"{1000 * row['seconds_per_commit']:.2f}",
                ]
                for row in scale["rows"]
            ],
        ),
        "",
        f"With 1,000 devices it is {scale['cost_ratio']:.2f} times that with 10. Resident memory",
        f"after 5,000 commits is {scale['memory_ratio']:.3f} times that after 500.",
        "",
    ]


def page() -> str:
    """Return the whole page."""
    memory = json.loads((RESULTS / "layer_memory.json").read_text(encoding="utf-8"))
    losses = json.loads((RESULTS / "time_to_loss.json").read_text(encoding="utf-8"))
    engine = json.loads((RESULTS / "engine_overhead.json").read_text(encoding="utf-8"))
    tuning, seeds = losses["tuning_seeds"], losses["seeds"]
    lines = [
        "# Benchmarks",
        "",
        "Made by `python -m benchmarks.write_docs` from `benchmarks/results/`. Each script says in",
        "its first lines what it measures, and each result holds the command that made it.",
        "",
        "## Virtual time to a loss",
        "",
        "`mnist-cnn`, until the validation loss, averaged over the trailing 60 s, is at most",
        f"{losses['rows'][0]['target_loss']}. Rivals and fixed rates were tuned with seeds",
        f"{text(tuning)} and are reported with {len(seeds) - len(tuning)} others; ADSP's search",
        "counts. Overhead is what one commit costs; the slowest step takes 4 s.",
        "",
    ]
    excess = "; ".join(f"{k} {100 * v:+.0f} %" for k, v in losses["search_excess"].items())
    lines += [
        "How much longer a search takes than the best fixed rate, its own time counted, median of",
        f"the cells: {excess}.",
        "",
    ]
    cells = by_cell(losses["rows"])
    for cell, rows in cells.items():
        saved = [e for e in losses["saving_vs"] if tuple(e[key] for key in CELL) == cell]
        lines += cell_lines(rows, saved)
    lines += curve_lines()
    lines += memory_lines(memory)
    lines += layer_time_lines()
    lines += recovery_lines()
    lines += supernode_lines()
    lines += network_lines()
    lines += socflow_lines()
    lines += [
        "## What the engine costs",
        "",
        "Commits per second of `Adsp` through `flwr run`, without training, over an app that only",
        f"echoes: {engine['ratio']:.2f} (median of {len(engine['rows'])} pairs), and",
        f"{engine['ratio_ordered']:.2f} over an echo that takes its replies in order, as a result",
        "that repeats must. Decoding, checking, applying and encoding a commit of 11.7 million",
        f"parameters takes {engine['commit_ms']:.0f} ms, {engine['commit_ratio']:.2f} times the",
        "bare library calls.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page and the pictures."""
    from benchmarks.plots import bars, curve

    PAGE.write_text(page(), encoding="utf-8")
    losses = json.loads((RESULTS / "time_to_loss.json").read_text(encoding="utf-8"))
    for rows in by_cell(losses["rows"]).values():
        bars(rows, title(rows[0]), PAGE.parent / "images" / picture(rows[0]))
    result = json.loads((RESULTS / "commit_rate_curve.json").read_text(encoding="utf-8"))
    times = {
        row["strategy"]: [seconds for seconds in row["seconds"] if seconds is not None]
        for row in result["rows"]
    }
    curve(
        {int(name.split()[1]): t for name, t in times.items() if name.startswith("rate") and t},
        {name: t for name, t in times.items() if name.startswith("search") and t},
        PAGE.parent / "images" / "commit_rate_curve.png",
    )


if __name__ == "__main__":
    main()
