"""The history of a run, as one JSON object a line."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_adsp.tracking.base import Callback, Record

if TYPE_CHECKING:
    from flower_adsp.strategies.state import FederationState


class History(Callback):
    """Writes ``history.jsonl``.

    Parameters
    ----------
    path : Path
        The file; it is overwritten, unless a run is resumed: then it is cut to what had happened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._file = path.open("r+", encoding="utf-8")
        self._is_cut = False
        self._flushed = 0.0

    def on_event(self, record: Record, state: "FederationState") -> None:
        """Write the record."""
        self._cut(0)
        self._file.write(json.dumps(record) + "\n")
        now = time.monotonic()
        # What a reader waits for is seen at once, commits within half a second of the host's.
        if record["event"] != "commit" or now - self._flushed > 0.5:
            self._flushed = now
            self._file.flush()

    def _cut(self, size: int) -> None:
        """Go on after so many bytes, once."""
        if not self._is_cut:
            self._is_cut = True
            self._file.seek(size)
            self._file.truncate()

    def state_dict(self) -> dict[str, Any]:
        """Return how many bytes there are, once they have reached the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._file.tell()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drop what was written after a checkpoint."""
        self._cut(int(state["bytes"]))

    def on_close(self) -> None:
        """Close the file."""
        self._file.close()
