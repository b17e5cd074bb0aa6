"""Figures about runs; each function takes runs and returns a matplotlib figure.

Colours are those of Okabe and Ito, which the colour-blind can tell apart; lines also differ in
their dashes, and areas in their hatches, so that they can be told apart in grey.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flower_adsp.report.runs import AWAY, BLOCKED, COMMUNICATING, COMPUTING, OPEN, Run

# Okabe and Ito, "Color Universal Design" (2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 2)))
_ACTIVITIES = {
    COMPUTING: ("#0072B2", ""),
    COMMUNICATING: ("#E69F00", "////"),
    BLOCKED: ("#D9D9D9", ""),
    AWAY: ("#FFFFFF", "xxxx"),
    OPEN: ("#CFE3F1", "...."),
}
_MOST_ROWS = 40  # devices that a figure shows

FigureMaker = Callable[[Sequence[Run]], Figure | None]


def loss_figure(runs: Sequence[Run]) -> Figure | None:
    """Return loss, and accuracy where there is one, over the runs' clocks."""
    keys = [key for key in ("loss", "accuracy") if any(_points(run, key)[0] for run in runs)]
    if not keys:
        return None
    figure = Figure(figsize=(4.6 * len(keys), 3.4), layout="constrained")
    axes = figure.subplots(1, len(keys), squeeze=False)[0]
    for axis, key in zip(axes, keys, strict=True):
        _draw_lines(axis, runs, key)
        target = runs[0].settings.get("run", {}).get("target_loss")
        if key == "loss" and target:
            axis.axhline(target, color="#666666", linewidth=0.8)
            axis.annotate("target", (0, target), xytext=(2, 2), textcoords="offset points")
        axis.set(xlabel="seconds of the run's clock", ylabel=f"validation {key}")
        axis.grid(alpha=0.3)
    if len(runs) > 1:
        axes[0].legend(frameon=False)
    return figure


def timeline_figure(runs: Sequence[Run]) -> Figure | None:
    """Return what every device did when, with its commits marked."""
    run = runs[0]
    workers = list(run.devices)[:_MOST_ROWS]
    if not any(run.spans[worker] for worker in workers):
        return None
    figure = Figure(figsize=(9.2, 1.3 + 0.26 * len(workers)), layout="constrained")
    axis = figure.subplots()
    for row, worker in enumerate(workers):
        for activity, (colour, hatch) in _ACTIVITIES.items():
            bars = [
                (span.start, span.end - span.start)
                for span in run.spans[worker]
                if span.activity == activity
            ]
            axis.broken_barh(
                bars, (row - 0.38, 0.76), facecolor=colour, hatch=hatch, edgecolor="#555555",
                linewidth=0,
            )  # fmt: skip
        moments = [record["t"] for record in run.commits[worker]]
        axis.plot(moments, [row + 0.3] * len(moments), "|", color="black", markersize=4)
    _name_rows(axis, run, workers)
    axis.set(xlabel="seconds of the run's clock", xlim=(0, run.end or 1))
    marks = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="#555555", linewidth=0.3, label=activity)
        for activity, (colour, hatch) in _ACTIVITIES.items()
    ]
    (commit,) = axis.plot([], [], "|", color="black", label="commit")
    axis.legend(
        handles=[*marks, commit], ncols=6, loc="lower left", bbox_to_anchor=(0, 1), frameon=False
    )
    return figure


def rate_figure(runs: Sequence[Run]) -> Figure | None:
    """Return commits a check period, and the rewards of the search where there was one."""
    run = runs[0]
    periods = run.events("checkpoint")
    if len(periods) < 2:
        return None
    searched = [record for record in periods if record.get("is_searching") is not None]
    rewards = sorted({key for record in searched for key in record if key.endswith("_reward")})
    count = 1 + len(rewards)
    figure = Figure(figsize=(1 + 3.6 * count, 3.2), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    times = [record["t"] for record in periods]
    counts = [record["commits"] for record in periods]
    earlier = [[0] * len(counts[0]), *counts[:-1]]
    for values, name, number in (
        (_each(counts, earlier, max), "most", 0),
        (_each(counts, earlier, min), "fewest", 1),
    ):
        axes[0].step(
            [0, *times], [values[0], *values], where="pre", color=COLOURS[number],
            linestyle=DASHES[number], label=f"{name} of any device",
        )  # fmt: skip
    axes[0].set(xlabel="seconds of the run's clock", ylabel="commits in a period", ylim=(0, None))
    axes[0].legend(frameon=False)
    for axis, key in zip(axes[1:], rewards, strict=True):
        found = [record for record in searched if record.get(key) is not None]
        axis.plot([r["t"] for r in found], [r[key] for r in found], "o-", color=COLOURS[2])
        axis.set(
            xlabel="seconds of the run's clock",
            ylabel=f"{key.removesuffix('_reward')} reward of the latest window",
        )
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure


def _each(
    counts: Sequence[Sequence[int]],
    earlier: Sequence[Sequence[int]],
    choose: Callable[[Iterator[int]], int],
) -> list[int]:
    """Return the most or the fewest commits of any worker within each period."""
    return [
        choose(now - before for now, before in zip(after, [*was, *[0] * len(after)], strict=False))
        for after, was in zip(counts, earlier, strict=True)
    ]


def plan_figure(runs: Sequence[Run]) -> Figure | None:
    """Return which device trains which unit, as the latest layer plan has it."""
    run = runs[0]
    plans = run.events("plan")
    if not plans:
        return None
    plan = plans[-1]
    units = plan["units"]
    workers = [worker for worker in run.devices if str(worker) in plan["workers"]][:_MOST_ROWS]
    figure = Figure(
        figsize=(2.4 + 0.32 * len(units), 1.9 + 0.28 * len(workers)), layout="constrained"
    )
    axis = figure.subplots()
    ratios = [
        [plan["workers"][str(worker)]["ratios"].get(unit, 0.0) for unit in units]
        for worker in workers
    ]
    axis.imshow(ratios, cmap="Blues", vmin=0, vmax=1.2, aspect="auto")
    for row, values in enumerate(ratios):
        for column, ratio in enumerate(values):
            if ratio:
                text = "●" if ratio == 1 else f"{ratio:g}"
                colour = "white" if ratio > 0.6 else "black"
                axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    axis.set_xticks(range(len(units)), units, rotation=90, fontsize=8)
    axis.set_xlabel("units; ● trained whole, a number: that share of its input channels")
    _name_rows(axis, run, workers)
    return figure


def memory_figure(runs: Sequence[Run]) -> Figure | None:
    """Return the memory that each device's part of the plan takes, against its budget."""
    run = runs[0]
    plans = run.events("plan")
    if not plans:
        return None
    shares = plans[-1]["workers"]
    workers = [worker for worker in run.devices if str(worker) in shares][:_MOST_ROWS]
    budgets = {worker["id"]: worker.get("memory_mib") for worker in run.records[0]["workers"]}
    figure = Figure(figsize=(6.4, 1.2 + 0.28 * len(workers)), layout="constrained")
    axis = figure.subplots()
    peaks = [shares[str(worker)]["peak_mib"] for worker in workers]
    axis.barh(range(len(workers)), peaks, color=COLOURS[0], label="modelled peak of its plan")
    known = [(budgets.get(w), row) for row, w in enumerate(workers) if budgets.get(w)]
    if known:
        axis.plot(
            *zip(*known, strict=True), "|", color=COLOURS[1], markersize=14,
            markeredgewidth=2.5, label="memory it has",
        )  # fmt: skip
    axis.set(xlabel="MiB", xlim=(0, None))
    axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    _name_rows(axis, run, workers)
    return figure


def traffic_figure(runs: Sequence[Run]) -> Figure | None:
    """Return the bytes that went up and down until each moment, all devices together."""
    ways = {"bytes_up": "to the server", "bytes_down": "to the devices"}
    if not any(_points(run, key)[0] for run in runs for key in ways):
        return None
    figure = Figure(figsize=(9.2, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (key, title) in zip(axes, ways.items(), strict=True):
        _draw_lines(axis, runs, key, 1e-6)
        axis.set(xlabel="seconds of the run's clock", title=title)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("MB of arrays")
    if len(runs) > 1:
        axes[0].legend(frameon=False)
    return figure


def trees_figure(trees: Sequence[tuple[Iterable[tuple[int, int]], float]]) -> Figure:
    """Return spanning trees from node 0, each with the part of the data that it carries."""
    figure = Figure(figsize=(3.0 * max(len(trees), 1), 3.2), layout="constrained")
    axes = figure.subplots(1, max(len(trees), 1), squeeze=False)[0]
    for number, (axis, (tree, part)) in enumerate(zip(axes, trees, strict=False)):
        places = _places(sorted(tree))
        for a, b in sorted(tree):
            (left, top), (right, bottom) = places[a], places[b]
            colour = COLOURS[number % len(COLOURS)]
            axis.plot([left, right], [-top, -bottom], color=colour, zorder=1)
        for node, (across, down) in places.items():
            axis.scatter(across, -down, s=130, color="white", edgecolor="black", zorder=2)
            axis.annotate(str(node), (across, -down), ha="center", va="center", fontsize=7)
        axis.set_title(f"{100 * part:.0f} % of the data", fontsize=9)
        axis.margins(0.15)
        axis.axis("off")
    return figure


def _places(tree: Sequence[tuple[int, int]]) -> dict[int, tuple[float, int]]:
    """Return the place across and the depth of each node: leaves side by side, others above."""
    children: dict[int, list[int]] = {}
    for a, b in tree:
        children.setdefault(a, []).append(b)
    places: dict[int, tuple[float, int]] = {}

    def place(node: int, depth: int, first: float) -> float:
        following = first
        for child in children.get(node, []):
            following = place(child, depth + 1, following)
        if node not in children:
            following = first + 1
        places[node] = ((first + following - 1) / 2, depth)
        return following

    place(0, 0, 0.0)
    return places


def save_figure(figure: Figure, folder: Path, stem: str) -> None:
    """Write a figure as PNG and SVG, the same file for the same figure."""
    figure.savefig(folder / f"{stem}.png", dpi=150)
    # No date and no random names.
    with rc_context({"svg.hashsalt": stem}):
        figure.savefig(folder / f"{stem}.svg", metadata={"Date": None})


def _draw_lines(axis: Axes, runs: Sequence[Run], key: str, scale: float = 1) -> None:
    """Draw a figure of the evaluations over the clock, a line a run."""
    for number, run in enumerate(runs):
        seconds, values = _points(run, key)
        axis.plot(
            seconds,
            [value * scale for value in values],
            color=COLOURS[number % len(COLOURS)],
            linestyle=DASHES[number % len(DASHES)],
            label=run.name,
        )


def _points(run: Run, key: str) -> tuple[list[float], list[float]]:
    found = [record for record in run.events("evaluation") if key in record]
    return [record["t"] for record in found], [record[key] for record in found]


def _name_rows(axis: Axes, run: Run, workers: Sequence[int]) -> None:
    axis.set_yticks(
        range(len(workers)), [f"{worker}  {run.devices[worker]}" for worker in workers], fontsize=8
    )
    axis.set_ylim(len(workers) - 0.4, -0.6)
    left_out = len(run.devices) - len(workers)
    if left_out > 0 and len(workers) == _MOST_ROWS:
        axis.set_ylabel(f"the first {_MOST_ROWS} of {len(run.devices)} devices")


# Name, title, maker, whether it shows several runs in one figure.
FIGURES: tuple[tuple[str, str, FigureMaker, bool], ...] = (
    ("loss", "Loss and accuracy", loss_figure, True),
    ("timeline", "What each device did", timeline_figure, False),
    ("commit-rate", "Commits and the search for their rate", rate_figure, False),
    ("plan", "Who trains which layers", plan_figure, False),
    ("memory", "Memory against budget", memory_figure, False),
    ("traffic", "Bytes up and down", traffic_figure, True),
)
