"""The history of a run, as one JSON object a line."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from flower_adsp.tracking.base import Callback, Record

if TYPE_CHECKING:
    from flower_adsp.strategies.state import FederationState


class History(Callback):
    """Writes ``history.jsonl``.

    Parameters
    ----------
    path : Path
        The file; it is overwritten.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")

    def on_event(self, record: Record, state: "FederationState") -> None:
        """Write the record."""
        self._file.write(json.dumps(record) + "\n")
        if record["event"] != "commit":  # what a reader waits for is seen at once
            self._file.flush()

    def on_close(self) -> None:
        """Close the file."""
        self._file.close()
