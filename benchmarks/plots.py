"""Plots of the benchmarks' results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's palette, which the colour-blind can tell apart; hatches serve print.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")


def _figure(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")


def bars(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw the median time to the loss of each strategy, with the spread over seeds."""
    figure, axes = _figure(7, 0.45 * len(rows) + 1.2)
    ordered = sorted(rows, key=lambda row: row["seconds_median"] or float("inf"), reverse=True)
    for place, row in enumerate(ordered):
        times = [seconds for seconds in row["seconds"] if seconds is not None]
        median = row["seconds_median"]
        if median is None:
            axes.text(0, place, " not reached", va="center")
            continue
        is_ours = row["strategy"].startswith("adsp")
        axes.barh(place, median, color=COLOURS[0 if is_ours else 1], hatch="" if is_ours else "//")
        axes.plot([min(times), max(times)], [place, place], color="black", linewidth=1.5)
        axes.text(max(*times, median), place, f"  {median:.0f} s", va="center")
    axes.set_yticks(range(len(ordered)), [row["strategy"] for row in ordered])
    axes.set_xlabel(f"virtual seconds to a validation loss of {rows[0]['target_loss']}")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15)
    _save(figure, path)


def curve(
    points: Mapping[int, Sequence[float]], marks: Mapping[str, Sequence[float]], path: Path
) -> None:
    """Draw the time to the loss over the commit rate; `marks` are times without a rate."""
    figure, axes = _figure(7, 4)
    rates = sorted(points)
    medians = [sorted(points[rate])[len(points[rate]) // 2] for rate in rates]
    axes.plot(rates, medians, color=COLOURS[0], marker="o", label="fixed commit rate, median")
    for rate in rates:
        axes.plot([rate] * len(points[rate]), points[rate], ".", color=COLOURS[4])
    for number, (name, times) in enumerate(marks.items()):
        axes.axhline(
            sorted(times)[len(times) // 2],
            color=COLOURS[1 + number],
            linestyle=("--", ":", "-.")[number % 3],
            label=f"{name}, median",
        )
    axes.set_xlabel("commits of each device in a check period of 60 s")
    axes.set_ylabel("virtual seconds to the loss")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    from matplotlib import pyplot

    pyplot.close(figure)
