"""A live view of a run, drawn from the history that it writes."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flower_adsp.tracking.files import HISTORY

_SECONDS = 0.25  # between two looks at the file
_MOST_ROWS = 40

_STATES = {"away": "away", "resting": "resting", "back": "training", "rested": "training"}


@dataclass
class Standing:
    """How one device stands.

    Attributes
    ----------
    device : str
        Its name.
    state : str
        ``training``, ``away`` or ``resting``.
    commits, refused : int
        What it has sent.
    computing : float
        Seconds of the run's clock spent training, up to its latest commit.
    loss : float or None
        Its latest training loss.
    """

    device: str
    state: str = "training"
    commits: int = 0
    refused: int = 0
    computing: float = 0.0
    loss: float | None = None


@dataclass
class Progress:
    """How a run stands, as the records of its history tell it one after the other."""

    strategy: str = ""
    seconds: float = 0.0
    commits: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    devices: dict[int, Standing] = field(default_factory=dict)
    is_over: bool = False

    def update(self, record: Mapping[str, Any]) -> None:
        """Take the next record."""
        event = record["event"]
        self.seconds = float(record["t"])
        if event == "start":
            self.strategy = record["strategy"]
            self.devices = {
                worker["id"]: Standing(worker["device"]) for worker in record["workers"]
            }
        elif event == "joined":
            self.devices[record["worker"]] = Standing(record["device"])
        elif event == "commit":
            standing = self.devices[record["worker"]]
            standing.commits += 1
            standing.loss = record["loss"]
            started, trained = record.get("started"), record.get("trained", record["t"])
            standing.computing += max(0.0, trained - (trained if started is None else started))
            self.commits += 1
        elif event == "refused":
            self.devices[record["worker"]].refused += 1
        elif event in _STATES:
            self.devices[record["worker"]].state = _STATES[event]
        elif event == "evaluation":
            self.figures = {
                key: record[key]
                for key in ("loss", "smoothed_loss", "accuracy")
                if record.get(key) is not None
            }
        elif event == "checkpoint":
            self.rounds = record["index"]
        self.is_over = event == "end"

    def render(self) -> Group:
        """Return what is shown."""
        figures = "   ".join(
            f"{key.replace('_', ' ')} {value:.4f}" for key, value in self.figures.items()
        )
        head = (
            f"{self.strategy or 'starting'}   {self.seconds:.1f} s of the run's clock   "
            f"round {self.rounds}   {self.commits} commits   {figures}"
        )
        table = Table(box=None, pad_edge=False)
        for name in ("worker", "device", "state", "commits", "refused", "computing", "train loss"):
            table.add_column(name, justify="left" if name in ("device", "state") else "right")
        for worker, standing in list(self.devices.items())[:_MOST_ROWS]:
            share = standing.computing / self.seconds if self.seconds else 0.0
            table.add_row(
                str(worker),
                standing.device,
                standing.state,
                str(standing.commits),
                str(standing.refused),
                f"{100 * share:.1f} %",
                "-" if standing.loss is None else f"{standing.loss:.4f}",
            )
        left_out = len(self.devices) - _MOST_ROWS
        rest = [Text(f"and {left_out} more devices")] if left_out > 0 else []
        return Group(Text(head), table, *rest)


class Follower:
    """Reads a history while it grows.

    Parameters
    ----------
    folder : Path
        The run's folder; the history need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / HISTORY
        self._position = 0
        self.progress = Progress()

    def read(self) -> bool:
        """Take what is new; return whether something was."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return False
        if size < self._position:  # a resumed run has cut it
            self._position, self.progress = 0, Progress()
        with self._path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            try:
                self.progress.update(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue  # the view is not the place to stop a run for a damaged line
        return bool(whole)


class LiveView:
    """Shows a run in the terminal while it goes; a context manager.

    Parameters
    ----------
    folder : Path
        The run's folder.
    console : Console or None (default: None)
        Where to draw.
    """

    def __init__(self, folder: Path, console: Console | None = None) -> None:
        self._follower = Follower(folder)
        self._live = Live(
            self._follower.progress.render(), console=console, auto_refresh=False, transient=False
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "LiveView":
        """Start to draw."""
        self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Draw the end, and stop."""
        self._stop.set()
        self._thread.join()
        self._draw()
        self._live.stop()

    def _follow(self) -> None:
        while not self._stop.wait(_SECONDS):
            self._draw()

    def _draw(self) -> None:
        if self._follower.read():
            self._live.update(self._follower.progress.render(), refresh=True)
