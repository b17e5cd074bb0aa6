"""What a run came to: the numbers of ``summary.json`` and the tables at the end."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flower_adsp.devices import heterogeneity, not_waiting_limit
from flower_adsp.tracking.base import Callback, Record

if TYPE_CHECKING:
    from flower_adsp.strategies.state import FederationState, Worker

# What of a summary is one number.
NUMBERS = (
    "seconds", "rounds", "model_version", "commits", "steps", "refused", "bytes_up", "bytes_down",
    "largest_commit_spread", "seconds_to_target", "H", "not_waiting_limit",
)  # fmt: skip


class Summary(Callback):
    """Collects what a run comes to.

    Attributes
    ----------
    numbers : dict[str, Any]
        Empty until the run has ended.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, Any] = {}
        self._latest: dict[str, Any] = {}
        self._spread: int = 0
        self._reached: float | None = None

    def on_event(self, record: Record, state: "FederationState") -> None:
        """Note the latest evaluation and the spread of commits; at the end, sum up."""
        if record["event"] == "evaluation":
            self._latest = {key: record[key] for key in ("loss", "accuracy") if key in record}
            if record.get("reached_target"):
                self._reached = record["t"]
        elif record["event"] == "checkpoint":
            counts = record["commits"]
            self._spread = max(self._spread, max(counts) - min(counts))
        elif record["event"] == "end":
            self.numbers = self._sum_up(record, state)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been collected."""
        return {"latest": self._latest, "spread": self._spread, "reached": self._reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self._latest, self._spread = dict(state["latest"]), state["spread"]
        self._reached = state["reached"]

    def _sum_up(self, record: Record, state: "FederationState") -> dict[str, Any]:
        workers = list(state.workers.values())
        degree = heterogeneity([worker.speed for worker in workers])
        rows = [_row(worker, state.now) for worker in workers]
        return {
            "seconds": record["t"],
            "rounds": record["index"],
            "model_version": record["version"],
            "commits": record["commits"],
            "steps": sum(worker.steps for worker in workers),
            "refused": sum(sum(worker.refused.values()) for worker in workers),
            "bytes_up": sum(worker.bytes_up for worker in workers),
            "bytes_down": sum(worker.bytes_down for worker in workers),
            "largest_commit_spread": self._spread,
            "seconds_to_target": self._reached,
            "H": degree,
            "not_waiting_limit": not_waiting_limit(degree),
            "validation": self._latest,
            "devices": rows,
        }


def _row(worker: "Worker", now: int) -> dict[str, Any]:
    computing, communicating, blocked = worker.spent(now)
    whole = max(now, 1)
    return {
        "worker": worker.id,
        "device": worker.profile.name,
        "speed": worker.speed,
        "steps": worker.steps,
        "commits": worker.commits,
        "computing": computing / whole,
        "communicating": communicating / whole,
        "blocked": blocked / whole,
        "refused": dict(sorted(worker.refused.items())),
    }


def format_summary(numbers: Mapping[str, Any]) -> list[str]:
    """Return the table per device and the figures of the whole run, as lines of text."""
    lines: list[str] = []
    rows = numbers.get("devices", [])
    if rows:
        lines.append(
            "worker  device        steps/s   steps  commits  computing  communicating  blocked"
        )
        for row in rows:
            refused = "".join(f"  refused {n} {kind}" for kind, n in row["refused"].items())
            lines.append(
                f"{row['worker']:6d}  {row['device'][:12]:12s}  {row['speed']:7.3f} "
                f"{row['steps']:7d}  {row['commits']:7d}  {100 * row['computing']:7.1f} %"
                f"  {100 * row['communicating']:11.1f} %  {100 * row['blocked']:5.1f} %{refused}"
            )
        lines.append("")
        lines.append(
            f"H = {numbers['H']:.2f}; not waiting can save at most 1 - 1/H = "
            f"{100 * numbers['not_waiting_limit']:.1f} % of the time at equal total steps"
        )
        lines.append(
            f"{numbers['seconds']:.1f} s of the run's clock, {numbers['rounds']} rounds, "
            f"{numbers['commits']} commits, {numbers['steps']} steps, "
            f"{numbers['refused']} commits refused"
        )
        lines.append(
            "largest difference between two devices' commits at a checkpoint: "
            f"{numbers['largest_commit_spread']}"
        )
        if numbers.get("seconds_to_target") is not None:
            lines.append(f"target loss reached at {numbers['seconds_to_target']:.1f} s")
    for split in ("validation", "test"):
        if numbers.get(split):
            figures = ", ".join(f"{key} {value:.4f}" for key, value in numbers[split].items())
            lines.append(f"{split}: {figures}")
    return lines
